# SPDX-License-Identifier: Apache-2.0
"""Measure part by part, so that what is done at a Ctrl-C is reported."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from dsd_ros.cli.shared import EXIT_INTERRUPTED, write_json

Part = TypeVar("Part")
_NUMBERS = (signal.SIGINT, signal.SIGTERM)  # a job of a shell ignores the first
_stop = threading.Event()  # as signals are, the process's


@contextmanager
def kept_at_interruption() -> Iterator[threading.Event]:
    """Let a first SIGINT or SIGTERM end :func:`parts`, and a second one the command; in the main thread.

    The event tells whether there was one.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _stop.set()
        for each in _NUMBERS:
            signal.signal(each, signal.default_int_handler)
        print("interrupted: the part under way is finished; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    _stop.clear()
    previous = [signal.signal(number, stop) for number in _NUMBERS]
    try:
        yield _stop
    finally:
        for number, handler in zip(_NUMBERS, previous, strict=True):
            signal.signal(number, handler)


def report_interruption(report: dict[str, Any], path: Path | None) -> int:
    """Say that a report, which is printed, is not whole, and write it as JSON; the exit code."""
    print("interrupted: this is what was done until then")
    write_json(path, report | {"interrupted": True})
    return EXIT_INTERRUPTED


def parts(work: Iterable[Part], begun: bool = False) -> Iterator[Part]:
    """The parts of a measurement, no further one after an interruption.

    Raises KeyboardInterrupt where none is done, unless others have ``begun`` the report.
    """
    for part in work:
        if _stop.is_set():
            if not begun:
                raise KeyboardInterrupt
            return
        yield part
        begun = True
