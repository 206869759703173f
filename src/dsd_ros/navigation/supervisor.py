"""The safety supervisor's decisions: whose command counts, and whether it may move the robot.

The operator's command wins over navigation's while it is fresh. Navigation's is passed on only
while nothing speaks against it: no cause of :class:`~dsd_ros.navigation.safety.Cause` holds, and
it is what the verified action under way allows. Whatever is unknown counts as bad: before the
first pose, picture or heartbeat nothing moves.

Pure and without a clock of its own. Every event carries ``now``, steady time in seconds; calls
are serialised by the caller, and :meth:`Supervisor.decide` is called after each and at short
intervals besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dsd_ros.navigation.actions import ActionKind
from dsd_ros.navigation.controller import Pose
from dsd_ros.navigation.guard import ActionGuard
from dsd_ros.navigation.safety import (
    BINDS_OPERATOR,
    STILL,
    Cause,
    Fallback,
    Limits,
    Motion,
    Requirements,
    Source,
    Timeouts,
    approach_speed,
)

_STALL_S = 0.3  # without any call for so long, this process itself was frozen
_DISTRUST_S = 0.1  # after that, what had queued up meanwhile is not taken for fresh
_TILT_BACK = math.radians(3.0)  # hystereses: of tilt,
_OBSTACLE_BACK = 0.05  # of distance (m),
_BATTERY_BACK = 0.02  # of charge
# What does not hold an action that is allowed to do without the target's word: that there is no way to the target.
_WAIVED = frozenset({Cause.LINK_LOST})
_LAST_WORDS_S = 1.0  # zero is repeated for so long after the last command


@dataclass(frozen=True)
class Decision:
    """What goes to the robot now, and why not more.

    ``stopped``: the command of ``source`` is held at zero. ``causes``: what speaks against
    navigation's moving the robot, gravest first, with a sentence each; those in ``waived`` do not
    hold the action under way. ``speaking``: ``motion`` is to be sent;
    otherwise nobody has said anything for a while, and the driver's own time-out is in charge.
    """

    motion: Motion
    source: Source
    stopped: bool
    causes: tuple[tuple[Cause, str], ...]
    speaking: bool
    waived: tuple[Cause, ...] = ()


class _Seen:
    """When something last came. A stamp that does not change is no news: a frozen sender repeats itself."""

    def __init__(self) -> None:
        self.time = -math.inf
        self._stamp: float | None = None

    def note(self, now: float, stamp: float | None = None) -> bool:
        if stamp is not None and stamp == self._stamp:
            return False
        self.time, self._stamp = now, stamp
        return True

    def fresh(self, now: float, limit: float) -> bool:
        return now - self.time < limit


class Supervisor:
    """See the module."""

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        required: Requirements | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._limits = limits or Limits()
        self._required = required or Requirements()
        self._guard = ActionGuard(self._limits, self._timeouts.action_s, fallback)
        self._called = -math.inf
        self._distrust_until = -math.inf
        self._emergency = ""
        self._navigation, self._operator = STILL, STILL
        self._navigation_seen, self._operator_seen = _Seen(), _Seen()
        self._deadman_held = False
        self._deadman_seen = _Seen()
        self._odometry, self._imu, self._camera = _Seen(), _Seen(), _Seen()
        self._obstacle_seen, self._distance = _Seen(), math.inf
        self._tilted = self._near = self._empty = False
        self._heartbeats = {name: _Seen() for name in self._required.heartbeat_nodes}
        # Node -> its trouble. One that never reports is the heartbeat's matter.
        self._link = dict.fromkeys(self._required.link_nodes, "")
        self._robot = dict.fromkeys(self._required.robot_nodes, "")
        self._spoken = -math.inf
        self._held = False  # the last decision kept navigation at zero

    # -- commands ------------------------------------------------------------------------------

    def on_navigation(self, motion: Motion, now: float) -> None:
        """Navigation's command. One that is not a finite number counts as none at all."""
        if self._trust(now) and motion.finite:
            self._navigation = motion
            self._navigation_seen.note(now)

    def on_operator(self, motion: Motion, now: float) -> None:
        """The operator's command. While it is fresh the robot is the operator's, at zero, too.

        Ends the action under way: after this the robot is not where the action's picture was taken.
        """
        if self._trust(now) and motion.finite:
            self._operator = motion
            self._operator_seen.note(now)
            self._guard.taken_over()

    def on_deadman(self, held: bool, now: float) -> None:
        """The deadman's state; releasing it counts at once, holding it only while it is repeated."""
        if self._trust(now) or not held:
            self._deadman_held = held
            self._deadman_seen.note(now)

    def on_emergency_stop(self, by: str, now: float) -> None:
        """Stop until :meth:`reset`. ``by`` says who asked."""
        self._trust(now)
        self._emergency = self._emergency or by
        self._guard.end()

    def reset(self) -> bool:
        """Lift the emergency stop; False when there was none. Nothing moves by this alone: the
        action that was under way is over.
        """
        was, self._emergency = self._emergency, ""
        return bool(was)

    # -- the robot -----------------------------------------------------------------------------

    def on_odometry(self, pose: Pose, stamp: float, now: float) -> None:
        """Where the robot is, in the odometry frame; not finite: no news."""
        if not (self._trust(now) and all(map(math.isfinite, (pose.x, pose.y, pose.yaw)))):
            return
        if self._odometry.note(now, stamp):
            self._guard.pose(pose)

    def on_tilt(self, angle: float | None, stamp: float, now: float) -> None:
        """Angle between the body's z axis and the vertical (rad); None: the imu does not know."""
        if angle is None:
            return
        limit = math.radians(self._limits.tilt_deg)
        if angle > limit:
            self._tilted = True
        if self._trust(now) and self._imu.note(now, stamp) and angle < limit - _TILT_BACK:
            self._tilted = False

    def on_picture(self, stamp: float, now: float) -> None:
        """The camera has sent a picture."""
        if self._trust(now):
            self._camera.note(now, stamp)

    def on_distance(self, distance: float | None, now: float, stamp: float | None = None) -> None:
        """Distance to what is ahead (m, infinite: nothing); None: the sensor does not know."""
        if distance is None or math.isnan(distance):
            return
        self._distance, limit = distance, self._limits.obstacle_distance
        if distance < limit:
            self._near = True
        if self._trust(now) and self._obstacle_seen.note(now, stamp) and distance > limit + _OBSTACLE_BACK:
            self._near = False

    def on_battery(self, charge: float) -> None:
        """Charge of the battery, 0 to 1; not a number: unknown, which is no cause."""
        if charge < self._limits.battery:
            self._empty = True
        elif charge > self._limits.battery + _BATTERY_BACK:
            self._empty = False

    # -- the nodes -----------------------------------------------------------------------------

    def on_heartbeat(self, node: str, now: float) -> None:
        """A node says that it lives; nodes that are not required are ignored."""
        if self._trust(now) and node in self._heartbeats:
            self._heartbeats[node].note(now)

    def on_report(self, node: str, trouble: str) -> None:
        """How a node of the link or of the robot is; ``trouble`` empty: well."""
        for reports in (self._link, self._robot):
            if node in reports:
                reports[node] = trouble

    def on_action(
        self,
        kind: ActionKind | None,
        amount: int,
        verified: bool,
        observed: float,
        stamp: float,
        now: float,
        retracing: bool = False,
    ) -> None:
        """Navigation announces an action; see :meth:`ActionGuard.announce`."""
        self._trust(now)
        self._guard.announce(kind, amount, verified, observed, stamp, now, retracing)

    # -- the decision --------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """Whose command goes to the robot at this moment, and what of it."""
        self._trust(now)
        navigation = self._navigation_seen.fresh(now, self._timeouts.command_s)
        operator = self._operator_seen.fresh(now, self._timeouts.operator_s)
        if navigation and not operator:
            self._guard.judge(self._navigation, now)
        causes = self._causes(now, navigation, operator)
        waived = () if self._guard.proved else tuple(_WAIVED & causes.keys())
        held = len(causes) > len(waived)
        if navigation:
            self._guard.commanded(self._navigation, held, now)
        if operator:
            limits = self._limits
            source, stopped = Source.OPERATOR, not BINDS_OPERATOR.isdisjoint(causes)
            turn_rate = math.radians(limits.operator_turn_rate_deg)
            motion = self._operator.within(limits.operator_speed, turn_rate)
        elif navigation:
            source, stopped = Source.NAVIGATION, held
            motion = self._approach(self._guard.allowed(self._navigation))
        else:
            source, stopped, motion = Source.NONE, held, STILL
        if source is not Source.NONE or self._emergency:
            self._spoken = now
        return Decision(
            motion=STILL if stopped else motion,
            source=source,
            stopped=stopped,
            causes=tuple(sorted(causes.items())),
            speaking=now - self._spoken < _LAST_WORDS_S,
            waived=waived,
        )

    def _causes(self, now: float, navigation: bool, operator: bool) -> dict[Cause, str]:
        """Every cause that holds now, with its sentence. Sentences change only with what they say."""
        times, limits, required = self._timeouts, self._limits, self._required
        found: dict[Cause, str] = {}
        if self._emergency:
            found[Cause.EMERGENCY_STOP] = f"Emergency stop by {self._emergency}; it holds until it is reset."
        held = self._deadman_held and self._deadman_seen.fresh(now, times.deadman_s)
        if required.deadman and not held:
            found[Cause.DEADMAN] = "The deadman is not held."
        if self._tilted:
            found[Cause.TILT] = f"The body leans more than {limits.tilt_deg:.0f} degrees."
        if operator:
            found[Cause.OPERATOR] = "The operator drives the robot."
        if not self._odometry.fresh(now, times.odometry_s):
            found[Cause.ODOMETRY_STALE] = _silent("The odometry", times.odometry_s)
        if required.imu and not self._imu.fresh(now, times.imu_s):
            found[Cause.STATE_STALE] = _silent("The robot's imu", times.imu_s)
        if required.camera != "none" and not self._camera.fresh(now, times.camera_s):
            found[Cause.CAMERA_STALE] = _silent("The camera", times.camera_s)
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
                f"Navigation fell silent while it moved the robot, for more than {times.command_s:.2f} s."
            )
        return found

    def _look_ahead(self, found: dict[Cause, str], now: float) -> None:
        """An obstacle is in the way only of a drive ahead: turning away from it must stay possible."""
        if self._required.obstacle == "none":
            return
        limits, times = self._limits, self._timeouts
        if not self._obstacle_seen.fresh(now, times.obstacle_s):
            found[Cause.OBSTACLE_SENSOR_STALE] = _silent("The sensor ahead", times.obstacle_s)
        if self._near and (self._guard.drives_ahead or self._navigation.vx > 0.0):
            found[Cause.OBSTACLE] = f"Something ahead is nearer than {limits.obstacle_distance:.2f} m."

    def _approach(self, motion: Motion) -> Motion:
        """Slower, where something is ahead: the robot must be able to stand before it is too near."""
        if self._required.obstacle == "none" or motion.vx <= 0.0:
            return motion
        return replace(motion, vx=min(motion.vx, approach_speed(self._distance, self._limits)))

    def _trust(self, now: float) -> bool:
        """Note that this process runs; False while what arrives may have waited in a queue."""
        if now - self._called > _STALL_S and self._called > -math.inf:
            self._distrust_until = now + _DISTRUST_S
        self._called = max(self._called, now)
        return now >= self._distrust_until


def _silent(what: str, limit: float) -> str:
    return f"{what} has been silent for more than {limit:.2f} s."
