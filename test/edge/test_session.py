# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LinkError, LinkTimeout, LocalChannel
from dsd_ros.wire.client import DeadlineExceeded, DecodeCancelled, Limits
from dsd_ros.wire.messages import Draft, DraftTokens, Observation

IMAGE = np.full((2, 2, 3), 1, np.uint8)
MODES = ("stream", "ar", "dsd", "fsd")


@pytest.fixture
def target():
    return TableModel(1, 12, ends=False)


@pytest.fixture
def draft():
    return TableModel(1, 12, ends=False, noise=0.5, padding=2)


@pytest.fixture
def engine(target):
    with VerifierEngine(target) as engine:
        yield engine


@pytest.fixture
def channel(engine):
    with LocalChannel(engine) as channel:
        yield channel


def greedy(model, length: int) -> list[int]:
    sequence = model.prefill(IMAGE, "go")
    while len(sequence.tokens) < length:
        sequence.append([int(sequence.next_logits().argmax())])
        if sequence.tokens[-1] in model.eos_token_ids:
            break
    return sequence.tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_says_what_it_took(channel, target, draft, mode):
    with EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=30)) as session:
        up, down = channel.bytes_up, channel.bytes_down
        reply = session.decode(IMAGE, "go")
        assert session.verifier.target_name == "table-1"
    assert reply.tokens == greedy(target, 30) and reply.text == target.decode_text(reply.tokens)
    assert reply.mode == mode and not reply.finished
    assert reply.rounds == len(reply.records) == len(reply.accepted)
    assert sum(reply.accepted) + reply.rounds == 30
    assert reply.tau == 30 / reply.rounds
    assert reply.tau == 1 if mode == "ar" else reply.tau > 1 or mode == "stream"
    assert reply.bytes_down == channel.bytes_down - down > 0
    assert 0 < reply.bytes_up < channel.bytes_up - up  # the rest is the closing
    assert sum(r.bytes_down for r in reply.records) == reply.bytes_down
    assert reply.verify_seconds > 0 and reply.wait_seconds > 0
    streams = mode in ("stream", "ar")
    assert (reply.draft_seconds > 0) != streams  # nothing waits for a stream's drafts
    assert reply.draft_seconds + reply.wait_seconds + (not streams) * reply.prefill_seconds <= reply.seconds


@pytest.mark.parametrize("mode", MODES)
def test_progress_grows_to_the_reply(channel, draft, mode):
    seen = []
    with EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=20)) as session:
        reply = session.decode(IMAGE, "go", on_progress=lambda *news: seen.append(news))
    assert seen[-1][:2] == (reply.text, len(reply.tokens))
    assert [record for _, _, record in seen] == reply.records
    for (text, count, _), (more, larger, _) in itertools.pairwise(seen):
        assert more.startswith(text) and larger > count


@pytest.mark.parametrize("gamma", [1, 4])
def test_the_end_of_a_reply_is_the_same_wherever_it_falls_in_a_draft(gamma):
    """Every reply ends somewhere; the token that ends it is the last one, in every mode."""
    ended = 0
    for seed in range(6):
        target, draft = TableModel(seed), TableModel(seed, noise=0.3)
        for model in (target, draft):
            model.table[..., 7] += 0.8
        with VerifierEngine(target) as engine:
            tokens = {}
            for mode in MODES:
                chosen = DecodeSettings(mode=mode, draft_length=gamma, max_tokens=25)
                with LocalChannel(engine) as channel, EdgeSession(channel, draft, chosen) as session:
                    reply = session.decode(IMAGE, "go")
                tokens[mode] = reply.tokens
                assert reply.finished == (reply.tokens[-1] == 7)
                assert 7 not in reply.tokens[:-1] and "h" not in reply.text
            assert tokens["ar"] == tokens["dsd"] == tokens["fsd"] == greedy(target, 25)
            ended += tokens["ar"][-1] == 7
    assert ended >= 3


def test_the_targets_end_counts_not_the_drafts(target, draft, channel):
    draft.eos_token_ids = frozenset(range(11))
    with EdgeSession(channel, draft, DecodeSettings(mode="dsd", max_tokens=20)) as session:
        reply = session.decode(IMAGE, "go")
    assert reply.tokens == greedy(target, 20) and max(reply.accepted) > 1


@pytest.mark.parametrize("mode", ["dsd", "fsd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_a_shorter_context_lets_the_target_go_on(engine, target, temperature, mode):
    short = TableModel(1, 12, ends=False, noise=0.3, max_length=12)
    chosen = DecodeSettings(mode=mode, max_tokens=30, temperature=temperature)
    with LocalChannel(engine) as channel, EdgeSession(channel, short, chosen) as session:
        reply = session.decode(IMAGE, "go")
    assert len(reply.tokens) == 30 and sum(reply.accepted[-10:]) == 0 < sum(reply.accepted)
    if temperature == 0:
        assert reply.tokens == greedy(target, 30)


def test_ar_without_a_model_has_tokens_and_no_text(channel, target):
    with EdgeSession(channel, None, DecodeSettings(mode="ar", max_tokens=9)) as session:
        reply = session.decode(IMAGE, "go")
    assert reply.tokens == greedy(target, 9) and reply.text == ""


def test_drafting_without_a_draft_model_is_refused(channel):
    with pytest.raises(ValueError, match="mode dsd needs a draft model"):
        EdgeSession(channel, None, DecodeSettings(mode="dsd"))


def test_distributions_too_large_for_the_wire_are_refused(channel):
    huge = TableModel(1, padding=1_000_000)
    chosen = DecodeSettings(mode="dsd", temperature=1.0, draft_length=20)
    with pytest.raises(ValueError, match="draft_length 20 is too long.*use 10 or less"):
        EdgeSession(channel, huge, chosen)
    EdgeSession(channel, huge, DecodeSettings(mode="dsd", draft_length=20))
    # Up go distributions of nodes with children, here 13; down those after two thirds of the nodes, 27.
    for mode, rows in (("mc-dsd", 13), ("dssd", 27)):
        chosen = DecodeSettings(mode=mode, shape="expansion", temperature=1.0, tree_expansion="3,3,3")
        with pytest.raises(ValueError, match=f"'3,3,3' takes {rows} distr.* at most 10 fit"):
            EdgeSession(channel, huge, chosen)
        EdgeSession(channel, huge, replace(chosen, tree_expansion="3,2"))


@pytest.mark.parametrize(
    ("image", "instruction", "words"),
    [(IMAGE, "", "empty"), (IMAGE, "word " * 10_000, "2000"), (IMAGE.astype(float), "go", "float64")],
)
@pytest.mark.parametrize("mode", ["stream", "fsd"])
def test_a_bad_input_is_a_sentence_and_the_session_goes_on(channel, target, draft, mode, image, instruction, words):
    with EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=9)) as session:
        with pytest.raises(ValueError, match=words):
            session.decode(image, instruction)
        assert session.decode(IMAGE, "go").tokens == greedy(target, 9)


class Slow(TableModel):
    seconds = 0.02

    def forward_tokens(self, *arguments):
        time.sleep(self.seconds)
        return super().forward_tokens(*arguments)


@pytest.mark.parametrize("mode", ["stream", "fsd"])
def test_a_deadline_ends_the_decode_and_the_session_goes_on(draft, mode):
    with (
        VerifierEngine(Slow(1, 12, ends=False)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=300)) as session,
    ):
        with pytest.raises(DeadlineExceeded, match="deadline"):
            session.decode(IMAGE, "go", deadline=time.monotonic() + 0.3)
        engine.model.seconds = 0
        assert len(session.decode(IMAGE, "go").tokens) == 300


@pytest.mark.parametrize("mode", ["stream", "fsd"])
def test_a_cancelled_decode_ends_and_the_session_goes_on(draft, mode):
    with (
        VerifierEngine(Slow(1, 12, ends=False)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=300)) as session,
    ):
        stop = threading.Event()

        def progress(_: str, verified: int, __: object) -> None:
            if verified > 3:
                stop.set()

        with pytest.raises(DecodeCancelled):
            session.decode(IMAGE, "go", progress, cancelled=stop.is_set)
        engine.model.seconds = 0
        assert len(session.decode(IMAGE, "go").tokens) == 300


def test_a_silent_verifier_is_given_up_with_a_sentence(draft):
    class Silent:
        def submit(self, message, reply, peer):
            return True

        def disconnect(self, peer):
            pass

    impatient = LinkSettings(response_timeout_s=0.05, attempts=2)
    with LocalChannel(Silent()) as channel:
        session = EdgeSession(channel, draft, DecodeSettings(), impatient)
        with pytest.raises(LinkTimeout, match="did not answer within 0.05 s"):
            session.decode(IMAGE, "go")
        with pytest.raises(DeadlineExceeded):
            session.open(deadline=time.monotonic())


def test_a_verifier_that_refuses_the_observation_says_why(draft):
    class Picky(TableModel):
        def open(self, image, instruction, history=()):
            if instruction == "dance":
                raise ValueError("unexpected")
            return super().open(image, instruction, history)

    with (
        VerifierEngine(Picky(1, 12, ends=False)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, DecodeSettings(max_tokens=5)) as session,
    ):
        with pytest.raises(VerifierRefused, match="log") as caught:
            session.decode(IMAGE, "dance")
        assert caught.value.code == "model-error" and isinstance(caught.value, LinkError)
        assert len(session.decode(IMAGE, "go").tokens) == 5


@pytest.mark.parametrize("mode", ["stream", "dsd"])
def test_the_observation_leaves_before_the_robot_reads_it_itself(engine, target, mode):
    order = []

    class Watched(LocalChannel):
        def send(self, message):
            order.append(type(message))
            super().send(message)

    class Reader(TableModel):
        def prefill(self, image, instruction, history=()):
            order.append("prefill")
            return super().prefill(image, instruction, history)

    with (
        Watched(engine) as channel,
        EdgeSession(channel, Reader(1, 12, ends=False), DecodeSettings(mode=mode, max_tokens=5)) as session,
    ):
        session.decode(IMAGE, "go")
    assert order.index(Observation) < order.index("prefill")
    assert not {Draft, DraftTokens} & set(order[: order.index("prefill")])


def test_limits_wait_no_longer_than_they_may():
    assert Limits().slice(9) == 9
    assert Limits(cancelled=lambda: False).slice(9) <= 0.05
    assert Limits(deadline=time.monotonic() + 1).slice(9) <= 1
    with pytest.raises(DeadlineExceeded):
        Limits(deadline=time.monotonic() + 0.02).sleep(60)


@pytest.mark.parametrize("method", ["prefill", "forward_tokens"])
def test_whatever_a_drafter_takes_long_for_keeps_no_reply_waiting(engine, target, monkeypatch, method):
    """The target says its whole reply meanwhile; the next reply drafts, once the drafter has ended with the first."""
    told = threading.Event()
    draft = TableModel(1, 12, ends=False)
    quick = getattr(draft, method)

    def slow(*args, **named):
        assert told.wait(20)
        return quick(*args, **named)

    monkeypatch.setattr(draft, method, slow)
    with LocalChannel(engine) as channel, EdgeSession(channel, draft, DecodeSettings(max_tokens=8)) as session:
        assert session.decode(IMAGE, "go").tokens == greedy(target, 8)
        told.set()
        assert session.decode(IMAGE, "go").tokens == greedy(target, 8)
