# SPDX-License-Identifier: Apache-2.0
"""Named links and machines of config/profiles.yaml, for benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dsd_lab.links.emulation import LinkProfile
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.paths import config_directory

_NUMBERS = ("delay_ms", "delay_up_ms", "delay_down_ms", "jitter_ms", "up_mbps", "down_mbps", "draft_ms", "target_ms")
_KEYS = ("summary", "gamma", *_NUMBERS)

Curve = tuple[tuple[float, float], ...]  # (sequences in a pass, what the pass takes), ascending, the first of one
# FSD Table 9: milliseconds of a pass of the target over so many sequences, on an A100.
TABLE_9_MS = {1: 17.94, 2: 21.75, 3: 24.35, 4: 24.63, 8: 30.73, 12: 44.52, 16: 45.79, 32: 96.94, 64: 258.79}
TABLE_9: Curve = tuple((count, milliseconds / TABLE_9_MS[1]) for count, milliseconds in TABLE_9_MS.items())


def at_batch(curve: Curve, batch: float) -> float:
    """What a pass over ``batch`` sequences takes: linear between the curve's points, in proportion beyond the last."""
    counts, values = zip(*curve, strict=True)
    beyond = max(0.0, batch - counts[-1]) * values[-1] / counts[-1]
    return float(np.interp(batch, counts, values)) + beyond


class ProfileError(ValueError):
    """A profile that does not exist or cannot be used; one sentence."""


@dataclass(frozen=True)
class Profile:
    """A link, and the machines at its ends where their times are given."""

    name: str
    summary: str
    link: LinkProfile
    gamma: int
    draft_s: float | None = None  # T_p, one forward; None: at the speed of this machine
    target_s: float | None = None  # T_q; given where draft_s is

    @property
    def paced(self) -> bool:
        """Whether the models' forwards are held to given times."""
        return self.target_s is not None

    def stretched(self, factor: float) -> Profile:
        """The same profile with every time multiplied by ``factor``, and the rates divided by it."""
        times = (None if time is None else time * factor for time in (self.draft_s, self.target_s))
        return Profile(self.name, self.summary, self.link.stretched(factor), self.gamma, *times)


def load_profiles(path: Path | None = None) -> dict[str, Profile]:
    """Every profile of a YAML file, by default config/profiles.yaml; ProfileError, OSError."""
    path = path or config_directory() / "profiles.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path.name} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ProfileError(f"{path.name} holds no profiles; give each a name and its settings")
    return {str(name): _profile(str(name), values) for name, values in content.items()}


def load_profile(name: str, path: Path | None = None) -> Profile:
    """The profile of that name; ProfileError names those there are."""
    profiles = load_profiles(path)
    if name not in profiles:
        raise ProfileError(f"unknown profile {name!r}; choose from {', '.join(profiles)}")
    return profiles[name]


def _profile(name: str, values: Any) -> Profile:
    if not isinstance(values, dict):
        raise ProfileError(f"profile {name} is no mapping; give it delay_ms and the rest")
    for key, value in values.items():
        if key not in _KEYS:
            raise ProfileError(f"profile {name} has an unknown setting {key!r}; use {', '.join(_KEYS)}")
        if key in _NUMBERS and not _is_number(value):
            raise ProfileError(f"{key} of profile {name} is {value!r}; give a number from 0")
        if key in ("draft_ms", "target_ms") and not 0.0 < value <= 60_000:
            raise ProfileError(f"{key} of profile {name} is {value}; use 0 to 60000 ms")
    ways = values.keys() & {"delay_up_ms", "delay_down_ms"}
    if ("delay_ms" in values) == bool(ways):
        raise ProfileError(f"profile {name} needs either delay_ms or delay_up_ms and delay_down_ms")
    if len(ways) == 1:
        raise ProfileError(f"profile {name} needs both delay_up_ms and delay_down_ms")
    if ("draft_ms" in values) != ("target_ms" in values):
        raise ProfileError(f"profile {name} needs both draft_ms and target_ms, or neither")
    gamma = values.get("gamma", 4)
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not 1 <= gamma <= MAX_DRAFT_LENGTH:
        raise ProfileError(f"gamma of profile {name} is {gamma!r}; use 1 to {MAX_DRAFT_LENGTH}")
    up, down = ("delay_up_ms", "delay_down_ms") if ways else ("delay_ms", "delay_ms")
    try:
        delays = 1e-3 * values[up], 1e-3 * values[down], 1e-3 * values.get("jitter_ms", 0)
        link = LinkProfile(*delays, 1e6 * values.get("up_mbps", 0), 1e6 * values.get("down_mbps", 0))
    except ValueError as error:
        raise ProfileError(f"profile {name} is out of bounds: {error}") from error
    draft_s, target_s = (1e-3 * values[key] if key in values else None for key in ("draft_ms", "target_ms"))
    return Profile(name, str(values.get("summary", "")), link, gamma, draft_s, target_s)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
