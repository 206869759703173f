"""What an observer saw of the robot, and whether it was what may be seen. Free of ROS, so that the judge can be judged.

Times are seconds of one monotonic clock, that of the observer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsd_ros.navigation.actions import Action, ActionKind

STOP_LIMIT_S = 0.5  # from the cause to the last command that moves the robot
# The base obeys a zero at once but must brake, 0.17 s from top speed; a driver whose commands fell silent, or a
# supervisor that stopped at the last moment, take their half second before that. And poses come every 0.02 s.
REST_LIMIT_S = STOP_LIMIT_S + 0.25
_STILL = 0.03  # m/s and rad/s: below this it stands
_ZERO = 1e-4
_ORDER_S = 0.15  # two topics may arrive in either order within this
# How much further than its action says the robot may get: the supervisor's margins.
DISTANCE_MARGIN_M, ANGLE_MARGIN_DEG = 0.3, 20.0
_SIDE = 0.05  # m/s that a turn may drift


class Command(NamedTuple):
    """A final velocity command: m/s ahead and to the left, rad/s."""

    at: float
    vx: float
    vy: float
    wz: float

    @property
    def moves(self) -> bool:
        return max(abs(self.vx), abs(self.vy), abs(self.wz)) > _ZERO


class Seen(NamedTuple):
    """Where the robot said it was, and how fast (m/s, rad/s)."""

    at: float
    x: float
    y: float
    yaw: float
    speed: float
    turn_rate: float

    @property
    def moves(self) -> bool:
        return abs(self.speed) > _STILL or abs(self.turn_rate) > _STILL


class Verdict(NamedTuple):
    """What the safety supervisor said."""

    at: float
    stopped: bool
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Announced:
    """An action as navigation announced it. ``picture``: stamp of the picture it answers, ns."""

    at: float
    run: int
    step: int
    action: Action | None  # None: none of the grammar's
    verified: bool
    retracing: bool
    reasoning: str
    picture: int


@dataclass
class Record:
    """All that was seen, each list in order of time."""

    commands: list[Command] = field(default_factory=list)
    poses: list[Seen] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    actions: list[Announced] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)  # the robot was carried to its start

    def between(self, since: float, until: float) -> Record:
        def cut(things: list) -> list:
            return [thing for thing in things if since <= thing.at < until]

        resets = [at for at in self.resets if since <= at < until]
        return Record(cut(self.commands), cut(self.poses), cut(self.verdicts), cut(self.actions), resets)


@dataclass(frozen=True)
class Stop:
    """How the robot came to rest after a cause; seconds from it, None where it did not move then."""

    commanded_s: float | None  # to the end of commanded motion
    rest_s: float | None  # to standstill, as far as the robot could say so


def stop_after(record: Record, cause: float, until: float) -> Stop:
    """Look at what was seen from a cause until motion may begin again."""
    if not moving_at(record, cause):
        return Stop(None, None)
    window = record.between(cause, until)
    last = max((c.at for c in window.commands if c.moves), default=cause)
    zero = min((c.at for c in window.commands if not c.moves and c.at > last), default=last)
    rest = None
    if window.poses:
        rest = max((p.at for p in window.poses if p.moves), default=cause) - cause
    return Stop(zero - cause, rest)


def moving_at(record: Record, at: float) -> bool:
    """Whether the last command before ``at`` moved the robot, and was fresh."""
    before = [c for c in record.commands if at - 0.3 <= c.at <= at]
    return bool(before) and before[-1].moves


def first_cause(record: Record, since: float, until: float) -> tuple[float, tuple[str, ...]] | None:
    """When the supervisor first gave a reason to stand after ``since``, and which."""
    for verdict in record.verdicts:
        if since <= verdict.at < until and verdict.causes:
            return verdict.at, verdict.causes
    return None


def late_motion(record: Record, cause: float, until: float) -> list[str]:
    """Motion between half a second after a cause and ``until``; a sentence each for command and base."""
    found = []
    commands = [c.at for c in record.commands if cause + STOP_LIMIT_S < c.at < until and c.moves]
    if commands:
        found.append(f"motion was commanded until {commands[-1] - cause:.2f} s after the cause")
    poses = [p.at for p in record.poses if cause + REST_LIMIT_S < p.at < until and p.moves]
    if poses:
        found.append(f"the base moved until {poses[-1] - cause:.2f} s after the cause")
    return found


def motion_against_verdict(record: Record) -> list[str]:
    """Motion commanded while the supervisor had said for half a second that the robot stands."""
    found = []
    verdicts = record.verdicts
    begin: float | None = None
    index = 0
    for command in record.commands:
        while index < len(verdicts) and verdicts[index].at <= command.at:
            if not verdicts[index].stopped:
                begin = None
            elif begin is None:
                begin = verdicts[index].at
            index += 1
        if command.moves and begin is not None and command.at > begin + STOP_LIMIT_S:
            found.append(f"motion was commanded {command.at - begin:.2f} s into a stop of the supervisor")
            begin = None  # once is enough for this stop
    return found


def wrong_announcements(actions: Sequence[Announced]) -> list[str]:
    """Actions that are unverified, of no grammar, out of order, repeated, or about an older picture."""
    found = []
    last: Announced | None = None
    for seen in actions:
        where = f"run {seen.run}, action {seen.step}"
        if not seen.verified:
            found.append(f"{where} was not verified")
        if seen.retracing:
            found.append(f"{where} was no model's word")
        if seen.action is None:
            found.append(f"{where} was none of the grammar's")
        same = last is not None and last.run == seen.run
        expected = last.step + 1 if same and last is not None else 1
        if seen.step != expected:
            found.append(f"{where} came where action {expected} was due")
        if same and last is not None and seen.picture <= last.picture:
            found.append(f"{where} was about a picture that had been answered before")
        last = seen
    return found


def unannounced_motion(record: Record) -> list[str]:
    """Commands that belong to no announced action, or to another than the newest."""
    found = []
    index = -1
    for command in record.commands:
        while index + 1 < len(record.actions) and record.actions[index + 1].at <= command.at + _ORDER_S:
            index += 1
        if not command.moves:
            continue
        candidates = [a for a in record.actions[max(0, index - 1) : index + 1]]
        # The one before still counts for what was on its way when the newest arrived.
        candidates = [a for a in candidates if a is record.actions[index] or command.at < _until(record, index)]
        if not any(_belongs(command, a.action) for a in candidates):
            newest = candidates[-1].action if candidates else None
            found.append(
                f"({command.vx:.2f}, {command.vy:.2f} m/s, {command.wz:.2f} rad/s) was commanded under "
                f"{'no action' if newest is None else newest}"
            )
            if len(found) >= 20:
                break
    return found


def _until(record: Record, index: int) -> float:
    return record.actions[index].at + _ORDER_S


def _belongs(command: Command, action: Action | None) -> bool:
    if action is None or action.kind is ActionKind.STOP:
        return False
    if action.kind is ActionKind.FORWARD:
        return abs(command.vy) <= _SIDE
    return math.hypot(command.vx, command.vy) <= _SIDE


def overshoots(record: Record) -> list[str]:
    """Actions that took the robot further than they say, by more than the supervisor's margins."""
    found = []
    for index, seen in enumerate(record.actions):
        if seen.action is None:
            continue
        until = math.inf
        if index + 1 < len(record.actions):
            until = record.actions[index + 1].at - _ORDER_S
        until = min([until, *(at for at in record.resets if at > seen.at)])
        poses = [p for p in record.poses if seen.at - 0.1 <= p.at < until]
        if len(poses) < 2:
            continue
        first = poses[0]
        far = max(math.hypot(p.x - first.x, p.y - first.y) for p in poses)
        turned = max(abs(math.remainder(p.yaw - first.yaw, math.tau)) for p in poses)
        allowed = abs(math.degrees(seen.action.radians)) + ANGLE_MARGIN_DEG
        if far > seen.action.metres + DISTANCE_MARGIN_M:
            found.append(f"run {seen.run}, action {seen.step} went {far:.2f} m: {seen.action}")
        if math.degrees(turned) > allowed:
            found.append(f"run {seen.run}, action {seen.step} turned {math.degrees(turned):.0f} degrees: {seen.action}")
    return found


def judge(record: Record) -> list[str]:
    """Everything that must never be seen, whatever the fault; a sentence each."""
    return (
        wrong_announcements(record.actions)
        + unannounced_motion(record)
        + motion_against_verdict(record)
        + overshoots(record)
    )
