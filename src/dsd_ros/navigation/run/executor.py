# SPDX-License-Identifier: Apache-2.0
"""Hands a run's actions to another navigator (Nav2) as goals, one at a time, and judges by odometry what came of them.

Pure. :class:`GoalExecutor` tracks the goal: its caller sends what :meth:`GoalExecutor.take_order` returns, and reports
the answers. :class:`DelegatedMotion` stands where the run's own MotionController stands; it commands no velocity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from dsd_ros.navigation.run.actions import Action, ActionKind, format_action
from dsd_ros.navigation.run.controller import AT_REST, MotionController, MotionSettings, Pose, Velocity
from dsd_ros.options import option

EXECUTORS, FORWARD_GOALS = ("own", "nav2"), ("drive_on_heading", "navigate_to_pose")
_ALLOWED, _ALLOWED_S = 2.0, 5.0  # times the duration at top speed, plus s
RESPONSE_S = 3.0  # a goal or its cancel that is unanswered for this long ends the run and stops the robot
_LEAST_SHARE = 0.5  # of the action; a robot that got less far counts as blocked


@dataclass(frozen=True)
class Nav2Settings:
    """How actions become Nav2's goals, where ``executor`` is nav2."""

    forward: str = option(
        "drive_on_heading", "the goal for a drive ahead; turns are always spin", choices=FORWARD_GOALS
    )


@dataclass(frozen=True)
class MotionGoal:
    """What is left of an action: ``amount`` m ahead, or rad counter-clockwise, from ``pose`` in the odometry frame.

    ``place``: where an action goes that has a goal; None: as far as ``amount`` says.
    """

    action: Action
    amount: float
    speed: float  # top speed, m/s or rad/s
    pose: Pose
    place: Pose | None = None

    @property
    def turning(self) -> bool:
        return self.action.kind in (ActionKind.TURN_LEFT, ActionKind.TURN_RIGHT)

    def server(self, forward: str) -> str:
        """Nav2's server for it. ``forward``: that of drives ahead."""
        if self.turning:
            return "spin"
        return forward if self.place is None else "navigate_to_pose"

    @property
    def time_allowance(self) -> float:
        """Longest time of the motion, s."""
        return _ALLOWED * abs(self.amount) / self.speed + _ALLOWED_S

    @property
    def target(self) -> Pose:
        """Where the robot stands in the end."""
        if self.place is not None:
            return self.place
        if self.turning:
            return Pose(self.pose.x, self.pose.y, self.pose.yaw + self.amount)
        x, y = self.amount * math.cos(self.pose.yaw), self.amount * math.sin(self.pose.yaw)
        return Pose(self.pose.x + x, self.pose.y + y, self.pose.yaw)


class Order(Enum):
    """What to send to the navigator now."""

    SEND = "send"
    CANCEL = "cancel"


class GoalEnd(Enum):
    """How a goal ended. After FAILED another goal may follow; CANCELLED is what :meth:`GoalExecutor.stop` asked for."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


class _State(Enum):
    IDLE = "idle"
    WAITING = "waiting"  # to be sent
    SENT = "sent"  # neither accepted nor rejected
    ACTIVE = "active"


class GoalExecutor:
    """The one goal that the navigator has. Not thread-safe: the caller serializes its calls. Times are steady seconds.

    ``goal``: the newest one. ``lost``: why nothing more can be asked of the navigator in this run; empty while it can.
    """

    def __init__(self) -> None:
        self.goal: MotionGoal | None = None
        self.lost = ""
        self._state = _State.IDLE
        self._number = 0  # of the newest goal; an answer to an older one is ignored
        self._now = self._since = 0.0  # ``_since``: the navigator owes an answer
        self._stopping = self._cancel_due = self._late = self._alarm = False
        self._end: tuple[GoalEnd, str] | None = None

    @property
    def busy(self) -> bool:
        """Whether the navigator has a goal, or may have one."""
        return self._state is not _State.IDLE

    @property
    def number(self) -> int:
        return self._number

    def begin_run(self) -> None:
        """A new run may try again."""
        self.lost, self._end = "", None

    # -- asked by the motion ---------------------------------------------------------------------

    def start(self, goal: MotionGoal) -> None:
        """Hand out ``goal``. Not while busy."""
        assert not self.busy
        self._state, self._since = _State.WAITING, self._now
        self._number += 1
        self.goal, self._end = goal, None
        self._stopping = self._cancel_due = self._late = False

    def stop(self) -> None:
        """Cancel the goal; it is busy until the navigator has confirmed that."""
        self._late = False
        if self._state is _State.WAITING:
            self._state = _State.IDLE
        elif self.busy and not self._stopping:
            self._stopping, self._since = True, self._now
            self._cancel_due = self._state is _State.ACTIVE

    def take_end(self) -> tuple[GoalEnd, str] | None:
        """How the last goal ended and why, handed out once."""
        end, self._end = self._end, None
        return end

    # -- asked and told by the caller ------------------------------------------------------------

    def take_order(self, ready: bool) -> Order | None:
        """What to send now, handed out once. ``ready``: the navigator's server for the goal can be reached."""
        if self._state is _State.WAITING and ready:
            self._state, self._since = _State.SENT, self._now
            return Order.SEND
        if self._cancel_due:
            self._cancel_due = False
            return Order.CANCEL
        return None

    def on_answer(self, number: int, accepted: bool) -> None:
        """The navigator accepted or rejected goal ``number``."""
        if number != self._number or self._state is not _State.SENT:
            return
        if not accepted:
            self._finish(GoalEnd.FAILED, "Nav2 rejected the goal")
            return
        self._state, self._since = _State.ACTIVE, self._now
        self._cancel_due = self._stopping

    def on_result(self, number: int, end: GoalEnd, why: str = "") -> None:
        """The navigator is done with goal ``number``."""
        if number == self._number and self._state is _State.ACTIVE:
            if end is GoalEnd.CANCELLED and not self._stopping:
                end, why = GoalEnd.FAILED, "somebody else cancelled Nav2's goal"
            self._finish(end, why)

    def on_time(self, now: float) -> None:
        """Apply the time-outs. Call at least a few times a second."""
        self._now = now
        if not self.busy:
            return
        assert self.goal is not None
        waited, limit = now - self._since, RESPONSE_S
        if self._state is _State.ACTIVE and not self._stopping:
            if waited > self.goal.time_allowance + limit:
                self.stop()
                self._late = True
        elif waited > limit:
            what = "the cancelling of its goal" if self._state is _State.ACTIVE else "the goal"
            self.lost = f"Nav2 has not answered {what} '{format_action(self.goal.action)}' within {limit:.1f} s."
            if self._state is _State.WAITING:
                self.lost = (
                    f"No Nav2 server takes the goal '{format_action(self.goal.action)}': start and activate Nav2."
                )
            self._alarm = self._state is not _State.WAITING
            self._state = _State.IDLE

    def take_alarm(self) -> bool:
        """Whether the robot must be stopped by other means: Nav2 may still be driving it. True once."""
        alarm, self._alarm = self._alarm, False
        return alarm

    def _finish(self, end: GoalEnd, why: str) -> None:
        self._state, self._cancel_due = _State.IDLE, False
        if self._stopping:
            end, why = GoalEnd.CANCELLED, ""
        if self._late:
            end, why = GoalEnd.FAILED, "Nav2 did not finish the goal in time"
        self._end = end, why


class DelegatedMotion(MotionController):
    """One action that Nav2 carries out, from start to rest. Call :meth:`update` with each odometry sample.

    A hold by the supervisor cancels the goal; the rest of the action is sent again after the hold.
    """

    def __init__(
        self, action: Action, settings: MotionSettings, pose: Pose, now: float, executor: GoalExecutor
    ) -> None:
        super().__init__(action, settings, pose, now)
        self._executor = executor
        if action.kind is ActionKind.GO_TO:  # Nav2 turns as it likes
            self._turning, self._goal = False, action.metres

    @property
    def progress(self) -> float:
        if self.action.kind is not ActionKind.GO_TO:
            return super().progress
        here, place = self._last_pose, self.place
        return self.action.metres - math.hypot(place.x - here.x, place.y - here.y)

    def pause(self, now: float) -> None:
        super().pause(now)
        self._executor.stop()

    def drop(self) -> None:
        self._executor.stop()
        self._executor.take_end()  # the next motion's goal is another

    def _move(self, step: float, now: float) -> Velocity:
        executor, remaining = self._executor, self._goal - self.progress
        ended = executor.take_end()
        if ended is not None and ended[0] is not GoalEnd.CANCELLED:
            far = self.progress >= _LEAST_SHARE * self._goal
            self.trouble = ended[1] or (
                "" if far else "Nav2 reports success, but by odometry the robot did not get there"
            )
            self._blocked = bool(self.trouble)
            return self._begin_rest(now)
        if not executor.busy and not executor.lost:
            top, _, tolerance = self._limits()
            if remaining <= tolerance:
                return self._begin_rest(now)
            amount = math.copysign(remaining, self.action.radians) if self._turning else remaining
            place = self.place if self.action.kind is ActionKind.GO_TO else None
            executor.start(MotionGoal(self.action, amount, top, self._last_pose, place))
        return AT_REST
