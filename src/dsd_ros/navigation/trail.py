"""Where the robot has been, coarsely: its way back may lead nowhere else."""

from __future__ import annotations

import math

_CELL = 0.1  # m; one place is kept of each
_LEAST = 0.2  # m; nearer than this the cells themselves would be seen
_MOST = 100_000  # cells, 1000 square metres; then it begins anew


class Trail:
    """Places in the odometry frame. ``within``: this near (m) to one of them counts as there."""

    def __init__(self, within: float) -> None:
        self._within = max(within, _LEAST)
        self._places: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, x: float, y: float) -> None:
        if len(self._places) >= _MOST:
            self._places.clear()
        self._places.setdefault((math.floor(x / _CELL), math.floor(y / _CELL)), (x, y))

    def near(self, x: float, y: float) -> bool:
        column, row = math.floor(x / _CELL), math.floor(y / _CELL)
        reach = math.ceil(self._within / _CELL)
        return any(
            (place := self._places.get((column + i, row + j))) is not None
            and math.hypot(place[0] - x, place[1] - y) <= self._within
            for i in range(-reach, reach + 1)
            for j in range(-reach, reach + 1)
        )
