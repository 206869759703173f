# SPDX-License-Identifier: Apache-2.0
"""Checks navigation's commands against the action announced for them: only what the action allows moves the robot."""

from __future__ import annotations

import math

from dsd_ros.navigation.run.actions import Action, ActionKind, format_action
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.points import goal_from, moved
from dsd_ros.navigation.safety.causes import MOST_UNVERIFIED, UNVERIFIED_SPEED, Cause, Motion, SafetyLimits

_SLACK = 1.05  # on speed limits, for rounding
_ROUNDING = 1e-3  # m and rad, on an action's amount
_CREEP = 0.03  # m/s and rad/s in a direction the action does not have, for rounding
_DISTANCE_MARGIN, _ANGLE_MARGIN = 0.3, math.radians(20.0)  # m and rad; an action may be exceeded by this much
_LONGEST_S = 20.0  # of an action
_OVER_S = 3.0  # an action is over when the command, after motion, has been zero for this long
_OBEYED_S = 1.0  # a refusal is over when the command has been zero for this long
_TRAIL_CELL = 0.1  # m; the trail keeps one place per cell
_TRAIL_MOST = 100_000  # cells (1000 m^2); then the trail starts again


class ActionGuard:
    """Admits one action at a time and refuses motion that it does not allow. Pure; ``now`` is steady time (s).

    A refusal lasts until the next admissible action, or until navigation has commanded zero for a while.
    """

    def __init__(self, limits: SafetyLimits, fallback: str) -> None:
        self.refusal: tuple[Cause, str] | None = None
        self.action: Action | None = None
        self.verified = True  # the target verified the action under way
        self._unverified_in_a_row = 0
        self._retracing = False
        self._trail = Trail()
        self.adopt(limits, fallback)
        self._began = -math.inf
        self._observed = -math.inf  # stamp of the newest picture that was acted upon
        self._pose: Pose | None = None
        self._start: Pose | None = None
        self._turned = 0.0  # rad since the start, unwrapped
        self._moved = self._drove = False
        self._zero_since: float | None = None
        self._of_picture = 0  # actions about the newest picture

    def adopt(self, limits: SafetyLimits, fallback: str) -> None:
        self._limits, self._fallback = limits, fallback

    @property
    def drives_ahead(self) -> bool:
        if self.action is None:
            return False
        return self.action.kind is ActionKind.FORWARD or (self.action.kind is ActionKind.GO_TO and self._drove)

    def announce(
        self, action: Action | str, verified: bool, observed: float, stamp: float, now: float, retracing: bool = False
    ) -> None:
        """Accept an announced action, or refuse it.

        A reply may have several actions about one picture, one after the other; the first must be about a fresh one.

        :param action: or a sentence that says why the announcement holds no action of the grammar.
        :param observed: stamp of the picture the action is about, s.
        :param stamp: the same clock now, s.
        :param retracing: a leg of navigation's own way back, which no picture and no model asked for.
        """
        self.end()
        self._retracing = retracing
        if self._observed > stamp + 0.5:
            self.forget_stamps()  # the clock was set back
        age, limit = stamp - observed, self._limits.observation_age_s
        unverified = self._needs_verification(verified, retracing)
        if unverified:
            self._refuse(Cause.UNVERIFIED_ACTION, unverified)
            return
        if isinstance(action, str):
            self._refuse(Cause.UNPARSABLE_ACTION, action)
        elif retracing:
            self._of_picture = 0
            self._take(action, False, now)
        elif verified and self._follows(action, observed, now):
            self._of_picture += 1
            self._take(action, verified, now)
        elif not -0.5 <= age <= limit:  # NaN fails here, too
            self._refuse(
                Cause.STALE_REPLY, f"The action is about a picture {age:.1f} s old; the limit is {limit:.1f} s."
            )
        elif observed <= self._observed:
            self._refuse(Cause.STALE_REPLY, "The action is about a picture that was acted upon before.")
        else:
            self._observed, self._of_picture = observed, int(verified)  # after an unverified one none follows
            self._unverified_in_a_row = 0 if verified else self._unverified_in_a_row + 1
            self._take(action, verified, now)

    def _follows(self, action: Action, observed: float, now: float) -> bool:
        """Whether the action may be the next one of the reply whose last action was carried out just before."""
        soon = now - self._began <= _LONGEST_S + self._limits.observation_age_s
        return observed == self._observed and 0 < self._of_picture < action.grammar.most and soon

    def forget_stamps(self) -> None:
        """The stamps' clock was set back: pictures of now are stamped earlier than some acted upon before."""
        self._observed = -math.inf

    def _needs_verification(self, verified: bool, retracing: bool) -> str:
        """Why an unverified action is refused; empty when it is verified or the fallback allows it."""
        fallback = self._fallback
        if retracing:
            sentence = f"Navigation wants to go back the way it came, but the fallback is '{fallback}'."
            return "" if fallback == "return" else sentence
        if verified:
            return ""
        if fallback != "draft_only":
            return "The target did not verify the action."
        if self._unverified_in_a_row < MOST_UNVERIFIED:
            return ""
        return f"The target did not verify the action, and there were {MOST_UNVERIFIED} such in a row already."

    def _take(self, action: Action, verified: bool, now: float) -> None:
        limits = self._limits
        if action.metres > limits.action_distance + _ROUNDING or abs(action.radians) > limits.action_angle + _ROUNDING:
            sentence = (
                f"'{format_action(action)}' exceeds the supervisor's limits: an action may drive "
                f"{limits.action_distance:.2f} m and turn {math.degrees(limits.action_angle):.0f} degrees "
                "(limit.action_distance, limit.action_angle)."
            )
            self._refuse(Cause.MOTION_REFUSED, sentence)
            return
        self.refusal = None
        self.action, self.verified = action, verified
        self._began = now
        self._start, self._turned = self._pose, 0.0

    def allowed(self, motion: Motion) -> Motion:
        """The motion to send: as commanded for a verified action, slower for an unverified one."""
        if self.verified:
            return motion
        return motion.within(UNVERIFIED_SPEED * self._limits.speed, UNVERIFIED_SPEED * self._limits.turn_rate)

    def taken_over(self) -> None:
        """The operator drives: the action is over, and the operator's path joins the trail."""
        self.end()
        self._of_picture = 0
        self._retracing = False

    def end(self) -> None:
        """No action is under way any more."""
        self.action, self.verified = None, True
        self._start, self._zero_since = None, None
        self._moved = self._drove = False

    def pose(self, pose: Pose) -> None:
        """Follow the robot."""
        if self._pose is not None:
            self._turned += math.remainder(pose.yaw - self._pose.yaw, math.tau)
        self._pose = pose
        if not self._retracing:
            self._trail.add(pose.x, pose.y)
        if self.action is not None and self._start is None:
            self._start, self._turned = pose, 0.0

    def commanded(self, motion: Motion, held: bool, now: float) -> None:
        """Note navigation's command.

        :param held: the command is not passed on, so a zero does not mean that the action is over.
        """
        if motion.moving:
            self._moved, self._zero_since = True, None
            self._drove = self._drove or motion.vx > _CREEP
        elif self.refusal is None and (held or not self._moved):
            self._zero_since = None
        elif self._zero_since is None:
            self._zero_since = now
        elif now - self._zero_since > (_OVER_S if self.refusal is None else _OBEYED_S):
            self.refusal = None  # without an action navigation cannot move anything anyway
            self.end()

    def judge(self, motion: Motion, now: float) -> None:
        """Refuse ``motion``, and revoke the action, when the action does not allow it."""
        if self.refusal is not None or not motion.moving:
            return
        if self.action is None:
            self._refuse(Cause.NO_ACTION, "Navigation commands motion, but no verified action is under way.")
        elif now - self._began > _LONGEST_S:
            self._refuse(Cause.NO_ACTION, f"'{format_action(self.action)}' is not over after {_LONGEST_S:.0f} s.")
        else:
            reason = self._beyond(self.action, motion)
            if reason:
                sentence = f"'{format_action(self.action)}' does not allow this motion: {reason}."
                self._refuse(Cause.MOTION_REFUSED, sentence)

    def _refuse(self, cause: Cause, sentence: str) -> None:
        self.refusal = (cause, sentence)
        self._of_picture = 0
        self.end()

    def _beyond(self, action: Action, motion: Motion) -> str:
        """How the motion exceeds the action; empty when it does not."""
        limits = self._limits
        if abs(motion.vx) > limits.speed * _SLACK:
            return f"faster than {limits.speed:.2f} m/s"
        if abs(motion.wz) > limits.turn_rate * _SLACK:
            return f"turning faster than {limits.turn_rate:.2f} rad/s"
        if abs(motion.vy) > _CREEP:
            return "sideways"
        travelled = 0.0
        if self._pose is not None and self._start is not None:
            travelled = math.hypot(self._pose.x - self._start.x, self._pose.y - self._start.y)
        if action.kind is ActionKind.STOP:
            return "it stands"
        if self._retracing and not (self._pose is None or self._trail.near(self._pose.x, self._pose.y)):
            return "the robot has left the way it came"
        if travelled > action.metres + _DISTANCE_MARGIN:
            return f"the robot has got {travelled:.2f} m away already"
        if action.kind is ActionKind.GO_TO:
            return self._astray(action, motion)
        if action.kind is ActionKind.FORWARD:
            if motion.vx < -_CREEP:
                return "backwards"
            if abs(self._turned) > _ANGLE_MARGIN:
                return "the robot has turned away"
            return ""
        sense = math.copysign(1.0, action.radians)
        if abs(motion.vx) > _CREEP:
            return "not on the spot"
        if motion.wz * sense < -_CREEP:
            return "the other way"
        if self._turned * sense > abs(action.radians) + _ANGLE_MARGIN:
            return f"the robot has turned {math.degrees(abs(self._turned)):.0f} degrees already"
        return ""

    def _astray(self, action: Action, motion: Motion) -> str:
        """How the motion does not go to the action's goal; empty when it does: it nears it, on whatever way."""
        if motion.vx < -_CREEP:
            return "backwards"
        if self._pose is None or self._start is None:
            return ""
        distance, _ = goal_from(self._pose, moved(self._start, (action.metres, action.radians)))
        if distance > action.metres + _DISTANCE_MARGIN:
            return f"the robot is {distance:.2f} m from its goal, further than before"
        return ""


class Trail:
    """Where the robot has been: its way back may lead nowhere else."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, x: float, y: float) -> None:
        if len(self._places) >= _TRAIL_MOST:
            self._places.clear()
        self._places.setdefault((math.floor(x / _TRAIL_CELL), math.floor(y / _TRAIL_CELL)), (x, y))

    def near(self, x: float, y: float) -> bool:
        column, row = math.floor(x / _TRAIL_CELL), math.floor(y / _TRAIL_CELL)
        reach = math.ceil(_DISTANCE_MARGIN / _TRAIL_CELL)
        return any(
            (place := self._places.get((column + i, row + j))) is not None
            and math.hypot(place[0] - x, place[1] - y) <= _DISTANCE_MARGIN
            for i in range(-reach, reach + 1)
            for j in range(-reach, reach + 1)
        )
