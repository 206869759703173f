"""One attempt of the device at a question: from its Question to the complete answer or the failure."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from dsd_ros.dragon.answers import AnswerRefused
from dsd_ros.dragon.mixture import LocalMixture, Preempted
from dsd_ros.dragon.peer import MAX_MEASURED_US, AggregationPeer, Agreed, Profile, end_of
from dsd_ros.dragon.state import Contradiction
from dsd_ros.wire.channel import LinkError
from dsd_ros.wire.messages import (
    MAX_VOCABULARY,
    EndCode,
    Message,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    RefusalCode,
    Reveal,
    Verdict,
)

_EARLY = 256  # messages that may overtake the reply
_FATAL = (RefusalCode.MALFORMED, RefusalCode.UNSUPPORTED)


class Attempt:
    """Call ``receive`` in one thread and ``work`` in another; ``wake`` is notified when either changes something."""

    def __init__(
        self,
        question: Question,
        model: Any,
        mixture: LocalMixture,
        send: Callable[[Message], object],
        profile: Profile,
        wake: threading.Condition,
    ) -> None:
        self.question = question
        self.half: AggregationPeer | None = None
        self.failure: LinkError | Exception | None = None
        self.eos: frozenset[int] = frozenset()
        self.documents = 0
        self._model, self._mixture, self._send = model, mixture, send
        self._profile, self._wake = profile, wake
        self._early: list[Message] = []
        self._read = False  # whether the documents were read, before the cloud replied
        self._stopped = False
        self._asked = self._heard = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.half is not None and self.half.ended

    @property
    def wants_work(self) -> bool:
        if self._stopped or self.failure is not None:
            return False
        return not self._read if self.half is None else self.half.wants_work

    def news(self, known: int) -> bool:
        """Whether there are more than ``known`` tokens, or the answer or the attempt has ended."""
        return self.failure is not None or (
            self.half is not None and (self.ended or len(self.question.answered) + len(self.half.times) > known)
        )

    def progress(self) -> tuple[list[int], list[float]]:
        """The tokens and when each was decided; NaN for those of earlier attempts."""
        if self.half is None:
            return self.question.answered, [math.nan] * len(self.question.answered)
        times = list(self.half.times)
        tokens = self.half.tokens[: len(self.question.answered) + len(times)]
        return tokens, [math.nan] * len(self.question.answered) + times

    def silent_in(self, patience: float) -> float:
        """Seconds until the cloud has been silent for ``patience``; all of them while it owes nothing."""
        if self.half is not None and not self.half.owed:
            return patience
        return max(0.0, self._heard + patience - time.monotonic())

    def stop(self) -> None:
        """Give up: a forward pass in progress ends before its next layer."""
        self._stopped = True
        if self.half is not None:
            self.half.stop()

    def work(self) -> None:
        """Make a draft or, until the cloud has replied, read the documents."""
        try:
            if self.half is None:
                self._mixture.follow(self.question.answered)
                self._mixture.next(lambda: self._stopped)
                self._read = True
            elif not self.half.owed:
                self.half.work()
                self._heard = time.monotonic()  # the cloud may have been waiting for this draft
            else:
                self.half.work()
        except Preempted:
            pass
        except Exception as error:  # whatever it is, report it to the caller
            self._fail(error, EndCode.MODEL_ERROR, "the device's model could not go on")

    def receive(self, message: Message) -> None:
        """Take a message of the cloud; those of other attempts are dropped."""
        if isinstance(message, Refusal):
            if message.code in _FATAL and not message.session:
                self._fail(AnswerRefused(message.sentence, message.code))
            return
        if not isinstance(message, (QuestionReply, Proposal, Verdict, Reveal, QuestionEnd)):
            return
        if (message.ask, message.attempt) != (self.question.ask, self.question.attempt):
            return
        self._heard = time.monotonic()
        if isinstance(message, QuestionEnd):
            self._fail(AnswerRefused(message.sentence or "the cloud ended the answer", message.code))
        elif isinstance(message, QuestionReply):
            self._on_reply(message)
        elif self.half is None:
            if len(self._early) < _EARLY:
                self._early.append(message)
        else:
            self._hand_over(message)

    def _on_reply(self, reply: QuestionReply) -> None:
        if self.half is not None:
            return
        if reply.error or not 2 <= reply.vocab_size <= MAX_VOCABULARY:
            sentence = reply.error or f"the cloud's vocabulary has {reply.vocab_size} tokens"
            self._fail(AnswerRefused(sentence, "question"))
            return
        trip = time.monotonic() - self._asked - reply.held / 1e6
        if reply.held and 0.0 <= trip <= MAX_MEASURED_US / 1e6:  # 0: it was not measured
            self._profile.link.observe_round_trip(trip)
        self.eos = frozenset(self.question.eos_token_ids) | frozenset(reply.eos_token_ids)
        self.documents = reply.documents
        agreed = Agreed(self._model.vocab_size, reply.vocab_size, self.eos)
        half = AggregationPeer(self.question, "device", agreed, self._mixture, self._send, self._profile, self._wake)
        if self._stopped:
            half.stop()
        early, self._early = self._early, []
        with self._wake:
            self.half = half
            self._wake.notify_all()
        for message in early:
            self._hand_over(message)

    def _hand_over(self, message: Message) -> None:
        assert self.half is not None
        try:
            self.half.receive(message)
        except Contradiction as error:
            self._fail(AnswerRefused(str(error), error.code), error.code, str(error))
        except Exception as error:  # whatever it is, report it to the caller
            self._fail(error, EndCode.MODEL_ERROR, "the device could not go on")

    def _fail(self, error: Exception, code: EndCode | None = None, sentence: str = "") -> None:
        if code is not None:
            self._send(end_of(self.question, code, sentence))
        with self._wake:
            self.failure = self.failure or error
            if self.half is not None:
                self.half.stop()
            self._wake.notify_all()
