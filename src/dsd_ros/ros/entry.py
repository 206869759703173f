# SPDX-License-Identifier: Apache-2.0
"""The nodes' executables. Signals are handled before anything heavy is imported: loading torch takes seconds, and a
Ctrl-C in that time must end the process without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from dsd_ros.environment import EXIT_BAD_START, check_environment
from dsd_ros.shown import shown
from dsd_ros.startup import quick_import


def __getattr__(name: str) -> Callable[[], None]:
    """One function per node, for the executables that setup.py names."""
    if not name.endswith("_node"):
        raise AttributeError(name)
    return partial(_start, name)


def _start(name: str) -> None:
    # The node replaces these handlers once it is built.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        check_environment()
        module = quick_import(f"dsd_ros.nodes.{name}")
    except (ImportError, ValueError) as error:
        sentence = f"{name}: {shown(' '.join(str(error).split()))}"
        if isinstance(error, ImportError):
            sentence += (
                f" in {sys.executable}; activate the virtual environment that has it, or see `dsd doctor --role robot`"
            )
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_START)
    module.main()


if __name__ == "__main__":  # python -m dsd_ros.ros.entry NODE [ROS arguments]
    sys.argv = sys.argv[1:]
    _start(sys.argv[0])
