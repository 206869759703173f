# SPDX-License-Identifier: Apache-2.0
"""The `dsd` and `dsd-lab` commands run in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsd_ros.cli.main import DSD, CommandLine, main


def dsd(capsys: pytest.CaptureFixture[str], *arguments: str | Path, program: CommandLine = DSD) -> tuple[int, str, str]:
    """Exit code, what it printed, what it complained."""
    try:
        code = main([str(argument) for argument in arguments], program)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def dsd_lab(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """As ``dsd``, of the laboratory's command."""
    from dsd_lab.cli.main import LAB

    return dsd(capsys, *arguments, program=LAB)
