"""One question to a baseline: what was asked, what has come over the link, and what it cost."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dsd_lab.dragon.baseline_service import unpack_document, unpack_sequence
from dsd_ros.dragon.answers import Answer, AnswerCancelled, AnswerLate, AnswerRefused, AnswerStatistics
from dsd_ros.dragon.documents.retrieval import Retrieved, scale_of
from dsd_ros.dragon.mixture import LocalMixture
from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    EndCode,
    Message,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    prefix_digest,
)

if TYPE_CHECKING:
    from dsd_lab.dragon.baselines import BaselineSession
    from dsd_ros.dragon.client import OnToken

_POLL_S = 0.05


@dataclass
class BaselineRun:
    """One question: what was asked, what has come, and what it cost."""

    session: BaselineSession
    text: str
    on_token: OnToken | None
    cancelled: Callable[[], bool] | None
    deadline: float | None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    mixtures: list[LocalMixture] = field(default_factory=list)

    def __post_init__(self) -> None:
        session = self.session
        settings, model = session.settings, session.model
        self.began = time.monotonic()
        self.bytes_before = session.channel.bytes_up, session.channel.bytes_down
        self.question = Question(
            secrets.randbelow((1 << 32) - 1) + 1, 0, PROTOCOL_VERSION, model.tokenizer_fingerprint,
            model.vocab_size, self.text, settings.documents, float(settings.temperature),
            settings.seed, session.replies, settings.randomness, settings.evidence, settings.head,
            settings.max_tokens, settings.window, 0, "device", "device",
            sorted(model.eos_token_ids)[:16], [], scale_of(session.retriever),
        )  # fmt: skip
        self.eos = frozenset(model.eos_token_ids)
        self.vocab_size = 0
        self._asked = False
        self._reply: QuestionReply | None = None
        self._proposals: dict[int, Proposal] = {}
        self._own = 0

    @property
    def ended(self) -> bool:
        last = self.tokens[-1:] or [-1]
        return len(self.tokens) >= self.session.settings.max_tokens or last[0] in self.eos

    def own_documents(self) -> list[Retrieved]:
        count = self.session.settings.documents
        found = self.session.retriever.retrieve(self.text, count) if count else []
        self._own = len(found)
        return found

    def ask(self, wanted: str) -> None:
        """Put the question to the cloud; what it asks for stands in its schedule."""
        self.question = replace(self.question, schedule=wanted)
        self._asked = True
        self.session.channel.send(self.question)

    def documents(self) -> list[Retrieved]:
        """The cloud's documents; those that come with keys and values are kept, so that nobody reads them again."""
        count = self.reply().documents
        found = []
        for number in range(count):
            proposal = self.proposal(number)
            try:
                text, digest, keys = unpack_document(proposal.evidence)
            except ValueError as error:
                raise AnswerRefused(f"the cloud sent no document: {error}", EndCode.BAD_EVIDENCE) from error
            found.append(Retrieved(str(number), text, proposal.log_weight))
            if keys:
                self._keep(text, digest, keys)
        return found

    def _keep(self, text: str, digest: bytes, keys: bytes) -> None:
        session = self.session
        head = session.asking.pieces(text, self.text).head
        same = self._reply is not None and self._reply.model_fingerprint == session.model.fingerprint
        if not same or digest != prefix_digest(head):
            raise AnswerRefused("keys and values are of use only to the very same model; use drcg-text", "question")
        sequence = unpack_sequence(session.model, head, keys)
        session.kept.keep(session.model, head, sequence)

    def reply(self) -> QuestionReply:
        while self._reply is None:
            self._receive()
        return self._reply

    def proposal(self, number: int) -> Proposal:
        """What the cloud says of this position, or document."""
        while number not in self._proposals:
            self._receive()
        return self._proposals[number]

    def over(self, number: int) -> bool:
        """Whether the cloud's own sequence has ended before this position."""
        return number > 0 and (number - 1 not in self._proposals or self.proposal(number - 1).token in self.eos)

    def _receive(self) -> None:
        """One message of the cloud's; LinkTimeout where none comes."""
        until = time.monotonic() + self.session.settings.patience_s
        while True:
            self.check()
            try:
                message = self.session.channel.receive(min(_POLL_S, max(0.0, until - time.monotonic())))
            except LinkTimeout:
                if time.monotonic() >= until:
                    raise
                continue
            if self._take_in(message):
                return

    def _take_in(self, message: Message) -> bool:
        if isinstance(message, Refusal):
            raise AnswerRefused(message.sentence, message.code)
        if not isinstance(message, (QuestionReply, Proposal, QuestionEnd)):
            return False
        if message.ask != self.question.ask:
            return False
        if isinstance(message, QuestionEnd):
            raise AnswerRefused(message.sentence or "the cloud ended the answer", message.code)
        if isinstance(message, QuestionReply):
            if message.error:
                raise AnswerRefused(message.error, "question")
            self._reply = message
            self.vocab_size = message.vocab_size
            self.eos |= frozenset(message.eos_token_ids)
        else:
            self._proposals[message.position] = message
        return True

    def take(self, token: int) -> None:
        """A token of the answer."""
        self.tokens.append(token)
        self.times.append(time.monotonic() - self.began)
        if self.on_token is not None:
            self.on_token(self.session.model.decode_text(self.tokens), list(self.tokens))

    def stopped(self) -> bool:
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.session.closing or late or (self.cancelled is not None and self.cancelled())

    def check(self) -> None:
        if self.session.closing:
            raise LinkClosed("the session was closed")
        if self.cancelled is not None and self.cancelled():
            raise AnswerCancelled("the answer was cancelled")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise AnswerLate("the answer was not complete at its deadline")

    def leave(self) -> None:
        """Tell the cloud that this is not wanted any more, where it was asked."""
        if self._asked:
            with contextlib.suppress(Exception):
                sentence = "the answer is not wanted any more"
                self.session.channel.send(QuestionEnd(self.question.ask, 0, EndCode.CANCELLED.value, sentence))

    def told(self) -> Answer:
        channel, model = self.session.channel, self.session.model
        statistics = AnswerStatistics(
            seconds=time.monotonic() - self.began,
            first_token_seconds=self.times[0] if self.times else 0.0,
            token_seconds=tuple(self.times),
            bytes_up=channel.bytes_up - self.bytes_before[0],
            bytes_down=channel.bytes_down - self.bytes_before[1],
            passes=sum(mixture.passes for mixture in self.mixtures),
            device_documents=self._own,
            cloud_documents=self._reply.documents if self._reply is not None else 0,
        )
        finished = bool(self.tokens) and self.tokens[-1] in self.eos
        return Answer(model.decode_text(self.tokens), self.tokens, finished, statistics)
