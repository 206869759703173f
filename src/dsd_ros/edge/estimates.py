"""Estimates of what changes slowly and is measured with outliers: means, shares, and lines of one or two slopes."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import numpy as np

_WINDOW = 64  # observations kept
_SLOPE_MEMORY = 0.97  # weight of an observation against the next newer one's
_LEVEL_MEMORY = 0.85
_SLOPE_WEIGHTS = _SLOPE_MEMORY ** np.arange(_WINDOW)[::-1]
_LEVEL_WEIGHTS = _LEVEL_MEMORY ** np.arange(_WINDOW)[::-1]
_SIGNIFICANT = 2.0  # standard errors, below which a slope counts as none

Numbers = TypeVar("Numbers", float, np.ndarray)


class Mean:
    """An average in which each value weighs ``memory`` times as much as the next one."""

    def __init__(self, memory: float = 0.9) -> None:
        self._memory = memory
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        """The next value."""
        self._sum = self._memory * self._sum + value
        self._weight = self._memory * self._weight + 1.0

    def value_or(self, otherwise: float) -> float:
        """The average, or ``otherwise`` if there is none."""
        return self._sum / self._weight if self._weight else otherwise


class Share:
    """How often something happens, 0 to 1; 1/2 as long as nothing is known."""

    def __init__(self, memory: float = 0.95) -> None:
        self._memory = memory
        self._yes = self._all = 0.0

    def add(self, happened: bool) -> None:
        """The next time that it could."""
        self._yes = self._memory * self._yes + happened
        self._all = self._memory * self._all + 1.0

    @property
    def value(self) -> float:
        """The share."""
        return (self._yes + 0.5) / (self._all + 1.0)


class LineFit:
    """y = level + slopes * x with slopes of 0 or more, from the last observations of it.

    Slopes come from the steps between one observation and the next, so that a change of the level is not
    taken for one (the median of their ratios, after Theil and Sen); one that noise could explain is 0. The
    level is a median that forgets faster.
    """

    def __init__(self) -> None:
        self._y: deque[float] = deque(maxlen=_WINDOW)
        self._x: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)
        self._found: tuple[float, list[float]] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, y: float, *x: float) -> None:
        """An observation; always of as many x."""
        self._y.append(y)
        self._x.append(x)
        self._count += 1
        self._found = None

    def at(self, *x: Numbers) -> Numbers:
        """The expected y, 0 before anything was observed; of many at once where x are arrays."""
        y = 0.0 * x[0]
        if self._y:
            level, slopes = self._fitted()
            y = y + level
            for slope, value in zip(slopes, x, strict=True):
                y = y + slope * value
        return y

    def _fitted(self) -> tuple[float, list[float]]:
        if self._found is None:
            y, x = np.array(self._y), np.array(self._x).T
            count = len(y)
            slopes = _slopes(y[1:] - y[:-1], x[:, 1:] - x[:, :-1], _SLOPE_WEIGHTS[-count:][1:])
            rest = y - sum(slope * row for slope, row in zip(slopes, x, strict=True))
            self._found = _median(rest, _LEVEL_WEIGHTS[-count:]), slopes
        return self._found


def _slopes(dy: np.ndarray, dx: np.ndarray, weights: np.ndarray) -> list[float]:
    """Slopes of dy (n,) by dx (x, n), one after the other with the others held, until they agree."""
    slopes = [0.0] * len(dx)
    moving = [(j, steps, np.flatnonzero(steps)) for j, steps in enumerate(dx) if steps.any()]
    for _ in range(1 if len(moving) < 2 else 4):
        for j, steps, moved in moving:
            rest = dy - sum(slopes[k] * dx[k] for k, _, _ in moving if k != j)
            ratios = rest[moved] / steps[moved]
            slope = _median(ratios, weights[moved] * np.abs(steps[moved]))
            noise = 1.4826 * _median(np.abs(rest - slope * steps), weights)
            doubt = (_SIGNIFICANT * noise) ** 2 / float(weights @ steps**2)
            known = slope > 0.0 and slope**2 > doubt
            slopes[j] = slope * (1.0 - doubt / slope**2) if known else 0.0
    return slopes


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values, kind="stable")
    summed = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(summed, 0.5 * summed[-1])]])
