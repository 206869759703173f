# SPDX-License-Identifier: Apache-2.0
"""A reply about earlier pictures and actions is the target's own as well."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from restarting_channel import RestartingChannel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.limits import LOSSLESS
from dsd_ros.vlm.errors import ImageError, PromptError
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import Observation
from dsd_ros.wire.websocket import WebsocketChannel

STEPS, TOKENS = 10, 10
ACTIONS = ("forward 25 cm", "turn left 15 degrees", "stop")
PATIENT = LinkSettings(response_timeout_s=0.4, attempts=60)


@pytest.fixture(scope="module")
def walk(picture):
    """The pictures, and the action after each, on a walk of ``STEPS`` steps."""
    return [(picture(100 + step), ACTIONS[step % 3]) for step in range(STEPS)]


def before(walk, step: int, frames: int):
    return walk[max(0, step - frames) : step]


def decode_walk(session, walk, frames: int = 8, steps=range(STEPS)):
    """The replies of a walk, each with up to ``frames`` earlier steps."""
    return [session.decode(walk[n][0], "go", history=before(walk, n, frames)) for n in steps]


def alone(target, image, history=()):
    """What the target itself says, with nothing of the protocol in between."""
    sequence = target.prefill(image, "go", history)
    while len(sequence.tokens) < TOKENS:
        sequence.append([int(sequence.next_logits().argmax())])
        if sequence.tokens[-1] in target.eos_token_ids:
            break
    return sequence.tokens


@pytest.fixture(scope="module")
def expected(target, walk):
    return [alone(target, image, before(walk, n, 8)) for n, (image, _) in enumerate(walk)]


COUPLED = {"proof": "coupled", "temperature": 0.9, "seed": 7}


@pytest.mark.parametrize(
    "values",
    [{"mode": "stream"}, {"mode": "fsd", "predraft_workers": 2}],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_greedy_replies_are_the_targets_own(target, draft, walk, expected, values):
    settings = DecodeSettings(**values, max_tokens=TOKENS)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, settings) as session,
    ):
        assert [reply.tokens for reply in decode_walk(session, walk)] == expected
    assert alone(target, walk[1][0]) != expected[1], "the history matters"


def test_over_a_websocket_the_same_and_one_new_picture_a_step(target_directory, draft, walk, expected, serving):
    """Eight earlier pictures cost their names and actions: nothing of them travels twice."""
    settings = DecodeSettings(mode="dsd", max_tokens=TOKENS)
    sent = {}
    with serving(str(target_directory)) as url:
        for frames in (0, 8):
            with WebsocketChannel(url) as channel, EdgeSession(channel, draft, settings) as session:
                sent[frames] = []
                send = channel.send

                def counting(message, send=send, channel=channel, to=sent[frames]):
                    up = channel.bytes_up
                    send(message)
                    if isinstance(message, Observation):
                        to.append(channel.bytes_up - up)

                channel.send = counting
                replies = decode_walk(session, walk, frames)
            if frames:
                assert [reply.tokens for reply in replies] == expected
    assert len(sent[0]) == len(sent[8]) == STEPS
    for step, (few, more) in enumerate(zip(sent[0], sent[8], strict=True)):
        names = sum(40 + len(action) for _, action in before(walk, step, 8))
        assert few > 10_000 and few <= more <= few + names


@pytest.mark.parametrize(
    "values", [{"image_encoding": "png"}, {"image_encoding": "jpeg"}, {"image_size": 200}], ids=str
)
def test_large_pictures_travel_as_the_target_reads_them(target, draft, picture, values, monkeypatch):
    """Both models see the same pixels, and of a lossless link those that the target would see anyway."""
    large = [(np.asarray(Image.fromarray(picture(200 + n)).resize((1280, 720))), ACTIONS[n]) for n in range(3)]
    seen = {id(target): [], id(draft): []}
    for model, read, name in ((target, target.open, "open"), (draft, draft.prefill, "prefill")):

        def look(image, instruction, history=(), *, model=model, read=read, **more):
            seen[id(model)].append([image, *(earlier for earlier, _ in history)])
            return read(image, instruction, history, **more)

        monkeypatch.setattr(model, name, look)
    settings = DecodeSettings(mode="dsd", max_tokens=TOKENS)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, settings, LinkSettings(**values)) as session,
    ):
        replies = [session.decode(large[n][0], "go", history=large[:n]) for n in range(3)]
    monkeypatch.undo()
    of_target, of_draft = seen[id(target)], seen[id(draft)]
    assert len(of_target) == len(of_draft) == 3
    for n, (reply, a, b) in enumerate(zip(replies, of_target, of_draft, strict=True)):
        assert all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))
        assert max(a[0].shape) < 720
        past = [(image, action) for image, (_, action) in zip(a[1:], large[:n], strict=True)]
        assert reply.tokens == alone(target, a[0], past)
        if values.get("image_encoding") in LOSSLESS:
            assert reply.tokens == alone(target, large[n][0], large[:n])
        assert reply.bytes_up < 1.5 * replies[0].bytes_up  # earlier pictures travel once


@pytest.mark.parametrize(("mode", "values"), [("stream", COUPLED), ("dsd", {})], ids=["stream", "dsd"])
def test_a_restarted_verifier_is_sent_everything_again(target, draft, walk, mode, values):
    """In the middle of the sixth reply, and nothing is left for the seventh."""
    settings = DecodeSettings(mode=mode, max_tokens=TOKENS, **values)

    def decoded(at: int) -> list[list[int]]:
        seen = Counter()

        def happens(_: int, message: object) -> str:
            seen[getattr(message, "reply", 0)] += 1
            waited = seen[at] > 0 and message is None
            seen["waited"] += waited
            return "restart and cut" if waited and seen["waited"] == 2 else ""

        channel = RestartingChannel(target, happens)
        with channel, EdgeSession(channel, draft, settings, PATIENT) as session:
            replies = decode_walk(session, walk, steps=range(7))
            assert channel.restarts == (at > 0)
        return [reply.tokens for reply in replies]

    assert decoded(6) == decoded(-1)


def test_pictures_that_the_verifier_has_dropped_are_sent_again_at_once(target, draft, walk, expected):
    settings = DecodeSettings(mode="dsd", max_tokens=TOKENS)
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        with EdgeSession(channel, draft, settings) as session:
            first = decode_walk(session, walk, steps=range(8))
            for held in engine._sessions._sessions.values():
                held.pictures.clear()
            dropped, after = decode_walk(session, walk, steps=(8, 9))
        assert [reply.tokens for reply in (*first, dropped, after)] == expected[:10]
        assert dropped.bytes_up > 8 * after.bytes_up
        assert after.bytes_up < 1.3 * first[0].bytes_up


def test_what_was_not_answered_is_sent_again(target, draft, walk, expected):
    """A decode that is given up leaves nothing taken for known."""
    settings = DecodeSettings(mode="dsd", max_tokens=TOKENS)
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        session = EdgeSession(channel, draft, settings)
        session.open()
        deaf, channel.send = channel.send, lambda message: None
        with pytest.raises(Exception, match="cancelled"):
            session.decode(walk[0][0], "go", cancelled=iter([False] * 3 + [True] * 9).__next__)
        channel.send = deaf
        assert session.decode(walk[1][0], "go", history=walk[:1]).tokens == expected[1]
        session.close()


@pytest.mark.parametrize(
    ("image", "history", "error", "sentence"),
    [
        (None, [(0, "stop")], ImageError, "without a present one"),
        (0, [(0, "stop")] * 9, WireError, "8 pictures with"),
        (0, [(0, "")], (PromptError, VerifierRefused), "action of an earlier step"),  # whoever reads it first
        (0, [(np.zeros((4, 4), np.uint8), "stop")], ImageError, "shape"),
    ],
)
def test_a_history_that_cannot_be_used_is_refused_with_a_sentence(target, draft, walk, image, history, error, sentence):
    history = [(walk[0][0] if isinstance(one, int) else one, action) for one, action in history]
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, DecodeSettings(max_tokens=3)) as session,
    ):
        with pytest.raises(error, match=sentence):
            session.decode(None if image is None else walk[0][0], "go", history=history)
        assert len(session.decode(walk[0][0], "go").tokens) == 3
