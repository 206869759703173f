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
    {
        "ask": "One question, answered by DRAGON or by a method it is compared with.",
        "bench": "Measure the system on this machine.",
        "figures": "Measure every figure of the pages again, and write them there.",
        "papers": "The four papers: every table and figure, and their formulas for any numbers.",
        "train": "Train the shipped models, or early exits for any model.",
        "evaluate": "Measure models on held-out scenes and in simulated runs.",
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `dsd-lab` command and return its exit code."""
    return product.main(argv, LAB)


def run() -> NoReturn:
    """The installed command."""
    product.run(LAB)
