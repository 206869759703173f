# SPDX-License-Identifier: Apache-2.0
"""The protocol over real DDS between processes: exact, with the right distribution, and robust to a dead verifier."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
import torch
from lifecycle_msgs.msg import Transition
from ros_rig import CameraRig, Rig, picture
from worded_table import constrained_alone

from dsd_msgs.msg import DecodeStats, ReplyProgress
from dsd_msgs.srv import Decode
from dsd_ros.decoding.constraint import ReplyForm
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import parse_reply, read_grammar
from dsd_ros.ros import qos
from dsd_ros.ros.dds_channel import DdsChannel, VerifierTopics
from dsd_ros.ros.stamps import seconds, to_duration
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire import messages as wire
from dsd_ros.wire.channel import LinkClosed, LinkTimeout

INSTRUCTION = "find the silver bottle"
LENGTH = 24


@pytest.fixture(scope="module")
def models(tiny_pair):
    return tuple(load_model(ModelSettings(str(path))) for path in tiny_pair)


@pytest.fixture
def channel(rig):
    made = DdsChannel(rig.node)
    yield made
    made.close()


def alone(target, image, length: int = LENGTH) -> list[int]:
    """What the target says greedily by itself."""
    sequence, tokens = target.prefill(image, INSTRUCTION), []
    while len(tokens) < length:
        tokens.append(int(sequence.next_logits().argmax()))
        if tokens[-1] in target.eos_token_ids:
            break
        sequence.append(tokens[-1:])
    return tokens


def test_sampled_replies_have_the_targets_distribution(rig, channel, tiny_pair, models):
    target, draft = models
    settings = DecodeSettings(mode="dsd", temperature=1.0, top_k=5, seed=11, max_tokens=2)
    image = picture(1000)
    expected = pairs_of(target, image, settings)
    rig.host("verifier_node", model__path=tiny_pair[0])
    draws = 300
    with EdgeSession(channel, draft, settings, LinkSettings(attempts=30)) as session:
        seen = Counter(tuple(session.decode(image, INSTRUCTION).tokens) for _ in range(draws))
    assert set(seen) <= set(expected)
    cells = sorted(expected, key=expected.__getitem__)
    chi, rare, rare_seen, count = 0.0, 0.0, 0, 0
    for cell in cells:  # cells too rare for the test are pooled
        if expected[cell] * draws < 5.0:
            rare, rare_seen = rare + expected[cell] * draws, rare_seen + seen[cell]
            continue
        chi += (seen[cell] - expected[cell] * draws) ** 2 / (expected[cell] * draws)
        count += 1
    if rare >= 1.0:
        chi, count = chi + (rare_seen - rare) ** 2 / rare, count + 1
    p = float(torch.special.gammaincc(torch.tensor((count - 1) / 2.0), torch.tensor(chi / 2.0)))
    assert p > 1e-3, f"chi-squared {chi:.1f} over {count} cells"


def pairs_of(target, image, settings) -> dict[tuple[int, ...], float]:
    """Probability of each beginning of a reply, two tokens or one that ends it."""
    root = target.prefill(image, INSTRUCTION)
    first = transform(root.next_logits(), settings.sampling)
    result = {}
    for a in first.nonzero().flatten().tolist():
        if a in target.eos_token_ids:
            result[(a,)] = float(first[a])
            continue
        branch = root.fork()
        branch.append([a])
        second = transform(branch.next_logits(), settings.sampling)
        for b in second.nonzero().flatten().tolist():
            result[(a, b)] = float(first[a] * second[b])
    return result


def test_without_a_verifier_the_channel_says_so(rig, channel):
    with pytest.raises(LinkClosed, match="start verifier_node or bridge_node"):
        channel.reconnect()
    with pytest.raises(LinkTimeout, match="within 0.1 s"):
        channel.receive(0.1)
    channel.close()
    channel.close()
    with pytest.raises(LinkClosed, match="closed"):
        channel.receive(0.1)


def test_another_tokenizer_is_refused_with_a_sentence(rig, channel, tiny_pair, tmp_path):
    from tiny_models import make_tiny_model

    stranger = load_model(ModelSettings(str(make_tiny_model(tmp_path / "other", seed=5, other_tokenizer=True))))
    rig.host("verifier_node", model__path=tiny_pair[0])
    session = EdgeSession(channel, stranger, DecodeSettings(), LinkSettings(attempts=60))
    with pytest.raises(VerifierRefused, match="tokenizer"):
        session.open()


class DecodeRig:
    """draft_node and verifier_node, and what they publish. ``start``: the rig's method that starts the verifier."""

    def __init__(self, rig: Rig, pair, start, **draft: object) -> None:
        self.rig = rig
        self.progress: list[ReplyProgress] = []
        self.stats: list[DecodeStats] = []
        rig.node.create_subscription(ReplyProgress, "dsd/reply_progress", self.progress.append, qos.STATE)
        stats = rig.node.create_subscription(DecodeStats, "dsd/decode_stats", self.stats.append, qos.STATE)
        self.camera = CameraRig(rig)
        self.verifier = start("verifier_node", model__path=pair[0])
        rig.host("draft_node", model__path=pair[1], **draft)
        rig.until_active()
        rig.until_linked("draft_node", stats)


def test_the_decode_service(rig, tiny_pair, models):
    target, _ = models
    nodes = DecodeRig(rig, tiny_pair, rig.start, decode__mode="dsd", decode__max_tokens=LENGTH)
    for seed in range(5):
        answer = nodes.camera.ask(picture(seed), INSTRUCTION)
        assert answer.success, answer.message
        expected = target.decode_text(alone(target, picture(seed)))
        assert answer.text == expected
        assert answer.stats.mode == "dsd" and answer.stats.transport == "dds"
        assert sum(answer.stats.accepted) + answer.stats.rounds >= answer.stats.tokens
        assert answer.stats.tau == pytest.approx(answer.stats.tokens / answer.stats.rounds)
        drafts = answer.stats.speculative_decoding
        drafted = list(drafts.per_step_drafted)
        assert drafts.num_spec_steps == len(drafted) == sum(drafts.acceptance_histogram) > 0
        assert drafts.num_draft_tokens == sum(drafted)
        assert drafts.num_accepted_draft_tokens == sum(drafts.per_step_accepted) == sum(answer.stats.accepted)
        assert drafts.mean_acceptance_length == 1 + drafts.num_accepted_draft_tokens / drafts.num_spec_steps
    rig.until(lambda: len(nodes.stats) == 5)
    rig.until(lambda: nodes.progress and nodes.progress[-1].done)
    assert nodes.progress[-1].text == expected
    told = nodes.progress[-1]
    assert told.rounds == nodes.stats[-1].rounds and seconds(told.last_round.wait_time) > 0
    assert told.last_round.accepted == nodes.stats[-1].accepted[-1]

    for instruction, timeout, code in [
        ("", 1.0, Decode.Response.INVALID_REQUEST),
        ("x" * 2001, 1.0, Decode.Response.INVALID_REQUEST),
        (INSTRUCTION, -1.0, Decode.Response.INVALID_REQUEST),
        (INSTRUCTION, 0.5, Decode.Response.NO_IMAGE),
    ]:
        request = Decode.Request(instruction=instruction, timeout=to_duration(timeout))
        request.not_before = rig.node.get_clock().now().to_msg()
        answer = rig.call(Decode, "dsd/decode", request)
        assert not answer.success and answer.code == code and answer.message.endswith(".")

    assert rig.set_parameter("draft_node", "link.response_timeout_s", 0.5).successful
    bad = nodes.camera.show(picture(0))
    bad.encoding = "yuv422"
    nodes.camera._publisher.publish(bad)
    answer = nodes.camera.ask(picture(7), INSTRUCTION)
    assert answer.success, answer.message  # the node is fine afterwards

    nodes.verifier.process.send_signal(signal.SIGSTOP)
    answer = nodes.camera.ask(picture(8), INSTRUCTION, timeout=1.2)
    assert not answer.success and answer.code == Decode.Response.LINK_LOST
    assert "at its deadline: the verifier" in answer.message
    assert any("waiting for the verifier: " in line for line in rig.lines), rig.lines
    nodes.verifier.process.send_signal(signal.SIGCONT)
    answer = nodes.camera.ask(picture(9), INSTRUCTION)
    assert answer.success, answer.message
    assert answer.text == target.decode_text(alone(target, picture(9)))


def test_replies_are_held_to_the_grammar_over_topics(rig, tiny_pair, models):
    target, _ = models
    settings = DecodeSettings(mode="dsd", max_tokens=44)
    form = ReplyForm(**read_grammar("dsd").written, limit=44)
    nodes = DecodeRig(rig, tiny_pair, rig.host, decode__mode="dsd", decode__max_tokens=44, constrain="grammar")
    for seed in range(2):
        answer = nodes.camera.ask(picture(seed), INSTRUCTION)
        assert answer.success, answer.message
        assert answer.text == target.decode_text(constrained_alone(target, picture(seed), INSTRUCTION, settings, form))
        assert parse_reply(answer.text) and answer.stats.parses and answer.stats.parse_share == 1.0
    refused = rig.set_parameter("draft_node", "decode.max_tokens", 12)
    assert not refused.successful and "a reply of 12 tokens is too short" in refused.reason
    assert rig.set_parameter("draft_node", "constrain", "none").successful
    answer = nodes.camera.ask(picture(0), INSTRUCTION)
    assert answer.text == target.decode_text(alone(target, picture(0), 44))
    assert not answer.stats.parses and answer.stats.parse_share == pytest.approx(2 / 3)


def test_a_draft_that_overtakes_its_observation_waits_for_it(rig):
    """Topics keep no order between each other: the verifier's end restores it."""
    arrived: list[wire.Message] = []
    topics = VerifierTopics(rig.node, arrived.append)
    topics.start()
    client = DdsChannel(rig.node)
    try:
        session = 8
        observation = wire.Observation(session, 2, INSTRUCTION, 1, 1, "rgb8", b"rgb")
        drafts = [wire.Draft(session, 2, number, 0, [number]) for number in (1, 2)]
        for message in (*drafts, observation):
            client.send(message)
        rig.until(lambda: len(arrived) == 3)
        assert arrived == [observation, *drafts]
        later = wire.Draft(session, 2, 3, 5, [9])
        client.send(later)
        rig.until(lambda: len(arrived) == 4)
        assert arrived[-1] == later
        # One whose observation never comes is passed on in the end, for the engine to refuse.
        lost = wire.Draft(9, 1, 1, 0, [1])
        client.send(lost)
        rig.until(lambda: len(arrived) == 5)
        assert arrived[-1] == lost
        topics.publish(wire.Outcome(session, 2, 1, 1, 1, 1, 0.5, True))
        assert client.receive(10.0).round == 1
    finally:
        client.close()
        topics.close()


def test_early_outcomes_of_many_rounds_push_no_final_one_out(rig):
    """28 layers, 8 rounds in flight, and a robot that is slow to look."""
    topics = VerifierTopics(rig.node, lambda _: None)
    topics.start()
    client = DdsChannel(rig.node)
    try:
        client.reconnect()
        said = [
            wire.Outcome(8, 1, number, layer, 1, 1, 0.5, layer == 28)
            for number in range(1, 9)
            for layer in range(1, 29)
        ]
        for outcome in said:
            topics.publish(outcome)
            time.sleep(0.001)
        assert [client.receive(10.0) for _ in said] == said
    finally:
        client.close()
        topics.close()


def test_after_a_silence_the_channel_looks_whether_anybody_listens(rig):
    topics = VerifierTopics(rig.node, lambda _: None)
    topics.start()
    client = DdsChannel(rig.node, match_timeout=0.2)
    try:
        client.reconnect()
        client.send(wire.SessionClose(8))
        topics.close()
        with pytest.raises(LinkTimeout):
            client.receive(0.1)
        with pytest.raises(LinkClosed, match="start verifier_node or bridge_node"):
            rig.until(lambda: client.send(wire.SessionClose(8)))
    finally:
        client.close()


def test_the_draft_nodes_lifecycle(rig, tiny_pair):
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.host("draft_node", model__path=tiny_pair[1], autostart=False, decode__max_tokens=8)
    camera = CameraRig(rig)

    def change(transition: int) -> bool:
        return rig.change("draft_node", transition)

    def decode() -> int:
        return camera.ask(picture(1), INSTRUCTION, timeout=10.0).code

    assert decode() == Decode.Response.LINK_LOST
    assert not change(Transition.TRANSITION_ACTIVATE)  # nothing is configured yet
    assert change(Transition.TRANSITION_CONFIGURE)
    assert decode() == Decode.Response.LINK_LOST
    rig.until(lambda: change(Transition.TRANSITION_ACTIVATE), what="a session with the verifier")
    assert decode() == Decode.Response.OK
    assert change(Transition.TRANSITION_DEACTIVATE)
    assert decode() == Decode.Response.LINK_LOST
    assert change(Transition.TRANSITION_ACTIVATE)
    assert decode() == Decode.Response.OK
    assert change(Transition.TRANSITION_DEACTIVATE)
    assert change(Transition.TRANSITION_CLEANUP)
    assert decode() == Decode.Response.LINK_LOST
    assert change(Transition.TRANSITION_CONFIGURE)
    assert change(Transition.TRANSITION_ACTIVATE)
    assert decode() == Decode.Response.OK
    assert change(Transition.TRANSITION_ACTIVE_SHUTDOWN)
    assert not any("Traceback" in line for line in rig.lines)
