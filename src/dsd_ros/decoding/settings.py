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
DRAFT_SOURCES = ("model", "lookup")
IMAGE_CUTS = ("shrink", "drop")
PREDRAFT_SOURCES = ("exits", "guesses", "both")
PREDRAFT_POLICIES = ("priority", "fifo", "random")
PREDRAFT_WHEN = ("pays", "always")
PROOFS = ("preset", *(proof.value for proof in Proof))
SHAPES = ("preset", *(shape.value for shape in Shape))
AUTO_LENGTH = 0
PRESET_LENGTH = -1


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
        PRESET_LENGTH,
        "tokens drafted per round (gamma); in shape budget, the tree's depth; an expansion has its own depth. "
        "auto (0): chosen from what rounds cost and gain, and a budget too; preset (-1): as the mode says",
        PRESET_LENGTH,
        MAX_DRAFT_LENGTH,
        words={"auto": AUTO_LENGTH, "preset": PRESET_LENGTH},
    )
    draft_source: str = option(
        DRAFT_SOURCES[0],
        "what drafts: the draft model, or lookup, which repeats what followed the same tokens earlier in prompt and "
        "reply; lookup is for modes dsd and coupled, greedy or with proof coupled",
        choices=DRAFT_SOURCES,
    )
    draft_image_tokens: int = option(
        0,
        "tokens of each picture that the draft model reads at most, so that it begins sooner; the target reads the "
        "whole picture, and the reply stays its own. 0: all",
        0,
        1 << 14,
    )
    draft_image_cut: str = option(
        IMAGE_CUTS[0],
        "how a picture comes down to draft_image_tokens: shrink makes it smaller before the draft's vision tower reads "
        "it; drop leaves tokens out after the tower, evenly, at their places",
        choices=IMAGE_CUTS,
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
    predraft_when: str = option(
        PREDRAFT_WHEN[0],
        "when to draft ahead: while it pays, so that it rests where it makes rounds slower, or always; mode auto "
        "chooses for itself",
        choices=PREDRAFT_WHEN,
    )
    predraft_workers: int = option(6, "number of drafts made ahead at the same time", 1, 64)
    predraft_policy: str = option("priority", "order in which outcomes are drafted ahead", choices=PREDRAFT_POLICIES)
    predraft_budget: int = option(24, "number of drafts begun ahead per round", 1, 1024)
    predraft_batch: int = option(1, "drafts advanced by one pass of the draft model; 1: each worker is a thread", 1, 64)
    pipeline_depth: int = option(1, "rounds in flight at once; above 1 they are sent on assumptions", 1, 8)
    exit_layers: str = option("", "layers whose early exits are used, as 2,4; empty: all; none: no exits")
    min_exit_confidence: float = option(0.0, "early outcomes with less confidence are not sent", 0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", mode(self.mode).name)
        check_options(self, SettingsError)
        if self.draft_length == PRESET_LENGTH:
            object.__setattr__(self, "draft_length", 4)
        # Each of these validates.
        _ = self.sampling, self.exits, self.proven_by, self.expansion, self.shaped_by
        self._check_split()
        self._check_look_up()

    @property
    def preset(self) -> Mode:
        """The mode as a combination of axes."""
        return mode(self.mode)

    @property
    def adapts(self) -> bool:
        """Whether all that makes a reply no different is chosen while decoding (mode auto)."""
        return False

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.preset.drafts

    @property
    def proven_by(self) -> Proof:
        """The proof in use. COUPLED in modes stream and ar: the target draws with the shared noise."""
        if self.proof == "preset":
            return self.preset.proof
        if self.preset.streams and self.proof != Proof.COUPLED:
            raise SettingsError(
                f"mode {self.mode} has no rounds that proof {self.proof!r} could be about; use preset or coupled"
            )
        return Proof(self.proof)

    @property
    def shaped_by(self) -> Shape:
        """The shape in use."""
        shape = self.preset.shape if self.shape == "preset" else Shape(self.shape)
        if self.adapts and shape is Shape.EXPANSION:
            raise SettingsError(f"mode {self.mode} chooses trees itself; use shape budget, or mode mc-dsd")
        if self.preset.streams and shape is not Shape.SEQUENCE:
            raise SettingsError(f"mode {self.mode} has no rounds that could have shape {self.shape!r}; use preset")
        sampled = not (self.sampling.greedy or self.proven_by is Proof.COUPLED)
        if shape is Shape.BUDGET and sampled:
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
        return self.draft_length if self.draft_length != AUTO_LENGTH else MAX_DRAFT_LENGTH

    @property
    def tunes(self) -> bool:
        """Whether draft lengths, or trees, are chosen while decoding."""
        chosen = self.draft_length == AUTO_LENGTH and self.shaped_by is not Shape.EXPANSION
        return self.adapts or (chosen and self.needs_draft)

    @property
    def splits(self) -> bool:
        """Whether the robot draws what follows a rejection, with a distribution from the cloud."""
        return self.proven_by is Proof.SPLIT and not self.sampling.greedy

    def _check_split(self) -> None:
        if self.adapts or not (self.splits and self.predrafts) or self.shaped_by is not Shape.EXPANSION:
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
    def looks_up(self) -> bool:
        """Whether drafts are looked up, so that no draft model runs."""
        return self.needs_draft and self.draft_source == "lookup"

    def _check_look_up(self) -> None:
        if not self.looks_up:
            return
        drawn = not (self.sampling.greedy or self.proven_by is Proof.COUPLED)
        if self.predrafts or self.tunes or self.shaped_by is not Shape.SEQUENCE or drawn:
            raise SettingsError(
                f"draft_source 'lookup' does not fit mode {self.mode} with these settings: it drafts sequences of "
                "a fixed draft_length, in turn; use mode dsd at temperature 0, or coupled"
            )

    @property
    def predrafts(self) -> bool:
        """Whether drafts are made while a round is being verified."""
        return self.preset.predrafts

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
