# SPDX-License-Identifier: Apache-2.0
"""`python -m dsd_lab.robot simulator_node|go2_standin_node [--ros-args ...]`."""

from __future__ import annotations

import importlib
import sys

_NODES = ("simulator_node", "go2_standin_node")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in _NODES:
        sys.exit(f"usage: python -m dsd_lab.robot {'|'.join(_NODES)} [--ros-args ...]")
    node = sys.argv.pop(1)
    importlib.import_module(f"dsd_lab.robot.{node}").main()


if __name__ == "__main__":
    main()
