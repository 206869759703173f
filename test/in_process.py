"""The `dsd` command run in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsd_ros import cli


def dsd(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, what it printed, what it complained."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
