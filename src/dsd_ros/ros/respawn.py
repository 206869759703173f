"""When a process that ended is started again. Imports nothing of ROS: launch files and the process runner share it."""

from __future__ import annotations

from dataclasses import dataclass, field

# 0: it was told to end. 2: it could not start as it was told to, and would not the next time (running.EXIT_BAD_START).
NO_CRASH = (0, 2)


@dataclass(frozen=True)
class RespawnRule:
    """After a crash there is a pause, doubled from crash to crash, and a bound on restarts within a span of time."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 5.0
    at_most: int = 5
    within_s: float = 60.0


RULE = RespawnRule()


@dataclass
class Restarts:
    """The restarts of one process. ``count`` is of all of them."""

    rule: RespawnRule = RULE
    count: int = 0
    _times: list[float] = field(default_factory=list)

    def after(self, returncode: int, now: float) -> float | None:
        """The pause before the process is started again, s; None: it is not.

        :param returncode: of the process; negative: the signal that ended it.
        :param now: monotonic seconds.
        """
        if returncode in NO_CRASH:
            return None
        rule = self.rule
        self._times = [time for time in self._times if now - time < rule.within_s]
        if len(self._times) >= rule.at_most:
            return None
        pause = min(rule.longest_pause_s, rule.first_pause_s * 2.0 ** len(self._times))
        self._times.append(now)
        self.count += 1
        return pause

    def sentence(self, returncode: int) -> str:
        """Why :meth:`after` gave None."""
        if returncode in NO_CRASH:
            return f"{how_it_ended(returncode)}; not started again"
        return (
            f"{how_it_ended(returncode)}, and had been started again {len(self._times)} times within "
            f"{self.rule.within_s:.0f} s"
        )


def how_it_ended(returncode: int) -> str:
    """As part of a sentence."""
    if returncode < 0:
        return f"ended by signal {-returncode}"
    return f"ended with exit code {returncode}"
