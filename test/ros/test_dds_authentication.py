# SPDX-License-Identifier: Apache-2.0
"""A stranger in the DDS domain, and nodes whose token files differ or are missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import get_args

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.serialization import deserialize_message, serialize_message
from ros_rig import CameraRig, picture
from wire_samples import SAMPLES

from dsd_msgs import msg as ros
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros import qos
from dsd_ros.ros.dds_channel import DdsChannel, from_ros, to_ros
from dsd_ros.ros.settings import SharedToken, reaches_other_machines
from dsd_ros.ros.transport import use_udp
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire import messages as m
from dsd_ros.wire.authentication import AuthenticatedChannel, SessionKey
from dsd_ros.wire.channel import LocalChannel, read_token
from dsd_ros.wire.codec import decode, encode

SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"
INSTRUCTION = "find the silver bottle"
LINK = LinkSettings(response_timeout_s=2.0, attempts=30)
MODES = [
    {"mode": "ar"}, {"mode": "dsd"}, {"mode": "fsd", "predraft_source": "guesses"},
    {"mode": "dssd", "temperature": 1.0, "seed": 3},
]  # fmt: skip


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef" * 4 + "\n")
    return path


class Answering:
    """Answers every draft at once, as the attack on record did, and in every way that it can."""

    def __init__(self, rig) -> None:
        self.sent = 0
        self._heard: list[bytes] = []
        self._outcomes = rig.node.create_publisher(ros.Outcome, "dsd/outcome", qos.OUTCOMES)
        self._refusals = rig.node.create_publisher(ros.Refusal, "dsd/refusal", qos.LINK)
        rig.node.create_subscription(
            ros.Outcome, "dsd/outcome", lambda o: self._heard.append(bytes(o.tag)), qos.OUTCOMES
        )
        self._verified = rig.node.create_publisher(ros.VerifiedTokens, "dsd/verified_tokens", qos.PROPOSALS)
        rig.node.create_subscription(
            ros.VerifiedTokens, "dsd/verified_tokens", lambda v: self._heard.append(bytes(v.tag)), qos.PROPOSALS
        )
        rig.node.create_subscription(ros.Draft, "dsd/draft", self._answer, qos.LINK)
        rig.node.create_subscription(ros.DraftTokens, "dsd/draft_tokens", self._answer_stream, qos.PROPOSALS)

    def _answer(self, draft: ros.Draft) -> None:
        name = draft.session, draft.reply, draft.round
        self._say(draft, lambda tag: self._outcomes.publish(to_ros(m.Outcome(*name, 6, 0, 3, 0.99, tag=tag))))

    def _answer_stream(self, draft: ros.DraftTokens) -> None:
        name = draft.session, draft.reply
        wrong = [1, 2, 3]
        self._say(
            draft, lambda tag: self._verified.publish(to_ros(m.VerifiedTokens(*name, 0, wrong, ended=True, tag=tag)))
        )

    def _say(self, draft, answer) -> None:
        name = draft.session, draft.reply, getattr(draft, "round", 1)
        tags = b"", bytes(20), bytes(draft.tag), *self._heard[-1:]
        for tag in tags:
            answer(tag)
            self._refusals.publish(to_ros(m.Refusal(*name, m.RefusalCode.MODEL_ERROR, "no", tag=tag)))
        self._refusals.publish(to_ros(m.Refusal(0, 0, 0, m.RefusalCode.MALFORMED, "no")))
        self.sent += 2 * len(tags) + 1


@pytest.mark.parametrize("transport", ["dds", "bridge"])
def test_a_stranger_that_answers_every_draft_gets_no_token_verified(rig, tiny_pair, token_file, transport):
    target, draft = (load_model(ModelSettings(str(path))) for path in tiny_pair)

    def replies(channel, settings) -> list[list[int]]:
        with EdgeSession(channel, draft, DecodeSettings(max_tokens=20, **settings), LINK) as session:
            return [session.decode(picture(seed), INSTRUCTION).tokens for seed in range(4)]

    with VerifierEngine(target) as engine, LocalChannel(engine) as undisturbed:
        reference = [replies(undisturbed, settings) for settings in MODES]
    if transport == "dds":
        rig.host("verifier_node", model__path=tiny_pair[0], token_file=token_file)
    else:
        said: list[str] = []
        command = [sys.executable, str(SERVER), str(tiny_pair[0]), f"token_file={token_file}"]
        rig.group.start("verifier", command, on_line=said.append)
        line = rig.until(lambda: next((text for text in said if "listening on" in text), None))
        rig.host("bridge_node", url=line.split()[-1], token_file=token_file)
    stranger = Answering(rig)
    channel = AuthenticatedChannel(DdsChannel(rig.node, match_timeout=30.0), read_token(token_file))
    try:
        assert [replies(channel, settings) for settings in MODES] == reference
    finally:
        channel.close()
    assert stranger.sent > 100 and channel.dropped.count > 50


@pytest.mark.parametrize("kind", get_args(m.Message), ids=lambda kind: kind.__name__)
def test_a_tag_holds_after_dds_and_after_the_bridge(kind):
    sent = SessionKey(b"k" * 32, robot=True).sign(kind(**SAMPLES[kind]))
    over_dds = from_ros(deserialize_message(serialize_message(to_ros(sent)), type(to_ros(sent))))
    bridged = from_ros(deserialize_message(serialize_message(to_ros(decode(encode(over_dds)))), type(to_ros(sent))))
    assert sent.tag and over_dds == sent
    for received in (over_dds, decode(encode(over_dds)), bridged):
        assert not SessionKey(b"k" * 32, robot=False).fault(received)


def test_nodes_with_the_same_token_decode_and_with_another_say_so(rig, tiny_pair, token_file, tmp_path):
    other = tmp_path / "other"
    other.write_text("f" * 64)
    target = load_model(ModelSettings(str(tiny_pair[0])))
    rig.host("verifier_node", model__path=tiny_pair[0], token_file=token_file)
    options = {"model__path": tiny_pair[1], "decode__max_tokens": 20, "link__response_timeout_s": 0.5}
    wrong = rig.start("draft_node", token_file=other, **options)
    rig.until(lambda: any("draft_node" in line and "does not prove" in line for line in rig.lines))
    wrong.process.terminate()
    wrong.process.wait()
    values: dict[str, dict[str, str]] = {}

    def noted(array: DiagnosticArray) -> None:
        values.update({status.name: {pair.key: pair.value for pair in status.values} for status in array.status})

    rig.node.create_subscription(DiagnosticArray, "/diagnostics", noted, 10)
    stranger = Answering(rig)
    rig.host("draft_node", token_file=token_file, **options)
    rig.until(lambda: any("session open, mode" in line for line in rig.lines))
    camera = CameraRig(rig)
    for seed in range(3):
        answer = camera.ask(picture(seed), INSTRUCTION)
        assert answer.success and answer.verified, answer.message
        sequence = target.prefill(picture(seed), INSTRUCTION)
        while len(sequence.tokens) < 20 and not set(sequence.tokens) & set(target.eos_token_ids):
            sequence.append([int(sequence.next_logits().argmax())])
        assert answer.text == target.decode_text(sequence.tokens)
    assert stranger.sent

    def dropped(node: str) -> int:
        return int(values.get(node, {}).get("dropped messages", 0))

    rig.until(lambda: dropped("draft_node") > 3)
    rig.until(lambda: dropped("verifier_node") > 0, what="what the robot with another token sent")
    assert values["draft_node"]["authenticated"] == values["verifier_node"]["authenticated"] == "yes"
    assert not any("0123456789abcdef" in line or "ffff" in line for line in rig.lines)


@pytest.mark.parametrize("node", ["draft_node", "verifier_node", "memory_node"])
def test_a_node_without_a_token_stays_off_a_domain_that_reaches_out(rig, monkeypatch, node):
    monkeypatch.setenv("ROS_STATIC_PEERS", "127.0.0.1")  # what reaches out, but no further than here
    ended = rig.host(node).node
    sentence = rig.until(lambda: ended.failure)
    assert ended.exit_code == 2
    assert all(
        part in sentence for part in ("token_file is not set", "openssl rand", "allow_unauthenticated", "LOCALHOST")
    )


def test_a_node_does_without_a_token_where_that_is_allowed(rig, monkeypatch, tiny_pair):
    monkeypatch.setenv("ROS_STATIC_PEERS", "127.0.0.1")
    rig.host("verifier_node", model__path=tiny_pair[0], allow_unauthenticated=True)
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))


@pytest.mark.parametrize(
    ("environment", "reaches"),
    [
        ({}, True),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, False),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"}, False),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"}, True),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SYSTEM_DEFAULT"}, True),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_STATIC_PEERS": "10.0.0.7"}, True),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET", "ROS_LOCALHOST_ONLY": "1"}, False),
        ({"ROS_LOCALHOST_ONLY": "0"}, True),
        ({"ROS_DISTRO": "humble", "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, True),
        ({"ROS_DISTRO": "humble", "ROS_LOCALHOST_ONLY": "1"}, False),
    ],
)
def test_what_reaches_other_machines(monkeypatch, token_file, environment, reaches):
    for name in list(os.environ):
        if name.startswith(("ROS_", "FAST")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert reaches_other_machines() == reaches
    if reaches:
        with pytest.raises(ValueError, match="token_file is not set"):
            SharedToken().token()
    else:
        assert SharedToken().token() is None
    assert SharedToken(allow_unauthenticated=True).token() is None
    assert SharedToken(token_file=str(token_file)).token() == read_token(token_file)
    if environment != {"ROS_DISTRO": "humble", "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}:  # the profile knows it
        use_udp(os.environ)
        assert reaches_other_machines() == reaches
