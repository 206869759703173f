# SPDX-License-Identifier: Apache-2.0
"""The device's side of questions: answer them together with the cloud, over a link that may break and come back.

The caller's thread dials, receives and passes on tokens, as in a decode; another one drafts. An answer can go on from
its tokens alone, so a lost link or a restarted cloud costs an attempt and changes no token.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsd_ros.dragon.answers import Answer, AnswerRefused, AnswerStatistics, Told, sources_of, withdrawn
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
from dsd_ros.wire.client import Connection, DecodeCancelled, Limits
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
_POLL_S = 0.005  # how soon a token that the drafting thread decides is passed on
_TRANSIENT = (EndCode.OVERLOADED, EndCode.UNKNOWN, EndCode.CLOSING)  # another attempt may succeed


class DragonClient:
    """Answers questions together with the cloud, one at a time, over a channel that stays the caller's.

    The noise of the n-th answer is keyed by n, so a repeated session gives the same tokens. A client can be used again
    after any failure.
    """

    side_class: Callable[..., AnswerSide] = AnswerSide

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
        self._closing = False
        self._answering = threading.RLock()  # ``on_token`` may close
        self._link = Connection(channel)

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
            return self._answer(_Asked(question, mixture, statistics, began, on_token, limits))

    def close(self) -> None:
        """End an answer in progress and wait for it: it raises LinkClosed. The channel is the caller's to close."""
        self._closing = True
        with self._answering:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, asked: _Asked) -> Answer:
        settings, bytes_before = self.settings, self._bytes
        self._link.backoff.reset()
        ask = secrets.randbelow((1 << 32) - 1) + 1
        failures = number = 0
        failure: LinkError
        while True:
            known = len(asked.tokens)
            try:
                asked.limits.check()
                if not self._link.up:
                    self._link.dial()
                attempt = Attempt(self._question(asked, ask, number), asked, self)
                attempt.run(settings.patience_s * 2.0 ** min(failures, 6))
                return self._result(asked, bytes_before, number + 1)
            except AnswerRefused as error:
                if error.code not in _TRANSIENT:
                    raise
                failure = error
            except (LinkClosed, LinkTimeout) as error:
                self._link.failed(error, failures, asked.limits)
                failure = error
            number += 1
            if len(asked.tokens) > known:
                failures = 0
                self._link.backoff.reset()
            failures += 1
            too_long = settings.on_loss == "alone" and getattr(failure, "retry_after", 0.0) > settings.patience_s
            if failures >= settings.attempts or too_long:
                break
            self._link.pause(failure, asked.limits)
        if settings.on_loss == "fail":
            raise failure
        self._go_on_alone(asked)
        return self._result(asked, bytes_before, number)

    @property
    def _bytes(self) -> tuple[int, int]:
        """Up and down so far."""
        return self._link.channel.bytes_up, self._link.channel.bytes_down

    def _question(self, asked: _Asked, ask: int, number: int) -> Question:
        """The device begins to aggregate: its first token comes half a round trip earlier."""
        settings, model = self.settings, self.model
        return Question(
            ask, number, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, asked.question,
            settings.documents, float(settings.temperature), settings.seed, self.replies,
            HEAD, settings.max_tokens, settings.window, "device",
            sorted(model.eos_token_ids)[:16], list(asked.tokens), scale_of(self.retriever),
        )  # fmt: skip

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
            asked.take(token, time.monotonic())

    def _result(self, asked: _Asked, bytes_before: tuple[int, int], attempts: int) -> Answer:
        figures, (up, down) = asked.statistics, self._bytes
        figures.seconds = time.monotonic() - asked.began
        figures.token_seconds = tuple(at - asked.began for at in asked.times)
        figures.first_token_seconds = figures.token_seconds[0] if asked.times else 0.0
        figures.bytes_up, figures.bytes_down = up - bytes_before[0], down - bytes_before[1]
        figures.passes, figures.attempts = asked.mixture.passes, attempts
        finished = bool(asked.tokens) and asked.tokens[-1] in asked.eos | self.model.eos_token_ids
        text, told = withdrawn(self.model.decode_text(asked.tokens)), asked.told
        sources = sources_of(asked.tokens, told[:-1] if finished else told, self.model.decode_text)
        return Answer(text, asked.tokens, finished, figures, sources)


class Attempt:
    """One attempt at a question, from its Question to the complete answer or a failure.

    ``run`` receives in the caller's thread; a thread of its own drafts and, until the cloud has replied, reads the
    documents.
    """

    def __init__(self, question: Question, asked: _Asked, client: DragonClient) -> None:
        self.question = question
        self.side: AnswerSide | None = None
        self.reply: QuestionReply | None = None
        self._asked, self._client, self._link = asked, client, client._link
        self._early: list[Message] = []
        self._error: Exception | None = None  # of the drafting thread
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._draft_all, name="ask-drafts", daemon=True)
        self._began = self._heard = time.monotonic()

    def run(self, patience: float) -> None:
        """Follow the answer to its end; LinkTimeout after ``patience`` seconds in which the cloud owed something."""
        end = end_of(self.question, EndCode.CANCELLED, "the device no longer waits for this answer")
        self._link.send(self.question)
        self._thread.start()
        try:
            while not self._ended:
                self._step(patience)
        except Contradiction as error:
            end = end_of(self.question, error.code, str(error))
            raise AnswerRefused(str(error), error.code) from error
        except (LinkError, DecodeCancelled):
            raise
        except Exception:  # the caller's to see
            end = end_of(self.question, EndCode.MODEL_ERROR, "the device could not go on")
            raise
        finally:
            self._stop()
            if not self._ended:
                self._link.post(end)
            self._hand_on()
            self._asked.gather(self)

    @property
    def _ended(self) -> bool:
        return self.side is not None and self.side.ended

    def _step(self, patience: float) -> None:
        """Pass on what is decided, and wait a moment for a message."""
        limits = self._asked.limits
        limits.check()
        self._hand_on()
        if self._error is not None:
            raise self._error
        if not self._link.up:
            raise LinkClosed("the link is down")
        message = self._link.receive(time.monotonic() + _POLL_S, limits)
        if message is not None:
            self._receive(message)
        elif (self.side is None or self.side.owed) and time.monotonic() >= self._heard + patience:
            raise LinkTimeout(self._link.doubt or f"the cloud said nothing for {patience:g} s")

    def _hand_on(self) -> None:
        if self.side is not None:
            tokens, times = self.side.progress()
            known = len(self._asked.tokens)
            for token, at in zip(tokens[known:], times[known - len(self.question.answered) :], strict=True):
                self._asked.take(token, at)

    def _stop(self) -> None:
        """Give up: a forward pass in progress ends before its next layer."""
        with self._changed:
            self._stopped = True
            if self.side is not None:
                self.side.stop()
            self._changed.notify_all()
        self._thread.join()

    def _receive(self, message: Message) -> None:
        """Take a message from the cloud; those of other attempts are dropped."""
        if isinstance(message, Refusal):
            if message.code in _FATAL and not message.session:
                raise AnswerRefused(message.sentence, message.code)
            return
        if not isinstance(message, (QuestionReply, Proposal, Verdict, Reveal, QuestionEnd)):
            return
        if (message.ask, message.attempt) != (self.question.ask, self.question.attempt):
            return
        self._heard = time.monotonic()
        if isinstance(message, QuestionEnd):
            raise AnswerRefused(message.sentence or "the cloud ended the answer", message.code)
        if isinstance(message, QuestionReply):
            self._on_reply(message)
        elif self.side is not None:
            self.side.receive(message)
        elif len(self._early) < _EARLY:
            self._early.append(message)

    def _on_reply(self, reply: QuestionReply) -> None:
        if self.side is not None:
            return
        most = largest_vocabulary(self.question.vocab_size)
        if reply.error or not 2 <= reply.vocab_size <= most:
            sentence = reply.error or f"the cloud has a vocabulary of {reply.vocab_size} tokens, not of 2 to {most}"
            raise AnswerRefused(sentence, "question")
        profile = self._client.profile
        trip = time.monotonic() - self._began - reply.held / 1e6
        if reply.held and 0.0 <= trip <= MAX_MEASURED_US / 1e6:  # 0: it was not measured
            profile.link.observe(trip)
        self.reply = reply
        ends = frozenset(self.question.eos_token_ids) | frozenset(reply.eos_token_ids)
        with self._changed:
            self.side = self._client.side_class(
                self.question, "device", reply.vocab_size, ends, self._asked.mixture, self._link.post, profile,
                self._changed,
            )  # fmt: skip
            self._changed.notify_all()
        for message in self._early:
            self.side.receive(message)

    # ------------------------------------------------------------------ the drafting thread

    def _draft_all(self) -> None:
        try:
            self._asked.mixture.follow(self.question.answered)
            self._asked.mixture.next(lambda: self._stopped)
            while (side := self._side_with_work()) is not None:
                owed = side.owed
                side.work()
                if not owed:
                    self._heard = time.monotonic()  # the cloud may have been waiting for this draft
        except Preempted:
            pass
        except Exception as error:
            self._error = error

    def _side_with_work(self) -> AnswerSide | None:
        """The side once it wants a draft; None when the attempt is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (self.side is not None and self.side.wants_work))
            return None if self._stopped else self.side


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

    def take(self, token: int, at: float) -> None:
        """A token is decided, at a time.monotonic() instant."""
        self.tokens.append(token)
        self.times.append(at)
        if self.on_token is not None:
            self.on_token(withdrawn(self.mixture.model.decode_text(self.tokens)), list(self.tokens))

    def gather(self, attempt: Attempt) -> None:
        """The attempt is over: keep its statistics."""
        side, reply = attempt.side, attempt.reply
        if side is None or reply is None:
            return
        figures, state = self.statistics, side.state
        self.eos |= frozenset(reply.eos_token_ids)
        figures.cloud_documents = reply.documents
        figures.steps += tuple(state.steps)
        for step in state.steps:
            self.tell(step.sources, reply.sources)
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
