"""The settings of a decode: one schema for command line flags, ROS parameters and benchmark rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH, PRESETS, Mode, mode
from dsd_ros.decoding.sampling import SamplingSettings


class SettingsError(ValueError):
    """A setting out of its range; one sentence."""


@dataclass(frozen=True)
class DecodeSettings:
    """How replies are decoded. Metadata: ``help``, ``min``, ``max``, ``choices``.

    Raises SettingsError, ModeError or SamplingError (each a ValueError) for a value out of place.
    """

    mode: str = field(default="dsd", metadata={"help": "decoding mode", "choices": tuple(PRESETS)})
    draft_length: int = field(
        default=4,
        metadata={"help": "tokens drafted per round (gamma)", "min": 1, "max": MAX_DRAFT_LENGTH},
    )
    temperature: float = field(
        default=0.0, metadata={"help": "sampling temperature; 0: greedy", "min": 0.0, "max": 100.0}
    )
    top_k: int = field(
        default=0,
        metadata={"help": "sample from the K likeliest tokens; 0: all", "min": 0, "max": 1 << 20},
    )
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "sample from the likeliest tokens of this mass; 1: all",
            "min": 0.0,
            "max": 1.0,
        },
    )
    seed: int = field(
        default=0, metadata={"help": "of the random draws", "min": 0, "max": (1 << 63) - 1}
    )
    max_tokens: int = field(
        default=96, metadata={"help": "longest reply in tokens", "min": 1, "max": 4096}
    )

    def __post_init__(self) -> None:
        mode(self.mode)
        for item in fields(self):
            value, low, high = (
                getattr(self, item.name),
                item.metadata.get("min"),
                item.metadata.get("max"),
            )
            if low is not None and high is not None and not low <= value <= high:
                raise SettingsError(f"{item.name} is {value}; use {low} to {high}")
        _ = self.sampling  # validated by its own class

    @property
    def preset(self) -> Mode:
        """The mode as a combination of axes."""
        return mode(self.mode)

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.preset.drafts

    @property
    def sampling(self) -> SamplingSettings:
        """What both sides apply to their logits."""
        return SamplingSettings(self.temperature, self.top_k, self.top_p)
