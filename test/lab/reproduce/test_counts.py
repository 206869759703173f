# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in the cloud alone, studies, and rounds that follow from distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsd_lab.bench.scenes import decode, held_out_scenes
from dsd_lab.papers.theory import expected_tokens
from dsd_lab.report import BenchError
from dsd_lab.reproduce.acceptances import expected_rounds
from dsd_lab.reproduce.cloud_draft import BilledTarget, CloudDraftTarget
from dsd_lab.reproduce.measure import Contestant, Study, _check, measure
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

MODELS = Path(__file__).resolve().parents[3] / "models"
SCENE, OTHER = held_out_scenes(2)


@pytest.fixture(scope="module")
def pair() -> Any:
    return [load_model(ModelSettings(str(MODELS / role), threads=1)) for role in ("draft", "target")]


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "proof": "coupled"}], ids=["greedy", "shared noise"])
def test_a_draft_in_the_cloud_changes_no_token_and_saves_passes(pair: Any, values: dict[str, Any]) -> None:
    draft, target = pair
    settings = DecodeSettings(mode="ar", max_tokens=40, seed=5, **values)
    plain, speculating = BilledTarget(target), CloudDraftTarget(target, draft, gamma=4)
    replies = []
    for one in (plain, speculating):
        with VerifierEngine(one) as engine:
            replies += [decode(LocalChannel(engine), None, settings, SCENE) for _ in range(2)]
    first, _, *others = replies
    assert all(reply.tokens == first.tokens for reply in replies) and len(first.tokens) > 10
    assert plain.bill.passes == plain.bill.positions == 2 * len(first.tokens)
    bill = speculating.bill
    assert bill.passes < 0.7 * plain.bill.passes and bill.cloud_drafted == bill.positions - bill.passes
    assert all(reply.rounds == len(reply.tokens) for reply in others)  # the robot takes them one by one


def test_what_a_robot_drafts_is_verified_as_ever(pair: Any) -> None:
    draft, target = pair
    replies = []
    for one in (BilledTarget(target), CloudDraftTarget(target, draft)):
        with VerifierEngine(one) as engine:
            replies.append(decode(LocalChannel(engine), draft, DecodeSettings(mode="dsd", max_tokens=24), SCENE))
        assert one.bill.cloud_drafted == 0 and one.bill.passes == replies[-1].rounds
    assert replies[0].tokens == replies[1].tokens


def study(*rows: Contestant) -> Study:
    return Study("try", rows, lambda: [SCENE, OTHER], 1)


def test_a_study_counts_and_refuses_other_tokens(tmp_path: Path) -> None:
    rows = [
        Contestant(name, DecodeSettings(mode=mode, max_tokens=12), name == "cloud-sd")
        for name, mode in (("ar", "ar"), ("cloud-sd", "ar"), ("dsd", "dsd"))
    ]
    out = tmp_path / "papers-try.json"
    report = measure(study(*rows), out, str(MODELS / "draft"), str(MODELS / "target"))
    assert [row["replies"] for row in report["rows"]] == [2, 2, 2] and json.loads(out.read_text()) == report
    ar, cloud, dsd = report["rows"]
    assert ar["passes"] == ar["tokens"] == cloud["tokens"] == dsd["tokens"]
    assert cloud["passes"] < ar["passes"] and cloud["rounds_sent"] == 0 and dsd["rounds_sent"] == dsd["rounds"]
    report["rows"][0]["digests"][0] += 1
    with pytest.raises(BenchError, match="greedy rows of study try decoded different tokens"):
        _check(study(*rows), report["rows"])


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


def test_replies_of_the_target_alone_say_how_a_draft_would_fare() -> None:
    """The reply's token was accepted with min(1, q/p): on average that is sum min(p, q)."""
    rng = np.random.default_rng(8)
    p, q = rng.dirichlet(np.ones(12), 2)
    drawn = rng.choice(12, 20_000, p=p)
    assert np.minimum(1, q[drawn] / p[drawn]).mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.01)
