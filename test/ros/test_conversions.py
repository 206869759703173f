# SPDX-License-Identifier: Apache-2.0
"""Protocol structs as ROS messages and back, over CDR, with the same bounds as on a socket."""

from __future__ import annotations

import math

import pytest
from any_message import MESSAGES
from hypothesis import given, settings
from rclpy.serialization import deserialize_message, serialize_message
from std_msgs.msg import String

from dsd_msgs import msg as ros
from dsd_ros.ros.dds_channel import AGGREGATION, DECODING, EVERYTHING, ROS_TYPES, from_ros, to_ros
from dsd_ros.wire import messages as wire
from dsd_ros.wire.codec import WireError

SESSION, TICKET = 8, b"sixteen bytes..."


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
        (OBSERVATION, "messages", bytes(wire.MAX_CHAT_BYTES + 1)),
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
