# SPDX-License-Identifier: Apache-2.0
"""The methods that DRAGON compares itself with (its section 7.2), each asked as a ``DragonClient`` is.

device and cloud: one side's documents alone, mixed. crcg and crcg-cloud: one side's documents in one prompt. drcg-text:
the cloud's documents travel as text, and the device reads both sides' in one prompt. drcg-kv: they travel with their
keys and values, and the device mixes both sides' documents. drdg-tw: dragon without speculation, one token a round
trip. drdg-sw: each side makes a whole answer alone, then the two distributions of each position are aggregated (the
plain reading of DRAGON, not exact after the sides differ).

No document of the device's ever travels. The cloud's half: ``baseline_service``.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from dsd_lab.dragon import IN_STEP, METHODS, OF_AN_ORDINARY_CLOUD
from dsd_lab.dragon.ablations import AblationClient, AblationServer, unpack_evidence
from dsd_lab.dragon.baseline_service import BaselineService, alone, noise_of, together, unpack_document, unpack_sequence
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.aggregation import eta
from dsd_ros.dragon.answers import Answer, AnswerRefused, AnswerStatistics
from dsd_ros.dragon.client import OnToken
from dsd_ros.dragon.documents.retrieval import Retrieved, Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, Local, LocalMixture
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.dragon.state import own_choice
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    prefix_digest,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_OF_THE_DEVICE_ALONE = ("device", "crcg")
_OF_THE_CLOUD_ALONE = ("cloud", "crcg-cloud")


def open_cloud(
    method: str, settings: AblationSettings, model: Any, retriever: Retriever, **options: Any
) -> AblationServer | BaselineService:
    """The cloud's half of one of METHODS, for sessions with the same settings."""
    if method in OF_AN_ORDINARY_CLOUD:
        return AblationServer(_settings_of(method, settings), model, retriever, **options)
    return BaselineService(method, settings, model, retriever, **options)


def open_session(
    method: str,
    channel: Channel,
    model: Any,
    retriever: Retriever,
    settings: AblationSettings | None = None,
    **options: Any,
) -> AblationClient | BaselineSession:
    """A session that answers by one of METHODS; ValueError. Only dragon and drdg-tw dial; else the channel is up."""
    settings = settings or AblationSettings()
    if method in OF_AN_ORDINARY_CLOUD:
        return AblationClient(channel, model, retriever, _settings_of(method, settings), **options)
    return BaselineSession(method, channel, model, retriever, settings, **options)


def _settings_of(method: str, settings: AblationSettings) -> AblationSettings:
    if method == IN_STEP:  # collected and aggregated on the device, as in the paper
        return dataclasses.replace(settings, window=1, schedule="device", aggregator="device")
    return settings


def kept_before(
    method: str, kept: KeptDocuments, model: Any, asking: Asking, question: str, documents: Sequence[Retrieved]
) -> KeptDocuments:
    """The keys and values that the device has before a question, of those it keeps: none that have to travel first."""
    if method not in ("drcg-text", "drcg-kv"):
        return kept
    own = KeptDocuments()
    for document in documents if method == "drcg-kv" else ():
        head = asking.pieces(document.text, question).head
        if (found := kept.find(model, head)) is not None:
            own.keep(model, head, found)
    return own


class BaselineSession:
    """Answers by one of the methods that aggregate nothing token by token; for measurements: it does not reconnect."""

    def __init__(
        self,
        method: str,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AblationSettings,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"there is no method {method!r}; use one of {', '.join(METHODS)}")
        self.model, self.retriever = model, retriever
        self.settings = settings
        self.asking: Asking = asking or DocumentPrompt(model)
        self.kept = kept if kept is not None else KeptDocuments()
        self.replies = 0  # questions so far
        self.method = method
        self.channel = channel
        self.closing = False

    def close(self) -> None:
        self.closing = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, question: str, on_token: OnToken | None = None) -> Answer:
        """As ``DragonClient.answer``, with no steps in its statistics. It cannot be cancelled and has no deadline."""
        self.replies += 1
        return _Run(self, check_instruction(question)).answer(on_token)


class _Run:
    """One question: what was asked, what has come, and what it cost."""

    def __init__(self, session: BaselineSession, text: str) -> None:
        self._session, self._model = session, session.model
        self._tokens: list[int] = []
        self._mixture: LocalMixture | None = None
        self._began = time.monotonic()
        self._bytes_before = session.channel.bytes_up, session.channel.bytes_down
        settings, model = session.settings, session.model
        self._question = Question(
            secrets.randbelow((1 << 32) - 1) + 1, 0, PROTOCOL_VERSION, model.tokenizer_fingerprint,
            model.vocab_size, text, settings.documents, float(settings.temperature), settings.seed, session.replies,
            settings.head, settings.max_tokens, settings.window, "device",
            sorted(model.eos_token_ids)[:16], [], scale_of(session.retriever),
        )  # fmt: skip
        self._eos = frozenset(model.eos_token_ids)
        self._reply: QuestionReply | None = None
        self._proposals: dict[int, Proposal] = {}
        self._own = 0

    def answer(self, on_token: OnToken | None) -> Answer:
        times: list[float] = []
        for token in self._decided():
            self._tokens.append(token)
            times.append(time.monotonic() - self._began)
            if on_token is not None:
                on_token(self._model.decode_text(self._tokens), list(self._tokens))
        channel = self._session.channel
        statistics = AnswerStatistics(
            seconds=time.monotonic() - self._began,
            first_token_seconds=times[0] if times else 0.0,
            token_seconds=tuple(times),
            bytes_up=channel.bytes_up - self._bytes_before[0],
            bytes_down=channel.bytes_down - self._bytes_before[1],
            passes=self._mixture.passes if self._mixture is not None else 0,
            device_documents=self._own,
            cloud_documents=self._reply.documents if self._reply is not None else 0,
        )
        finished = bool(self._tokens) and self._tokens[-1] in self._eos
        return Answer(self._model.decode_text(self._tokens), self._tokens, finished, statistics)

    def _decided(self) -> Iterator[int]:
        """The answer's tokens by the session's method."""
        method = self._session.method
        if method not in _OF_THE_DEVICE_ALONE:
            self._session.channel.send(self._question)
        if method == "drdg-sw":
            yield from self._joined_sequences()
        elif method in _OF_THE_CLOUD_ALONE:
            while not self._ended:
                yield self._proposal(len(self._tokens)).token
        else:
            documents = self._own_documents()
            if method not in _OF_THE_DEVICE_ALONE:
                documents += self._cloud_documents()
            if method in ("crcg", "drcg-text"):
                documents = together(documents)
            yield from (token for token, _, _ in self._decode_alone(documents))

    @property
    def _ended(self) -> bool:
        return len(self._tokens) >= self._question.max_tokens or (bool(self._tokens) and self._tokens[-1] in self._eos)

    # -- the device's own ----------------------------------------------------------------------

    def _own_documents(self) -> list[Retrieved]:
        count = self._question.documents
        found = self._session.retriever.retrieve(self._question.text, count) if count else []
        self._own = len(found)
        return found

    def _decode_alone(self, documents: list[Retrieved]) -> Iterator[tuple[int, Local, float]]:
        """The device's own answer from these documents."""
        session, question = self._session, self._question
        self._mixture = LocalMixture(
            self._model, session.asking, question.text, documents, question.temperature, session.kept
        )
        self._mixture.reserve(question.max_tokens)
        return alone(self._mixture, question, self._eos, lambda: session.closing)

    def _joined_sequences(self) -> Iterator[int]:
        """Make the device's sequence, collect the cloud's, and aggregate them afterwards (DRAGON, section 7.3)."""
        ours = [local for _, local, _ in self._decode_alone(self._own_documents())]
        self._session.channel.send(msgspec.structs.replace(self._question, attempt=1))
        while not self._ended:
            number = len(self._tokens)
            ended = number > 0 and (number - 1 not in self._proposals or self._proposal(number - 1).token in self._eos)
            theirs = None if ended else self._proposal(number)
            if theirs is None and number >= len(ours):
                break
            yield self._aggregated(ours[number : number + 1], theirs, number)

    def _aggregated(self, ours: list[Local], theirs: Proposal | None, number: int) -> int:
        """The token of two sequences' distributions at a position, or of one; what evidence leaves open counts as 0."""
        sizes = self._model.vocab_size, self._cloud().vocab_size
        p = np.zeros(max(sizes))
        share, other_share = 1.0, 1.0
        if ours and theirs is not None:
            share, other_share = eta(ours[0].log_weight, theirs.log_weight)
        if ours:
            p[: sizes[0]] += share * ours[0].p.double().numpy()
        if theirs is not None:
            noise = noise_of(self._question, number, len(p))
            known = unpack_evidence(self._session.settings.evidence, theirs.evidence, sizes[1], noise)
            p[: sizes[1]] += other_share * known.lo
        return own_choice(self._question, self._question.reply, torch.from_numpy(p), number)

    # -- the cloud's ---------------------------------------------------------------------------

    def _cloud_documents(self) -> list[Retrieved]:
        """The cloud's documents; keys and values that come with them are kept, so that the device reads no document."""
        found = []
        for number in range(self._cloud().documents):
            proposal = self._proposal(number)
            text, digest, keys = unpack_document(proposal.evidence)
            found.append(Retrieved(str(number), text, proposal.log_weight))
            if keys:
                head = self._session.asking.pieces(text, self._question.text).head
                if self._cloud().model_fingerprint != self._model.fingerprint or digest != prefix_digest(head):
                    raise AnswerRefused(
                        "keys and values are of use only to the very same model; use drcg-text", "question"
                    )
                self._session.kept.keep(self._model, head, unpack_sequence(self._model, head, keys))
        return found

    def _cloud(self) -> QuestionReply:
        while self._reply is None:
            self._receive()
        return self._reply

    def _proposal(self, number: int) -> Proposal:
        """What the cloud says at this position, or its document of this number."""
        while number not in self._proposals:
            self._receive()
        return self._proposals[number]

    def _receive(self) -> None:
        """Take in one message of the cloud's; LinkTimeout where none comes."""
        message = self._session.channel.receive(self._session.settings.patience_s)
        if isinstance(message, Refusal):
            raise AnswerRefused(message.sentence, message.code)
        if not isinstance(message, (QuestionReply, Proposal, QuestionEnd)) or message.ask != self._question.ask:
            return
        if isinstance(message, QuestionEnd):
            raise AnswerRefused(message.sentence or "the cloud ended the answer", message.code)
        if isinstance(message, Proposal):
            self._proposals[message.position] = message
        elif message.error:
            raise AnswerRefused(message.error, "question")
        else:
            self._reply = message
            self._eos |= frozenset(message.eos_token_ids)
