# SPDX-License-Identifier: Apache-2.0
"""The `dsd-lab` command: the laboratory's commands, run by the same main as `dsd`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from dsd_ros.cli import main as product

LAB = product.CommandLine(
    "dsd-lab",
    "The laboratory of dsd_ros: benchmarks, the papers' formulas, training and evaluation of the shipped models.",
    "dsd_lab.cli",
    ("ask", "bench", "figures", "papers", "train", "evaluate", "export"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `dsd-lab` command and return its exit code."""
    return product.main(argv, LAB)


def run() -> NoReturn:
    """The installed command."""
    product.run(LAB)
