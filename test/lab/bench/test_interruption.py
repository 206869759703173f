# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a bench keeps what is done."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsd_lab.bench.harness import Bench
from dsd_lab.parts import parts
from dsd_ros.cli.shared import EXIT_DONE, EXIT_INTERRUPTED


def bench(presses: Sequence[int]) -> Bench:
    """Of four parts, during which Ctrl-C is pressed as often as ``presses`` says."""

    def measure(flags: Any, told: Any) -> dict[str, Any]:
        rows = []
        for part in parts(range(4)):
            for _ in range(presses[part]):
                os.kill(os.getpid(), signal.SIGINT)
            rows.append({"part": part})
        return {"rows": rows, "machine": "this machine"}

    return Bench(measure, lambda report: [("part", "part", "d")])


def test_the_rows_that_are_done_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    flags = SimpleNamespace(json=tmp_path / "report.json")
    assert bench([0, 1, 0, 0]).run(flags) == EXIT_INTERRUPTED
    out, err = capsys.readouterr()
    assert out.split()[:5] == ["part", "0", "1", "this", "machine"]
    assert out.endswith("interrupted: this is what was done until then\n")
    assert "the part under way is finished" in err
    report = json.loads(flags.json.read_text())
    assert report["interrupted"] and [row["part"] for row in report["rows"]] == [0, 1]
    assert bench([0] * 4).run(flags) == EXIT_DONE and "interrupted" not in json.loads(flags.json.read_text())
    with pytest.raises(KeyboardInterrupt):
        bench([2, 0, 0, 0]).run(flags)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_others_began_is_not_lost_for_a_part_that_never_ran() -> None:
    def measure(flags: Any, told: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            next(parts([1]))
        assert list(parts([1], begun=True)) == []
        return {"rows": [{"part": 0}], "machine": ""}

    assert Bench(measure, lambda report: [("part", "part", "d")]).run(SimpleNamespace(json=None)) == EXIT_INTERRUPTED
