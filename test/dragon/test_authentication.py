# SPDX-License-Identifier: Apache-2.0
"""A question over a link on which a stranger answers first: the same tokens as in one thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import pytest
from asking import Letters, Shelf, in_one_thread
from stranger import Stranger
from table_model import TableModel

from dsd_lab.dragon.ablations import AblationClient
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.dragon.answers import AnswerRefused
from dsd_ros.dragon.server import DragonServer, WithDocuments
from dsd_ros.wire import messages as m
from dsd_ros.wire.authentication import AuthenticatedChannel
from dsd_ros.wire.channel import LinkTimeout, LocalChannel

TOKEN = "a-token-that-nobody-else-has"
OURS, THEIRS = Shelf(("The Viola is liked.", 0.4)), Shelf(("The Viola chair is red.", 0.6))
DEVICE, CLOUD = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.8)
QUESTION = "bring me to the chair I like"


class Guarded:
    """The cloud behind its end of the proof, as topics reach it."""

    def __init__(self, both: WithDocuments, token: str) -> None:
        self.submit = Authenticator(both.submit, Tokens.shared(token)).submit
        self.disconnect = both.disconnect


@contextlib.contextmanager
def cloud(token: str | None = TOKEN) -> Iterator[tuple[WithDocuments, LocalChannel]]:
    both = WithDocuments(VerifierEngine(CLOUD), DragonServer(CLOUD, THEIRS, asking=Letters(12)))
    with both, LocalChannel(both) as channel:
        if token is not None:
            channel._engine = Guarded(both, token)
        yield both, channel


def test_a_stranger_that_answers_first_and_replays_changes_no_token():
    settings = AblationSettings(temperature=1.0, schedule="random", max_tokens=20, window=4, seed=7)
    with cloud() as (_, local):
        stranger = Stranger(local)
        channel = AuthenticatedChannel(stranger, TOKEN)

        def answer(message: m.Message) -> None:
            if not isinstance(message, m.Proposal | m.Verdict | m.Reveal):
                return
            name = message.ask, message.attempt
            for tag in (b"", bytes(20), message.tag, *(one.tag for one in stranger.down[-1:])):
                stranger.waiting += [
                    m.Verdict(*name, message.position, 3, True, True, tag=tag),
                    m.Proposal(*name, message.position, 0, 3, 0.0, b"", tag=tag),
                    *(m.QuestionEnd(*name, code, "no", tag=tag) for code in m.EndCode),
                ]
            stranger.waiting += stranger.down[-2:]  # once more

        stranger.on_up = answer
        with AblationClient(channel, DEVICE, OURS, settings, asking=Letters(12)) as asking:
            replies = [asking.answer(QUESTION) for _ in range(2)]
    for number, reply in enumerate(replies, 1):
        sides = (DEVICE, Letters(12), OURS), (CLOUD, Letters(12), THEIRS)
        assert reply.tokens == in_one_thread(*sides, settings, QUESTION, number)
        assert reply.statistics.attempts == 1
    assert channel.dropped.count > 100  # the others are about a question that is over


def test_a_replayed_question_is_not_answered():
    with cloud() as (both, local):
        stranger = Stranger(local)
        with AblationClient(AuthenticatedChannel(stranger, TOKEN), DEVICE, OURS, asking=Letters(12)) as asking:
            asking.answer(QUESTION)
        heard: list[m.Message] = []
        for message in stranger.up:
            assert local._engine.submit(message, heard.append, "a stranger")
        deadline = time.monotonic() + 30
        while both.service.answers and time.monotonic() < deadline:
            time.sleep(0.01)  # until the cloud has read the last verdict
        assert not heard and both.service.answers == 0


@pytest.mark.parametrize(("device", "far"), [(TOKEN, "another-secret"), (TOKEN, None), (None, TOKEN)])
def test_a_side_that_does_not_prove_the_token_is_refused_by_name(device, far):
    settings = AblationSettings(patience_s=0.2, attempts=2, on_loss="fail")
    with cloud(far) as (both, local):
        channel = AuthenticatedChannel(local, device) if device is not None else local
        with (
            AblationClient(channel, DEVICE, OURS, settings, asking=Letters(12)) as asking,
            pytest.raises((LinkTimeout, AnswerRefused), match="token_file"),
        ):
            asking.answer(QUESTION)
        assert far is None or both.service.answers == 0


class Restarting(Stranger):
    """Loses what the first cloud has not yet delivered when the next one takes its place."""

    restarted = False

    def receive(self, timeout: float) -> m.Message:
        while True:
            message = super().receive(timeout)
            if not self.restarted or isinstance(message, m.QuestionEnd) or getattr(message, "attempt", 1) > 0:
                return message


def test_a_cloud_that_was_restarted_says_so_with_proof():
    settings = AblationSettings(temperature=1.0, schedule="cloud", max_tokens=20, window=4, patience_s=60, seed=3)
    with cloud() as (_, local), cloud() as (_, anew):
        link = Restarting(local)
        channel = AuthenticatedChannel(link, TOKEN)

        def restart(message: m.Message) -> None:
            if isinstance(message, m.Proposal) and message.position == 6:
                link.restarted = True
                local._engine = anew._engine  # a new process at the same address: it knows no key of the first one

        link.on_up = restart
        with AblationClient(channel, DEVICE, OURS, settings, asking=Letters(12)) as asking:
            reply = asking.answer(QUESTION)
    sides = (DEVICE, Letters(12), OURS), (CLOUD, Letters(12), THEIRS)
    assert reply.tokens == in_one_thread(*sides, settings, QUESTION, 1)
    denials = [one for one in link.down if isinstance(one, m.QuestionEnd)]
    assert denials and reply.statistics.attempts == 2 and reply.statistics.seconds < 50
    assert channel._accepted(msgspec.structs.replace(denials[0], attempt=1)) is None  # of no use for the next attempt
