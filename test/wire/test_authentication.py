# SPDX-License-Identifier: Apache-2.0
"""Forged, changed and replayed messages count for nothing, and the honest reply stays the same."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from stranger import Stranger
from table_model import TableModel
from wire_samples import SAMPLES

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire import messages as m
from dsd_ros.wire.authentication import REMEMBERED, AuthenticatedChannel, SessionKey, Token
from dsd_ros.wire.channel import LinkClosed, LinkTimeout, LocalChannel, read_token
from dsd_ros.wire.codec import decode, encode

TOKEN = "a-token-that-nobody-else-has"
TARGET, DRAFT = TableModel(1, ends=False), TableModel(1, ends=False, noise=0.5)
IMAGE = np.full((2, 2, 3), 1, np.uint8)
EVERYTHING = [
    {"mode": "stream", "temperature": 1.0}, {"mode": "dsd"}, {"mode": "dssd", "temperature": 1.0, "seed": 3},
]  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """The same value, changed a little in every way that matters to it."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value ^ 1
        yield value ^ 2
    elif isinstance(value, float):
        yield value / 2
    elif isinstance(value, bytes):
        yield from (
            value[:at] + bytes([value[at] ^ 1 << bit]) + value[at + 1 :] for at in range(len(value)) for bit in range(8)
        )
        yield b""
    elif isinstance(value, str):
        yield value + "x"
        yield value[:-1]
    elif isinstance(value, list):
        yield []
        yield [*value, value[0]]
        yield from ([other, *value[1:]] for other in changed(value[0]))
    else:
        for name in value.__struct_fields__:
            yield from (msgspec.structs.replace(value, **{name: other}) for other in changed(getattr(value, name)))


def fault(received: m.Message) -> str:
    """What a fresh end of the verifier's session says."""
    return SessionKey(b"k" * 32, robot=False).fault(received)


@pytest.mark.parametrize("kind", get_args(m.Message), ids=lambda kind: kind.__name__)
def test_no_bit_of_any_field_can_be_changed(kind):
    fields = SAMPLES[kind]
    assert set(fields) == set(kind.__struct_fields__) - {"tag", "distribution"}  # where it stands in for next_token
    message = decode(encode(SessionKey(b"k" * 32, robot=True).sign(kind(**fields))))
    assert not fault(message)
    forgeries = [msgspec.structs.replace(message, **{n: v}) for n in fields for v in changed(fields[n])]
    forgeries += [msgspec.structs.replace(message, tag=tag) for tag in changed(message.tag)]
    if kind is m.Outcome:
        forgeries.append(msgspec.structs.replace(message, next_token=0, distribution=b"p"))
    assert {fault(forged) for forged in forgeries} == {"forged"}
    if kind in (m.SessionRequest, m.Question):
        opening = Token(TOKEN).sign(message)
        assert Token(TOKEN).holds(opening) and not Token(TOKEN + "x").holds(opening)
        for name in (*fields, "tag"):
            forgeries = [msgspec.structs.replace(opening, **{name: v}) for v in changed(getattr(opening, name))]
            assert not any(map(Token(TOKEN).holds, forgeries)), name


def test_no_message_counts_in_the_other_direction_in_another_session_or_as_another_type():
    robot = SessionKey(b"k" * 32, robot=True)
    close = robot.sign(m.SessionClose(7))
    assert not fault(close)
    assert robot.fault(close) == SessionKey(b"j" * 32, robot=False).fault(close) == "forged"
    # Reveal and Proposal begin alike.
    end = robot.sign(m.QuestionEnd(9, 1, "cancelled", ""))
    assert fault(m.QuestionReply(9, 1, "", "cancelled", "", 0, tag=end.tag)) == "forged"


def test_each_message_counts_once_in_any_order():
    robot, verifier = SessionKey(b"k" * 32, robot=True), SessionKey(b"k" * 32, robot=False)
    sent = [robot.sign(m.SessionClose(7)) for _ in range(2 * REMEMBERED)]
    order = np.random.default_rng(0).permutation(REMEMBERED).tolist()
    assert not any(verifier.fault(sent[at]) for at in order)
    assert {verifier.fault(sent[at]) for at in order} == {"replayed"}
    assert not verifier.fault(sent[-1])
    assert {verifier.fault(one) for one in sent[:REMEMBERED]} == {"replayed"}  # too old to tell
    assert not any(verifier.fault(one) for one in sent[REMEMBERED:-1])
    assert {verifier.fault(one) for one in sent[REMEMBERED:]} == {"replayed"}


class Guarded:
    """An engine behind its end of the proof, as topics reach it."""

    def __init__(self, guard: Authenticator, engine: VerifierEngine) -> None:
        self.guard, self.submit, self.disconnect = guard, guard.submit, engine.disconnect


class Rig:
    """A verifier, a stranger on the link, and a robot; each side's token, or None."""

    def __init__(self, stack: contextlib.ExitStack, robot: Any = TOKEN, verifier: str | None = TOKEN) -> None:
        self.engine = stack.enter_context(VerifierEngine(TARGET))
        self.served: Any = self.engine
        if verifier is not None:
            guard = Authenticator(self.engine.submit, Tokens.shared(verifier), self.engine.metrics)
            self.served = Guarded(guard, self.engine)
        self.local = stack.enter_context(LocalChannel(self.served))
        self.stranger = Stranger(self.local)
        self.channel: Any = self.stranger
        if robot is not None:
            self.channel = AuthenticatedChannel(self.stranger, robot)

    def session(self, settings: dict[str, Any], **link: Any) -> EdgeSession:
        return EdgeSession(self.channel, DRAFT, DecodeSettings(**{"max_tokens": 24} | settings), LinkSettings(**link))

    def ask_as_stranger(self, message: m.Message) -> list[m.Message]:
        """What the verifier says to a message that comes over a link of the stranger's own."""
        heard: list[m.Message] = []
        assert self.served.submit(decode(encode(message)), heard.append, self)
        return heard

    def counted(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"dsd_verifier_{name}", labels) or 0.0


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    with contextlib.ExitStack() as stack:
        yield lambda **changes: Rig(stack, **changes)


def undisturbed(settings: dict[str, Any], replies: int = 2) -> list[list[int]]:
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Rig(stack, None, None).session(settings))
        return [session.decode(IMAGE, "go").tokens for _ in range(replies)]


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda settings: settings["mode"])
def test_a_stranger_that_answers_everything_first_changes_no_token(rig, settings):
    rig = rig()
    stranger = rig.stranger

    def answer(message: m.Message) -> None:
        if not isinstance(message, (m.Observation, m.DraftTokens, m.Draft)):
            return
        number = getattr(message, "round", getattr(message, "stream", 0))
        name = message.session, message.reply, number
        real = [heard.tag for heard in stranger.down if heard.tag]
        for tag in (b"", bytes(20), message.tag, real[-1], message.tag[:4] + real[-1][4:]):
            for final in (True, False):
                stranger.waiting.append(m.Outcome(*name, 6, 0, 3, 0.99, final, tag=tag))
            for at in range(3):
                stranger.waiting.append(m.VerifiedTokens(*name[:2], at, [3] * 9, 9, 9, ended=True, tag=tag))
            for code in m.RefusalCode:
                stranger.waiting.append(m.Refusal(*name, code, "no", tag=tag))
        stranger.waiting.append(m.Refusal(0, 0, 0, m.RefusalCode.MALFORMED, "no"))

    with rig.session(settings) as session:
        stranger.on_up = answer
        replies = [session.decode(IMAGE, "go").tokens for _ in range(2)]
    assert replies == undisturbed(settings)
    assert stranger.injected > 60 and rig.channel.dropped.count == stranger.injected


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda settings: settings["mode"])
def test_replays_in_both_directions_change_no_token(rig, settings):
    rig = rig()
    stranger = rig.stranger
    with rig.session(settings) as session:
        replies = [session.decode(IMAGE, "go").tokens]
        heard, sent = list(stranger.down), list(stranger.up)
        recorded = len([one for one in sent if not isinstance(one, m.SessionRequest)])

        def replay(message: m.Message) -> None:
            stranger.on_up = lambda _: None
            for one in sent:
                rig.ask_as_stranger(one)
            for one in heard:
                stranger.waiting += [one, msgspec.structs.replace(one, reply=2) if hasattr(one, "reply") else one]
                stranger.waiting += sent[1:2]  # from the other direction

        stranger.on_up = replay
        replies.append(session.decode(IMAGE, "go").tokens)
        assert rig.engine.sessions == 1
    assert replies == undisturbed(settings)
    assert rig.counted("messages_dropped_total", reason="replayed") >= recorded
    assert rig.channel.dropped.count > len(heard)


def test_a_replayed_opening_opens_nothing_and_a_replayed_resume_moves_nothing(rig):
    rig = rig()
    with rig.session({"mode": "dsd"}) as session:
        replies = [session.decode(IMAGE, "go").tokens]
        session.reconnect()
        number = session.verifier.session
        opening, resume = (one for one in rig.stranger.up if isinstance(one, m.SessionRequest))
        assert not opening.resume and len(resume.resume) == 16
        for one in (opening, resume):
            (answer,) = rig.ask_as_stranger(one)  # the same answer again, which its session knows
            assert answer in rig.stranger.down and not answer.ticket
        replies.append(session.decode(IMAGE, "go").tokens)
        assert session.verifier.session == number
        assert rig.engine.sessions == 1 and rig.counted("sessions_resumed_total") == 1
        # A verifier that has forgotten the opening opens a session that nobody can use; the resume finds no ticket.
        rig.served.guard._nonces.clear()
        for one in (opening, resume):
            rig.ask_as_stranger(one)
        replies.append(session.decode(IMAGE, "go").tokens)
        assert session.verifier.session == number and rig.counted("sessions_resumed_total") == 1
    assert replies == undisturbed({"mode": "dsd"}, 3)


def test_a_ticket_that_was_read_is_useless(rig):
    rig = rig()
    with rig.session({"mode": "dsd"}) as session:
        session.decode(IMAGE, "go")
        session.reconnect()
        resume = next(one for one in rig.stranger.up if isinstance(one, m.SessionRequest) and one.resume)
        assert all(not one.ticket for one in rig.stranger.down if isinstance(one, m.SessionReply))
        for forged in (
            msgspec.structs.replace(resume, nonce=b"x" * 16),
            msgspec.structs.replace(resume, nonce=b"", tag=b""),
            Token("another").sign(resume),
        ):
            (answer,) = rig.ask_as_stranger(forged)
            assert answer.session == 0 and "prove its token" in answer.error
        assert session.decode(IMAGE, "go").tokens == undisturbed({"mode": "dsd"})[1]
    assert rig.counted("sessions_resumed_total") == 1


def test_a_token_is_read_for_each_opening(rig, tmp_path):
    """A session lives on after the token has been changed on both sides, and the next one shows the new token."""
    file = tmp_path / "token"
    file.write_text("changed\n")
    rig = rig(robot=partial(read_token, file), verifier="changed")
    with rig.session({"mode": "dsd"}) as session:
        replies = [session.decode(IMAGE, "go").tokens]
        file.write_text("changed-again\n")
        rig.served.guard._tokens = Tokens.shared("changed-again")
        replies.append(session.decode(IMAGE, "go").tokens)
        session.close()
        replies.append(session.decode(IMAGE, "go").tokens)
        session.close()
        file.unlink()
        with pytest.raises(LinkClosed, match="cannot be read"):
            session.open()
    assert replies == undisturbed({"mode": "dsd"}, 3)


def test_the_answer_to_a_resume_may_be_lost(rig):
    rig = rig()
    with rig.session({"mode": "dsd"}, response_timeout_s=0.5) as session:
        replies = [session.decode(IMAGE, "go").tokens]
        number = session.verifier.session
        lost: list[m.Message] = []
        receive = rig.local.receive

        def lose(timeout: float) -> m.Message:
            message = receive(timeout)
            if isinstance(message, m.SessionReply) and not lost:
                lost.append(message)
                raise LinkTimeout("lost")
            return message

        rig.local.receive = lose
        with pytest.raises(LinkTimeout):
            session.reconnect()
        session.reconnect()
        replies.append(session.decode(IMAGE, "go").tokens)
        assert lost and session.verifier.session == number
    assert replies == undisturbed({"mode": "dsd"})


@pytest.mark.parametrize(("robot", "verifier"), [(TOKEN, "some-other-secret"), (TOKEN, None)])
def test_a_verifier_that_does_not_prove_the_token_is_refused_by_name(rig, robot, verifier, caplog):
    rig = rig(robot=robot, verifier=verifier)
    session = rig.session({"mode": "dsd"}, response_timeout_s=0.1, attempts=2)
    with caplog.at_level(logging.DEBUG), pytest.raises(LinkTimeout, match="does not prove.*token_file"):
        session.open()
    assert session.verifier is None and rig.channel.dropped.count >= 2
    assert TOKEN not in caplog.text and "some-other-secret" not in caplog.text
    assert caplog.text.count("was dropped") <= 2  # one line of each side


def test_a_robot_without_a_token_is_refused_by_name(rig):
    rig = rig(robot=None)
    with pytest.raises(VerifierRefused, match="prove its token.*token_file"):
        rig.session({"mode": "dsd"}).open()
    for message in (m.SessionClose(7), m.Draft(7, 1, 1, 0, [1]), m.Reveal(9, 1, 0, 0, [1])):
        assert rig.ask_as_stranger(message) == []
    assert rig.engine.sessions == 0 and rig.counted("messages_dropped_total", reason="missing") == 4


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda settings: settings["mode"])
def test_a_verifier_that_was_restarted_says_so_with_proof(rig, settings):
    """The robot goes on at once: without proof it would wait for the time-out."""
    rig = rig()
    began = time.monotonic()
    with VerifierEngine(TARGET) as anew, rig.session(settings, response_timeout_s=60.0) as session:
        first = session.verifier.session

        def restart(message: m.Message) -> None:
            if isinstance(message, m.Draft) and message.round == 2:
                rig.stranger.on_up = lambda _: None
                rig.local._engine = Guarded(Authenticator(anew.submit, Tokens.shared(TOKEN)), anew)

        if settings["mode"] in ("ar", "stream"):  # there are no rounds: between two replies
            replies = [session.decode(IMAGE, "go").tokens]
            rig.local._engine = Guarded(Authenticator(anew.submit, Tokens.shared(TOKEN)), anew)
        else:
            rig.stranger.on_up = restart
            replies = [session.decode(IMAGE, "go").tokens]
        replies.append(session.decode(IMAGE, "go").tokens)
        assert session.verifier.session != first
    assert replies == undisturbed(settings)
    assert time.monotonic() - began < 50
    # What the verifier said is no use to a stranger: it is about that one message.
    denial = next(one for one in rig.stranger.down if isinstance(one, m.Refusal) and one.code == "unknown-session")
    assert Token(TOKEN).denies(denial, next(one.tag for one in rig.stranger.up if one.tag[:4] == denial.tag[:4]))
    assert not any(Token(TOKEN).denies(msgspec.structs.replace(denial, session=8), one.tag) for one in rig.stranger.up)


def test_another_verifier_that_does_not_know_the_session_ends_nothing(rig):
    """Strangers may ask it, and hand on its proof; the verifier that knows the session has answered meanwhile."""
    rig, other = rig(), rig()
    asked: list[m.Message] = []

    def ask(message: m.Message) -> None:
        if isinstance(message, m.Draft):
            asked.append(message)
            denials = other.ask_as_stranger(message)
            assert [denial.code for denial in denials] == ["unknown-session"]
            rig.stranger.waiting += denials

    with rig.session({"mode": "dsd"}) as session:
        session.decode(IMAGE, "go")
        number = session.verifier.session
        rig.stranger.on_up = ask
        assert session.decode(IMAGE, "go").tokens == undisturbed({"mode": "dsd"})[1]
        assert len(asked) > 3 and session.verifier.session == number and rig.engine.sessions == 1
