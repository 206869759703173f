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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from dsd_lab.dragon import IN_STEP, OF_AN_ORDINARY_CLOUD
from dsd_lab.dragon.ablations import AblationClient, unpack_evidence
from dsd_lab.dragon.baseline_service import (
    COLLECT,
    KEYS,
    MIXED,
    SEQUENCE,
    TEXTS,
    TOGETHER,
    alone,
    chooser,
    noise_of,
    together,
    unpack_document,
    unpack_sequence,
)
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.aggregation import eta
from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.packing import PackingError
from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.dragon.answers import Answer, AnswerRefused, AnswerStatistics
from dsd_ros.dragon.client import OnToken
from dsd_ros.dragon.documents.retrieval import Retrieved, Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, Local, LocalMixture
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    EndCode,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    prefix_digest,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_WANTED = {  # method -> what it asks the cloud for
    "device": None,
    "cloud": MIXED,
    "crcg": None,
    "crcg-cloud": TOGETHER,
    "drcg-text": TEXTS,
    "drcg-kv": KEYS,
    "drdg-sw": SEQUENCE,
}


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
        if method == IN_STEP:  # collected and aggregated on the device, as in the paper
            settings = dataclasses.replace(settings, window=1, schedule="device", aggregator="device")
        return AblationClient(channel, model, retriever, settings, **options)
    options = {name: value for name, value in options.items() if name in ("asking", "kept")}
    return BaselineSession(method, channel, model, retriever, settings, **options)


class BaselineSession:
    """Answers by one of the methods that aggregate nothing token by token; for measurements: it does not reconnect."""

    def __init__(
        self,
        method: str,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AblationSettings | None = None,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
    ) -> None:
        if method not in _WANTED:
            raise ValueError(f"there is no method {method!r}; use one of {', '.join(_WANTED)}")
        self.model, self.retriever = model, retriever
        self.settings = settings or AblationSettings()
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
        run = _Run(self, check_instruction(question), on_token)
        wanted = _WANTED[self.method]
        if wanted is not None:
            run.ask(wanted)
        if wanted == SEQUENCE:
            run.join_sequences()
        elif wanted in (MIXED, TOGETHER):
            while not run.ended:
                run.take(run.proposal(len(run.tokens)).token)
        else:
            documents = run.own_documents() + (run.cloud_documents() if wanted else [])
            if self.method in ("crcg", "drcg-text"):
                documents = together(documents)
            for token, _, _ in run.decode_alone(documents):
                run.take(token)
        return run.answer()


class _Run:
    """One question: what was asked, what has come, and what it cost."""

    def __init__(self, session: BaselineSession, text: str, on_token: OnToken | None) -> None:
        self._session, self._settings, self._model = session, session.settings, session.model
        self._on_token = on_token
        self.tokens: list[int] = []
        self._times: list[float] = []
        self._mixture: LocalMixture | None = None
        self._began = time.monotonic()
        self._bytes_before = session.channel.bytes_up, session.channel.bytes_down
        settings, model = self._settings, self._model
        self._question = Question(
            secrets.randbelow((1 << 32) - 1) + 1, 0, PROTOCOL_VERSION, model.tokenizer_fingerprint,
            model.vocab_size, text, settings.documents, float(settings.temperature),
            settings.seed, session.replies, settings.randomness, settings.evidence, settings.head,
            settings.max_tokens, settings.window, 0, "device", "device",
            sorted(model.eos_token_ids)[:16], [], scale_of(session.retriever),
        )  # fmt: skip
        self._eos = frozenset(model.eos_token_ids)
        self._reply: QuestionReply | None = None
        self._proposals: dict[int, Proposal] = {}
        self._own = 0

    @property
    def ended(self) -> bool:
        return len(self.tokens) >= self._settings.max_tokens or (bool(self.tokens) and self.tokens[-1] in self._eos)

    # -- the device's own ----------------------------------------------------------------------

    def own_documents(self) -> list[Retrieved]:
        count = self._settings.documents
        found = self._session.retriever.retrieve(self._question.text, count) if count else []
        self._own = len(found)
        return found

    def decode_alone(self, documents: list[Retrieved]) -> Iterator[tuple[int, Local, float]]:
        """The device's own answer from these documents."""
        session, settings = self._session, self._settings
        self._mixture = mixture = LocalMixture(
            self._model, session.asking, self._question.text, documents, settings.temperature, session.kept
        )
        mixture.reserve(settings.max_tokens)
        return alone(mixture, chooser(self._question), settings.max_tokens, self._eos, lambda: session.closing)

    def join_sequences(self) -> None:
        """Make the device's sequence, collect the cloud's, and aggregate them afterwards (DRAGON, section 7.3)."""
        ours = [local for _, local, _ in self.decode_alone(self.own_documents())]
        self.ask(COLLECT)
        while not self.ended:
            number = len(self.tokens)
            ended = number > 0 and (number - 1 not in self._proposals or self.proposal(number - 1).token in self._eos)
            theirs = None if ended else self.proposal(number)
            if theirs is None and number >= len(ours):
                break
            self.take(self._aggregated(ours[number : number + 1], theirs, number))

    def _aggregated(self, ours: list[Local], theirs: Proposal | None, number: int) -> int:
        """The token of two sequences' distributions at a position, or of one; what evidence leaves open counts as 0."""
        sizes = self._model.vocab_size, self.reply().vocab_size
        p = np.zeros(max(sizes))
        noise = noise_of(self._question, number, len(p))
        share, other_share = 1.0, 1.0
        if ours and theirs is not None:
            share, other_share = eta(ours[0].log_weight, theirs.log_weight)
        if ours:
            p[: sizes[0]] += share * ours[0].p.double().numpy()
        if theirs is not None:
            try:
                known = unpack_evidence(self._question, theirs, sizes[1], noise)
            except (SamplingError, PackingError) as error:
                raise AnswerRefused(str(error), EndCode.BAD_EVIDENCE) from error
            p[: sizes[1]] += other_share * known.lo
        row = torch.from_numpy(p)
        return int(row.argmax()) if noise is None else choose(row, noise)

    # -- the cloud's ---------------------------------------------------------------------------

    def ask(self, wanted: str) -> None:
        """Put the question to the cloud; its schedule says what is wanted."""
        self._question = msgspec.structs.replace(self._question, schedule=wanted)
        self._session.channel.send(self._question)

    def cloud_documents(self) -> list[Retrieved]:
        """The cloud's documents; keys and values that come with them are kept, so that the device reads no document."""
        found = []
        for number in range(self.reply().documents):
            proposal = self.proposal(number)
            try:
                text, digest, keys = unpack_document(proposal.evidence)
            except ValueError as error:
                raise AnswerRefused(f"the cloud sent no document: {error}", EndCode.BAD_EVIDENCE) from error
            found.append(Retrieved(str(number), text, proposal.log_weight))
            if keys:
                head = self._session.asking.pieces(text, self._question.text).head
                if self.reply().model_fingerprint != self._model.fingerprint or digest != prefix_digest(head):
                    raise AnswerRefused(
                        "keys and values are of use only to the very same model; use drcg-text", "question"
                    )
                self._session.kept.keep(self._model, head, unpack_sequence(self._model, head, keys))
        return found

    def reply(self) -> QuestionReply:
        while self._reply is None:
            self._receive()
        return self._reply

    def proposal(self, number: int) -> Proposal:
        """What the cloud says at this position, or its document of this number."""
        while number not in self._proposals:
            self._receive()
        return self._proposals[number]

    def _receive(self) -> None:
        """Take in one message of the cloud's; LinkTimeout where none comes."""
        while True:
            message = self._session.channel.receive(self._settings.patience_s)
            if isinstance(message, Refusal):
                raise AnswerRefused(message.sentence, message.code)
            if not isinstance(message, (QuestionReply, Proposal, QuestionEnd)) or message.ask != self._question.ask:
                continue
            if isinstance(message, QuestionEnd):
                raise AnswerRefused(message.sentence or "the cloud ended the answer", message.code)
            if isinstance(message, Proposal):
                self._proposals[message.position] = message
            elif message.error:
                raise AnswerRefused(message.error, "question")
            else:
                self._reply = message
                self._eos |= frozenset(message.eos_token_ids)
            return

    # -- the answer ----------------------------------------------------------------------------

    def take(self, token: int) -> None:
        """Add a token to the answer."""
        self.tokens.append(token)
        self._times.append(time.monotonic() - self._began)
        if self._on_token is not None:
            self._on_token(self._model.decode_text(self.tokens), list(self.tokens))

    def answer(self) -> Answer:
        channel = self._session.channel
        statistics = AnswerStatistics(
            seconds=time.monotonic() - self._began,
            first_token_seconds=self._times[0] if self._times else 0.0,
            token_seconds=tuple(self._times),
            bytes_up=channel.bytes_up - self._bytes_before[0],
            bytes_down=channel.bytes_down - self._bytes_before[1],
            passes=self._mixture.passes if self._mixture is not None else 0,
            device_documents=self._own,
            cloud_documents=self._reply.documents if self._reply is not None else 0,
        )
        finished = bool(self.tokens) and self.tokens[-1] in self._eos
        return Answer(self._model.decode_text(self.tokens), self.tokens, finished, statistics)
