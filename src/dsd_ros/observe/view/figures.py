# SPDX-License-Identifier: Apache-2.0
"""Figures of the newest reply and of the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dsd_ros.decoding.modes import PRESETS, streams, unit_of

_TIMES = {  # field -> that of dsd_msgs/DecodeStats, a Duration
    "seconds": "total_time", "verify_round_seconds": "verify_round_time", "link_delay_seconds": "link_delay",
    "observation_age": "observation_age",
}  # fmt: skip


def seconds_of(value: Any) -> float:
    """A stamp or duration of rclpy, or of a bag, in seconds."""
    return float(value.sec + value.nanosec * 1e-9)


@dataclass(frozen=True)
class ReplyFigures:
    """The cost of one reply. Each duration is measured on one machine's monotonic clock."""

    mode: str = ""
    transport: str = ""
    tokens: int = 0
    rounds: int = 0  # or passes of the target
    tau: float = 0.0
    seconds: float = 0.0
    draft_share: float = 0.0  # of the tokens
    sooner: float = 0.0  # mode stream, an estimate: times as fast as the target alone; 0: unknown
    verify_round_seconds: float = 0.0  # T_q
    link_delay_seconds: float = 0.0  # T_c, one way
    miss_rate: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    predrafts_used: int = 0
    predrafts_wasted: int = 0
    observation_age: float = 0.0

    @classmethod
    def of(cls, message: Any) -> ReplyFigures:
        """From a dsd_msgs/DecodeStats; what is no finite number becomes 0."""
        values: dict[str, Any] = {name: getattr(message, name) for name in cls.__dataclass_fields__.keys() - _TIMES}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = 0.0
        return cls(**values | {name: seconds_of(getattr(message, time)) for name, time in _TIMES.items()})

    @property
    def passes_per_token(self) -> float:
        """Passes, or rounds, that a token took."""
        return self.rounds / self.tokens if self.tokens else 0.0

    @property
    def alone_seconds(self) -> float:
        """Estimated time of the target alone for the same tokens; 0 when unknown."""
        return self.sooner * self.seconds


class Figures:
    """Sums over a run."""

    def __init__(self) -> None:
        self.newest = ReplyFigures()
        self.replies = self.tokens = self.rounds = self.bytes_up = self.bytes_down = self.steps = self.predrafts = 0
        self.seconds = self.drafted = self.alone = self.compared = self.misses = self.step_seconds = 0.0

    def add_reply(self, reply: ReplyFigures) -> None:
        """Add a completed reply."""
        self.newest = reply
        self.replies += 1
        self.tokens += reply.tokens
        self.rounds += reply.rounds
        self.drafted += reply.draft_share * reply.tokens
        self.seconds += reply.seconds
        self.bytes_up += reply.bytes_up
        self.bytes_down += reply.bytes_down
        self.predrafts += reply.predrafts_used + reply.predrafts_wasted
        self.misses += reply.miss_rate
        if reply.sooner:
            self.alone += reply.alone_seconds
            self.compared += reply.seconds

    def add_step(self, seconds: float) -> None:
        """Add an action announced ``seconds`` after the previous one (0: unknown, not counted)."""
        if seconds > 0.0:
            self.steps += 1
            self.step_seconds += seconds

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def sooner(self) -> float:
        """See ReplyFigures."""
        return self.alone / self.compared if self.compared else 0.0

    @property
    def seconds_per_action(self) -> float:
        return self.step_seconds / self.steps if self.steps else 0.0

    def gained(self) -> str:
        """What the drafts gained in the run, in a sentence; empty where nothing is drafted."""
        if not self.drafted:
            return ""
        text = f"{percent(self.drafted / self.tokens)} of the tokens came from drafts"
        if not streams(self.newest.mode):
            return f"{text}: {self.tau:.1f} tokens a round in place of 1."
        if not self.sooner:
            return f"{text}."
        return f"{text}: replies were about {self.sooner:.1f} times as fast as by the target alone (an estimate)."

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, newest reply, whole run) as text: what there is in the newest reply's mode."""
        new, count, passes = self.newest, max(1, self.replies), streams(self.newest.mode)
        rows = []
        if new.mode not in PRESETS or PRESETS[new.mode].drafts:
            share = self.drafted / max(1, self.tokens)
            rows.append(("tokens from drafts", percent(new.draft_share), percent(share)))
            rows.append(
                ("passes per token", f"{new.passes_per_token:.2f}", f"{self.rounds / max(1, self.tokens):.2f}")
                if passes
                else ("tokens per round (tau)", f"{new.tau:.2f}", f"{self.tau:.2f}")
            )
        rows.append(("seconds per reply", f"{new.seconds:.2f}", f"{self.seconds / count:.2f}"))
        rows.append(("seconds per action", "", f"{self.seconds_per_action:.2f}"))
        if self.predrafts:
            rows.append(("miss rate", percent(new.miss_rate), percent(self.misses / count)))
            rows.append(("pre-drafts used / wasted", f"{new.predrafts_used} / {new.predrafts_wasted}", ""))
        rows.append(("bytes up", size(new.bytes_up), size(self.bytes_up)))
        rows.append(("bytes down", size(new.bytes_down), size(self.bytes_down)))
        rows.append((f"T_q, one {unit_of(new.mode)} in the target", milliseconds(new.verify_round_seconds), ""))
        if not passes:
            rows.append(("T_c, one way", milliseconds(new.link_delay_seconds), ""))
        rows.append(("age of the picture", f"{new.observation_age:.2f} s", ""))
        if self.sooner:
            rows.append(("as fast as the target alone (estimate)", times(new.sooner), times(self.sooner)))
        return rows


def size(count: float) -> str:
    """A readable number of bytes."""
    if count < 1000:
        return f"{count:.0f} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def times(factor: float) -> str:
    return f"{factor:.2f} x" if factor else "unknown"
