# SPDX-License-Identifier: Apache-2.0
"""Protocol structs as ROS messages and back, over CDR, with the same bounds as on a socket."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st
from rclpy.serialization import deserialize_message, serialize_message
from std_msgs.msg import String

from dsd_msgs import msg as ros
from dsd_ros.ros.dds_channel import AGGREGATION, DECODING, EVERYTHING, ROS_TYPES, from_ros, to_ros
from dsd_ros.wire import messages as wire
from dsd_ros.wire.codec import WireError

SESSION, TICKET = 8, b"sixteen bytes..."
U16, U32 = st.integers(0, 65535), st.integers(0, 2**32 - 1)
TOKEN = st.integers(0, wire.MAX_VOCABULARY - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
LAYERS = st.lists(U16, max_size=256)
ID = st.integers(1, 2**32 - 1)
PASTS = st.builds(
    wire.Past, TEXT, st.sampled_from(["rgb8", "png"]), st.integers(0, 8192), st.integers(0, 8192),
    st.binary(max_size=50), st.binary(min_size=8, max_size=8),
)  # fmt: skip
MESSAGES = st.one_of(
    st.builds(
        wire.SessionRequest, U32, U16, TEXT, TEXT, U32, st.floats(0, 100), U32,
        st.floats(0.001, 1), st.integers(0, 2**63 - 1), st.integers(1, 256),
        st.sampled_from([b"", TICKET]), st.booleans(), LAYERS, st.floats(0, 1), TEXT,
    ),
    st.builds(
        wire.SessionReply, U32, U32, TEXT, TEXT, TEXT, U32,
        st.lists(TOKEN, max_size=16), LAYERS, st.sampled_from([b"", TICKET]),
    ),
    st.builds(
        wire.Observation, ID, U32, TEXT.filter(bool), st.integers(0, 8192), st.integers(0, 8192),
        st.sampled_from(["rgb8", "png", "none"]), st.binary(max_size=100),
        st.lists(TOKEN, max_size=200), U32, st.lists(PASTS, max_size=8),
    ),
    st.builds(
        wire.Draft, ID, U32, U32, U32, st.lists(TOKEN, max_size=64), st.binary(max_size=200),
        st.binary(max_size=64), st.sampled_from([b"", b"digested"]), st.lists(TOKEN, max_size=64),
    ),
    st.builds(wire.DraftTokens, ID, U32, U32, U32, st.lists(TOKEN, max_size=64)),
    st.builds(wire.VerifiedTokens, ID, U32, U32, st.lists(TOKEN, max_size=200), U16, U16, U32, st.booleans()),
    st.builds(
        wire.Outcome, ID, U32, U32, U16, U16, TOKEN, st.floats(0, 1), st.booleans(), U32,
        st.binary(max_size=100),
    ),
    st.builds(
        wire.Refusal, U32, U32, U32, st.sampled_from(wire.RefusalCode),
        TEXT,
    ),
    st.builds(wire.SessionClose, ID),
    st.builds(
        wire.Question, ID, U16, U16, TEXT, U32, TEXT.filter(bool), st.integers(0, 64),
        st.floats(0, 100), st.integers(0, 2**63 - 1), U32, TEXT, TEXT, st.integers(1, 4096), U16,
        st.integers(1, 64), U16, TEXT, TEXT, st.lists(TOKEN, max_size=16),
        st.lists(TOKEN, max_size=200),
    ),
    st.builds(
        wire.QuestionReply, ID, U16, TEXT, TEXT, TEXT, U32, st.lists(TOKEN, max_size=16), U16
    ),
    st.builds(
        wire.Proposal, ID, U16, U16, U16, TOKEN, st.floats(-1000, 1000), st.binary(max_size=200),
        U32, U32, U32, U32,
    ),
    st.builds(
        wire.Verdict, ID, U16, U16, TOKEN, st.booleans(), st.booleans(), st.booleans(), U32, U32,
        U32, U32,
    ),
    st.builds(
        wire.Reveal, ID, U16, U16, U16, st.lists(TOKEN, min_size=1, max_size=100),
        st.binary(max_size=400),
    ),
    st.builds(wire.QuestionEnd, ID, U16, st.sampled_from(wire.EndCode), TEXT),
)  # fmt: skip


@settings(max_examples=200)
@given(MESSAGES)
def test_every_message_survives_the_way_there_and_back(message):
    there = to_ros(message)
    assert from_ros(deserialize_message(serialize_message(there), type(there))) == message


def test_every_message_has_a_topic_and_a_direction():
    up, down = EVERYTHING.up, EVERYTHING.down
    assert set(up) | set(down) == set(ROS_TYPES) == set(wire.Message.__args__)
    both = {wire.Proposal, wire.Verdict, wire.Reveal, wire.QuestionEnd}
    assert set(up) & set(down) == both  # and then a topic for each way
    topics = [*up.values(), *down.values()]
    assert len(set(topics)) == len(topics) == len(ROS_TYPES) + len(both)
    # Another node may carry the one concern without the other.
    assert not {*DECODING.up, *DECODING.down} & {*AGGREGATION.up, *AGGREGATION.down}


DRAFT = wire.Draft(SESSION, 1, 1, 0, [1, 2])
OUTCOME = wire.Outcome(SESSION, 1, 1, 1, 1, 1, 0.5, True)
OBSERVATION = wire.Observation(SESSION, 1, "go", 1, 1, "rgb8", b"123")
REQUEST = wire.SessionRequest(1, 1, "dsd", "x", 5, 0.0, 0, 1.0, 0, 8)
PROPOSAL = wire.Proposal(SESSION, 0, 1, 0, 2, 0.5, b"row")
REVEAL = wire.Reveal(SESSION, 0, 1, 0, [3])


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (DRAFT, "session", 0),
        (DRAFT, "assumed", [1] * 9),
        (DRAFT, "tokens", [wire.MAX_VOCABULARY]),
        (OUTCOME, "confidence", 1.5),
        (OUTCOME, "confidence", math.nan),
        (OUTCOME, "next_token", 2**32 - 1),
        (REQUEST, "temperature", math.nan),
        (REQUEST, "temperature", -1.0),
        (REQUEST, "top_p", 0.0),
        (REQUEST, "seed", 2**63),
        (REQUEST, "min_exit_confidence", math.nan),
        (REQUEST, "min_exit_confidence", 1.5),
        (OBSERVATION, "instruction", ""),
        (OBSERVATION, "instruction", "x" * 2001),
        (OBSERVATION, "height", 8193),
        (OBSERVATION, "verified", [wire.MAX_VOCABULARY]),
        (OBSERVATION, "history", [ros.Past()]),  # without a digest
        (PROPOSAL, "ask", 0),
        (PROPOSAL, "log_weight", math.nan),
        (PROPOSAL, "log_weight", -1001.0),
        (REVEAL, "ids", []),
    ],
)
def test_what_breaks_the_protocol_is_refused(message, field, value):
    broken = to_ros(message)
    setattr(broken, field, value)
    with pytest.raises(WireError, match=type(message).__name__):
        from_ros(broken)


def test_other_messages_are_refused():
    with pytest.raises(WireError, match="String is not a message of the protocol"):
        from_ros(String())
