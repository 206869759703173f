# SPDX-License-Identifier: Apache-2.0
"""What all methods share: the name of a round, a draft as they see it, the cloud's verdict and the robot's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.sampling import generator_for, transform
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import TokenTree


class ResultError(ValueError):
    """The cloud's result of a round contradicts the round; one sentence, and the code that goes with it."""

    def __init__(self, sentence: str, code: str = "bad-distribution") -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class RoundContext:
    """What both sides know of a round; all their random numbers derive from it."""

    sampling: SamplingSettings
    seed: int
    reply: int
    number: int
    start: int  # tokens of the reply before the draft
    top_k: int = 0  # method truncated: see ``truncation.truncate``
    top_rho: float = 0.0
    weights: str = "float16"

    def p(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions (..., V) that are sampled, of logits (..., V); on the CPU."""
        return transform(logits, self.sampling).cpu()

    def generator(self, side: str) -> np.random.Generator:
        """The random stream of one side: "draft", "verifier" or "resample"."""
        return generator_for(side, self.seed, self.reply, self.number)

    def noise(self, position: int, size: int) -> np.ndarray:
        """Shared Gumbel noise (size,) of the token at ``position`` of the reply."""
        return gumbel(self.seed, self.reply, position, size)


Kept = tuple[np.ndarray, np.ndarray]  # of one distribution: ids (k,) int64 ascending, and weights (k,)
Drawn = tuple[torch.Tensor, list[Kept]]  # rows (n, V) that tokens are drawn from, and what was kept of each


class Drafted(Protocol):
    """A round's draft as a method sees it."""

    @property
    def tree(self) -> TokenTree: ...

    @property
    def q(self) -> Sequence[torch.Tensor]: ...  # (V,), which the children of each inner node were drawn from, if drawn

    @property
    def kept(self) -> Sequence[Kept]: ...  # what ``draw_from`` kept of each of these, where it truncates

    @property
    def context(self) -> RoundContext: ...

    @property
    def vocab_size(self) -> int: ...  # V of the draft model


@dataclass(frozen=True)
class DraftVerdict:
    """The cloud's verdict on a draft: ``accepted`` tokens of it, and ``next_token`` follows them.

    For a tree ``accepted`` is 1 + the index of the last accepted node.
    """

    accepted: int
    next_token: int
    # Split alone, after a rejection (next_token is then 0): p (n, V) at the last accepted node, and at the nodes that
    # may still be accepted.
    target: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Result:
    """A verdict as the robot has it. ``target``: the bytes of its rows; ``vocab_size``: the target's.

    ``recovered`` are the tokens that the robot drew itself after a rejection; the verifier does not know them yet.
    """

    accepted: int
    next_token: int
    target: bytes = b""
    vocab_size: int = 0
    recovered: tuple[int, ...] = ()


class Method(Protocol):
    """What each module of this package has; see the package."""

    def draw_from(self, logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn: ...

    def evidence(self, draft: Drafted) -> bytes: ...

    def read(self, data: bytes, tree: TokenTree, vocab_size: int) -> Any: ...

    def verify(self, tree: TokenTree, evidence: Any, logits: torch.Tensor, context: RoundContext) -> DraftVerdict: ...

    def finish(self, draft: Drafted, result: Result) -> Result: ...


def no_evidence(draft: Drafted) -> bytes:
    """``evidence`` of a method whose token ids are enough."""
    return b""


def read_nothing(data: bytes, tree: TokenTree, vocab_size: int) -> None:
    """``read`` of such a method."""


def as_it_is(draft: Drafted, result: Result) -> Result:
    """``finish`` of a method whose robot draws nothing; ResultError for a distribution that was not asked for."""
    if result.target:
        raise ResultError(
            "the verifier sent a distribution where none was rejected; it does not follow the protocol", "out-of-step"
        )
    return result
