"""The nodes' executables: signals are handled before anything heavy is imported.

Loading torch takes seconds, and a Ctrl-C in that time must end the process like any other, without a traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from dsd_ros.paths import config_directory

_CAMERAS = ("simulator_node", "go2_node", "go2_standin_node")
_PROFILES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")


def simulator_node() -> None:
    _start("simulator_node")


def navigation_node() -> None:
    _start("navigation_node")


def supervisor_node() -> None:
    _start("supervisor_node")


def draft_node() -> None:
    _start("draft_node")


def verifier_node() -> None:
    _start("verifier_node")


def memory_node() -> None:
    _start("memory_node")


def bridge_node() -> None:
    _start("bridge_node")


def go2_node() -> None:
    _start("go2_node")


def go2_standin_node() -> None:
    _start("go2_standin_node")


def visual_node() -> None:
    _start("visual_node")


def view_node() -> None:
    _start("view_node")


def record_node() -> None:
    _start("record_node")


def _start(name: str) -> None:
    # Replaced by the node's own handlers once it is built.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    if name in _CAMERAS and not any(variable in os.environ for variable in _PROFILES):
        for variable in _PROFILES:  # the older name and the newer
            os.environ[variable] = str(config_directory() / "fastdds.xml")
    importlib.import_module(f"dsd_ros.nodes.{name}").main()


if __name__ == "__main__":  # python -m dsd_ros.ros.entry NODE [ROS arguments]
    sys.argv = sys.argv[1:]
    _start(sys.argv[0])
