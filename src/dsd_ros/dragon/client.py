"""The device's half of questions: answers them together with the cloud, over a link that may break and come back.

Three threads: the caller's waits and passes on tokens, one drafts, one dials and receives. An answer can go on
elsewhere from its tokens alone, so a lost link or a restarted cloud costs an attempt and changes no token.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from dsd_ros.dragon.answers import Answer, AnswerRefused, AnswerStatistics
from dsd_ros.dragon.attempt import Attempt
from dsd_ros.dragon.documents.retrieval import Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture, Preempted, Relevance
from dsd_ros.dragon.peer import Profile, end_of
from dsd_ros.dragon.profiler import DecodeDelay
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.dragon.scheduler import SIDES, Scheduler
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.dragon.state import Step, own_choice
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Backoff, Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.client import BackgroundConnection, Limits
from dsd_ros.wire.messages import PROTOCOL_VERSION, EndCode, Message, Question

OnToken = Callable[[str, list[int]], object]  # the text so far, and its tokens
_TRANSIENT = (EndCode.OVERLOADED, EndCode.UNKNOWN, EndCode.CLOSING)  # another attempt may succeed


class Asker(ABC):
    """What answers questions on the device, by whatever method: a model and its documents. A context that closes."""

    def __init__(
        self,
        model: Any,
        retriever: Retriever,
        settings: AggregationSettings | None,
        asking: Asking | None,
        kept: KeptDocuments | None,
    ) -> None:
        self.settings = settings or AggregationSettings()
        self.model = model
        self.retriever = retriever
        self.asking: Asking = asking or DocumentPrompt(model)
        self.kept = kept if kept is not None else KeptDocuments()
        self.replies = 0  # questions so far

    @abstractmethod
    def close(self) -> None:
        """End an answer in progress. The channel is the caller's to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DragonClient(Asker):
    """Answers questions, one at a time, over a channel that stays the caller's.

    The n-th answer of a session uses n as the reply's number in the noise, so a repeated session gives the same
    tokens. A session can be used again after any failure. ``close`` it, or use it as a context; closing also ends an
    answer in progress.
    """

    def __init__(
        self,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AggregationSettings | None = None,
        *,
        asking: Asking | None = None,
        relevance: Relevance | None = None,
        kept: KeptDocuments | None = None,
        delay: DecodeDelay | None = None,
    ) -> None:
        """``model``: from ``vlm.loading.load_model``, with the cloud's tokenizer. ``asking``, ``relevance`` and
        ``delay``: see ``server.DragonServer``."""
        super().__init__(model, retriever, settings, asking, kept)
        self.profile = Profile.of("device", delay)
        self._relevance = relevance
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
        time.monotonic() instant; ``cancelled`` is polled. Raises PromptError or ContextError (ValueErrors) for
        a question that cannot be used, LinkError when link or cloud fail for good (with ``on_loss`` "alone":
        only when the cloud refuses), AnswerRefused, DeadlineExceeded, DecodeCancelled.
        """
        with self._answering:
            question = check_instruction(question)
            self.replies += 1
            began = time.monotonic()
            count = self.settings.documents
            documents = self.retriever.retrieve(question, count) if count else []
            mixture = LocalMixture(
                self.model, self.asking, question, documents, self.settings.temperature, self.kept,
                self.settings.reweight_every, self._relevance,
            )  # fmt: skip
            mixture.reserve(self.settings.max_tokens)
            limits = Limits(deadline, cancelled, closed=lambda: self._closing, what="answer")
            asked = _Asked(question, mixture, len(documents), began, on_token, limits)
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

    # ------------------------------------------------------------------ the caller's thread

    def _answer(self, asked: _Asked) -> Answer:
        ask = secrets.randbelow((1 << 32) - 1) + 1
        backoff = Backoff()
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
                backoff.reset()
            failures += 1
            if failures < self.settings.attempts:
                asked.limits.sleep(backoff.next_delay())
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
        settings, model = self.settings, self.model
        message = Question(
            ask, number, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, asked.question,
            settings.documents, float(settings.temperature), settings.seed, self.replies,
            settings.randomness, settings.evidence, settings.head, settings.max_tokens, settings.window,
            settings.reweight_every, settings.schedule, self._beginner(asked.mixture),
            sorted(model.eos_token_ids)[:16], list(asked.tokens), scale_of(self.retriever),
        )  # fmt: skip
        attempt = Attempt(message, model, asked.mixture, self._link.post, self.profile, self._wake)
        with self._wake:
            if self._closing:
                raise LinkClosed("the session was closed")
            self._attempt = attempt
            self._wake.notify_all()
        self._link.post(message)

    def _beginner(self, mixture: LocalMixture) -> str:
        """The side that aggregates the first token."""
        settings = self.settings
        if settings.aggregator in SIDES:
            return settings.aggregator
        self.profile.learn()
        estimates = self.profile.estimates(mixture.context)
        return Scheduler(settings.schedule, seed=settings.seed).begins(estimates)

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
        tokens, times = attempt.progress()
        for number in range(len(asked.tokens), len(tokens)):
            self._take(asked, tokens[number], times[number])

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
        asked.alone_from = len(asked.tokens)
        while not asked.ended(settings.max_tokens, self.model.eos_token_ids):
            asked.mixture.follow(asked.tokens)
            try:
                local = asked.mixture.next(asked.limits.over)
            except Preempted:
                asked.limits.check()
                continue
            token = own_choice(settings, self.replies, local.p, len(asked.tokens))
            self._take(asked, token, time.monotonic())

    def _result(self, asked: _Asked, bytes_before: tuple[int, int], attempts: int) -> Answer:
        up, down = self._bytes
        times = tuple(at - asked.began for at in asked.times)
        statistics = AnswerStatistics(
            seconds=time.monotonic() - asked.began,
            first_token_seconds=times[0] if times else 0.0,
            token_seconds=times,
            bytes_up=up - bytes_before[0],
            bytes_down=down - bytes_before[1],
            steps=tuple(asked.steps),
            reveals=asked.reveals,
            rejections=asked.rejections,
            preemptions=asked.preemptions,
            dropped=asked.dropped,
            passes=asked.mixture.passes,
            attempts=attempts,
            alone_from=asked.alone_from,
            device_documents=asked.documents,
            cloud_documents=asked.cloud_documents,
        )
        finished = bool(asked.tokens) and asked.tokens[-1] in asked.eos | self.model.eos_token_ids
        text = self.model.decode_text(asked.tokens)
        return Answer(text, asked.tokens, finished, statistics)

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


class _Asked:
    """One question and its answer so far, through all attempts."""

    def __init__(
        self,
        question: str,
        mixture: LocalMixture,
        documents: int,
        began: float,
        on_token: OnToken | None,
        limits: Limits,
    ) -> None:
        self.question, self.mixture, self.documents = question, mixture, documents
        self.began, self.on_token, self.limits = began, on_token, limits
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.steps: list[Step] = []
        self.rejections = {"device": 0, "cloud": 0}
        self.reveals = self.preemptions = self.dropped = self.cloud_documents = 0
        self.alone_from = -1
        self.eos: frozenset[int] = frozenset()

    def ended(self, max_tokens: int, eos: frozenset[int]) -> bool:
        last = self.tokens[-1:] or [-1]
        return len(self.tokens) >= max_tokens or last[0] in eos or last[0] in self.eos

    def take(self, attempt: Attempt) -> None:
        half = attempt.half
        if half is None:
            return
        self.eos = attempt.eos
        self.cloud_documents = attempt.documents
        self.steps += half.steps
        self.reveals += half.reveals
        self.preemptions += half.preemptions
        self.dropped += half.dropped
        for side, count in half.rejections.items():
            self.rejections[side] += count
