# SPDX-License-Identifier: Apache-2.0
"""The settings of a decode: one schema for flags, ROS parameters, config files and benchmark rows.

Loads no torch: programs that only read or relay settings import this module, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH, MAX_EXITS, PRESETS, Mode, Proof, Shape, mode
from dsd_ros.options import check_options, option

MAX_NODES = MAX_DRAFT_LENGTH  # of a drafted tree
MAX_KEPT = 1 << 16  # ids of one truncated distribution
FLOATS = ("float16", "float32")
PREDRAFT_SOURCES = ("exits", "guesses", "both")
PROOFS = ("preset", *(proof.value for proof in Proof))
SHAPES = ("preset", *(shape.value for shape in Shape))


class SettingsError(ValueError):
    """A setting out of its range; one sentence."""


class SamplingError(ValueError):
    """Sampling settings out of range, or malformed logits or probabilities; one sentence."""


class TreeError(ValueError):
    """A malformed token tree, path or expansion; one sentence."""


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


def parse_expansion(text: str) -> tuple[int, ...]:
    """The children of every node, level by level, from a text such as "2,2,2"; TreeError otherwise."""
    try:
        expansion = tuple(int(part) for part in text.split(","))
    except ValueError:
        expansion = (0,)
    if min(expansion) < 1 or len(expansion) > MAX_NODES:
        raise TreeError(f"expansion {text!r} is not valid; give the children of a node level by level, as 2,2,2")
    nodes = expansion_nodes(expansion)
    if nodes > MAX_NODES:
        raise TreeError(f"expansion {text!r} makes {nodes} nodes; at most {MAX_NODES} are possible")
    return expansion


def expansion_nodes(expansion: Sequence[int]) -> int:
    """The number of nodes of a tree where every node of level l - 1 has expansion[l - 1] children."""
    return sum(math.prod(expansion[: level + 1]) for level in range(len(expansion)))


@dataclass(frozen=True)
class DecodeSettings:
    """How replies are decoded.

    Settings that begin with predraft, pipeline or exit matter only in modes that draft ahead (``predrafts``).

    Raises SettingsError, ModeError or SamplingError (each a ValueError) for a value out of range.
    """

    mode: str = option("stream", "decoding mode", choices=tuple(PRESETS))
    proof: str = option(
        "preset", "what lets the cloud verify a sampled draft; preset: as the mode says", choices=PROOFS
    )
    top_k_proof: int = option(
        32, "number of likeliest tokens that proof truncated keeps of each draft distribution", 1, MAX_KEPT
    )
    top_rho_proof: float = option(
        0.0, "probability mass that proof truncated keeps instead; 0: top_k_proof tokens, whatever their mass", 0.0, 1.0
    )
    top_float_proof: str = option(FLOATS[0], "format of the weights that proof truncated sends", choices=FLOATS)
    shape: str = option(
        "preset",
        "shape of a draft: a sequence, or a tree given by tree_expansion or tree_budget; preset: as the mode says",
        choices=SHAPES,
    )
    tree_expansion: str = option("2,2,2", "shape expansion: children of every node, level by level")
    tree_budget: int = option(16, "shape budget: number of nodes in the tree", 1, MAX_NODES)
    draft_length: int = option(
        4,
        "tokens drafted per round (gamma); in shape budget, the tree's depth; an expansion has its own depth",
        1,
        MAX_DRAFT_LENGTH,
    )
    temperature: float = option(SamplingSettings.temperature, "sampling temperature; 0: greedy", 0.0, 100.0)
    top_k: int = option(SamplingSettings.top_k, "sample from the K likeliest tokens; 0: all", 0, 1 << 20)
    top_p: float = option(SamplingSettings.top_p, "sample from the likeliest tokens of this mass; 1: all", 0.0, 1.0)
    seed: int = option(0, "seed of the random draws", 0, (1 << 63) - 1)
    max_tokens: int = option(96, "longest reply, tokens", 1, 4096)
    predraft_source: str = option(
        "both",
        "outcomes to draft ahead for while a round is verified: those that early exits name, the draft's own "
        "guesses, or both",
        choices=PREDRAFT_SOURCES,
    )
    predraft_workers: int = option(6, "number of drafts made ahead at the same time", 1, 64)
    predraft_budget: int = option(24, "number of drafts begun ahead per round", 1, 1024)
    pipeline_depth: int = option(1, "rounds in flight at once; above 1 they are sent on assumptions", 1, 8)
    exit_layers: str = option("", "layers whose early exits are used, as 2,4; empty: all; none: no exits")
    min_exit_confidence: float = option(0.0, "early outcomes with less confidence are not sent", 0.0, 1.0)

    def __post_init__(self) -> None:
        mode(self.mode)
        check_options(self, SettingsError)
        # Each of these validates.
        _ = self.sampling, self.exits, self.proven_by, self.expansion, self.shaped_by
        self._check_split()

    @property
    def preset(self) -> Mode:
        """The mode as a combination of axes."""
        return mode(self.mode)

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.preset.drafts

    @property
    def proven_by(self) -> Proof:
        """The proof in use."""
        if self.proof == "preset":
            return self.preset.proof
        if self.preset.streams and self.proof != self.preset.proof:
            raise SettingsError(f"mode {self.mode} draws with shared noise, not by proof {self.proof!r}; use preset")
        return Proof(self.proof)

    @property
    def shaped_by(self) -> Shape:
        """The shape in use."""
        shape = self.preset.shape if self.shape == "preset" else Shape(self.shape)
        if self.preset.streams and shape is not Shape.SEQUENCE:
            raise SettingsError(
                f"mode {self.mode} has no rounds whose drafts could have shape {self.shape!r}; use preset"
            )
        if shape is Shape.BUDGET and self.draws:
            raise SettingsError(
                f"shape 'budget' draws no nodes, so that proof {self.proven_by.value!r} has nothing to go by; "
                "use shape expansion, or proof coupled, or temperature 0"
            )
        return shape

    @property
    def expansion(self) -> tuple[int, ...]:
        """Shape expansion: the children of every node, level by level."""
        try:
            return parse_expansion(self.tree_expansion)
        except TreeError as error:
            raise SettingsError(f"tree_expansion cannot be used: {error}") from None

    @property
    def depth(self) -> int:
        """The most tokens that one draft can add to a reply."""
        if self.shaped_by is Shape.EXPANSION:
            return len(self.expansion)
        return self.draft_length

    @property
    def splits(self) -> bool:
        """Whether the robot draws what follows a rejection, with a distribution from the cloud."""
        return self.proven_by.declared.recovers and not self.sampling.greedy

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from distributions that the verifier has to know."""
        return not (self.sampling.greedy or self.proven_by.declared.draws_alike)

    @property
    def drawn_by(self) -> object:
        """What decides a reply's tokens, beside sampling and seed: equal values, equal tokens."""
        if not self.draws:
            return None  # the target alone
        truncated = self.top_k_proof, self.top_rho_proof, self.top_float_proof
        return self.proven_by, self.shaped_by, self.depth, self.expansion, truncated

    def _check_split(self) -> None:
        if not (self.splits and self.predrafts) or self.shaped_by is not Shape.EXPANSION:
            return
        # The robot decides what is left of a tree after a rejection: the cloud cannot foresee where it ends.
        if self.pipeline_depth > 1:
            raise SettingsError(
                "rounds with trees cannot be sent ahead when proof 'split' is sampled, since the robot decides what is "
                "left of a tree; use pipeline_depth 1, shape sequence or another proof"
            )
        if self.predraft_source != "guesses" and self.exits is not None:
            raise SettingsError(
                "early exits cannot name the outcome of a tree when proof 'split' is sampled; "
                "use predraft_source guesses, shape sequence or another proof"
            )

    @property
    def predrafts(self) -> bool:
        """Whether drafts are made while a round is being verified."""
        return self.preset.predrafts

    @property
    def uses_exits(self) -> bool:
        """Whether early outcomes are asked for."""
        return self.predrafts and self.predraft_source != "guesses" and self.exits is not None

    @property
    def exits(self) -> tuple[int, ...] | None:
        """The exits to ask for, 1-based and ascending; () for all, None for none."""
        text = self.exit_layers.strip()
        if text == "none":
            return None
        try:
            layers = sorted({int(part) for part in text.split(",")}) if text else []
        except ValueError:
            layers = [0]
        if len(layers) > MAX_EXITS or any(not 1 <= layer < 1 << 16 for layer in layers):
            raise SettingsError(
                f"exit_layers is {self.exit_layers!r}; use layer numbers from 1 such as 2,4, "
                "nothing for all exits, or none"
            )
        return tuple(layers)

    @property
    def sampling(self) -> SamplingSettings:
        """The transform that both sides apply to their logits."""
        return SamplingSettings(self.temperature, self.top_k, self.top_p)
