# SPDX-License-Identifier: Apache-2.0
"""An answer, where its sentences come from, its statistics, and the error for a refused question."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsd_ros.dragon.settings import SIDES
from dsd_ros.dragon.state import Step
from dsd_ros.vlm.prompts import NOT_KNOWN
from dsd_ros.wire.channel import LinkError


class AnswerRefused(LinkError):
    """The cloud or the device refuses a question; ``code`` is an EndCode or "question"."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass
class AnswerStatistics:
    """What an answer cost. Times in seconds; bytes of encoded messages, lost attempts included.

    ``steps`` are those that both sides decided; tokens from ``alone_from`` on (-1: none) are the device's alone.
    ``rejections`` are drafts that differed from the token, by side.
    """

    seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: tuple[float, ...] = ()  # when each token came, from the beginning
    bytes_up: int = 0
    bytes_down: int = 0
    steps: tuple[Step, ...] = ()
    reveals: int = 0
    rejections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    preemptions: int = 0  # interrupted forward passes of the device
    dropped: int = 0  # drafts of the device that came too late
    passes: int = 0  # of the device's model
    attempts: int = 1
    alone_from: int = -1
    device_documents: int = 0
    cloud_documents: int = 0

    @property
    def accepted(self) -> dict[str, float]:
        """Each side's acceptance rate."""
        count = max(1, len(self.steps))
        return {
            "device": sum(step.device_accepted for step in self.steps) / count,
            "cloud": sum(step.cloud_accepted for step in self.steps) / count,
        }

    @property
    def switches(self) -> int:
        """How often the aggregating side changed."""
        return sum(step.switch for step in self.steps)

    @property
    def aggregators(self) -> tuple[str, ...]:
        """Which side decided each token."""
        return tuple(step.aggregator for step in self.steps)

    @property
    def bytes_per_token(self) -> float:
        """Up and down together."""
        return (self.bytes_up + self.bytes_down) / max(1, len(self.token_seconds))


class SentenceSource(NamedTuple):
    """A sentence of an answer, and the document that tells it: its side, "device" or "cloud", and its name."""

    sentence: str
    side: str
    document: str


def withdrawn(text: str) -> str:
    """An answer's text as it is said: one that begins and then does not know says that it does not know, no more."""
    return NOT_KNOWN if NOT_KNOWN[:-1] in text else text


Told = dict[tuple[str, str], float]  # of one token: (side, document) -> how much of its probability the document gives
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sources_of(
    tokens: Sequence[int], told: Sequence[Told], text_of: Callable[[list[int]], str]
) -> tuple[SentenceSource, ...]:
    """The document behind each sentence: the one that gives most of its tokens' probability.

    ``told``: for the first tokens of an answer, as many as count. Left out are sentences of which no document is named;
    an answer that is withdrawn has none.
    """
    tokens, begin = list(tokens), 0
    if withdrawn(text_of(tokens)) == NOT_KNOWN:
        return ()
    sentences: list[tuple[int, int, Told]] = []  # its first token, the one after its last, and its documents
    held: Told = {}
    for at, shares in enumerate(told):
        if _SENTENCE_END.search(text_of(tokens[begin : at + 1])):
            sentences.append((begin, at, held))
            begin, held = at, {}
        for document, share in shares.items():
            held[document] = held.get(document, 0.0) + share
    sentences.append((begin, len(told), held))
    said = [(text_of(tokens[first:last]).strip(), weights) for first, last, weights in sentences]
    return tuple(SentenceSource(text, *max(weights, key=weights.__getitem__)) for text, weights in said if weights)


@dataclass(frozen=True)
class Answer:
    """One answer: ``tokens`` with the one that ends it, and their text without special tokens.

    ``finished``: it ended by itself, not at max_tokens.
    """

    text: str
    tokens: list[int]
    finished: bool
    statistics: AnswerStatistics
    sources: tuple[SentenceSource, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the answer tells anything: false where it says "I do not know."."""
        return withdrawn(self.text) not in ("", NOT_KNOWN)

    @property
    def whole(self) -> bool:
        """Whether both sides took part in every token."""
        return self.statistics.alone_from < 0
