# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decides by: each side's decoding delay, the link's round trip, and acceptance rates.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 5.2. The paper measures the link with ping, sockperf and iperf3; here the answers' own messages are timed.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsd_ros.vlm.sequence import next_logits_together

if TYPE_CHECKING:
    from typing_extensions import Self

LENGTHS = (32, 128, 320)  # tokens of context at which the offline stage times a model
_STEPS_EACH = 4  # their median counts
_TOKEN = 1  # any token: a step takes equally long
_WEIGHT = 0.2  # zeta, of a new decoding step
_STEPS = 256  # newest steps that a line is fitted to
_LEAST_STEPS = 16
_LEAST_SPREAD = 1.25  # the longest context of these over the shortest
_QUICK, _SLOW = 0.5, 0.05  # weights of a new round trip in the two averages of the latency
_LEAST_BYTES = 4096  # a smaller message measures the latency, not the rate
_ACCEPTANCE_WEIGHT = 0.05


class ProfilerError(ValueError):
    """An invalid measurement."""


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ProfilerError(f"{name} is {value}; give a number of 0 or more")


class DecodeDelay:
    """Seconds of one decoding step at context length t: k_a t / k_b + k_c.

    The slope follows each observation. ``fit`` makes the line offline; without that stage, ``learn`` fits slope and
    intercept k_c to the newest observations (0 until then).
    """

    def __init__(self) -> None:
        self.k_a = self.k_b = self.k_c = 0.0
        self._measured = False
        self._observed: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    @classmethod
    def fit(cls, lengths: Sequence[int], seconds: Sequence[float]) -> Self:
        """Least squares over measured steps; a level line through their median if it does not rise from 0 or more."""
        delay = cls()
        delay._measured = True
        if not delay._fit(np.array(lengths, float), np.array(seconds)):
            delay.k_c = statistics.median(seconds)
        return delay

    def copy(self) -> Self:
        """A line of its own that starts as this one."""
        return copy.deepcopy(self)

    def observe(self, t: int, seconds: float) -> None:
        """Record that a step at length ``t``, 1 or more, took ``seconds``."""
        _check("a step's time", seconds)
        if t < 1:
            raise ProfilerError(f"a context's length is {t}; give 1 or more")
        zeta = _WEIGHT if self.k_b > 0.0 else 1.0
        self.k_a = (1.0 - zeta) * self.k_a + zeta * (seconds - self.k_c) * t
        self.k_b = (1.0 - zeta) * self.k_b + zeta * t * t
        self._observed.append((t, seconds))

    def learn(self) -> None:
        """Fit a line that was not measured offline to the newest steps, if their lengths differ enough."""
        if self._measured or len(self._observed) < _LEAST_STEPS:
            return
        t, seconds = np.array(self._observed).T
        if t.max() >= _LEAST_SPREAD * t.min():
            self._fit(t, seconds)

    def _fit(self, t: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> bool:
        """Fit the line; False, and no change, if it does not rise from 0 or more."""
        slope, k_c = map(float, np.polyfit(t, seconds, 1))
        if slope < 0.0 or k_c < 0.0:
            return False
        self.k_b, self.k_c = float(np.mean(t * t)), k_c
        self.k_a = slope * self.k_b
        return True

    def at(self, t: int) -> float:
        """Seconds of a step at length ``t``, 0 or more; 0 while nothing is known."""
        slope = self.k_a / self.k_b if self.k_b > 0.0 else 0.0
        return max(0.0, slope * t + self.k_c)


class LinkEstimate:
    """The link's round trip in seconds: latency (the mean of a quick and a slow moving average) and rate."""

    def __init__(self) -> None:
        self._averages: list[float] = []
        self._whole: float | None = None  # average of long messages' round trips, until a short one is seen
        self._seconds_per_byte: float | None = None

    def observe(self, count: int, seconds: float) -> None:
        """Record a round trip of ``count`` bytes in all: a small one measures the latency, a large one the rate.

        The time of a large one beyond the latency measures the rate. While no latency is known it counts as one
        itself, which is right if all messages are equally long.
        """
        _check("a round trip's bytes", count)
        _check("a round trip", seconds)
        if count < _LEAST_BYTES:
            self._averages = self._averages or [seconds, seconds]
            for i, weight in enumerate((_QUICK, _SLOW)):
                self._averages[i] += weight * (seconds - self._averages[i])
        elif not self._averages:
            before = seconds if self._whole is None else self._whole
            self._whole = before + _QUICK * (seconds - before)
        else:
            found = max(0.0, seconds - self.latency) / count
            before = found if self._seconds_per_byte is None else self._seconds_per_byte
            self._seconds_per_byte = before + _QUICK * (found - before)

    @property
    def latency(self) -> float:
        """Seconds of a round trip without its bytes; 0 while nothing is known."""
        if not self._averages:
            return self._whole or 0.0
        return sum(self._averages) / 2.0

    def round_trip(self, count: int = 0) -> float:
        """Seconds for ``count`` bytes there and back together."""
        return self.latency + count * (self._seconds_per_byte or 0.0)


class Acceptance:
    """A side's acceptance rate: a moving average, at first over all observations and four of 0.5."""

    def __init__(self) -> None:
        self.value, self._seen = 0.5, 4

    def observe(self, accepted: float) -> None:
        """Record whether a draft was accepted, or the probability of it (DRAGON, equation 5)."""
        if not 0.0 <= accepted <= 1.0:
            raise ProfilerError(f"an acceptance is {accepted}; give a share from 0 to 1")
        self._seen += 1
        self.value += max(_ACCEPTANCE_WEIGHT, 1.0 / self._seen) * (accepted - self.value)


def measure_delay(model: Any, documents: int, lengths: Sequence[int] = LENGTHS) -> DecodeDelay:
    """The offline stage: time ``model`` on this machine with ``documents`` sequences in a pass, and fit the line."""
    fitting = [length for length in lengths if length + _STEPS_EACH <= model.max_length]
    if len(fitting) < 2:  # a model of few positions
        fitting = [model.max_length // 4, model.max_length - _STEPS_EACH]
    first, medians = model.begin(), []
    for length in fitting:
        first.append([_TOKEN] * (length - len(first.tokens)))
        next_logits_together([first])
        together = [first.fork() for _ in range(max(1, documents))]
        taken = []
        for _ in range(_STEPS_EACH):
            for sequence in together:
                sequence.append([_TOKEN])
            began = time.monotonic()
            next_logits_together(together)
            taken.append(time.monotonic() - began)
        medians.append(statistics.median(taken))
    return DecodeDelay.fit(fitting, medians)
