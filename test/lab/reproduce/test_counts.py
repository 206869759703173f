# SPDX-License-Identifier: Apache-2.0
"""Studies, and rounds that follow from distributions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsd_lab.bench.scenes import held_out_scenes
from dsd_lab.papers.theory import expected_tokens
from dsd_lab.report import BenchError
from dsd_lab.reproduce.acceptances import expected_rounds
from dsd_lab.reproduce.measure import Study, _check, measure
from dsd_ros.decoding.settings import DecodeSettings

MODELS = Path(__file__).resolve().parents[3] / "models"


def test_a_study_counts_and_refuses_other_tokens(tmp_path: Path) -> None:
    rows = {mode: DecodeSettings(mode=mode, max_tokens=12) for mode in ("ar", "dsd")}
    study = Study("try", rows, lambda: held_out_scenes(2), 1)
    out = tmp_path / "papers-try.json"
    report = measure(study, out, str(MODELS / "draft"), str(MODELS / "target"))
    assert [row["replies"] for row in report["rows"]] == [2, 2] and json.loads(out.read_text()) == report
    ar, dsd = report["rows"]
    assert ar["rounds"] == ar["tokens"] == dsd["tokens"] and ar["drafted"] == ar["rounds_sent"] == 0
    assert dsd["rounds"] < ar["rounds"] and dsd["rounds_sent"] == dsd["rounds"]
    report["rows"][0]["digests"][0] += 1
    with pytest.raises(BenchError, match="greedy rows of study try decoded different tokens"):
        _check(study, report["rows"])


def test_rounds_follow_from_how_tokens_are_accepted() -> None:
    assert expected_rounds([1.0] * 10, 4) == (2.0, 0.0) and expected_rounds([0.0] * 7, 4) == (7.0, 7.0)
    rng = np.random.default_rng(2)
    accepted, gamma = list(rng.random(30)), 3
    counts = []
    for _ in range(4000):
        place = rounds = rejections = 0
        while place < len(accepted):
            rounds += 1
            for _ in range(gamma):
                held = place < len(accepted) and rng.random() < accepted[place]
                if place < len(accepted) and not held:
                    rejections += 1
                    break
                place += 1
            place += 1  # the token that follows
        counts.append((rounds, rejections))
    wanted = np.mean(counts, axis=0)
    assert np.allclose(expected_rounds(accepted, gamma), wanted, rtol=0.02)
    rounds, _ = expected_rounds([0.6] * 3000, 5)
    assert 3000 / rounds == pytest.approx(expected_tokens(alpha=0.6, gamma=5), rel=0.01)
