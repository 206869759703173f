# SPDX-License-Identifier: Apache-2.0
"""Figures of the newest reply and of the whole run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplyFigures:
    """The cost of one reply. Each duration is measured on one machine's monotonic clock."""

    mode: str = ""
    transport: str = ""
    tokens: int = 0
    rounds: int = 0
    tau: float = 0.0
    seconds: float = 0.0
    verify_seconds: float = 0.0  # in the target, all rounds and the prefill
    verify_round_seconds: float = 0.0  # T_q
    link_delay_seconds: float = 0.0  # T_c, one way
    miss_rate: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    predrafts_used: int = 0
    predrafts_wasted: int = 0
    mean_exit: float = 0.0
    observation_age: float = 0.0

    @property
    def alone_seconds(self) -> float:
        """Estimated time of the target alone in the cloud for as many tokens; 0 when unknown.

        One prefill and one round trip, then a pass of T_q per token. T_q is measured on a whole draft, which takes
        slightly longer than one token, so the estimate is slightly high on a compute-bound machine.
        """
        if not self.verify_round_seconds or self.rounds < 2:
            return 0.0
        passes = self.verify_round_seconds * (self.rounds - 1)
        first = max(0.0, self.verify_seconds - passes)
        return first + self.verify_round_seconds * (self.tokens - 1) + 2 * self.link_delay_seconds

    @property
    def speedup(self) -> float:
        """Relative to :attr:`alone_seconds`; 0 when unknown."""
        return self.alone_seconds / self.seconds if self.seconds > 0.0 else 0.0


class Figures:
    """Sums over a run."""

    def __init__(self) -> None:
        self.newest = ReplyFigures()
        self.replies = self.tokens = self.rounds = self.bytes_up = self.bytes_down = self.steps = 0
        self.seconds = self.alone = self.compared = self.misses = self.step_seconds = 0.0

    def add_reply(self, reply: ReplyFigures) -> None:
        """Add a completed reply."""
        self.newest = reply
        self.replies += 1
        self.tokens += reply.tokens
        self.rounds += reply.rounds
        self.seconds += reply.seconds
        self.bytes_up += reply.bytes_up
        self.bytes_down += reply.bytes_down
        self.misses += reply.miss_rate
        if reply.alone_seconds:
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
    def speedup(self) -> float:
        return self.alone / self.compared if self.compared else 0.0

    @property
    def seconds_per_action(self) -> float:
        return self.step_seconds / self.steps if self.steps else 0.0

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, newest reply, whole run) as text."""
        new, count = self.newest, max(1, self.replies)
        return [
            ("tokens per round (tau)", f"{new.tau:.2f}", f"{self.tau:.2f}"),
            ("seconds per reply", f"{new.seconds:.2f}", f"{self.seconds / count:.2f}"),
            ("seconds per action", "", f"{self.seconds_per_action:.2f}"),
            ("miss rate", f"{100 * new.miss_rate:.0f} %", f"{100 * self.misses / count:.0f} %"),
            ("pre-drafts used / wasted", f"{new.predrafts_used} / {new.predrafts_wasted}", ""),
            ("bytes up", size(new.bytes_up), size(self.bytes_up)),
            ("bytes down", size(new.bytes_down), size(self.bytes_down)),
            ("T_q, one round in the target", milliseconds(new.verify_round_seconds), ""),
            ("T_c, one way", milliseconds(new.link_delay_seconds), ""),
            ("age of the picture", f"{new.observation_age:.2f} s", ""),
            ("over the target alone (estimate)", times(new.speedup), times(self.speedup)),
        ]

    def markdown(self) -> str:
        """A Markdown table of :meth:`rows`."""
        title = f"**{self.newest.mode or 'no reply yet'}** {self.newest.transport}".strip()
        replies = "1 reply" if self.replies == 1 else f"{self.replies} replies"
        lines = [f"{title}, {replies}", "", "| | newest | run |", "|---|---|---|"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows()])


def size(count: float) -> str:
    """A readable number of bytes."""
    if count < 1000:
        return f"{count:.0f} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def times(factor: float) -> str:
    return f"{factor:.2f} x" if factor else "unknown"
