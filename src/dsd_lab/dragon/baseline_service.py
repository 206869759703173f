# SPDX-License-Identifier: Apache-2.0
"""The cloud's half of the methods that DRAGON is compared with, by a question's own messages.

``Question.schedule`` says what is wanted, which an ordinary cloud refuses: only a cloud that was started for it gives
its documents away.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from dsd_lab.dragon.ablations import AblationServer, pack_evidence
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.dragon.documents.retrieval import Retrieved, Retriever, scale_of
from dsd_ros.dragon.mixture import KeptDocuments, Local, LocalMixture
from dsd_ros.dragon.prompts import Asking, DocumentPrompt, Pieces
from dsd_ros.dragon.server import name_of, refusal_of
from dsd_ros.dragon.side import end_of
from dsd_ros.vlm.sequence import Sequence as ModelSequence
from dsd_ros.wire.messages import MAX_EVIDENCE_BYTES, EndCode, Message, Proposal, Question, QuestionReply, prefix_digest

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

# What a question's ``schedule`` asks for.
MIXED = "alone"  # an answer from the cloud's documents, a Proposal per token without evidence
TOGETHER = "alone-in-one-prompt"  # the same, the documents one after the other in one prompt
SEQUENCE = "sequence"  # a whole answer is made and kept
COLLECT = "collect"  # all Proposals of the answer that was made for this question
TEXTS = "documents"  # the documents, a Proposal each, packed by ``pack_document``
KEYS = "documents-and-keys"  # the same, with keys and values
WANTED = (MIXED, TOGETHER, SEQUENCE, COLLECT, TEXTS, KEYS)
_DIGEST_BYTES = 8

Answer = Callable[[Message], object]
Choose = Callable[[Local, int], int]


def together(documents: Sequence[Retrieved]) -> list[Retrieved]:
    """Documents as one, the best first: what context aggregation puts in one prompt."""
    if not documents:
        return []
    best = sorted(documents, key=lambda found: -found.relevance)
    return [Retrieved("", " ".join(found.text for found in best), best[0].relevance)]


def alone(
    mixture: LocalMixture, choose: Choose, max_tokens: int, eos: frozenset[int], stopped: Callable[[], bool]
) -> Iterator[tuple[int, Local, float]]:
    """One side's own answer: each token with its distribution and seconds. Preempted once ``stopped()``."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos):
        began = time.monotonic()
        mixture.follow(tokens)
        local = mixture.next(stopped)
        tokens.append(choose(local, len(tokens)))
        yield tokens[-1], local, time.monotonic() - began


def noise_of(question: Question, position: int, size: int) -> np.ndarray | None:
    """The noise of a token over ``size`` ids; None: greedy."""
    if question.temperature == 0.0:
        return None
    return gumbel(question.seed, question.reply, position, size)


def chooser(question: Question) -> Choose:
    """How a side on its own chooses its tokens: reproducibly for the same question."""

    def choose_token(local: Local, position: int) -> int:
        noise = noise_of(question, position, len(local.p))
        return int(local.p.argmax()) if noise is None else choose(local.p, noise)

    return choose_token


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
    """(text, digest, keys and values) from ``pack_document``; the last two empty for a text alone. ValueError."""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 + size:
        raise ValueError("a document is shorter than it says")
    rest = data[4 + size :]
    if rest and len(rest) <= _DIGEST_BYTES:
        raise ValueError("a document's keys and values are cut off")
    return data[4 : 4 + size].decode("utf-8"), rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]


def pack_sequence(sequence: ModelSequence) -> bytes:
    """The keys and values of all tokens that have been through a pass, in the model's precision."""
    return sequence._cache.to_bytes()


def unpack_sequence(model: Any, tokens: Sequence[int], data: bytes) -> ModelSequence:
    """A sequence of these tokens without a forward pass, for the very same model; ValueError for another size."""
    sequence: ModelSequence = model.begin()
    sequence._cache.fill(tokens, data)
    sequence.append(tokens)
    return sequence


@dataclass(eq=False)
class _Asked:
    question: Question
    reply: Answer
    peer: Hashable
    stopped: bool = False


class BaselineService:
    """Answers one question after another; see ``dragon.server.DragonServer`` for the interface."""

    def __init__(
        self, model: Any, retriever: Retriever, *, asking: Asking | None = None, kept: KeptDocuments | None = None
    ) -> None:
        self.model = model
        self._retriever = retriever
        self._asking: Asking = asking or DocumentPrompt(model)
        self._kept = kept if kept is not None else KeptDocuments()
        self._lock = threading.Lock()  # guards the two below
        self._questions: list[_Asked] = []  # waiting or being answered
        self._made: dict[Hashable, list[Proposal]] = {}  # a peer's newest whole answer
        self._worker = ThreadPoolExecutor(1, "baselines")

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when closed. ``reply`` must not block."""
        if isinstance(message, Question):
            asked = _Asked(message, reply, peer)
            with self._lock:
                try:
                    self._worker.submit(self._work, asked)
                except RuntimeError:  # closed
                    return False
                self._questions.append(asked)
        return True

    def disconnect(self, peer: Hashable) -> None:
        """End the questions of a peer whose link is down."""
        self._stop(lambda asked: asked.peer == peer)
        with self._lock:
            self._made.pop(peer, None)

    def close(self) -> None:
        """End all questions and the thread."""
        self._stop(lambda asked: True)
        self._worker.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, which: Callable[[_Asked], bool]) -> None:
        with self._lock:
            for asked in filter(which, self._questions):
                asked.stopped = True

    def _work(self, asked: _Asked) -> None:
        try:
            if not asked.stopped:
                self._serve(asked)
        except ValueError as error:  # of prompts and contexts
            asked.reply(end_of(asked.question, EndCode.BAD_QUESTION, str(error)))
        except Exception:
            if not asked.stopped:  # one question's failure must not end the service
                _log.exception("a question could not be served")
                sentence = "the cloud could not go on with this; its log says why"
                asked.reply(end_of(asked.question, EndCode.MODEL_ERROR, sentence))
        finally:
            with self._lock:
                self._questions = [one for one in self._questions if one is not asked]

    def _serve(self, asked: _Asked) -> None:
        question, model = asked.question, self.model
        scale = scale_of(self._retriever)
        error = refusal_of(model, replace(question, schedule="device"), AblationServer.offered, scale)
        if not error and question.schedule not in WANTED:
            error = (
                f"this cloud is for comparisons and knows no schedule {question.schedule!r}; "
                f"use one of {', '.join(WANTED)}"
            )
        name = name_of(model)
        if error:
            asked.reply(QuestionReply(question.ask, question.attempt, error, *name, 0))
            return
        if question.schedule == COLLECT:
            self._send_made(asked)
            return
        count = question.documents
        documents = self._retriever.retrieve(question.text, count) if count else []
        asked.reply(QuestionReply(question.ask, question.attempt, "", *name, len(documents)))
        if question.schedule in (TEXTS, KEYS):
            for number, document in enumerate(documents):
                if not asked.stopped:
                    self._send_document(asked, number, document)
        else:
            self._answer(asked, documents)

    def _send_document(self, asked: _Asked, number: int, document: Retrieved) -> None:
        question = asked.question
        pieces = self._asking.pieces(document.text, question.text)
        keys = self._keys(pieces) if question.schedule == KEYS else b""
        asked.reply(
            Proposal(
                question.ask, question.attempt, number, 0, 0, document.relevance,
                pack_document(document, pieces.head, keys),
            )
        )  # fmt: skip

    def _keys(self, pieces: Pieces) -> bytes:
        """Keys and values of a prompt up to the document's end, read where they are not kept."""
        sequence = self._kept.find(self.model, pieces.head)
        if sequence is None:
            sequence = self.model.begin()
            sequence.append(pieces.head)
            sequence.next_logits()
            self._kept.keep(self.model, pieces.head, sequence)
        return pack_sequence(sequence)

    def _answer(self, asked: _Asked, documents: list[Retrieved]) -> None:
        question, model = asked.question, self.model
        if question.schedule == TOGETHER:
            documents = together(documents)
        mixture = LocalMixture(model, self._asking, question.text, documents, question.temperature, self._kept)
        mixture.reserve(question.max_tokens)
        eos = frozenset(question.eos_token_ids) | frozenset(model.eos_token_ids)
        made: list[Proposal] = []
        for token, local, seconds in alone(mixture, chooser(question), question.max_tokens, eos, lambda: asked.stopped):
            evidence = b""
            if question.schedule == SEQUENCE:
                noise = noise_of(question, len(made), len(local.p))
                evidence = pack_evidence(question, local.p, token, noise)
            made.append(
                Proposal(
                    question.ask, question.attempt, len(made), 0, token, local.log_weight, evidence,
                    round(1e6 * seconds) % (1 << 32),
                )
            )  # fmt: skip
            if question.schedule != SEQUENCE:
                asked.reply(made[-1])
        with self._lock:
            if question.schedule == SEQUENCE and not asked.stopped:
                self._made[asked.peer] = made

    def _send_made(self, asked: _Asked) -> None:
        question = asked.question
        with self._lock:
            made = self._made.pop(asked.peer, [])
        if not made or made[0].ask != question.ask:
            sentence = f"no answer was made for this question; ask for its {SEQUENCE} first"
            asked.reply(end_of(question, EndCode.BAD_QUESTION, sentence))
            return
        for proposal in made:
            asked.reply(proposal)
