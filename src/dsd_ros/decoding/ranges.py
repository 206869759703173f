"""What settings may be: their ranges, and errors, without torch, for what only reads settings or relays them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH

MAX_NODES = MAX_DRAFT_LENGTH  # of a drafted tree
MAX_KEPT = 1 << 16  # ids of one distribution
FLOATS = ("float16", "float32")  # of weights


class SamplingError(ValueError):
    """Sampling settings out of range, or logits and probabilities that are none; one sentence."""


@dataclass(frozen=True)
class SamplingSettings:
    """Temperature (0: greedy), top-k (0: off) and top-p (1: off), applied in this order."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise SamplingError(f"temperature is {self.temperature}; use 0 (greedy) or a number up to 100")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}; use 0 (off) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingError(f"top_p is {self.top_p}; use a number above 0 and up to 1 (off)")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that nothing is drawn."""
        return self.temperature == 0.0


class TreeError(ValueError):
    """A tree, a path down it or an expansion that is none; one sentence."""


def parse_expansion(text: str) -> tuple[int, ...]:
    """The children of every node, level by level, of a text such as "2,2,2"; else TreeError."""
    try:
        expansion = tuple(int(part) for part in text.split(","))
    except ValueError:
        expansion = (0,)
    if min(expansion) < 1 or len(expansion) > MAX_NODES:
        raise TreeError(f"expansion {text!r} is none; give the children of a node level by level, as 2,2,2")
    nodes = expansion_nodes(expansion)
    if nodes > MAX_NODES:
        raise TreeError(f"expansion {text!r} makes {nodes} nodes; at most {MAX_NODES} are possible")
    return expansion


def expansion_nodes(expansion: Sequence[int]) -> int:
    """The nodes of a tree where every node of level l - 1 has expansion[l - 1] children."""
    return sum(math.prod(expansion[: level + 1]) for level in range(len(expansion)))
