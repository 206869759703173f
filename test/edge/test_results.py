# SPDX-License-Identifier: Apache-2.0
"""What a reply reports of its drafts, under vLLM's names: one definition, equal to what the steps say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply, RoundRecord, SpeculativeDecoding
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel

IMAGE = np.full((2, 2, 3), 1, np.uint8)
# A response of vLLM 0.32 at the level "detailed" (its SpeculativeDecodingMetrics).
VLLM_FIELDS = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "per_step_accepted", "per_step_drafted",
}  # fmt: skip


def decode(draft, settings) -> DecodedReply:
    with (
        VerifierEngine(TableModel(1, ends=False)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, settings) as session,
    ):
        return session.decode(IMAGE, "go")


def test_the_example_of_vllms_page():
    """39 steps accepted none of three drafted tokens, one accepted one, three accepted all."""
    accepted = [0] * 39 + [1] + [3] * 3
    found = SpeculativeDecoding.of([3] * 43, accepted, 3)
    assert found is not None
    assert found.mean_acceptance_length == 1.2325581395348837
    assert found.draft_acceptance_rate == 0.07751937984496124
    assert found.acceptance_histogram == [39, 1, 0, 3]
    assert (found.num_spec_steps, found.num_accepted_draft_tokens, found.num_draft_tokens) == (43, 10, 129)
    assert found.num_spec_tokens == 3


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "dsd", "draft_length": 5}, {"mode": "dssd", "temperature": 1.0, "draft_length": 3},
        {"mode": "mc-dsd", "temperature": 1.0}, {"mode": "stream"}, {"mode": "fsd"},
    ],
)  # fmt: skip
def test_a_reply_reports_its_drafts(values):
    draft = TableModel(1, ends=False, noise=0.7)
    # On a busy machine the target of a stream may be done before the draft has begun.
    replies = (decode(draft, DecodeSettings(max_tokens=40, **values)) for _ in range(50))
    reply = next(reply for reply in replies if reply.speculative_decoding is not None)
    found = json.loads(json.dumps(reply.as_json()))["speculative_decoding"]
    assert found.keys() == VLLM_FIELDS
    steps = [record for record in reply.records if record.drafted]
    assert found["per_step_drafted"] == [record.drafted for record in steps]
    assert found["per_step_accepted"] == [record.accepted for record in steps]
    if "draft_length" in values and values["mode"] in ("dsd", "dssd"):
        assert found["num_spec_tokens"] == values["draft_length"]
    # Each round gives one token more than it accepts; the last one may be cut off or drawn by the robot.
    assert abs(found["num_accepted_draft_tokens"] + reply.rounds - len(reply.tokens)) <= 1


def test_a_reply_without_drafts_has_none():
    reply = decode(None, DecodeSettings(mode="ar", max_tokens=8))
    assert reply.speculative_decoding is None
    assert reply.as_json()["speculative_decoding"] is None
    assert (reply.draft_share, reply.passes_per_token, reply.sooner) == (0.0, 1.0, 0.0)
    assert reply.summary().startswith("ar: 8 tokens in 8 passes, ") and "draft" not in reply.summary()


def passes(mode: str, *verify: float, accepted: tuple[int, ...], seconds: float = 1.0) -> DecodedReply:
    """A reply of passes that took so long, and accepted so many drafted tokens."""
    records = [
        RoundRecord(4, held, 0.0, 0.1, took, 0, 0, gained=(7,) * (held + 1))
        for took, held in zip(verify, accepted, strict=True)
    ]
    tokens = [token for record in records for token in record.gained]
    return DecodedReply(tokens, "", mode, True, seconds, 0.1, 100, 50, records, draft_length=mode != "ar")


def test_how_much_sooner_a_stream_is_is_estimated_by_the_passes_that_drafts_saved():
    reply = passes("stream", 0.5, 0.1, 0.2, 0.0, accepted=(0, 3, 1, 0))  # the last tokens were sent again
    assert (len(reply.tokens), reply.rounds) == (8, 4)
    assert (reply.draft_share, reply.passes_per_token) == (0.5, 0.5)
    assert reply.verify_round_seconds == pytest.approx(0.15)
    assert reply.sooner == pytest.approx((1.0 + 4 * 0.1) / 1.0)  # by the least pass
    said = reply.summary()
    assert "8 tokens in 4 passes, 1.000 s, 50 % from drafts, about 1.4 times" in said and "(estimate)" in said
    assert not any(word in said for word in ("T_c", "tau", "miss rate", "gamma"))
    assert reply.link_delay_seconds == reply.miss_rate == 0.0
    assert passes("dsd", 0.5, 0.1, accepted=(0, 3)).sooner == passes("stream", 0.5, accepted=(0,)).sooner == 0.0
