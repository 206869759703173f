# SPDX-License-Identifier: Apache-2.0
"""The way back: a path walked in reverse with the actions of the grammar, closed loop on odometry.

Actions are coarse (25 cm, 15 degrees), so the robot follows the path to within about 0.2 m and ends within
:data:`REACHED_M` of its start. Errors do not accumulate: each action is chosen from where the last one ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsd_ros.navigation.run.actions import FORWARD_CM, TURN_DEGREES, Action, ActionKind
from dsd_ros.navigation.run.controller import Pose

REACHED_M = 0.15  # with drives of 25 cm, 12.5 cm is about the nearest
AIMED = math.radians(9.0)  # turns of 15 degrees leave up to 7.5, and odometry adds a little
_SPACING_M = 0.05  # between two points of a path
_STRAIGHT_M = 0.05  # greatest deviation of a path from its simplification
_DRIFT_M = 0.07  # greatest deviation of a drive from the straight line to its goal


class Path:
    """Where the robot has been, as points a few centimetres apart."""

    def __init__(self) -> None:
        self.points: list[Pose] = []

    def add(self, pose: Pose) -> None:
        last = self.points[-1] if self.points else None
        if last is None or _distance(last, pose) >= _SPACING_M:
            self.points.append(pose)


class Retrace:
    """Chooses the actions of a way back.

    :param path: poses from the start on, the last one near the robot's present pose.
    :param reason: why the robot goes back, and ``since`` when (steady, s); kept for the caller.
    """

    def __init__(self, path: Sequence[Pose], reason: str = "", since: float = 0.0) -> None:
        self.reason, self.since = reason, since
        self._corners = straightened(path)
        self._target = max(0, len(self._corners) - 2)
        length = sum(map(_distance, self._corners, self._corners[1:]))
        self.leg: Action | None = None  # the one under way
        self._left = 12 + 8 * len(self._corners) + math.ceil(3 * length / 0.25)  # actions

    @property
    def exhausted(self) -> bool:
        """Whether it took far more actions than a robot that obeys them needs."""
        return self._left <= 0

    def next_action(self, pose: Pose) -> Action | None:
        """The next action at ``pose``; None when the robot stands at the path's first pose."""
        if not self._corners or self.exhausted:
            return None
        while _distance(pose, self._corners[self._target]) <= REACHED_M:
            if self._target == 0:
                return self._turn(self._corners[0].yaw - pose.yaw)
            self._target -= 1
        goal = self._corners[self._target]
        bearing = math.remainder(math.atan2(goal.y - pose.y, goal.x - pose.x) - pose.yaw, math.tau)
        turn = self._turn(bearing)
        if turn is not None:
            return turn
        self._left -= 1
        ahead = _distance(pose, goal) * math.cos(bearing)
        return Action(ActionKind.FORWARD, _drive(ahead, bearing))

    def remaining_path(self, pose: Pose) -> list[Pose]:
        """The rest of the path for a robot at ``pose``."""
        return [*self._corners[: self._target + 1], pose]

    def _turn(self, angle: float) -> Action | None:
        """The turn that reduces ``angle`` (rad) the most; None when it is small enough."""
        angle = math.remainder(angle, math.tau)
        if abs(angle) <= AIMED:
            return None
        self._left -= 1
        kind = ActionKind.TURN_LEFT if angle > 0.0 else ActionKind.TURN_RIGHT
        wanted = math.degrees(abs(angle))
        return Action(kind, min(TURN_DEGREES, key=lambda degrees: abs(degrees - wanted)))


def straightened(path: Sequence[Pose]) -> list[Pose]:
    """The corners of a path, simplified by Ramer-Douglas-Peucker to within a few centimetres."""
    if len(path) < 3:
        return list(path)
    kept = {0, len(path) - 1}
    spans = [(0, len(path) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        middle = range(first + 1, last)
        furthest = max(middle, key=lambda i: _off_line(path[i], path[first], path[last]))
        if _off_line(path[furthest], path[first], path[last]) > _STRAIGHT_M:
            kept.add(furthest)
            spans += [(first, furthest), (furthest, last)]
    return [path[index] for index in sorted(kept)]


def _drive(ahead: float, bearing: float) -> int:
    """The drive (cm) that ends nearest to a goal ``ahead`` (m) without deviating far from the line to it."""
    fitting = [cm for cm in FORWARD_CM if cm / 100.0 * abs(math.sin(bearing)) <= _DRIFT_M]
    return min(fitting or FORWARD_CM[:1], key=lambda cm: abs(cm / 100.0 - ahead))


def _off_line(point: Pose, start: Pose, end: Pose) -> float:
    """Distance of a point from a line segment, m."""
    along = (end.x - start.x, end.y - start.y)
    away = (point.x - start.x, point.y - start.y)
    length = math.hypot(*along)
    if length == 0.0:
        return math.hypot(*away)
    share = max(0.0, min(1.0, (away[0] * along[0] + away[1] * along[1]) / (length * length)))
    return math.hypot(away[0] - share * along[0], away[1] - share * along[1])


def _distance(a: Pose, b: Pose) -> float:
    return math.hypot(a.x - b.x, a.y - b.y)
