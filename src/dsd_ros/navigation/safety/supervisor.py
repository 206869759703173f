# SPDX-License-Identifier: Apache-2.0
"""The safety supervisor's decisions: whose command goes to the robot, and whether it may move it.

An operator's command takes precedence over navigation's while it is fresh. Navigation's command is passed on only
while no :class:`~dsd_ros.navigation.safety.causes.Cause` holds and the action under way allows it. Unknown counts as
bad: before the first pose, picture or heartbeat nothing moves.

Pure. Every event carries ``now``, steady time in seconds. The caller serializes its calls, and calls
:meth:`Supervisor.decide` after each event and at short intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dsd_ros.navigation.run.actions import Action
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.records import ClockWatch, Moment
from dsd_ros.navigation.safety.causes import (
    BINDS_OPERATOR,
    FALLBACKS,
    SEVERITY,
    STARTING,
    STILL,
    Cause,
    Motion,
    Requirements,
    SafetyLimits,
    Source,
    Timeouts,
    approach_speed,
    names,
    plausible,
)
from dsd_ros.navigation.safety.guard import ActionGuard

_STALL_S = 0.3  # after no call for this long, this process itself was frozen
_DISTRUST_S = 0.1  # how long after a stall queued inputs are not taken for fresh
_TILT_BACK = math.radians(3.0)  # hysteresis of the tilt
_OBSTACLE_BACK = 0.05  # hysteresis of the obstacle distance, m
_BATTERY_BACK = 0.02  # hysteresis of the charge
# A lost link does not hold an action that is allowed unverified.
_WAIVED = frozenset({Cause.LINK_LOST})
# During these, zero is repeated though nobody commands: to contradict whoever else does.
_SPEAKS = frozenset({Cause.EMERGENCY_STOP, Cause.SUPERVISOR_FAULT, Cause.FOREIGN_PUBLISHER})
_LAST_WORDS_S = 1.0  # how long zero is repeated after the last command


@dataclass(frozen=True)
class SafetyDecision:
    """What goes to the robot now, and why.

    ``stopped``: the command of ``source`` is held at zero. ``causes``: why navigation may not move the robot, most
    severe first, each with a sentence; those in ``waived`` do not hold the action under way. ``speaking``: send
    ``motion``; otherwise there has been no command for a while, and the driver's own time-out applies. ``awaited``:
    nodes that have not been well since the start.
    """

    motion: Motion
    source: Source
    stopped: bool
    causes: tuple[tuple[Cause, str], ...]
    speaking: bool
    waived: tuple[Cause, ...] = ()
    awaited: frozenset[str] = frozenset()


class _Seen:
    """When an input last came. An unchanged stamp does not count: a frozen sender repeats itself."""

    def __init__(self) -> None:
        self.time = self._came = -math.inf
        self._stamp: float | None = None

    def note(self, now: float, stamp: float | None = None) -> bool:
        self._came = now
        if stamp is not None and stamp == self._stamp:
            return False
        self.time, self._stamp = now, stamp
        return True

    def fresh(self, now: float, limit: float) -> bool:
        return now - self.time < limit

    def trouble(self, what: str, now: float, limit: float) -> str:
        """Why it is not fresh."""
        if now - self._came < limit and self._stamp is not None:
            return f"{what} repeats the stamp {self._stamp:.3f}: it is frozen, or does not stamp its messages."
        return f"{what} has been silent for more than {limit:.2f} s."


class Supervisor:
    """See the module."""

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        limits: SafetyLimits | None = None,
        required: Requirements | None = None,
        fallback: str = FALLBACKS[0],
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._limits = limits or SafetyLimits()
        self._required = required or Requirements()
        self._guard = ActionGuard(self._limits, fallback)
        self._called = -math.inf
        self._distrust_until = -math.inf
        self._emergency = self._fault = self._strangers = ""
        self._navigation, self._operator = STILL, STILL
        self._navigation_seen, self._operator_seen = _Seen(), _Seen()
        self._operator_moved = -math.inf
        self._deadman_held = False
        self._deadman_seen = _Seen()
        self._odometry, self._imu, self._camera = _Seen(), _Seen(), _Seen()
        self._obstacle_seen, self._distance = _Seen(), math.inf
        self._tilted = self._near = self._empty = False
        self._heartbeats = {name: _Seen() for name in names(self._required.heartbeats)}
        # Node -> its trouble. One that is required is missing until it reports; others need not be there.
        self._link = {name: STARTING * (name in self._heartbeats) for name in names(self._required.link)}
        self._robot = dict.fromkeys(names(self._required.robot), "")
        self._awaited = set(self._heartbeats)  # nodes that have not reported to be well yet
        self._spoken = -math.inf
        self._clock: ClockWatch | None = None

    def adopt(self, timeouts: Timeouts, limits: SafetyLimits, fallback: str) -> None:
        """Judge by other settings from now on, the action under way too."""
        self._timeouts, self._limits = timeouts, limits
        self._guard.adopt(limits, fallback)

    # -- commands ------------------------------------------------------------------------------

    def on_navigation(self, motion: Motion, now: float) -> None:
        """Navigation's command, ignored unless it is plausible."""
        if self._trust(now) and motion.finite:
            self._navigation = motion
            self._navigation_seen.note(now)

    def on_operator(self, motion: Motion, now: float) -> None:
        """The operator's command. While it is fresh, even at zero, the operator has the robot; no action goes on.

        A joystick that repeats zero for ever counts until ``release_s`` after it last moved, where that is set.
        """
        if self._trust(now) and motion.finite:
            if motion.moving:
                self._operator_moved = now
            elif 0.0 < self._timeouts.release_s < now - self._operator_moved:
                return
            self._operator = motion
            self._operator_seen.note(now)
            self._guard.taken_over()

    def on_deadman(self, held: bool, now: float) -> None:
        """The deadman's state; a release takes effect at once, holding must be repeated."""
        if self._trust(now) or not held:
            self._deadman_held = held
            self._deadman_seen.note(now)

    def on_emergency_stop(self, by: str, now: float) -> None:
        """Stop until :meth:`reset`. ``by``: who asked for it."""
        self._trust(now)
        self._emergency = self._emergency or by
        self._guard.end()

    def reset(self) -> bool:
        """Lift the emergency stop, and a fault's; False when there was none. The action under way stays over."""
        was, self._emergency, self._fault = self._emergency or self._fault, "", ""
        return bool(was)

    def on_fault(self, what: str, now: float) -> None:
        """The supervisor's own process failed in ``what``: stop until :meth:`reset`, since its state is in doubt."""
        self._trust(now)
        self._fault = self._fault or what
        self._guard.end()

    def on_strangers(self, sentence: str, now: float) -> None:
        """Who publishes what only nodes of this system may, as a sentence; empty: nobody does any more."""
        self._trust(now)
        self._strangers = sentence

    # -- the robot -----------------------------------------------------------------------------

    def on_odometry(self, pose: Pose, stamp: float, now: float) -> None:
        """The robot's pose in the odometry frame, ignored unless it is plausible."""
        if not (self._trust(now) and plausible(pose.x, pose.y, pose.yaw)):
            return
        if self._odometry.note(now, stamp):
            self._guard.pose(pose)

    def on_tilt(self, angle: float | None, stamp: float, now: float) -> None:
        """Angle between the body's z axis and the vertical (rad); None: unknown."""
        if angle is None:
            return
        limit = self._limits.tilt
        if angle > limit:
            self._tilted = True
        if self._trust(now) and self._imu.note(now, stamp) and angle < limit - _TILT_BACK:
            self._tilted = False

    def on_picture(self, stamp: float, now: float) -> None:
        """A picture came from the camera."""
        if self._trust(now):
            self._camera.note(now, stamp)

    def on_distance(self, distance: float | None, now: float, stamp: float | None = None) -> None:
        """Distance to the obstacle ahead (m, infinite: none); None: unknown."""
        if distance is None or math.isnan(distance):
            return
        self._distance, limit = distance, self._limits.obstacle_distance
        if distance < limit:
            self._near = True
        if self._trust(now) and self._obstacle_seen.note(now, stamp) and distance > limit + _OBSTACLE_BACK:
            self._near = False

    def on_battery(self, charge: float) -> None:
        """Charge of the battery; NaN (unknown) and what is not 0 to 1 are no news."""
        if not 0.0 <= charge <= 1.0:
            return
        if charge < self._limits.battery:
            self._empty = True
        elif charge > self._limits.battery + _BATTERY_BACK:
            self._empty = False

    def on_clock(self, moment: Moment) -> None:
        """The time by the stamps' clock; call it often. When that clock is set back, earlier stamps mean nothing."""
        if self._clock is None:
            self._clock = ClockWatch(moment)
        elif self._clock.jump(moment) < 0.0:
            self._guard.forget_stamps()

    # -- the nodes -----------------------------------------------------------------------------

    def on_heartbeat(self, node: str, now: float) -> None:
        """A node's heartbeat; nodes that are not required are ignored."""
        if self._trust(now) and node in self._heartbeats:
            self._heartbeats[node].note(now)

    def on_report(self, node: str, trouble: str) -> None:
        """The state of a node of the link or of the robot; ``trouble`` is empty when it is well."""
        for reports in (self._link, self._robot):
            if node in reports:
                reports[node] = trouble
        if not trouble:
            self._awaited.discard(node)

    def on_action(
        self, action: Action | str, verified: bool, observed: float, stamp: float, now: float, retracing: bool = False
    ) -> None:
        """Navigation announces an action; see :meth:`ActionGuard.announce`."""
        self._trust(now)
        self._guard.announce(action, verified, observed, stamp, now, retracing)

    # -- the decision --------------------------------------------------------------------------

    def decide(self, now: float) -> SafetyDecision:
        """The command that goes to the robot now, and whose it is."""
        self._trust(now)
        navigation = self._navigation_seen.fresh(now, self._timeouts.input_s)
        operator = self._operator_seen.fresh(now, self._timeouts.input_s)
        if navigation and not operator:
            self._guard.judge(self._navigation, now)
        causes = self._causes(now, navigation, operator)
        waived = () if self._guard.verified else tuple(_WAIVED & causes.keys())
        held = len(causes) > len(waived)
        if navigation:
            self._guard.commanded(self._navigation, held, now)
        if operator:
            limits = self._limits
            source, stopped = Source.OPERATOR, not BINDS_OPERATOR.isdisjoint(causes)
            turn_rate = limits.operator_turn_rate
            motion = self._operator.within(limits.operator_speed, turn_rate)
        elif navigation:
            source, stopped = Source.NAVIGATION, held
            motion = self._approach(self._guard.allowed(self._navigation))
        else:
            source, stopped, motion = Source.NONE, held, STILL
        if source is not Source.NONE or not _SPEAKS.isdisjoint(causes):
            self._spoken = now
        return SafetyDecision(
            motion=STILL if stopped else motion,
            source=source,
            stopped=stopped,
            causes=tuple(sorted(causes.items(), key=lambda item: SEVERITY[item[0]])),
            speaking=now - self._spoken < _LAST_WORDS_S,
            waived=waived,
            awaited=frozenset(self._awaited),
        )

    def _causes(self, now: float, navigation: bool, operator: bool) -> dict[Cause, str]:
        """Every cause that holds now, with its sentence. Equal causes have equal sentences."""
        times, limits, required = self._timeouts, self._limits, self._required
        found: dict[Cause, str] = {}
        if self._emergency:
            found[Cause.EMERGENCY_STOP] = f"Emergency stop by {self._emergency}; it holds until it is reset."
        if self._fault:
            found[Cause.SUPERVISOR_FAULT] = f"The supervisor failed in {self._fault}; it stops until it is reset."
        if self._strangers:
            found[Cause.FOREIGN_PUBLISHER] = self._strangers
        held = self._deadman_held and self._deadman_seen.fresh(now, times.input_s)
        if required.deadman and not held:
            found[Cause.DEADMAN] = "The deadman is not held."
        if self._tilted:
            found[Cause.TILT] = f"The body leans more than {math.degrees(limits.tilt):.0f} degrees."
        if operator:
            found[Cause.OPERATOR] = "The operator drives the robot."
        if not self._odometry.fresh(now, times.state_s):
            found[Cause.ODOMETRY_STALE] = self._odometry.trouble("The odometry", now, times.state_s)
        if required.imu and not self._imu.fresh(now, times.state_s):
            found[Cause.STATE_STALE] = self._imu.trouble("The robot's imu", now, times.state_s)
        if required.camera != "none" and not self._camera.fresh(now, times.camera_s):
            found[Cause.CAMERA_STALE] = self._camera.trouble("The camera", now, times.camera_s)
        self._look_ahead(found, now)
        if self._empty:
            found[Cause.LOW_BATTERY] = f"The battery is below {limits.battery:.0%}."
        silent = [name for name, seen in self._heartbeats.items() if not seen.fresh(now, times.heartbeat_s)]
        if silent:
            found[Cause.NODE_SILENT] = (
                f"No heartbeat of {' and '.join(silent)} for more than {times.heartbeat_s:.2f} s."
            )
        for cause, what, reports in (
            (Cause.ROBOT_FAULT, "The robot has a fault", self._robot),
            (Cause.LINK_LOST, "The link is lost", self._link),
        ):
            troubles = [f"{name}: {said.rstrip('.')}" for name, said in reports.items() if said]
            if troubles:
                found[cause] = f"{what}: {'; '.join(troubles)}."
        if self._guard.refusal is not None:
            found[self._guard.refusal[0]] = self._guard.refusal[1]
        if self._navigation.moving and not navigation:
            found[Cause.COMMAND_STALE] = (
                f"Navigation fell silent while it moved the robot, for more than {times.input_s:.2f} s."
            )
        return found

    def _look_ahead(self, found: dict[Cause, str], now: float) -> None:
        """Add causes of the sensor ahead. An obstacle stops only a drive ahead, so the robot can turn away from it."""
        if self._required.obstacle == "none":
            return
        limits, times = self._limits, self._timeouts
        if not self._obstacle_seen.fresh(now, times.input_s):
            found[Cause.OBSTACLE_SENSOR_STALE] = self._obstacle_seen.trouble("The sensor ahead", now, times.input_s)
        if self._near and (self._guard.drives_ahead or self._navigation.vx > 0.0):
            found[Cause.OBSTACLE] = f"Something ahead is nearer than {limits.obstacle_distance:.2f} m."

    def _approach(self, motion: Motion) -> Motion:
        """Slow down towards an obstacle, so that the robot can stop before it is too near."""
        if self._required.obstacle == "none" or motion.vx <= 0.0:
            return motion
        return replace(motion, vx=min(motion.vx, approach_speed(self._distance, self._limits)))

    def _trust(self, now: float) -> bool:
        """Record that this process runs; False while an input may have waited in a queue."""
        if now - self._called > _STALL_S and self._called > -math.inf:
            self._distrust_until = now + _DISTRUST_S
        self._called = max(self._called, now)
        return now >= self._distrust_until
