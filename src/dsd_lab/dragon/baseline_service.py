# SPDX-License-Identifier: Apache-2.0
"""The cloud's half of the methods that DRAGON is compared with, by a question's own messages.

A service is made for one method, and no question can ask it for another: only a cloud that was started for it gives its
documents away. It answers by Proposals: a token each, without evidence ("cloud", "crcg-cloud"); a token each of a whole
answer, which is made at a question's first attempt and sent at its second ("drdg-sw"); or a document each, packed by
``pack_document`` ("drcg-text", and "drcg-kv" with its keys and values).
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dsd_lab.dragon.ablations import pack_evidence
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.dragon.documents.retrieval import Retrieved, Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, Local, LocalMixture, Preempted
from dsd_ros.dragon.prompts import Asking, DocumentPrompt, Pieces
from dsd_ros.dragon.server import name_of, refusal_of
from dsd_ros.dragon.side import end_of
from dsd_ros.dragon.state import own_choice
from dsd_ros.vlm.sequence import Sequence as ModelSequence
from dsd_ros.wire.messages import (
    DIGEST_BYTES,
    MAX_EVIDENCE_BYTES,
    EndCode,
    Message,
    Proposal,
    Question,
    QuestionReply,
    prefix_digest,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

Answer = Callable[[Message], object]


def together(documents: Sequence[Retrieved]) -> list[Retrieved]:
    """Documents as one, the best first: what context aggregation puts in one prompt."""
    if not documents:
        return []
    best = sorted(documents, key=lambda found: -found.relevance)
    return [Retrieved("", " ".join(found.text for found in best), best[0].relevance)]


def alone(
    mixture: LocalMixture, question: Question, eos: frozenset[int], stopped: Callable[[], bool]
) -> Iterator[tuple[int, Local, float]]:
    """One side's own answer: each token with its distribution and seconds. Preempted once ``stopped()``."""
    tokens: list[int] = []
    while len(tokens) < question.max_tokens and not (tokens and tokens[-1] in eos):
        began = time.monotonic()
        mixture.follow(tokens)
        local = mixture.next(stopped)
        tokens.append(own_choice(question, question.reply, local.p, len(tokens)))
        yield tokens[-1], local, time.monotonic() - began


def noise_of(question: Question, position: int, size: int) -> np.ndarray | None:
    """The noise of a token over ``size`` ids; None: greedy."""
    if question.temperature == 0.0:
        return None
    return gumbel(question.seed, question.reply, position, size)


def pack_document(document: Retrieved, head: Sequence[int], keys: bytes = b"") -> bytes:
    """A document for the device: its text's length (uint32), text, digest of ``head``, keys and values; ValueError."""
    text = document.text.encode("utf-8")
    data = struct.pack("<I", len(text)) + text + (prefix_digest(head) + keys if keys else b"")
    if len(data) > MAX_EVIDENCE_BYTES:
        raise ValueError(
            f"a document with keys and values takes {len(data)} bytes and a message holds {MAX_EVIDENCE_BYTES}; "
            "send its text"
        )
    return data


def unpack_document(data: bytes) -> tuple[str, bytes, bytes]:
    """(text, digest, keys and values) from ``pack_document``; the last two empty for a text alone."""
    end = 4 + int.from_bytes(data[:4], "little")
    keys = end + DIGEST_BYTES
    return data[4:end].decode("utf-8"), data[end:keys], data[keys:]


def pack_sequence(sequence: ModelSequence) -> bytes:
    """The keys and values of all tokens that have been through a pass, in the model's precision."""
    return sequence._cache.to_bytes()


def unpack_sequence(model: Any, tokens: Sequence[int], data: bytes) -> ModelSequence:
    """A sequence of these tokens without a forward pass, for the very same model; ValueError for another size."""
    sequence: ModelSequence = model.begin()
    sequence._cache.fill(tokens, data)
    sequence.append(tokens)
    return sequence


class BaselineService:
    """Answers one question after another by ``method``; see ``dragon.server.DragonServer`` for the interface."""

    def __init__(
        self,
        method: str,
        settings: AblationSettings,
        model: Any,
        retriever: Retriever,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
    ) -> None:
        """``settings``: the device's, for the evidence of a whole answer."""
        self.model = model
        self._method, self._settings = method, settings
        self._retriever = retriever
        self._asking: Asking = asking or DocumentPrompt(model)
        self._kept = kept if kept is not None else KeptDocuments()
        self._closed = False
        self._gone: set[Hashable] = set()  # peers whose link is down
        self._made: dict[Hashable, list[Proposal]] = {}  # a peer's newest whole answer
        self._worker = ThreadPoolExecutor(1, "baselines")

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when closed. ``reply`` must not block."""
        if isinstance(message, Question):
            try:
                self._worker.submit(self._work, message, reply, peer)
            except RuntimeError:  # closed
                return False
        return True

    def disconnect(self, peer: Hashable) -> None:
        """End the questions of a peer whose link is down."""
        self._gone.add(peer)

    def close(self, _timeout: float = 0.0) -> bool:
        """End all questions and the thread."""
        self._closed = True
        self._worker.shutdown(cancel_futures=True)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, question: Question, reply: Answer, peer: Hashable) -> None:
        def stopped() -> bool:
            return self._closed or peer in self._gone

        try:
            self._serve(question, reply, peer, stopped)
        except Preempted:
            pass
        except ValueError as error:  # of prompts and contexts
            reply(end_of(question, EndCode.BAD_QUESTION, str(error)))
        except Exception:  # one question's failure must not end the service
            _log.exception("a question could not be served")
            reply(end_of(question, EndCode.MODEL_ERROR, "the cloud could not go on with this; its log says why"))

    def _serve(self, question: Question, reply: Answer, peer: Hashable, stopped: Callable[[], bool]) -> None:
        error = refusal_of(self.model, question, scale_of(self._retriever))
        if error:
            reply(QuestionReply(question.ask, question.attempt, error, *name_of(self.model), 0))
        elif self._method == "drdg-sw" and question.attempt:
            for proposal in self._made.pop(peer, []):
                reply(proposal)
        else:
            documents = self._retriever.retrieve(question.text, question.documents) if question.documents else []
            reply(QuestionReply(question.ask, question.attempt, "", *name_of(self.model), len(documents)))
            if self._method in ("drcg-text", "drcg-kv"):
                for number, document in enumerate(documents):
                    reply(self._packed(question, number, document))
                return
            made = []
            for proposal in self._answer(question, documents, stopped):
                made.append(proposal)
                if self._method != "drdg-sw":
                    reply(proposal)
            self._made[peer] = made

    def _packed(self, question: Question, number: int, document: Retrieved) -> Proposal:
        pieces = self._asking.pieces(document.text, question.text)
        keys = self._keys(pieces) if self._method == "drcg-kv" else b""
        data = pack_document(document, pieces.head, keys)
        return Proposal(question.ask, question.attempt, number, 0, 0, document.relevance, data)

    def _keys(self, pieces: Pieces) -> bytes:
        """Keys and values of a prompt up to the document's end, read where they are not kept."""
        sequence = self._kept.find(self.model, pieces.head)
        if sequence is None:
            sequence = self.model.begin()
            sequence.append(pieces.head)
            sequence.next_logits()
            self._kept.keep(self.model, pieces.head, sequence)
        return pack_sequence(sequence)

    def _answer(
        self, question: Question, documents: list[Retrieved], stopped: Callable[[], bool]
    ) -> Iterator[Proposal]:
        model = self.model
        if self._method == "crcg-cloud":
            documents = together(documents)
        mixture = LocalMixture(model, self._asking, question.text, documents, question.temperature, self._kept)
        mixture.reserve(question.max_tokens)
        eos = frozenset(question.eos_token_ids) | frozenset(model.eos_token_ids)
        for number, (token, local, seconds) in enumerate(alone(mixture, question, eos, stopped)):
            evidence = b""
            if self._method == "drdg-sw":
                noise = noise_of(question, number, len(local.p))
                evidence = pack_evidence(self._settings.evidence, question.head, local.p, token, noise)
            decode_us = round(1e6 * seconds) % (1 << 32)
            yield Proposal(question.ask, question.attempt, number, 0, token, local.log_weight, evidence, decode_us)
