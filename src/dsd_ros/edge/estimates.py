# SPDX-License-Identifier: Apache-2.0
"""Running estimates of slowly changing figures, robust to outliers: means, shares and line fits."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_WINDOW = 64  # observations kept
# An observation's weight relative to the next newer one's.
_SLOPE_WEIGHTS = 0.97 ** np.arange(_WINDOW)[::-1]
_LEVEL_WEIGHTS = 0.85 ** np.arange(_WINDOW)[::-1]
_SIGNIFICANT = 2.0  # standard errors; smaller slopes count as 0

Floats = NDArray[np.floating]
Numbers = TypeVar("Numbers", float, Floats)


_KEPT = 16  # observations written down


class Estimate:
    """What can be written down in plain JSON values, and read again: the attributes that ``kept`` names."""

    kept: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        """The values of the attributes by name."""
        return {name: _plain(getattr(self, name)) for name in self.kept}

    def restore(self, state: dict[str, Any]) -> None:
        """Take on what ``state`` gave; ValueError, TypeError or KeyError for anything else, which may change a part."""
        for name in self.kept:
            own, value = getattr(self, name), state[name]
            if isinstance(own, Estimate):
                own.restore(value)
            else:
                setattr(self, name, _like(own, value))


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.state()
    if isinstance(value, deque):
        return [_plain(item) for item in list(value)[-_KEPT:]]
    if isinstance(value, (np.ndarray, tuple, list)):
        return [_plain(item) for item in value]
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _like(own: Any, value: Any) -> Any:
    """``value`` of the type and shape of ``own``; ValueError or TypeError."""
    if isinstance(own, deque):
        rows = np.array(value, dtype=np.float64)
        if not np.isfinite(rows).all() or len(rows) > _WINDOW:
            raise ValueError("not the last observations")
        return deque((tuple(row) if isinstance(row, list) else row for row in rows.tolist()), own.maxlen)
    numbers = np.array(value, dtype=np.float64)
    if numbers.shape != np.shape(own) or not (np.isfinite(numbers) & (numbers >= 0.0)).all():
        raise ValueError("not numbers of this shape")
    return numbers if isinstance(own, np.ndarray) else type(own)(numbers)


class Mean(Estimate):
    """An exponential average: each value has ``memory`` times the weight of the next one."""

    kept = ("_sum", "_weight")

    def __init__(self, memory: float = 0.9) -> None:
        self._memory = memory
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        """The next value."""
        self._sum = self._memory * self._sum + value
        self._weight = self._memory * self._weight + 1.0

    @property
    def weight(self) -> float:
        """How many values there were, older ones in part."""
        return self._weight

    @property
    def known(self) -> bool:
        """Whether there was a value."""
        return self._weight > 0.0

    def value_or(self, otherwise: float) -> float:
        """The average, or ``otherwise`` before the first value."""
        return self._sum / self._weight if self._weight else otherwise


class Share(Mean):
    """How often something happens, 0 to 1; starts at 1/2."""

    def __init__(self, memory: float = 0.95) -> None:
        super().__init__(memory)

    @property
    def value(self) -> float:
        """The share, with one half occurrence in one trial as prior."""
        return (self._sum + 0.5) / (self._weight + 1.0)


class LineFit(Estimate):
    """Fits y = level + slopes * x, slopes 0 or more, to the last observations.

    A slope is the median ratio of steps between neighbouring observations (after Theil and Sen), so a change of level
    is not mistaken for a slope; one that noise could explain is 0. The level is a median that forgets faster.
    """

    kept = ("_y", "_x", "_count")

    def __init__(self) -> None:
        self._y: deque[float] = deque(maxlen=_WINDOW)
        self._x: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)
        self._found: tuple[float, list[float]] | None = None
        self._count = 0

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._found = None
        if len(self._y) != len(self._x) or len({np.shape(x) for x in self._x}) > 1 or (self._count and not self._y):
            raise ValueError("not observations of a line")

    def __len__(self) -> int:
        return self._count

    def add(self, y: float, *x: float) -> None:
        """Add an observation; always with the same number of x."""
        self._y.append(y)
        self._x.append(x)
        self._count += 1
        self._found = None

    @property
    def typical(self) -> float:
        """The median y of late, 0 before the first observation."""
        return _median(np.array(self._y), _LEVEL_WEIGHTS[-len(self._y) :]) if self._y else 0.0

    @property
    def least(self) -> float:
        """The smallest first x of late."""
        return float(min(x[0] for x in self._x)) if self._x else 0.0

    def at(self, *x: Numbers) -> Numbers:
        """The expected y, 0 before the first observation; an array if x are arrays."""
        y = 0.0 * x[0]
        if self._y:
            level, slopes = self._fitted()
            y = y + level
            for slope, value in zip(slopes, x, strict=True):
                y = y + slope * value
        return cast("Numbers", np.maximum(y, 0.0))

    def _fitted(self) -> tuple[float, list[float]]:
        if self._found is None:
            y, x = np.array(self._y), np.array(self._x).T
            count = len(y)
            slopes = _slopes(y[1:] - y[:-1], x[:, 1:] - x[:, :-1], _SLOPE_WEIGHTS[-count:][1:])
            rest = y - sum(slope * row for slope, row in zip(slopes, x, strict=True))
            self._found = _median(rest, _LEVEL_WEIGHTS[-count:]), slopes
        return self._found


def _slopes(dy: Floats, dx: Floats, weights: Floats) -> list[float]:
    """Slopes of dy (n,) by dx (x, n): each in turn with the others fixed, a few times over."""
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


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    summed = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(summed, 0.5 * summed[-1])]])
