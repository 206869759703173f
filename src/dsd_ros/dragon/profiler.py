"""What the scheduler decides by: each side's decoding delay, the link's round trip, and acceptance rates.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 5.2. The paper measures the link with ping, sockperf and iperf3; here the reply's own messages are timed. The
offline stage (``delay_of``) measures a machine's decoding delay once and keeps it as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsd_ros.vlm.sequence import next_logits_together

FILE = "decoding-delay.json"  # in a store's folder
LENGTHS = (32, 128, 320)  # tokens of context
STEPS = 4  # at each length; their median counts
_FORMAT = 1
_TOKEN = 1  # any token: a step takes equally long

_LEAST_BYTES = 4096  # a smaller message measures the latency, not the rate
_STEPS = 256  # newest steps that a line is fitted to
_LEAST_STEPS = 16
_LEAST_SPREAD = 1.25  # the longest context of these over the shortest

_log = logging.getLogger(__name__)


class ProfilerError(ValueError):
    """An invalid measurement."""


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ProfilerError(f"{name} is {value}; give a number of 0 or more")


class DecodeDelay:
    """Seconds of one decoding step by the context's length t: k_a t / k_b + k_c.

    The intercept k_c comes from ``fit`` and stays; the slope follows the observations. For a side that was not
    measured beforehand, ``learn`` takes the intercept from the observations (0 until then).
    """

    def __init__(self, k_a: float = 0.0, k_b: float = 0.0, k_c: float = 0.0, weight: float = 0.2) -> None:
        """``weight``: zeta, 0..1, of a new observation."""
        self.k_a, self.k_b, self.k_c, self.weight = k_a, k_b, k_c, weight
        self._observed: deque[tuple[int, float]] | None = deque(maxlen=_STEPS)

    @classmethod
    def fit(cls, lengths: Sequence[int], seconds: Sequence[float], weight: float = 0.2) -> DecodeDelay:
        """The least-squares line through steps measured offline at two lengths or more."""
        if len(lengths) != len(seconds) or len(set(lengths)) < 2:
            raise ProfilerError("a line takes the seconds of steps at two lengths or more")
        for length, value in zip(lengths, seconds, strict=True):
            _check("a length", length)
            _check("a step's time", value)
        count = len(lengths)
        mean_t, mean_c = sum(lengths) / count, sum(seconds) / count
        above = sum((t - mean_t) * c for t, c in zip(lengths, seconds, strict=True))
        k_c = mean_c - above / sum((t - mean_t) ** 2 for t in lengths) * mean_t
        # With this intercept the line's slope is that of least squares through it: k_a / k_b.
        k_a = sum((c - k_c) * t for t, c in zip(lengths, seconds, strict=True)) / count
        found = cls(k_a, sum(t * t for t in lengths) / count, k_c, weight)
        found._observed = None
        return found

    def observe(self, t: int, seconds: float) -> None:
        """Record that a step at length ``t``, 1 or more, took ``seconds``."""
        _check("a step's time", seconds)
        if t < 1:
            raise ProfilerError(f"a context's length is {t}; give 1 or more")
        zeta = self.weight if self.k_b > 0.0 else 1.0
        self.k_a = (1.0 - zeta) * self.k_a + zeta * (seconds - self.k_c) * t
        self.k_b = (1.0 - zeta) * self.k_b + zeta * t * t
        if self._observed is not None:
            self._observed.append((t, seconds))

    def learn(self) -> None:
        """Fit the line to the newest steps, if their lengths differ enough and it rises from 0 or more."""
        steps = self._observed or ()
        if len(steps) < _LEAST_STEPS:
            return
        lengths, seconds = zip(*steps, strict=True)
        if max(lengths) < _LEAST_SPREAD * min(lengths):
            return
        found = DecodeDelay.fit(lengths, seconds, self.weight)
        if found.k_a >= 0.0 and found.k_c >= 0.0:
            self.k_a, self.k_b, self.k_c = found.k_a, found.k_b, found.k_c

    def at(self, t: int) -> float:
        """Seconds of a step at length ``t``, 0 or more; 0 while nothing is known."""
        slope = self.k_a / self.k_b if self.k_b > 0.0 else 0.0
        return max(0.0, slope * t + self.k_c)


class LinkEstimate:
    """The link's round trip in seconds: latency (the mean of a quick and a slow moving average) and rate."""

    def __init__(self, quick: float = 0.5, slow: float = 0.05) -> None:
        """``quick``, ``slow``: weights, 0..1, of a new observation."""
        self._weights = (quick, slow)
        self._averages: list[float] = []
        self._whole: float | None = None  # average of round trips with many bytes, until another is seen
        self._seconds_per_byte: float | None = None

    def observe(self, count: int, seconds: float) -> None:
        """Record a round trip of ``count`` bytes in all: a small one measures the latency, a large one the rate."""
        if count < _LEAST_BYTES:
            self.observe_round_trip(seconds)
        else:
            self.observe_transfer(count, seconds)

    def observe_round_trip(self, seconds: float) -> None:
        """Record the travel time of a small message and its answer together."""
        _check("a round trip", seconds)
        if not self._averages:
            self._averages = [seconds, seconds]
        for i, weight in enumerate(self._weights):
            self._averages[i] += weight * (seconds - self._averages[i])

    def observe_transfer(self, count: int, seconds: float) -> None:
        """Record a round trip of ``count`` bytes, both ways together; too few bytes are ignored.

        The time beyond the latency measures the rate. While no latency is known the round trip counts as one itself,
        which is right if all messages are equally long.
        """
        _check("a transfer's bytes", count)
        _check("a transfer's time", seconds)
        if count < _LEAST_BYTES:
            return
        if not self._averages:
            before = seconds if self._whole is None else self._whole
            self._whole = before + self._weights[0] * (seconds - before)
            return
        found = max(0.0, seconds - self.latency) / count
        if self._seconds_per_byte is None:
            self._seconds_per_byte = found
        self._seconds_per_byte += self._weights[0] * (found - self._seconds_per_byte)

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
    """A side's acceptance rate: a moving average, at first over all observations."""

    def __init__(self, weight: float = 0.05, start: float = 0.5) -> None:
        """``start`` counts as four observations."""
        self.weight, self.value, self._seen = weight, start, 4

    def observe(self, accepted: float) -> None:
        """Record whether a draft was accepted, or the probability of it (DRAGON, equation 5)."""
        if not 0.0 <= accepted <= 1.0:
            raise ProfilerError(f"an acceptance is {accepted}; give a share from 0 to 1")
        self._seen += 1
        self.value += max(self.weight, 1.0 / self._seen) * (accepted - self.value)


def delay_of(model: Any, documents: int, folder: Path | None = None) -> DecodeDelay:
    """The decoding delay of this model on this machine, with ``documents`` sequences in a pass.

    Read from FILE in ``folder``. If that is missing, damaged, or of another model or machine, measure and write it.
    Without a folder it is measured each time.
    """
    path = None if folder is None else folder / FILE
    kept = kept_delay(model, documents, folder)
    if kept is not None:
        return kept
    lengths, seconds = measure(model, documents)
    delay = fitted(lengths, seconds)
    if path is not None:
        content = {**_facts(model, documents), "lengths": lengths, "seconds": seconds}
        making = path.with_suffix(f".{os.getpid()}")
        try:
            making.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            making.replace(path)
        except OSError as error:  # costs another measurement, not an answer
            _log.warning("%s cannot be kept (%s); it is measured again next time", path, error)
            with contextlib.suppress(OSError):
                making.unlink()
    return delay


def kept_delay(model: Any, documents: int, folder: Path | None) -> DecodeDelay | None:
    """The delay that ``delay_of`` would read; None if it would measure."""
    return None if folder is None else _read(folder / FILE, _facts(model, documents))


def measure(model: Any, documents: int, lengths: Sequence[int] = LENGTHS) -> tuple[list[int], list[float]]:
    """Context lengths in tokens, those of ``lengths`` that fit the model, and the seconds of a step at each."""
    held = [length for length in lengths if length + STEPS <= model.max_length]
    if len(held) < 2:  # a model of few positions
        held = [model.max_length // 4, model.max_length - STEPS]
    first = model.begin()
    found = []
    for length in held:
        first.append([_TOKEN] * (length - len(first.tokens)))
        next_logits_together([first])
        together = [first.fork() for _ in range(max(1, documents))]
        taken = []
        for _ in range(STEPS):
            for sequence in together:
                sequence.append([_TOKEN])
            began = time.monotonic()
            next_logits_together(together)
            taken.append(time.monotonic() - began)
        found.append(statistics.median(taken))
    return held, found


def fitted(lengths: Sequence[int], seconds: Sequence[float]) -> DecodeDelay:
    """``DecodeDelay.fit``, or a level line through the median if the line does not rise from 0 or more."""
    delay = DecodeDelay.fit(lengths, seconds)
    if delay.k_a < 0.0 or delay.k_c < 0.0:
        delay = DecodeDelay.fit(lengths, [statistics.median(seconds)] * len(lengths))
    return delay


def _facts(model: Any, documents: int) -> dict[str, Any]:
    """What a measurement is valid for."""
    return {
        "format": _FORMAT,
        "model": model.fingerprint,
        "machine": f"{platform.node()} {platform.machine()}, {torch.get_num_threads()} threads",
        "device": str(getattr(model, "device", "cpu")),
        "documents": documents,
    }


def _read(path: Path, facts: dict[str, Any]) -> DecodeDelay | None:
    """The delay kept in a file, if it is valid for ``facts``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if {name: content[name] for name in facts} != facts:
            return None
        return fitted(content["lengths"], content["seconds"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ProfilerError) as error:
        _log.warning("%s cannot be used (%s); it is measured again", path, error)
        return None
