"""The device's half of questions: asks the cloud to answer with it, over a link that may break and come back.

Three threads: the caller's waits and hands on tokens, one makes drafts, one receives and dials. All that an answer
needs to go on elsewhere are its tokens: a lost link or a cloud started anew costs an attempt and changes no token.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from dsd_ros.dragon.answers import Answer, AnswerCancelled, AnswerLate, AnswerRefused, AnswerStatistics
from dsd_ros.dragon.asker import Asker
from dsd_ros.dragon.attempt import Attempt
from dsd_ros.dragon.documents.retrieval import Retriever, scale_of
from dsd_ros.dragon.line import Line
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture, Preempted, Relevance
from dsd_ros.dragon.peer import Profile
from dsd_ros.dragon.profiler import DecodeDelay
from dsd_ros.dragon.prompts import Asking
from dsd_ros.dragon.requests import end_of
from dsd_ros.dragon.scheduler import SIDES, Scheduler
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.dragon.state import Step, own_choice
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Backoff, Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import PROTOCOL_VERSION, EndCode, Message, Question

OnToken = Callable[[str, list[int]], object]  # the text so far, and its tokens
_POLL_S = 0.05  # how soon a cancellation is noticed
_AGAIN = (EndCode.OVERLOADED, EndCode.UNKNOWN, EndCode.CLOSING)  # mended by asking again


class AskSession(Asker):
    """Answers questions, one at a time, over a channel that stays the caller's.

    The n-th answer of a session has n as the reply's number in the noise, and so the same tokens each time.
    After any failure the session can be asked again. Use as a context, or ``close`` it: that ends an answer
    under way as well.
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
        """``model``: of ``vlm.loading.load_model``, with the cloud's tokenizer. ``asking``, ``relevance`` and
        ``delay`` as of ``service.AggregationService``."""
        super().__init__(model, retriever, settings, asking, kept)
        self.profile = Profile.of("device", delay)
        self._relevance = relevance
        self._wake = threading.Condition()
        self._attempt: Attempt | None = None
        self._drafting = False  # the worker is in the mixture
        self._closing = False
        self._answering = threading.Lock()
        self._line = Line(channel, self._receive, self._wake)
        self._worker = threading.Thread(target=self._work_all, name="ask-worker", daemon=True)
        self._worker.start()

    def answer(
        self,
        question: str,
        on_token: OnToken | None = None,
        cancelled: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """One answer, from the device's documents and the cloud's.

        on_token(text so far, tokens so far) is called in this thread as tokens are decided. ``deadline`` is a
        time.monotonic() instant; ``cancelled`` is polled. Raises PromptError or ContextError (ValueErrors) for
        a question that cannot be used, LinkError when link or cloud fail for good (with ``on_loss`` "alone":
        only where the cloud refuses), AnswerRefused, AnswerLate, AnswerCancelled.
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
            asked = _Asked(question, mixture, len(documents), began, on_token, cancelled, deadline)
            try:
                return self._answer(asked)
            finally:
                self._leave()

    def close(self) -> None:
        """End an answer under way, and the threads. The channel is the caller's to close."""
        with self._wake:
            self._closing = True
            if self._attempt is not None:
                self._attempt.stop()
            self._wake.notify_all()
        self._line.close()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    # ------------------------------------------------------------------ the caller's thread

    def _answer(self, asked: _Asked) -> Answer:
        ask = secrets.randbelow((1 << 32) - 1) + 1
        backoff = Backoff()
        failures = number = 0
        failure: LinkError = LinkClosed("the cloud was not asked")
        bytes_before = self._line.bytes
        while True:
            began_with, whole = len(asked.tokens), False
            try:
                self._line.up(lambda: self._check(asked))
                self._begin(asked, ask, number)
                self._follow(asked, self.settings.patience_s * 2.0 ** min(failures, 6))
                whole = True
            except AnswerRefused as error:
                if error.code not in _AGAIN:
                    raise
                failure = error
            except (LinkClosed, LinkTimeout) as error:
                if isinstance(error, LinkTimeout) and failures > 0:
                    self._line.drop()  # it may be dead without knowing it
                failure = error
            finally:
                self._gather(asked)
            number += 1
            if whole:
                return self._told(asked, bytes_before, number)
            if len(asked.tokens) > began_with:
                failures = 0
                backoff.reset()
            failures += 1
            if failures >= self.settings.attempts:
                break
            self._pause(asked, backoff.next_delay())
        if self.settings.on_loss == "fail":
            raise failure
        self._go_on_alone(asked)
        return self._told(asked, bytes_before, number)

    def _begin(self, asked: _Asked, ask: int, number: int) -> None:
        """Ask, and let the worker read the documents meanwhile."""
        settings, model = self.settings, self.model
        message = Question(
            ask, number, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, asked.question,
            settings.documents, float(settings.temperature), settings.seed, self.replies,
            settings.randomness, settings.evidence, settings.head, settings.max_tokens, settings.window,
            settings.reweight_every, settings.schedule, self._beginner(asked.mixture),
            sorted(model.eos_token_ids)[:16], list(asked.tokens), scale_of(self.retriever),
        )  # fmt: skip
        attempt = Attempt(message, model, asked.mixture, self._line.send, self.profile, self._wake)
        with self._wake:
            if self._closing:
                raise LinkClosed("the session was closed")
            self._attempt = attempt
            self._wake.notify_all()
        self._line.send(message)

    def _beginner(self, mixture: LocalMixture) -> str:
        """The side that aggregates the first token."""
        settings = self.settings
        if settings.aggregator in SIDES:
            return settings.aggregator
        self.profile.learn()
        estimates = self.profile.estimates(mixture.context)
        return Scheduler(settings.schedule, seed=settings.seed).begins(estimates)

    def _follow(self, asked: _Asked, patience: float) -> None:
        """Wait until the answer is whole; LinkError where it does not come."""
        attempt = self._attempt
        assert attempt is not None
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: attempt.news(len(asked.tokens)) or self._line.failure or self._closing,
                    asked.slice(attempt.silent_in(patience)),
                )
                if self._closing:
                    raise LinkClosed("the session was closed")
                failure = attempt.failure or self._line.failure
            self._check(asked)
            self._hand_on(asked, attempt)
            if attempt.ended:
                return
            if failure is not None:
                raise failure
            if attempt.silent_in(patience) <= 0.0:
                raise LinkTimeout(f"the cloud said nothing for {patience:g} s")

    def _hand_on(self, asked: _Asked, attempt: Attempt) -> None:
        tokens, times = attempt.progress()
        for number in range(len(asked.tokens), len(tokens)):
            asked.tokens.append(tokens[number])
            asked.times.append(times[number])
            if asked.on_token is not None:
                asked.on_token(self.model.decode_text(asked.tokens), list(asked.tokens))

    def _gather(self, asked: _Asked) -> None:
        """The attempt is over: keep what it decided and what it cost."""
        attempt = self._leave()
        if attempt is not None:
            self._hand_on(asked, attempt)
            asked.take(attempt)

    def _leave(self) -> Attempt | None:
        """End the attempt and wait until the worker has left the mixture; tell the cloud if it has to be told."""
        with self._wake:
            attempt, self._attempt = self._attempt, None
            if attempt is None:
                return None
            ended = attempt.ended
            attempt.stop()
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._drafting)
        if not ended and attempt.failure is None:
            sentence = "the device does not wait for this answer any more"
            self._line.send(end_of(attempt.question, EndCode.CANCELLED, sentence))
        return attempt

    def _go_on_alone(self, asked: _Asked) -> None:
        """The rest of the answer from the device's documents, which nobody else had a say in."""
        settings = self.settings
        asked.alone_from = len(asked.tokens)
        while not asked.ended(settings.max_tokens, self.model.eos_token_ids):
            asked.mixture.follow(asked.tokens)
            try:
                local = asked.mixture.next(lambda: self._closing or asked.over())
            except Preempted:
                self._check(asked)
                raise LinkClosed("the session was closed") from None
            token = own_choice(settings, self.replies, local.p, len(asked.tokens))
            asked.tokens.append(token)
            asked.times.append(time.monotonic())
            if asked.on_token is not None:
                asked.on_token(self.model.decode_text(asked.tokens), list(asked.tokens))

    def _told(self, asked: _Asked, before: tuple[int, int], attempts: int) -> Answer:
        up, down = self._line.bytes
        times = tuple(at - asked.began for at in asked.times)
        statistics = AnswerStatistics(
            seconds=time.monotonic() - asked.began,
            first_token_seconds=times[0] if times else 0.0,
            token_seconds=times,
            bytes_up=up - before[0],
            bytes_down=down - before[1],
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
        finished = bool(asked.tokens) and (
            asked.tokens[-1] in asked.eos or asked.tokens[-1] in self.model.eos_token_ids
        )
        text = self.model.decode_text(asked.tokens)
        return Answer(text, asked.tokens, finished, statistics)

    def _check(self, asked: _Asked) -> None:
        if self._closing:
            raise LinkClosed("the session was closed")
        asked.check()

    def _pause(self, asked: _Asked, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check(asked)
            with self._wake:
                self._wake.wait_for(lambda: self._closing, asked.slice(left))

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
        cancelled: Callable[[], bool] | None,
        deadline: float | None,
    ) -> None:
        self.question, self.mixture, self.documents = question, mixture, documents
        self.began, self.on_token = began, on_token
        self._cancelled, self._deadline = cancelled, deadline
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.steps: list[Step] = []
        self.rejections = {"device": 0, "cloud": 0}
        self.reveals = self.preemptions = self.dropped = self.cloud_documents = 0
        self.alone_from = -1
        self.eos: frozenset[int] = frozenset()

    def over(self) -> bool:
        """Whether ``check`` would raise."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or (self._cancelled is not None and self._cancelled())

    def check(self) -> None:
        """AnswerCancelled or AnswerLate when it is time."""
        if self._cancelled is not None and self._cancelled():
            raise AnswerCancelled("the answer was cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise AnswerLate("the answer was not complete at its deadline")

    def slice(self, seconds: float) -> float:
        """How much of ``seconds`` may be waited before the next ``check``."""
        if self._cancelled is not None:
            seconds = min(seconds, _POLL_S)
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        return max(0.0, seconds)

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
