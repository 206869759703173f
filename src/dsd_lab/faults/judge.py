# SPDX-License-Identifier: Apache-2.0
"""What an observer saw of the robot, and whether it is allowed. Free of ROS, so that the judge can be tested.

Times are seconds of the observer's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsd_ros.navigation.run.actions import Action, ActionKind, UnparsableReply, parse_reply

STOP_LIMIT_S = 0.5  # from the cause to the last command that moves the robot
# The base obeys a zero at once but must brake, 0.17 s from top speed; a driver whose commands fell silent, or a
# supervisor that stopped at the last moment, takes its half second before that. And poses come every 0.02 s.
REST_LIMIT_S = STOP_LIMIT_S + 0.25
MAX_TOKENS = 96  # of a reply, as the draft node's
_STILL = 0.03  # m/s and rad/s: below this the robot stands
_ZERO = 1e-4
_ORDER_S = 0.15  # two topics may arrive in either order within this
# How much further than its action says the robot may get: the supervisor's margins.
DISTANCE_MARGIN_M, ANGLE_MARGIN_DEG = 0.3, 20.0
_SIDE = 0.05  # m/s that a turn may drift
_MOST_FINDINGS = 20

TargetReply = tuple[str, int]  # the reply, and its number of tokens


class Command(NamedTuple):
    """A final velocity command: m/s ahead and to the left, rad/s."""

    at: float
    vx: float
    vy: float
    wz: float

    @property
    def moves(self) -> bool:
        return max(abs(self.vx), abs(self.vy), abs(self.wz)) > _ZERO


class SeenPose(NamedTuple):
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


class SupervisorVerdict(NamedTuple):
    """What the safety supervisor said."""

    at: float
    stopped: bool
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Announced:
    """An action as navigation announced it. ``picture``: stamp of the picture that it answers, ns."""

    at: float
    run: int
    step: int
    action: Action | None  # None: not in the grammar
    verified: bool
    retracing: bool
    reasoning: str
    picture: int


@dataclass
class Record:
    """All that was seen, each list in order of time."""

    commands: list[Command] = field(default_factory=list)
    poses: list[SeenPose] = field(default_factory=list)
    verdicts: list[SupervisorVerdict] = field(default_factory=list)
    actions: list[Announced] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)  # when the robot was carried to its start

    def between(self, since: float, until: float) -> Record:
        def cut(things: list) -> list:
            return [thing for thing in things if since <= thing.at < until]

        resets = [at for at in self.resets if since <= at < until]
        return Record(cut(self.commands), cut(self.poses), cut(self.verdicts), cut(self.actions), resets)


@dataclass(frozen=True)
class Stop:
    """How the robot came to rest after a cause; seconds from the cause, None where it did not move then."""

    commanded_s: float | None  # to the end of commanded motion
    rest_s: float | None  # to standstill, as far as the robot could report it


def stop_after(record: Record, cause: float, until: float) -> Stop:
    """The stop between a cause and ``until``, when motion may begin again."""
    if not moving_at(record, cause):
        return Stop(None, None)
    window = record.between(cause, until)
    last = max((c.at for c in window.commands if c.moves), default=cause)
    zero = min((c.at for c in window.commands if not c.moves and c.at > last), default=last)
    rest = max((p.at for p in window.poses if p.moves), default=cause) - cause if window.poses else None
    return Stop(zero - cause, rest)


def moving_at(record: Record, at: float) -> bool:
    """Whether the last command before ``at`` moved the robot, and was fresh."""
    before = [c for c in record.commands if at - 0.3 <= c.at <= at]
    return bool(before) and before[-1].moves


def first_cause(record: Record, since: float, until: float) -> tuple[float, tuple[str, ...]] | None:
    """When the supervisor first gave a cause to stand from ``since`` on, and its causes."""
    verdicts = (v for v in record.verdicts if since <= v.at < until and v.causes)
    return next(((verdict.at, verdict.causes) for verdict in verdicts), None)


def late_motion(record: Record, cause: float, until: float) -> list[str]:
    """Motion later than half a second after a cause and before ``until``; a sentence each for command and base."""
    found = []
    commands = [c.at for c in record.commands if cause + STOP_LIMIT_S < c.at < until and c.moves]
    if commands:
        found.append(f"motion was commanded until {commands[-1] - cause:.2f} s after the cause")
    poses = [p.at for p in record.poses if cause + REST_LIMIT_S < p.at < until and p.moves]
    if poses:
        found.append(f"the base moved until {poses[-1] - cause:.2f} s after the cause")
    return found


def motion_against_verdict(record: Record) -> list[str]:
    """Motion commanded more than half a second after the supervisor had said that the robot stands."""
    found = []
    begin: float | None = None
    verdicts = list(record.verdicts)
    for command in record.commands:
        while verdicts and verdicts[0].at <= command.at:
            verdict = verdicts.pop(0)
            if not verdict.stopped:
                begin = None
            elif begin is None:
                begin = verdict.at
        if command.moves and begin is not None and command.at > begin + STOP_LIMIT_S:
            found.append(f"motion was commanded {command.at - begin:.2f} s into a stop of the supervisor")
            begin = None  # once is enough for this stop
    return found


def wrong_announcements(actions: Sequence[Announced]) -> list[str]:
    """Actions that are unverified, not in the grammar, out of order, repeated, or about an older picture."""
    found = []
    last: Announced | None = None
    for seen in actions:
        where = f"run {seen.run}, action {seen.step}"
        same = last is not None and last.run == seen.run
        expected = last.step + 1 if same and last is not None else 1
        wrong = {
            "was not verified": not seen.verified,
            "was no model's word": seen.retracing,
            "was none of the grammar's": seen.action is None,
            f"came where action {expected} was due": seen.step != expected,
            "was about a picture that had been answered before": same
            and last is not None
            and seen.picture <= last.picture,
        }
        found += [f"{where} {what}" for what, is_so in wrong.items() if is_so]
        last = seen
    return found


def unannounced_motion(record: Record) -> list[str]:
    """Commands that belong to no announced action, or to another than the newest."""
    found: list[str] = []
    index = -1
    for command in record.commands:
        while index + 1 < len(record.actions) and record.actions[index + 1].at <= command.at + _ORDER_S:
            index += 1
        if not command.moves or len(found) >= _MOST_FINDINGS:
            continue
        # The action before the newest still counts for commands that were on their way when the newest arrived.
        recent = index > 0 and command.at < record.actions[index].at + _ORDER_S
        candidates = record.actions[index - 1 if recent else max(0, index) : index + 1]
        if not any(_belongs(command, a.action) for a in candidates):
            newest = candidates[-1].action if candidates else None
            found.append(
                f"({command.vx:.2f}, {command.vy:.2f} m/s, {command.wz:.2f} rad/s) was commanded under "
                f"{'no action' if newest is None else newest}"
            )
    return found


def _belongs(command: Command, action: Action | None) -> bool:
    if action is None or action.kind is ActionKind.STOP:
        return False
    if action.kind is ActionKind.FORWARD:
        return abs(command.vy) <= _SIDE
    return math.hypot(command.vx, command.vy) <= _SIDE


def overshoots(record: Record) -> list[str]:
    """Actions that took the robot further than they say, by more than the supervisor's margins."""
    found = []
    ends = [action.at - _ORDER_S for action in record.actions[1:]] + [math.inf]
    for seen, end in zip(record.actions, ends, strict=False):
        if seen.action is None:
            continue
        until = min([end, *(at for at in record.resets if at > seen.at)])
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


# ------------------------------------------------------------------------------------ the target's own reply


def target_replies(model: str, asked: Iterable[tuple[np.ndarray, str]]) -> list[TargetReply]:
    """What the target alone says, token after token, to pictures (RGB uint8, (H, W, 3)) with their instructions."""
    from dsd_ros.vlm.loading import ModelSettings, load_model

    target = load_model(ModelSettings(model, threads=1))
    found = []
    for picture, instruction in asked:
        sequence = target.prefill(picture, instruction)
        while len(sequence.tokens) < MAX_TOKENS and not set(sequence.tokens[-1:]) & target.eos_token_ids:
            sequence.append([int(sequence.constrained(sequence.next_logits()[None]).argmax())])
        found.append((target.decode_text(sequence.tokens), len(sequence.tokens)))
    return found


def difference(action: Announced, heard: TargetReply | None, answer: TargetReply) -> str:
    """What is wrong with an action by the target's own answer, and with the reply where that was heard; "": nothing."""
    text, _ = answer
    where = f"run {action.run}, action {action.step}"
    try:
        wanted = parse_reply(text)
    except UnparsableReply as error:
        return f"{where} was carried out, and the target says nothing that may be: {error}"
    if wanted.action != action.action or wanted.reasoning[:1000] != action.reasoning:
        return f"{where} was {action.action} ({action.reasoning}); the target says {text}"
    if heard is not None and heard != answer:
        return f"{where}: the reply was {heard}, the target's is {answer}"
    return ""
