# SPDX-License-Identifier: Apache-2.0
"""Mode stream, the robot's end of a reply: whole and in order, or ended within the attempts, whatever the link does."""

from __future__ import annotations

import random
import time
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings as profile, strategies as st

from dsd_ros.cloud.drafts import StreamedDraft
from dsd_ros.edge.client import LinkSettings, VerifierClient, VerifierRefused
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.reply_stream import ReplyStream, rest_of
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.client import DeadlineExceeded, DecodeCancelled, Limits
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    DraftTokens,
    Observation,
    Refusal,
    RefusalCode,
    SessionReply,
    SessionRequest,
    VerifiedTokens,
)

SIZE, END = 12, 11
QUICK = LinkSettings(response_timeout_s=0.05, attempts=4)


class Verifier:
    """The other end of the link, in the robot's own thread: decodes when it is listened to."""

    bytes_up = bytes_down = 0

    def __init__(self, reply: list[int], seed: int = 0) -> None:
        self.reply, self.chance = reply, random.Random(seed)
        self.session, self.at = 0, -1  # -1: without the observation
        self.inbox: deque = deque()
        self.draft = StreamedDraft()
        self.up: list = []
        self.busy = False

    def reconnect(self) -> None:
        self.inbox.clear()

    def close(self) -> None:
        pass

    def send(self, message) -> None:
        self.up.append(message)
        match message:
            case SessionRequest():
                if not message.resume:
                    self.forget()
                ticket = b"t" * 16
                self.inbox.append(SessionReply(message.request, self.session, "", "t", "f", SIZE, [END], ticket=ticket))
            case _ if message.session != self.session:
                self.refuse(RefusalCode.UNKNOWN_SESSION, message)
            case Observation():
                assert message.verified == self.reply[: len(message.verified)]
                self.at = max(self.at, len(message.verified))
            case DraftTokens() if message.tokens:
                self.draft.take(message)
            case DraftTokens() if self.at < message.start:
                self.refuse(RefusalCode.NO_OBSERVATION, message)
            case DraftTokens() if message.start < self.at or self.at == len(self.reply):
                self.inbox.append(self.verified(message.start, self.at))

    def receive(self, timeout: float):
        if not self.inbox:
            self.decode()
        if not self.inbox:
            raise LinkTimeout("nothing came")
        return self.inbox.popleft()

    def decode(self) -> None:
        """A step of the reply, if it is known and has not ended."""
        if 0 <= self.at < len(self.reply):
            start, self.at = self.at, min(len(self.reply), self.at + self.chance.randrange(1, 5))
            self.inbox.append(self.verified(start, self.at))

    def verified(self, start: int, end: int) -> VerifiedTokens:
        tokens = self.reply[start:end]
        return VerifiedTokens(self.session, 1, start, tokens, ended=end == len(self.reply))

    def refuse(self, code: RefusalCode, about=None) -> None:
        number = getattr(about, "stream", 0)
        self.inbox.append(Refusal(getattr(about, "session", self.session), 1, number, code, "no"))

    def forget(self) -> None:
        self.session, self.at = self.session + 1, -1


class Fickle(Verifier):
    """Does something wrong now and then, ``left`` times."""

    def __init__(self, reply: list[int], seed: int, left: int) -> None:
        super().__init__(reply, seed)
        self.left = left

    def send(self, message) -> None:
        if self.happens(0.1):
            if self.chance.random() < 0.5:
                raise LinkClosed("the link broke off")
            return  # lost
        super().send(message)
        if self.happens(0.1):
            super().send(message)  # doubled

    def receive(self, timeout: float):
        if self.happens(0.3):
            what = self.chance.randrange(8)
            if what == 0:
                raise LinkClosed("the link broke off")
            if what == 1:
                self.forget()
            elif what == 2:
                self.refuse(self.chance.choice([RefusalCode.OVERLOADED, RefusalCode.NO_OBSERVATION]))
            elif what == 3:
                self.inbox.append(Refusal(self.session, 0, 9, RefusalCode.MODEL_ERROR, "of another reply"))
            elif what == 4 and self.at > 0:
                start = self.chance.randrange(self.at)
                self.inbox.append(self.verified(start, self.chance.randrange(start, self.at) + 1))
            elif what == 5:
                self.decode()
                self.decode()
                self.chance.shuffle(self.inbox)
            elif what == 6:
                self.decode()
                if self.inbox:
                    self.inbox.popleft()  # lost
            else:
                self.inbox.append(msgspec.structs.replace(self.verified(0, 0), reply=7, tokens=[3], ended=True))
        self.busy = self.chance.random() < 0.2
        return super().receive(timeout)

    def happens(self, chance: float) -> bool:
        happens = self.left > 0 and self.chance.random() < chance
        self.left -= happens
        return happens


def begun(verifier: Verifier, link: LinkSettings = QUICK, **limits) -> ReplyStream:
    """A reply whose observation has been sent."""

    def request(number: int, resume: bytes) -> SessionRequest:
        return SessionRequest(number, PROTOCOL_VERSION, "stream", "f", SIZE, 0.0, 0, 1.0, 0, 64, resume)

    client = VerifierClient(verifier, request, link)
    client.backoff.first = client.backoff.longest = 0.001
    pictures = SessionPictures(link)
    pictures.begin(None)
    asked = Limits(**limits)
    client.open(Limits())
    stream = ReplyStream(client, pictures, ReplyRequest(1, None, "go", None, str, asked), 64)
    stream.begin()
    return stream


def replies(chance: random.Random) -> list[int]:
    length = chance.choice([1, 2, 30, 63, 64])
    tokens = [chance.randrange(END) for _ in range(length)]
    return tokens if length == 64 else [*tokens[:-1], END]


@given(seed=st.integers(0, 1 << 30), left=st.integers(0, 30))
@profile(max_examples=80)
def test_the_reply_is_whole_and_told_once_whatever_happens(seed, left):
    chance = random.Random(seed)
    wanted = replies(chance)
    verifier = Fickle(wanted, seed, 0)
    stream = begun(verifier, LinkSettings(response_timeout_s=0.05, attempts=60))
    verifier.left = left
    told: list[int] = []
    while not stream.ended:
        if (found := stream.verified()) is not None:
            news, _ = found
            assert news.at == len(told) and news.tokens and news.accepted <= news.drafted
            told += news.tokens
        assert told == stream.tokens == wanted[: len(told)]
        known, right = max(0, len(told) - chance.randrange(3)), chance.randrange(5)
        wrong = [chance.randrange(SIZE) for _ in range(chance.randrange(3))]
        stream.draft(told[:known], wanted[known : known + right] + wrong)
    assert told == wanted
    assert {message.reply for message in verifier.up if not isinstance(message, SessionRequest)} == {1}


@given(seed=st.integers(0, 1 << 30))
@profile(max_examples=80)
def test_what_the_verifier_holds_of_the_draft_is_the_draft(seed):
    """Whatever is drafted next, after whichever verified tokens, and whenever the link is busy."""
    chance = random.Random(seed)
    verifier = Verifier(replies(chance), seed)
    stream, draft, before = begun(verifier), [], []
    while not stream.ended:
        if chance.random() < 0.3:
            stream.verified()
        if chance.random() < 0.5:  # else the drafter has not heard of it yet
            draft, before = rest_of(draft, stream.tokens[len(before) :]), list(stream.tokens)
        if chance.random() < 0.1:
            del draft[chance.randrange(len(draft) + 1) :]  # the drafter thinks better of it
        known = len(before)
        right = verifier.reply[known + len(draft) : known + len(draft) + 1]
        draft += right if chance.random() < 0.8 else [chance.randrange(SIZE)]
        verifier.busy = chance.random() < 0.3
        if stream.draft(before, draft) and not stream.ended and (rest := rest_of(draft, stream.tokens[len(before) :])):
            assert verifier.draft.after(1, stream.tokens, 200, (), SIZE) == rest
    streams = [message.stream for message in verifier.up if isinstance(message, DraftTokens)]
    assert streams == sorted(streams)


def test_a_lost_message_is_asked_for_once_and_what_came_after_it_is_told_again():
    verifier = Verifier(list(range(10)))
    stream = begun(verifier)
    verifier.at = 9
    verifier.inbox += [verifier.verified(start, start + 1) for start in range(3, 9)]
    assert stream.verified()[0].tokens == list(range(9))
    assert [message.start for message in verifier.up if isinstance(message, DraftTokens)] == [0]


class Refusing(Verifier):
    def __init__(self, code: RefusalCode) -> None:
        super().__init__([1] * 40)
        self.code = code

    def decode(self) -> None:
        self.inbox.append(Refusal(self.session, 1, (1 << 32) - 1, self.code, "no"))


class Silent(Verifier):
    def decode(self) -> None:
        pass


class Stalling(Verifier):
    """Answers, and never says anything."""

    def decode(self) -> None:
        self.inbox.append(self.verified(0, 0))


class Gone(Verifier):
    """Its link opens, and is closed as soon as the robot listens."""

    def receive(self, timeout: float):
        if not isinstance(self.inbox[0] if self.inbox else None, SessionReply):
            raise LinkClosed("the link broke off")
        return super().receive(timeout)


class Forgetful(Verifier):
    def send(self, message) -> None:
        super().send(message)
        if not isinstance(message, SessionRequest):
            self.refuse(RefusalCode.UNKNOWN_SESSION, message)


@pytest.mark.parametrize(
    "verifier",
    [
        lambda: Silent([1] * 40),
        lambda: Stalling([1] * 40),
        lambda: Gone([1] * 40),
        lambda: Forgetful([1] * 40),
        *(lambda code=code: Refusing(code) for code in RefusalCode if code != RefusalCode.ASSUMPTION_FAILED),
    ],
)
def test_it_ends_within_the_attempts(verifier):
    verifier = verifier()
    stream = begun(verifier)
    with pytest.raises(LinkError):
        while True:
            stream.verified()
    assert stream.tokens == []
    assert sum(isinstance(message, Observation) for message in verifier.up) <= QUICK.attempts + 1
    assert sum(isinstance(message, SessionRequest) for message in verifier.up) <= QUICK.attempts + 2


class Chattering(Verifier):
    """Never stops sending, and never anything new."""

    def decode(self) -> None:
        self.inbox.append(Refusal(self.session, 0, 0, RefusalCode.OUT_OF_STEP, "of another reply"))


@pytest.mark.parametrize("verifier", [Silent, Chattering])
def test_deadline_and_cancellation_hold_whatever_comes(verifier):
    patient = LinkSettings(response_timeout_s=600.0)
    polls = iter(range(1000))
    stream = begun(verifier([1] * 40), patient, cancelled=lambda: next(polls) > 50)
    with pytest.raises(DecodeCancelled):
        while True:
            stream.verified()
    stream = begun(verifier([1] * 40), patient, deadline=time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        while True:
            stream.verified()


def test_an_overdue_answer_is_reported_at_once_and_named_at_the_deadline():
    said = []
    verifier = Silent([1] * 40)
    stream = begun(verifier, on_trouble=said.append)
    verifier.at = 3  # which it says when it is asked
    assert stream.verified()
    assert len(said) == 2 and "sent nothing after token 0 for 0.05 s" in said[0] and said[1] == ""
    stream = begun(Silent([1] * 40), on_trouble=said.append, deadline=time.monotonic() + 0.1)
    with pytest.raises(DeadlineExceeded, match=r"at its deadline: the verifier sent nothing after token 0") as error:
        stream.verified()
    assert error.value.trouble == said[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [SIZE]},
        {"tokens": [END, 1]},
        {"tokens": [1] * 63},
        {"at": 0, "tokens": [9, 9]},
        {"accepted": 2, "drafted": 2},
        {"accepted": 1, "drafted": 0},
    ],
)
def test_what_cannot_follow_is_never_taken(changes):
    verifier = Silent([1, 2, 3])
    stream = begun(verifier)
    verifier.inbox.append(verifier.verified(0, 2))
    stream.verified()
    verifier.inbox.append(msgspec.structs.replace(VerifiedTokens(verifier.session, 1, 2, [3]), **changes))
    with pytest.raises(VerifierRefused, match="does not follow the protocol"):
        stream.verified()
    assert stream.tokens == [1, 2]
