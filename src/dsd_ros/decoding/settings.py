"""The settings of a decode: one schema for command line flags, ROS parameters and benchmark rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsd_ros.decoding.bounds import check_bounds
from dsd_ros.decoding.modes import (
    EXIT_POLICIES,
    MAX_DRAFT_LENGTH,
    MAX_EXITS,
    PRESETS,
    Mode,
    Overlap,
    Proof,
    Shape,
    mode,
)
from dsd_ros.decoding.ranges import FLOATS, MAX_KEPT, MAX_NODES, SamplingSettings, TreeError, parse_expansion

PREDRAFT_SOURCES = ("exits", "guesses", "both")
PREDRAFT_POLICIES = ("priority", "fifo", "random")
PROOFS = ("preset", *(proof.value for proof in Proof if proof is not Proof.NONE))
SHAPES = ("preset", *(shape.value for shape in Shape))
AUTO_LENGTH = 0
PRESET_LENGTH = -1


class SettingsError(ValueError):
    """A setting out of its range; one sentence."""


@dataclass(frozen=True)
class DecodeSettings:
    """How replies are decoded. Metadata: ``help``, ``min``, ``max``, ``choices``.

    What begins with predraft, pipeline or exit matters in modes that draft ahead only (``predrafts``).

    Raises SettingsError, ModeError or SamplingError (each a ValueError) for a value out of place.
    """

    mode: str = field(default="dsd", metadata={"help": "decoding mode", "choices": tuple(PRESETS)})
    proof: str = field(
        default="preset",
        metadata={"help": "what lets the cloud verify a sampled draft; preset: what the mode says", "choices": PROOFS},
    )
    top_k_proof: int = field(
        default=32,
        metadata={
            "help": "likeliest tokens that proof truncated keeps of a draft's distribution",
            "min": 1,
            "max": MAX_KEPT,
        },
    )
    top_rho_proof: float = field(
        default=0.0,
        metadata={
            "help": "mass that proof truncated keeps instead; 0: top_k_proof tokens, whatever their mass",
            "min": 0.0,
            "max": 1.0,
        },
    )
    shape: str = field(
        default="preset",
        metadata={
            "help": "how drafted tokens hang together: one behind the other, as a tree that tree_expansion "
            "or tree_budget describes; preset: what the mode says",
            "choices": SHAPES,
        },
    )
    tree_expansion: str = field(
        default="2,2,2", metadata={"help": "in shape expansion, the children of every node, level by level"}
    )
    tree_budget: int = field(
        default=16, metadata={"help": "nodes of a tree in shape budget", "min": 1, "max": MAX_NODES}
    )
    top_float_proof: str = field(
        default="float16", metadata={"help": "how proof truncated sends what it keeps", "choices": FLOATS}
    )
    draft_length: int = field(
        default=PRESET_LENGTH,
        metadata={
            "help": "tokens drafted per round (gamma), in shape budget the tree's depth; an expansion has "
            "its own; auto (0): chosen from what rounds cost and gain, and a budget too; preset (-1): what "
            "the mode says",
            "min": PRESET_LENGTH,
            "max": MAX_DRAFT_LENGTH,
            "words": {"auto": AUTO_LENGTH, "preset": PRESET_LENGTH},
        },
    )
    temperature: float = field(
        default=0.0, metadata={"help": "sampling temperature; 0: greedy", "min": 0.0, "max": 100.0}
    )
    top_k: int = field(
        default=0, metadata={"help": "sample from the K likeliest tokens; 0: all", "min": 0, "max": 1 << 20}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "sample from the likeliest tokens of this mass; 1: all", "min": 0.0, "max": 1.0}
    )
    seed: int = field(default=0, metadata={"help": "of the random draws", "min": 0, "max": (1 << 63) - 1})
    max_tokens: int = field(default=96, metadata={"help": "longest reply in tokens", "min": 1, "max": 4096})
    predraft_source: str = field(
        default="both",
        metadata={
            "help": "outcomes to draft behind while a round is verified: those that early exits name, "
            "the draft's own guesses, or both",
            "choices": PREDRAFT_SOURCES,
        },
    )
    predraft_workers: int = field(
        default=6, metadata={"help": "drafts made ahead at the same time", "min": 1, "max": 64}
    )
    predraft_policy: str = field(
        default="priority", metadata={"help": "order of the outcomes to draft behind", "choices": PREDRAFT_POLICIES}
    )
    predraft_budget: int = field(default=24, metadata={"help": "drafts begun ahead per round", "min": 1, "max": 1024})
    predraft_batch: int = field(
        default=1,
        metadata={
            "help": "drafts advanced by one pass of the draft model; 1: each worker is a thread",
            "min": 1,
            "max": 64,
        },
    )
    pipeline_depth: int = field(
        default=1,
        metadata={"help": "rounds on their way at once; above 1 they are sent on assumptions", "min": 1, "max": 8},
    )
    exit_layers: str = field(
        default="", metadata={"help": "exits that may speak, as 2,4; empty: all there are; none: none of them"}
    )
    exit_policy: str = field(
        default="priority", metadata={"help": "order of early outcomes waiting for the link", "choices": EXIT_POLICIES}
    )
    min_exit_confidence: float = field(
        default=0.0, metadata={"help": "early outcomes below this are not sent", "min": 0.0, "max": 1.0}
    )

    def __post_init__(self) -> None:
        mode(self.mode)
        check_bounds(self, SettingsError)
        if self.draft_length == PRESET_LENGTH:
            object.__setattr__(self, "draft_length", self.preset.draft_length)
        # Validated on being made.
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
        """The proof in force. In mode ar, COUPLED: the target alone draws with the shared noise."""
        if self.proof == "preset":
            return self.preset.proof
        if not self.preset.drafts and self.proof != Proof.COUPLED:
            raise SettingsError(
                f"mode {self.mode} has no drafts that proof {self.proof!r} could be about; use preset or coupled"
            )
        return Proof(self.proof)

    @property
    def shaped_by(self) -> Shape:
        """The shape in force."""
        shape = self.preset.shape if self.shape == "preset" else Shape(self.shape)
        if not self.preset.drafts and shape is not Shape.SEQUENCE:
            raise SettingsError(f"mode {self.mode} has no drafts that could have shape {self.shape!r}; use preset")
        sampled = not (self.sampling.greedy or self.proven_by is Proof.COUPLED)
        if shape is Shape.BUDGET and sampled:
            raise SettingsError(
                f"shape 'budget' draws no nodes, so that proof {self.proven_by.value!r} has nothing to go by; "
                "use shape expansion, or proof coupled, or temperature 0"
            )
        return shape

    @property
    def expansion(self) -> tuple[int, ...]:
        """The children of every node, level by level, in shape expansion."""
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
        """Whether the drafts' lengths, or trees, are chosen as it goes."""
        chosen = self.draft_length == AUTO_LENGTH and self.shaped_by is not Shape.EXPANSION
        return chosen and self.needs_draft

    @property
    def splits(self) -> bool:
        """Whether the robot draws what follows a rejection, with a distribution from the cloud."""
        return self.proven_by is Proof.SPLIT and not self.sampling.greedy

    def _check_split(self) -> None:
        if not (self.splits and self.predrafts):
            return
        if self.pipeline_depth > 1:
            raise SettingsError(
                "rounds cannot be sent ahead when proof 'split' is sampled, since the cloud does not know "
                "the token behind a rejection; use pipeline_depth 1 or another proof"
            )
        if self.predraft_source != "guesses" and self.exits is not None:
            raise SettingsError(
                "early exits cannot name the token behind a rejection when proof 'split' is sampled; "
                "use predraft_source guesses or another proof"
            )

    @property
    def predrafts(self) -> bool:
        """Whether drafts are made while a round is being verified."""
        return self.preset.overlap is Overlap.PREDRAFT

    @property
    def exits(self) -> tuple[int, ...] | None:
        """The exits to ask for, 1-based and ascending; () for all there are, None for none at all."""
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
        """What both sides apply to their logits."""
        return SamplingSettings(self.temperature, self.top_k, self.top_p)
