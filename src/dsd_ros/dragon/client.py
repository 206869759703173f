# SPDX-License-Identifier: Apache-2.0
"""The device's side of questions: answer them together with the cloud, over a link that may break and come back.

Three threads: the caller's waits and passes on tokens, one drafts, one dials and receives. An answer can go on from its
tokens alone, so a lost link or a restarted cloud costs an attempt and changes no token.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsd_ros.dragon.answers import Answer, AnswerRefused, AnswerStatistics, Told, sources_of
from dsd_ros.dragon.documents.retrieval import Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture, Preempted
from dsd_ros.dragon.profiler import Profile
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.dragon.settings import HEAD, SIDES, AggregationSettings
from dsd_ros.dragon.side import MAX_MEASURED_US, AnswerSide, end_of
from dsd_ros.dragon.state import Contradiction, Sources, own_choice
from dsd_ros.limits import largest_vocabulary
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.client import BackgroundConnection, Limits
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
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

if TYPE_CHECKING:
    from typing_extensions import Self

OnToken = Callable[[str, list[int]], object]  # the text so far, and its tokens
_FATAL = (RefusalCode.MALFORMED, RefusalCode.UNSUPPORTED)
_EARLY = 256  # messages that may overtake the reply
_TRANSIENT = (EndCode.OVERLOADED, EndCode.UNKNOWN, EndCode.CLOSING)  # another attempt may succeed


class DragonClient:
    """Answers questions together with the cloud, one at a time, over a channel that stays the caller's.

    The noise of the n-th answer is keyed by n, so a repeated session gives the same tokens. A client can be used again
    after any failure.
    """

    side_class = AnswerSide

    def __init__(
        self,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AggregationSettings | None = None,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
    ) -> None:
        """``model`` has the cloud's tokenizer. ``asking``: see ``server.DragonServer``."""
        self.settings = settings or AggregationSettings()
        self.model = model
        self.retriever = retriever
        self.asking: Asking = asking or DocumentPrompt(model)
        self.kept = kept if kept is not None else KeptDocuments()
        self.replies = 0  # questions so far
        self.profile = Profile()
        self._wake = threading.Condition()
        self._attempt: Attempt | None = None
        self._drafting = False  # the worker is in the mixture
        self._closing = False
        self._answering = threading.Lock()
        self._link = BackgroundConnection(channel, self._receive, self._wake)
        self._worker = threading.Thread(target=self._work_all, name="ask-worker", daemon=True)
        self._worker.start()

    def answer(
        self,
        question: str,
        on_token: OnToken | None = None,
        cancelled: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Answer a question from the device's documents and the cloud's.

        on_token(text so far, tokens so far) is called in this thread as tokens are decided. ``deadline`` is a
        time.monotonic() instant; ``cancelled`` is polled. Raises PromptError or ContextError for a question that
        cannot be used, LinkError when link or cloud fail for good (with ``on_loss`` "alone": only AnswerRefused),
        DeadlineExceeded, DecodeCancelled.
        """
        with self._answering:
            question = check_instruction(question)
            self.replies += 1
            began = time.monotonic()
            count = self.settings.documents
            documents = self.retriever.retrieve(question, count) if count else []
            mixture = LocalMixture(self.model, self.asking, question, documents, self.settings.temperature, self.kept)
            mixture.reserve(self.settings.max_tokens)
            limits = Limits(deadline, cancelled, closed=lambda: self._closing, what="answer")
            statistics = AnswerStatistics(device_documents=len(documents))
            asked = _Asked(question, mixture, statistics, began, on_token, limits)
            try:
                return self._answer(asked)
            finally:
                self._leave()

    def close(self) -> None:
        """End an answer in progress and both threads. The channel is the caller's to close."""
        with self._wake:
            self._closing = True
            if self._attempt is not None:
                self._attempt.stop()
            self._wake.notify_all()
        self._link.close()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the caller's thread

    def _answer(self, asked: _Asked) -> Answer:
        self._link.backoff.reset()
        ask = secrets.randbelow((1 << 32) - 1) + 1
        failures = number = 0
        failure: LinkError = LinkClosed("the cloud was not asked")
        bytes_before = self._bytes
        while failures < self.settings.attempts:
            tokens_before, whole = len(asked.tokens), False
            try:
                self._link.connect(asked.limits)
                self._begin(asked, ask, number)
                self._follow(asked, self.settings.patience_s * 2.0 ** min(failures, 6))
                whole = True
            except AnswerRefused as error:
                if error.code not in _TRANSIENT:
                    raise
                failure = error
            except (LinkClosed, LinkTimeout) as error:
                self._link.failed(error, failures)
                failure = error
            finally:
                self._gather(asked)
            number += 1
            if whole:
                return self._result(asked, bytes_before, number)
            if len(asked.tokens) > tokens_before:
                failures = 0
                self._link.backoff.reset()
            failures += 1
            if failures < self.settings.attempts:
                if self.settings.on_loss == "alone" and getattr(failure, "retry_after", 0.0) > self.settings.patience_s:
                    break
                self._link.pause(failure, asked.limits)
        if self.settings.on_loss == "fail":
            raise failure
        self._go_on_alone(asked)
        return self._result(asked, bytes_before, number)

    @property
    def _bytes(self) -> tuple[int, int]:
        """Up and down so far."""
        return self._link.channel.bytes_up, self._link.channel.bytes_down

    def _begin(self, asked: _Asked, ask: int, number: int) -> None:
        """Send the question, and let the worker read the documents meanwhile."""
        message = self._question(asked, ask, number)
        attempt = Attempt(message, asked.mixture, self._link.post, self.profile, self._wake, self.side_class)
        with self._wake:
            if self._closing:
                raise LinkClosed("the session was closed")
            self._attempt = attempt
            self._wake.notify_all()
        self._link.post(message)

    def _question(self, asked: _Asked, ask: int, number: int) -> Question:
        """The device begins to aggregate: its first token comes half a round trip earlier."""
        settings, model = self.settings, self.model
        return Question(
            ask, number, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, asked.question,
            settings.documents, float(settings.temperature), settings.seed, self.replies,
            "shared", "sparse", HEAD, settings.max_tokens, settings.window,
            0, "auto", "device",
            sorted(model.eos_token_ids)[:16], list(asked.tokens), scale_of(self.retriever),
        )  # fmt: skip

    def _follow(self, asked: _Asked, patience: float) -> None:
        """Wait until the answer is complete; LinkError if it does not come."""
        attempt = self._attempt
        assert attempt is not None
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: attempt.news(len(asked.tokens)) or self._link.failure or self._closing,
                    asked.limits.slice(attempt.silent_in(patience)),
                )
                failure = attempt.failure or self._link.failure
            asked.limits.check()
            self._hand_on(asked, attempt)
            if attempt.ended:
                return
            if failure is not None:
                raise failure
            if attempt.silent_in(patience) <= 0.0:
                raise LinkTimeout(self._link.doubt or f"the cloud said nothing for {patience:g} s")

    def _hand_on(self, asked: _Asked, attempt: Attempt) -> None:
        known = len(asked.tokens)
        for token, at in list(zip(*attempt.progress(), strict=True))[known:]:
            self._take(asked, token, at)

    def _take(self, asked: _Asked, token: int, at: float) -> None:
        asked.tokens.append(token)
        asked.times.append(at)
        if asked.on_token is not None:
            asked.on_token(self.model.decode_text(asked.tokens), list(asked.tokens))

    def _gather(self, asked: _Asked) -> None:
        """The attempt is over: keep its tokens and its statistics."""
        attempt = self._leave()
        if attempt is not None:
            self._hand_on(asked, attempt)
            asked.take(attempt)

    def _leave(self) -> Attempt | None:
        """End the attempt, wait until the worker has left the mixture, and tell the cloud if it goes on."""
        with self._wake:
            attempt, self._attempt = self._attempt, None
            if attempt is None:
                return None
            ended = attempt.ended
            attempt.stop()
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._drafting)
        if not ended and attempt.failure is None:
            sentence = "the device no longer waits for this answer"
            self._link.post(end_of(attempt.question, EndCode.CANCELLED, sentence))
        return attempt

    def _go_on_alone(self, asked: _Asked) -> None:
        """Finish the answer from the device's documents alone."""
        settings = self.settings
        asked.statistics.alone_from = len(asked.tokens)
        while not asked.ended(settings.max_tokens, self.model.eos_token_ids):
            asked.mixture.follow(asked.tokens)
            try:
                local = asked.mixture.next(asked.limits.over)
            except Preempted:
                asked.limits.check()
                continue
            token = own_choice(settings, self.replies, local.p, len(asked.tokens))
            asked.tell((local.source_of(token), (0, 0.0)), [])
            self._take(asked, token, time.monotonic())

    def _result(self, asked: _Asked, bytes_before: tuple[int, int], attempts: int) -> Answer:
        figures, (up, down) = asked.statistics, self._bytes
        figures.seconds = time.monotonic() - asked.began
        figures.token_seconds = tuple(at - asked.began for at in asked.times)
        figures.first_token_seconds = figures.token_seconds[0] if asked.times else 0.0
        figures.bytes_up, figures.bytes_down = up - bytes_before[0], down - bytes_before[1]
        figures.passes, figures.attempts = asked.mixture.passes, attempts
        finished = bool(asked.tokens) and asked.tokens[-1] in asked.eos | self.model.eos_token_ids
        text, told = self.model.decode_text(asked.tokens), asked.told
        sources = sources_of(asked.tokens, told[:-1] if finished else told, self.model.decode_text)
        return Answer(text, asked.tokens, finished, figures, sources)

    # ------------------------------------------------------------------ the other threads

    def _receive(self, message: Message) -> None:
        attempt = self._attempt
        if attempt is not None:
            attempt.receive(message)

    def _work_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or (self._attempt is not None and self._attempt.wants_work))
                if self._closing:
                    return
                attempt = self._attempt
                assert attempt is not None
                self._drafting = True
            try:
                attempt.work()
            finally:
                with self._wake:
                    self._drafting = False
                    self._wake.notify_all()


class Attempt:
    """One attempt at a question, from its Question to the complete answer or a failure.

    One thread calls ``receive``, another ``work``; ``wake`` is notified when either changes something.
    """

    def __init__(
        self,
        question: Question,
        mixture: LocalMixture,
        send: Callable[[Message], object],
        profile: Profile,
        wake: threading.Condition,
        side_class: type[AnswerSide] = AnswerSide,
    ) -> None:
        self.question = question
        self.side: AnswerSide | None = None
        self.failure: LinkError | Exception | None = None
        self.eos: frozenset[int] = frozenset()
        self.documents = 0
        self.sources: list[str] = []  # the names of the cloud's documents
        self._mixture, self._send, self._profile, self._wake = mixture, send, profile, wake
        self._side_class = side_class
        self._early: list[Message] = []
        self._read = False  # whether the documents were read while waiting for the reply
        self._stopped = False
        self._asked = self._heard = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.side is not None and self.side.ended

    @property
    def wants_work(self) -> bool:
        if self._stopped or self.failure is not None:
            return False
        return not self._read if self.side is None else self.side.wants_work

    def news(self, known: int) -> bool:
        """Whether there are more than ``known`` tokens, or the answer or the attempt has ended."""
        return self.failure is not None or self.ended or len(self.progress()[1]) > known

    def progress(self) -> tuple[list[int], list[float]]:
        """The tokens and when each was decided; NaN for those of earlier attempts."""
        before = [math.nan] * len(self.question.answered)
        if self.side is None:
            return self.question.answered, before
        tokens, times = self.side.progress()
        return tokens, before + times

    def silent_in(self, patience: float) -> float:
        """Seconds until the cloud has been silent for ``patience``; all of it while the cloud owes nothing."""
        if self.side is not None and not self.side.owed:
            return patience
        return max(0.0, self._heard + patience - time.monotonic())

    def stop(self) -> None:
        """Give up: a forward pass in progress ends before its next layer."""
        self._stopped = True
        if self.side is not None:
            self.side.stop()

    def work(self) -> None:
        """Make a draft or, until the cloud has replied, read the documents."""
        try:
            if self.side is None:
                self._mixture.follow(self.question.answered)
                self._mixture.next(lambda: self._stopped)
                self._read = True
            else:
                owed = self.side.owed
                self.side.work()
                if not owed:
                    self._heard = time.monotonic()  # the cloud may have been waiting for this draft
        except Preempted:
            pass
        except Exception as error:  # any failure is the caller's to see
            self._fail(error, EndCode.MODEL_ERROR, "the device's model could not go on")

    def receive(self, message: Message) -> None:
        """Take a message from the cloud; those of other attempts are dropped."""
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
        elif self.side is None:
            if len(self._early) < _EARLY:
                self._early.append(message)
        else:
            self._hand_over(message)

    def _on_reply(self, reply: QuestionReply) -> None:
        if self.side is not None:
            return
        most = largest_vocabulary(self.question.vocab_size)
        if reply.error or not 2 <= reply.vocab_size <= most:
            sentence = reply.error or f"the cloud has a vocabulary of {reply.vocab_size} tokens, not of 2 to {most}"
            self._fail(AnswerRefused(sentence, "question"))
            return
        trip = time.monotonic() - self._asked - reply.held / 1e6
        if reply.held and 0.0 <= trip <= MAX_MEASURED_US / 1e6:  # 0: it was not measured
            self._profile.link.observe(trip)
        self.eos = frozenset(self.question.eos_token_ids) | frozenset(reply.eos_token_ids)
        self.documents, self.sources = reply.documents, reply.sources
        side = self._side_class(
            self.question, "device", reply.vocab_size, self.eos, self._mixture, self._send, self._profile, self._wake
        )
        if self._stopped:
            side.stop()
        early, self._early = self._early, []
        with self._wake:
            self.side = side
            self._wake.notify_all()
        for message in early:
            self._hand_over(message)

    def _hand_over(self, message: Message) -> None:
        assert self.side is not None
        try:
            self.side.receive(message)
        except Contradiction as error:
            self._fail(AnswerRefused(str(error), error.code), error.code, str(error))
        except Exception as error:  # any failure is the caller's to see
            self._fail(error, EndCode.MODEL_ERROR, "the device could not go on")

    def _fail(self, error: Exception, code: EndCode | None = None, sentence: str = "") -> None:
        if code is not None:
            self._send(end_of(self.question, code, sentence))
        with self._wake:
            self.failure = self.failure or error
            if self.side is not None:
                self.side.stop()
            self._wake.notify_all()


@dataclass
class _Asked:
    """One question and its answer so far, through all attempts."""

    question: str
    mixture: LocalMixture
    statistics: AnswerStatistics
    began: float
    on_token: OnToken | None
    limits: Limits
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    eos: frozenset[int] = frozenset()
    told: list[Told] = field(default_factory=list)  # by which documents, for each token

    def ended(self, max_tokens: int, eos: frozenset[int]) -> bool:
        last = self.tokens[-1:] or [-1]
        return len(self.tokens) >= max_tokens or last[0] in eos or last[0] in self.eos

    def take(self, attempt: Attempt) -> None:
        side = attempt.side
        if side is None:
            return
        figures, state = self.statistics, side.state
        self.eos = attempt.eos
        figures.cloud_documents = attempt.documents
        figures.steps += tuple(state.steps)
        for step in state.steps:
            self.tell(step.sources, attempt.sources)
        figures.reveals += state.reveals
        figures.preemptions += side.preemptions
        figures.dropped += side.dropped
        for name, count in state.rejections.items():
            figures.rejections[name] += count

    def tell(self, sources: Sources, cloud: list[str]) -> None:
        """Note the documents behind a token, by ``Step.sources`` and the names of the cloud's."""
        names = [found.source for found in self.mixture.documents], cloud
        self.told.append({
            (side, of[number - 1]): share
            for side, (number, share), of in zip(SIDES, sources, names, strict=True)
            if 0 < number <= len(of) and of[number - 1]
        })  # fmt: skip
