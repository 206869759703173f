# SPDX-License-Identifier: Apache-2.0
"""One side's own next-token distribution: the mean over its documents, weighted by relevance.

p(x | prefix) = sum_d w(d) p(x | d, prefix), w = softmax of the relevances (DRAGON, equation 2). Each document is a
sequence of its own, and all of them are advanced by one forward pass.

A reader that abstains where its document does not tell what comes next (``not_told``) changes the weights at every
token, as DRAGON's section 3 allows: w(d) is multiplied by the odds that document d tells, (1 - u) / u, with u the
probability of ``not_told``, and only a quarter of the relevances counts, since cosines may differ by more between two
sides than the odds can. If exactly one document tells, these are the posterior odds that it is d, so a relevant
document that does not tell cannot outvote a less relevant one that does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache

from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.prompts import Asking
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence as TokenSequence, next_logits_together

# What is asked about when nothing is found: no document, with less weight than any document of the other side.
NOTHING_FOUND = Retrieved("", "", -30.0)
_KEPT_TOKENS = 65_536
_COLDEST = 1e-12
_SUREST = 1e-3  # least u and 1 - u, so that where all documents tell, relevance weighs them
_RELEVANCE = 0.25  # what of the relevance counts beside these odds
_ENDING = 0.75  # what ending the answer counts as abstaining: a document with more to say weighs more
_UNFINISHED = 3.0  # taken from the logit of not_told within a sentence: a document that began it can mostly end it


class Preempted(Exception):
    """A forward pass was given up between two layers; no sequence has changed. Internal to this package."""


class Local(NamedTuple):
    """p (V,) float32, and the log-sum-exp of the documents' relevances.

    ``source_of`` a token: the document that gives most of p(token), from 1 (0: none is named), and how much it gives.
    """

    p: torch.Tensor
    log_weight: float
    source_of: Callable[[int], tuple[int, float]] = lambda _token: (0, 0.0)


class KeptDocuments:
    """An LRU cache of documents' keys and values, ``limit`` tokens in all. Thread-safe."""

    def __init__(self, limit: int = _KEPT_TOKENS) -> None:
        self._kept: LRUCache[tuple[object, ...], TokenSequence] = LRUCache(limit, lambda kept: len(kept.tokens))
        self._lock = threading.Lock()

    def find(self, model: Any, head: list[int]) -> TokenSequence | None:
        """A new sequence of exactly these tokens, if they are kept."""
        with self._lock:
            kept = self._kept.get((model.fingerprint, *head))
        return None if kept is None else kept.fork()

    def keep(self, model: Any, head: list[int], sequence: TokenSequence) -> None:
        """Keep a copy of a sequence that was fed these tokens and no others, unless it is too long."""
        if len(head) > self._kept.maxsize:
            return
        twin = sequence.fork()
        with self._lock:
            self._kept.setdefault((model.fingerprint, *head), twin)

    @property
    def tokens(self) -> int:
        """Tokens of all documents kept."""
        return int(self._kept.currsize)

    def __len__(self) -> int:
        return len(self._kept)


class LocalMixture:
    """One side's mixture for one question; one thread at a time. ``follow`` sets the answer so far."""

    def __init__(
        self,
        model: Any,
        asking: Asking,
        question: str,
        documents: Sequence[Retrieved],
        temperature: float,
        kept: KeptDocuments | None = None,
    ) -> None:
        """No forward pass yet. PromptError for texts that cannot be used.

        ``temperature`` 0 gives the distribution at 1, whose argmax greedy decoding takes.
        """
        self.model = model
        self.documents = list(documents) or [NOTHING_FOUND]
        self.passes = 0
        self._not_told: int | None = getattr(model, "not_told", None)
        self._temperature = max(temperature, _COLDEST) if temperature > 0.0 else 1.0
        self._kept = kept if kept is not None else KeptDocuments(0)
        self._pieces = [asking.pieces(found.text, question) for found in self.documents]
        self._sequences: list[TokenSequence] = []
        self._tokens: list[int] = []

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, answer included."""
        return len(self._tokens) + max(len(head) + len(tail) for head, tail in self._pieces)

    def reserve(self, tokens: int) -> None:
        """Cut documents to leave room for an answer of ``tokens``; ContextError if that is not enough."""
        room = self.model.max_length - tokens
        for index, (head, tail) in enumerate(self._pieces):
            if len(tail) >= room:
                raise ContextError(
                    f"the question takes {len(tail)} tokens, the answer up to {tokens}, and {self.model.name} holds "
                    f"{self.model.max_length}; ask for a shorter answer"
                )
            self._pieces[index] = self._pieces[index]._replace(head=head[: room - len(tail)])

    def follow(self, tokens: Sequence[int]) -> None:
        """Set the answer so far; a common prefix keeps its keys and values. No forward pass."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._tokens, tokens, strict=False)))
        for sequence in self._sequences:
            sequence.rollback(len(sequence.tokens) - len(self._tokens) + same)
            sequence.append(tokens[same:])
        self._tokens = list(tokens)

    def next(self, preempted: Callable[[], bool] = lambda: False) -> Local:
        """The distribution of the next token; ContextError if a sequence has become too long.

        ``preempted`` is polled between layers; once it is true, Preempted is raised and only this pass is lost.
        """

        def on_layer(*_: object) -> None:
            if preempted():
                raise Preempted

        if len(self._sequences) < len(self._pieces):
            self._read(on_layer)
        self.passes += 1
        rows = next_logits_together(self._sequences, on_layer)
        counts = 1.0 if self._not_told is None else _RELEVANCE
        relevances = [
            counts * found.relevance + self._log_odds(row) for found, row in zip(self.documents, rows, strict=True)
        ]
        highest = max(relevances)
        shares = [math.exp(value - highest) for value in relevances]
        total = math.fsum(shares)
        parts = [
            share / total * torch.softmax(row / self._temperature, dim=0)
            for row, share in zip(self._silence_lowered(rows), shares, strict=True)
        ]
        p = torch.stack(parts).sum(dim=0)

        def source_of(token: int) -> tuple[int, float]:
            given, number = max((float(part[token]), number) for number, part in enumerate(parts))
            return (number + 1 if self.documents[number].source else 0), given

        return Local(p.float(), highest + math.log(total), source_of)

    def _log_odds(self, row: torch.Tensor) -> float:
        """The log odds that a document tells what comes next, from its logits; 0 for a reader that never abstains."""
        if self._not_told is None:
            return 0.0
        p = torch.softmax(row.double(), dim=0)
        ends = [token for token in self.model.eos_token_ids if token != self._not_told]
        silent = float(p[self._not_told]) + _ENDING * float(p[ends].sum())
        silent = min(max(silent, _SUREST), 1.0 - _SUREST)
        return math.log((1.0 - silent) / silent)

    def _silence_lowered(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits (documents, V), float64 on the CPU; that of ``not_told`` is lowered within an unfinished sentence."""
        logits = torch.stack(list(rows)).cpu().double()
        if self._not_told is not None and self.model.decode_text(self._tokens).rstrip()[-1:] not in ("", ".", "!", "?"):
            logits[:, self._not_told] -= _UNFINISHED
        return logits

    def _read(self, on_layer: Callable[..., None]) -> None:
        """Read the documents that are not in the cache, and append question and answer to each."""
        sequences: list[TokenSequence] = []
        unread: list[tuple[list[int], TokenSequence]] = []
        for head, _ in self._pieces:
            found = self._kept.find(self.model, head)
            if found is None:
                found = self.model.begin()
                found.append(head)
                unread.append((head, found))
            sequences.append(found)
        if unread:
            next_logits_together([sequence for _, sequence in unread], on_layer)
            for head, sequence in unread:
                self._kept.keep(self.model, head, sequence)
        for sequence, (_, tail) in zip(sequences, self._pieces, strict=True):
            sequence.append(tail + self._tokens)
        self._sequences = sequences
