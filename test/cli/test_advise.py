# SPDX-License-Identifier: Apache-2.0
"""`dsd advise`: what it computes, by hand, and what it says of tiny models."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from contextlib import contextmanager

import pytest
from in_process import dsd

from dsd_ros.cli.advice import WORTH, Advice, Machines, alone_seconds, computed_gain, stream_seconds
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.edge.drafters import ModelDrafter
from dsd_ros.vlm.loading import ModelSettings, load_model

# A target of 10 s a token that begins at once, and a draft of 1 s a token, on one machine.
NEAR = Machines(draft_s=1, draft_prefill_s=0, target_s=10, first_s=10, first_pass_s=10, one_way_s=0)
FAR = dataclasses.replace(NEAR, first_s=14, one_way_s=2)


@pytest.mark.parametrize(
    ("on", "agrees", "seconds"),
    [
        # The first pass knows no draft; in it all six are drafted, and the second one verifies five of them.
        (NEAR, [True] * 6, 20),
        # One way up, two passes, one way down.
        (FAR, [True] * 6, 24),
        # The second token is drafted wrong. The robot learns it at 20 s, when the third pass begins without a draft.
        (NEAR, [True, False, True, True], 40),
        # The target ends at 20 s, and the robot drafts until 21 s.
        (dataclasses.replace(NEAR, draft_s=7), [False, False], 21),
        # The draft has not read its prompt when the reply ends.
        (dataclasses.replace(NEAR, draft_prefill_s=100), [True, True], 20),
        # The third to fifth token are drafted at 24 to 26 s, in time for the fourth pass, which is the last.
        (dataclasses.replace(NEAR, draft_prefill_s=23), [True] * 5, 40),
    ],
)
def test_seconds_of_a_reply_as_by_hand(on, agrees, seconds):
    assert stream_seconds(on, agrees) == pytest.approx(seconds)
    assert alone_seconds(on, len(agrees)) == on.first_s + 10 * (len(agrees) - 1)


def test_the_first_target_that_pays():
    replies = [[True] * 9 + [False] + [True] * 20]
    first = Advice(FAR, replies, [1.0], {1: 1.0}).pays_from_s
    assert first is not None and computed_gain(FAR.with_target(first), replies) >= WORTH
    assert computed_gain(FAR.with_target(first / 1.06), replies) < WORTH
    assert Advice(FAR, [[False] * 30], [1.0], {1: 1.0}).pays_from_s is None
    assert FAR.with_target(20) == dataclasses.replace(FAR, target_s=20, first_s=24, first_pass_s=20)


@contextmanager
def engine_of(models, **settings):
    chosen = VerifierSettings(port=0, **settings)
    engine = VerifierEngine(load_model(ModelSettings(str(models / "target"))), chosen)
    with engine, VerifierServer(engine, chosen) as server:
        yield server


def test_link_draft_and_target_are_measured_and_advice_is_given(models, picture, capsys):
    pair = ["--draft", models / "draft", "--max-tokens", "12", "--replies", "2", "--robots", "2"]
    with engine_of(models) as server:
        code, out, err = dsd(
            capsys, "advise", "--verifier", server.url, *pair, "--image", picture, "--instruction", "go", "--json"
        )  # fmt: skip
        assert code == 0, err
        found = json.loads(out)
    with engine_of(models, max_sessions=1) as server:
        code, out, err = dsd(capsys, "advise", "--verifier", server.url, *pair, "--instruction", "the red chair")
    assert found["target_s"] > 0 and found["draft_s"] > 0 and found["one_way_s"] > 0 and found["gain"] > 0
    assert 0.2 < found["agreement"] < 1 and found["at_once"]["1"] > found["target_s"]
    assert list(found["at_once"]) == ["1", "2"] and found["robots"] in (1, 2)
    assert code == 0 and "times as fast as the target alone" in out, err
    assert "2 robots at once were not served: " in out  # one is


def test_a_draft_that_reads_longer_than_the_target_decodes_is_asked_all_the_same(models, capsys, monkeypatch):
    begin, following = ModelDrafter.begin, ModelDrafter.next

    def slowly(drafter, *given):
        begin(drafter, *given)
        time.sleep(0.15 * (threading.current_thread() is not threading.main_thread()))

    monkeypatch.setattr(ModelDrafter, "begin", slowly)
    monkeypatch.setattr(ModelDrafter, "next", lambda drafter: (time.sleep(0.05), following(drafter))[1])
    asked = ["--replies", "1", "--robots", "1", "--max-tokens", "5", "--instruction", "the red chair"]
    code, _, err = dsd(capsys, "advise", "--draft", models / "draft", "--target", models / "target", *asked)
    assert code == 0, err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mode", "dsd"], "leave out --mode dsd"),
        (["--replies", "0"], "replies is 0; use 1 to 100"),
        (["--instruction", "find the moon"], "name a colour"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(capsys, options, named):
    code, _, err = dsd(capsys, "advise", *options)
    assert code == 2 and named in err and err.count("\n") == 1
