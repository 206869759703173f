# SPDX-License-Identifier: Apache-2.0
"""The interface of what proposes each round's tokens, and the proposer without a draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dsd_ros.decoding.constraint import Constraint
from dsd_ros.decoding.methods import Drafted, Result, RoundContext
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.edge.observation import History
from dsd_ros.edge.results import Progress
from dsd_ros.edge.strategies import ALONE, IN_TURN, Strategy
from dsd_ros.wire.client import Limits
from dsd_ros.wire.messages import Outcome


@dataclass(frozen=True)
class Plan:
    """What one round drafts: a sequence of ``length`` tokens, or a tree of ``nodes`` in ``length`` levels.

    ``strategy`` says what is drafted ahead while the round is verified. Without drafts, the target decodes this round
    and ``rounds`` - 1 further ones alone; 0: all that are left of the reply.
    """

    length: int
    nodes: int = 0  # 0: a sequence
    strategy: Strategy = IN_TURN
    rounds: int = 0

    @property
    def size(self) -> int:
        """Tokens in the whole draft, at most."""
        return self.nodes or self.length


@dataclass(frozen=True)
class ReplyRequest:
    """One reply to be decoded. ``text`` turns tokens into text; ``image`` is RGB uint8 (H, W, 3), or None.

    ``constrain``: what holds a draft to the grammar of constrained replies, by the target's end tokens.
    """

    number: int
    image: np.ndarray | None
    instruction: str
    on_progress: Progress | None
    text: Callable[[list[int]], str]
    limits: Limits
    history: History = ()
    constrain: Callable[[frozenset[int]], Constraint] | None = None


class RoundDraft(Drafted, Protocol):
    """A round's draft as loop, client and recorder see it."""

    @property
    def number(self) -> int: ...  # the round, from 1

    @property
    def prefix(self) -> Sequence[int]: ...  # all tokens of the reply before the draft

    @property
    def plan(self) -> Plan: ...  # the shape that was asked for

    @property
    def seconds(self) -> float: ...  # in the draft model, whenever that was

    @property
    def rests(self) -> bool: ...  # whether drafting ahead rests while it is verified

    @property
    def autonomous_rounds(self) -> int: ...  # how many rounds the target decodes alone; 0: it verifies this draft

    def ranks(self, accepted: int, next_token: int) -> list[int]:
        """For each token of an outcome, how many tokens the draft preferred to it, as far as its rows are known."""


@dataclass(frozen=True)
class Origin:
    """Where the next round's draft comes from.

    source: "exit" or "guess" (pre-drafted), "flight" (already sent), "" (drafted in turn). ``complete``: all of it was
    there. ``begun``: pre-drafts begun in this round, for this outcome and others.
    """

    source: str = ""
    complete: bool = False
    begun: int = 0


class Proposer(ABC):
    """One session's source of drafts. All calls come from the session's thread."""

    origin = Origin()
    device: torch.device | None = None  # where the draft model runs

    @property
    def error(self) -> str:
        """The first failure of a worker in this reply, one sentence; "" if none."""
        return ""

    def explain(self) -> str:
        """What it chose by itself, and why, for a log; "" if nothing."""
        return ""

    @abstractmethod
    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None:
        """Start a reply: read its prompt. ``eos_token_ids`` are the target's."""

    @abstractmethod
    def propose(self, tokens: list[int]) -> RoundDraft:
        """The draft that follows ``tokens``, all of the reply so far: made now, or ahead."""

    def draft_ahead(self, draft: RoundDraft) -> None:  # noqa: B027
        """``draft`` is being verified: use the time."""

    def on_early(self, outcome: Outcome) -> None:  # noqa: B027
        """An early exit forecasts the round's outcome."""

    def update(self, draft: RoundDraft, result: Result) -> None:  # noqa: B027
        """The round is over, with this result."""

    def reset(self) -> None:  # noqa: B027
        """Drop what was made for the reply: it is over, or begins again."""

    def close(self) -> None:  # noqa: B027
        """End worker threads; the next reply may start them again."""


@dataclass(frozen=True)
class NoTokens:
    """The draft of a round that the target decodes alone."""

    number: int
    prefix: list[int]
    context: RoundContext
    autonomous_rounds: int
    tree: TokenTree = TokenTree((), ())
    q: tuple[torch.Tensor, ...] = ()
    kept: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    vocab_size: int = 0
    plan: Plan = Plan(0, strategy=ALONE)
    rests: bool = False
    seconds: float = 0.0

    def ranks(self, accepted: int, next_token: int) -> list[int]:
        """None."""
        return []


class NoDraft(Proposer):
    """Proposes nothing: the target decodes alone, token by token (mode ``ar``)."""

    def __init__(self, settings: DecodeSettings) -> None:
        self._settings = settings
        self._reply = self._number = 0

    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None:
        """Only the target reads the prompt."""
        self._reply, self._number = request.number, 0

    def propose(self, tokens: list[int]) -> NoTokens:
        """No tokens, and how many rounds the target decodes alone."""
        settings = self._settings
        self._number += 1
        context = RoundContext(settings.sampling, settings.seed, self._reply, self._number, len(tokens))
        return NoTokens(self._number, list(tokens), context, settings.max_tokens - len(tokens))
