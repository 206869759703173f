# SPDX-License-Identifier: Apache-2.0
"""Links and machines for benchmarks: those named in config/profiles.yaml, and those that `bench gpu` measured."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dsd_lab.links.emulation import LinkProfile
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.paths import config_directory

_LINK = ("delay_ms", "delay_up_ms", "delay_down_ms", "jitter_ms", "up_mbps", "down_mbps")
_TIMES = ("draft_ms", "target_ms", "draft_prefill_ms", "target_prefill_ms", "exit_ms")
_GROWTHS = ("batch_growth", "thread_growth")
_NUMBERS = (*_LINK, *_TIMES, *_GROWTHS)
ASSUMPTIONS = ("prefill", "exits", "batch", "threads")  # what a profile's times hold beyond T_p and T_q
_KEYS = ("summary", "gamma", *_NUMBERS)

ROBOT = "go2-a100"  # whose link and draft a target measured by `bench gpu` gets, unless its report says otherwise

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
class Times:
    """What the models of two machines take, in seconds."""

    draft_s: float  # T_p, one forward
    target_s: float  # T_q
    draft_prefill_s: float | None = None  # a prompt; None: as one forward
    target_prefill_s: float | None = None
    exit_s: float = 0.0  # an early exit, added to the target's forward
    batch_growth: float = 0.0  # how much longer the draft's forward over eight takes, as a share
    thread_growth: float = 0.0  # how much longer it takes beside each other forward of the draft, as a share
    target_tokens: Curve = ()  # (tokens that a forward of the target reads of a sequence, times one alone)
    target_batch: Curve = ()  # (sequences, times one alone); none: FSD Table 9's where there is a batch_growth

    def verify_s(self, tokens: float) -> float:
        """T_q of a forward that reads so many tokens of one sequence: a draft, and one more."""
        return self.target_s * (at_batch(self.target_tokens, tokens) if self.target_tokens else 1.0)

    def passes(self, tokens: float) -> tuple[Curve, float]:
        """(rounds in a pass, seconds), each of so many tokens; and the seconds of a prompt."""
        one = self.verify_s(tokens)
        curve = tuple((batch, one * factor) for batch, factor in self.target_batch or TABLE_9)
        return curve, self.target_prefill_s or one

    def stretched(self, factor: float) -> Times:
        """Every time multiplied by ``factor``."""
        seconds = {name: getattr(self, name) for name in ("draft_prefill_s", "target_prefill_s")}
        longer = {name: None if value is None else value * factor for name, value in seconds.items()}
        longer |= {name: getattr(self, name) * factor for name in ("draft_s", "target_s", "exit_s")}
        return dataclasses.replace(self, **longer)  # type: ignore[arg-type]

    def without(self, *assumptions: str) -> Times:
        """The same with these of ASSUMPTIONS left out: a prompt like any forward, the others without a cost."""
        free: dict[str, dict[str, Any]] = {
            "prefill": {"draft_prefill_s": None, "target_prefill_s": None},
            "exits": {"exit_s": 0.0},
            "batch": {"batch_growth": 0.0, "target_batch": ()},
            "threads": {"thread_growth": 0.0},
        }
        for name in assumptions:
            if name not in free:
                raise ProfileError(f"there is no assumption {name!r}; name some of {', '.join(ASSUMPTIONS)}")
        return dataclasses.replace(self, **{k: v for name in assumptions for k, v in free[name].items()})


@dataclass(frozen=True)
class Profile:
    """A link, and the machines at its ends where their times are given."""

    name: str
    summary: str
    link: LinkProfile
    gamma: int
    times: Times | None = None  # None: at the speed of this machine

    @property
    def paced(self) -> bool:
        """Whether the models' forwards are held to given times."""
        return self.times is not None

    @property
    def draft_s(self) -> float | None:
        """T_p."""
        return None if self.times is None else self.times.draft_s

    @property
    def target_s(self) -> float | None:
        """T_q."""
        return None if self.times is None else self.times.target_s

    def stretched(self, factor: float) -> Profile:
        """The same profile with every time multiplied by ``factor``, and the rates divided by it."""
        times = None if self.times is None else self.times.stretched(factor)
        return dataclasses.replace(self, link=self.link.stretched(factor), times=times)

    def without(self, *assumptions: str) -> Profile:
        """The same profile with some of ASSUMPTIONS left out; ProfileError."""
        if not assumptions:
            return self
        if self.times is None:
            raise ProfileError(f"profile {self.name} gives no times of models, so there is nothing to leave out")
        return dataclasses.replace(self, times=self.times.without(*assumptions))


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
    """The profile of that name, or in a JSON file of `dsd-lab bench gpu`; ProfileError names those there are."""
    if name.endswith(".json"):
        return _measured(Path(name))
    profiles = load_profiles(path)
    if name not in profiles:
        raise ProfileError(f"unknown profile {name!r}; choose from {', '.join(profiles)}, or name a JSON of bench gpu")
    return profiles[name]


def _measured(path: Path) -> Profile:
    """The target that a report of `dsd-lab bench gpu` timed, and a robot before it; ProfileError.

    The report's entry "robot" is a profile's name or a profile's settings: link, gamma and the draft's times. A robot
    without draft_ms drafts as fast as the report has it.
    """
    why = "measure one with dsd-lab bench gpu --json FILE"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        robot, target = report.get("robot", ROBOT), partial(_timed, report, "target")
        step, tokens = 1e-3 * target("verify")[0], _curve(target("verify"), 1)
        ((exits, with_exits),) = target("exits").items()
        # A pass in which exits speak reads a draft of four, as the one beside it does.
        exit_s = max(0.0, 1e-3 * (with_exits - target("verify")[4]) / exits) if exits else 0.0
        values = robot if isinstance(robot, dict) else {}
        if "draft_ms" in values:  # a profile has both or neither
            values = {**values, "target_ms": 1e3 * step}
        base = load_profile(str(robot)) if not isinstance(robot, dict) else _profile(f"robot of {path.name}", values)
        times = dataclasses.replace(
            base.times or _own_draft(report),
            target_s=step, target_prefill_s=1e-3 * min(target("prefill").values()), exit_s=exit_s,
            target_tokens=tokens, target_batch=_curve(target("batch")),
        )  # fmt: skip
        summary = f"{report['target']} on {report['device']}, to a robot of {base.name}"
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}); {why}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path.name} is no report with a target's times ({error!r}); {why}") from error
    return dataclasses.replace(base, name=path.stem, summary=summary, times=times)


def _own_draft(report: dict[str, Any]) -> Times:
    """The draft as the report timed it on its own device; the target's times are to be filled in."""
    step, (prefill,) = _timed(report, "draft", "step"), _timed(report, "draft", "prefill").values()
    growth = max(0.0, at_batch(_curve(step), 8) - 1.0)
    return Times(1e-3 * step[1], 0.0, draft_prefill_s=1e-3 * prefill, batch_growth=growth)


def _timed(report: dict[str, Any], model: str, what: str) -> dict[int, float]:
    """A model's milliseconds by count, of the rows of that name; ValueError where there are none."""
    rows = [row for row in report["rows"] if (row["model"], row["what"]) == (model, what)]
    if not rows or not all(_is_number(row["ms"]) and 0.0 < row["ms"] <= 60_000 for row in rows):
        raise ValueError(f"no times of {model} {what}")
    return {row["count"]: float(row["ms"]) for row in rows}


def _curve(timed: dict[int, float], more: int = 0) -> Curve:
    """Milliseconds by a number, as (that number and ``more``, times the first)."""
    found = sorted((count + more, milliseconds) for count, milliseconds in timed.items())
    if found[0][0] != 1:
        raise ValueError("timings that do not begin with one")
    return tuple((float(count), milliseconds / found[0][1]) for count, milliseconds in found)


def _profile(name: str, values: Any) -> Profile:
    if not isinstance(values, dict):
        raise ProfileError(f"profile {name} is no mapping; give it delay_ms and the rest")
    for key, value in values.items():
        if key not in _KEYS:
            raise ProfileError(f"profile {name} has an unknown setting {key!r}; use {', '.join(_KEYS)}")
        if key in _NUMBERS and not _is_number(value):
            raise ProfileError(f"{key} of profile {name} is {value!r}; give a number from 0")
        if key in _TIMES[:4] and not 0.0 < value <= 60_000:
            raise ProfileError(f"{key} of profile {name} is {value}; use 0 to 60000 ms")
    ways = values.keys() & {"delay_up_ms", "delay_down_ms"}
    if ("delay_ms" in values) == bool(ways):
        raise ProfileError(f"profile {name} needs either delay_ms or delay_up_ms and delay_down_ms")
    if len(ways) == 1:
        raise ProfileError(f"profile {name} needs both delay_up_ms and delay_down_ms")
    if ("draft_ms" in values) != ("target_ms" in values):
        raise ProfileError(f"profile {name} needs both draft_ms and target_ms, or neither")
    if "draft_ms" not in values and (lost := values.keys() & {*_TIMES, *_GROWTHS}):
        raise ProfileError(f"profile {name} has {min(lost)} without draft_ms and target_ms; give them too")
    gamma = values.get("gamma", 4)
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not 1 <= gamma <= MAX_DRAFT_LENGTH:
        raise ProfileError(f"gamma of profile {name} is {gamma!r}; use 1 to {MAX_DRAFT_LENGTH}")
    up, down = ("delay_up_ms", "delay_down_ms") if ways else ("delay_ms", "delay_ms")
    try:
        delays = 1e-3 * values[up], 1e-3 * values[down], 1e-3 * values.get("jitter_ms", 0)
        link = LinkProfile(*delays, 1e6 * values.get("up_mbps", 0), 1e6 * values.get("down_mbps", 0))
    except ValueError as error:
        raise ProfileError(f"profile {name} is out of bounds: {error}") from error
    times = None
    if "draft_ms" in values:
        seconds = {f"{key.removesuffix('_ms')}_s": 1e-3 * values[key] for key in _TIMES if key in values}
        times = Times(**seconds, **{key: values[key] for key in _GROWTHS if key in values})
    return Profile(name, str(values.get("summary", "")), link, gamma, times)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
