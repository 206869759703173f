"""Notices a run that gets nowhere: the same decided at the same place again and again, or turns to and fro."""

from __future__ import annotations

import math

from dsd_ros.navigation.actions import Action, ActionKind, format_action
from dsd_ros.navigation.controller import Pose

_SAME_PLACE_M = 0.1
_SAME_HEADING = math.radians(7.5)  # half of the smallest turn
_MOST_TURNED = 2.6 * math.tau  # on one spot, all in one sense


class Oscillation:
    """Tell it each action that was carried out; ask it before the next one. Pure.

    Blocked actions do not count: they are noticed by themselves.

    :param repeats: the same action at the same pose for this many-th time is too much.
    :param reversals: so many changes of sense, with no drive between the turns, are too many.
    """

    def __init__(self, repeats: int, reversals: int) -> None:
        self._repeats = repeats
        self._reversals = reversals
        self._done: list[tuple[Pose, Action]] = []
        self._turns: list[float] = []  # rad, since the last drive

    def refuses(self, pose: Pose, action: Action) -> str:
        """Why ``action`` at ``pose`` would lead nowhere; empty when it may."""
        if action.kind is ActionKind.STOP:
            return ""
        same = sum(1 for then, what in self._done if what == action and _same(then, pose))
        if same + 1 >= self._repeats:
            return f"'{format_action(action)}' was decided {same + 1} times at the same place"
        turns = [*self._turns, action.radians] if action.radians else []
        changes = sum(1 for a, b in zip(turns, turns[1:], strict=False) if a * b < 0.0)
        if changes >= self._reversals:
            return f"it turned to and fro {len(turns)} times without driving"
        if abs(sum(turns)) > _MOST_TURNED:
            return f"it turned by {math.degrees(abs(sum(turns))):.0f} degrees without driving"
        return ""

    def carried_out(self, pose: Pose, action: Action) -> None:
        """``action`` was decided at ``pose``, and is over."""
        if action.kind is ActionKind.STOP:
            return
        self._done.append((pose, action))
        self._turns = [*self._turns, action.radians] if action.radians else []


def _same(a: Pose, b: Pose) -> bool:
    near = math.hypot(a.x - b.x, a.y - b.y) <= _SAME_PLACE_M
    return near and abs(math.remainder(a.yaw - b.yaw, math.tau)) <= _SAME_HEADING
