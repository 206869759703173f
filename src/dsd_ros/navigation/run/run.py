# SPDX-License-Identifier: Apache-2.0
"""One Navigate run as a pure state machine: rest, observe and decode, check, execute, rest, ...

The caller passes in odometry, answers, failures and the time, and carries out what the run asks for. Every run ends
in exactly one :class:`RunOutcome` with a sentence, and commands only zero from then on.

    SETTLING --at rest--> DECODING
    DECODING --answer that parses and is fresh--> EXECUTING
    EXECUTING --at rest--> DECODING, or CHECKING after a stop if the arrival is to be checked
    DECODING --link lost, fallback "return"--> RETRACING --link back--> SETTLING
        any phase --cancel, time-out, failure, lost odometry, safety stop--> ENDED

The next decode is requested as soon as the robot is first measured standing, while its rest is still being confirmed.
The answer is acted on once the robot is at rest.

With ``look_ahead`` it is requested earlier, while the action is still carried out. What the target then says is meant
from where the picture was taken, and is carried out from where the robot is: an action of the same kind at once, any
other after a rest, and a stop only near the picture's place. What cannot be used is asked again at rest.

While the safety supervisor holds the robot, a run commands zero; a latched hold, or one that lasts while there is an
action to carry out, ends it. After an operator has driven the robot, it observes again. See docs/navigation.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dsd_ros.navigation.run.actions import Action, ActionKind, Grammar, ParsedReply, format_action
from dsd_ros.navigation.run.controller import AT_REST, MotionController, MotionSettings, Pose, Velocity, stands
from dsd_ros.navigation.run.decode_request import PendingRequest, ReplyRefused, check_reply
from dsd_ros.navigation.run.executor import GoalExecutor
from dsd_ros.navigation.run.motion import OscillationDetector, RobotMotion
from dsd_ros.navigation.run.points import Locate, PointUnknown, goal_from, moved
from dsd_ros.navigation.run.records import (
    Announcement,
    Announcer,
    ClockWatch,
    DecodeAnswer,
    DecodeRequest,
    Failure,
    Hold,
    Moment,
    Phase,
    RunStep,
)
from dsd_ros.navigation.run.retrace import Retrace
from dsd_ros.navigation.run.settings import RunOutcome, RunSettings
from dsd_ros.navigation.safety.causes import MOST_UNVERIFIED, UNVERIFIED_SPEED, SafetyReport

HISTORY = 8  # earlier steps that a request carries
WAY_BACK = "back the way it came"
_CLOCK_SET_S = 2.0  # so long after the clock was set pictures of before may come
_ODOMETRY_S = 2.0  # a run ends after this long without the robot's pose
_MOST_STUCK = 3  # blocked actions in a row
_MOST_REPEATS = 3  # decisions for the same action at the same place
_MOST_REVERSALS = 4  # reversed turns without a drive in between
ARRIVAL_S = 2.0  # for the service check_arrival to answer
_LOST = (RunOutcome.LINK_LOST, RunOutcome.DECODE_TIMEOUT)


class NavigationRun:
    """See the module. Not thread-safe: the caller serializes its calls."""

    def __init__(
        self,
        settings: RunSettings,
        motion: MotionSettings,
        moment: Moment,
        executor: GoalExecutor | None = None,
        grammar: Grammar | None = None,
        locate: Locate | None = None,
    ) -> None:
        """``executor``: carries out the actions in place of this run's own commands; it outlives the run. ``grammar``:
        of the replies; None: the shipped models'. ``locate``: finds where a point of a picture is.
        """
        self._grammar, self._locate = grammar, locate
        self.phase = Phase.SETTLING
        self.outcome = RunOutcome.UNKNOWN
        self.sentence = ""
        self.steps: list[RunStep] = []
        self._settings, self._motion_settings = settings, motion
        self._now = self._began = self._odometry_time = moment.steady
        self._clock = ClockWatch(moment)
        self._robot = RobotMotion(executor)
        self._executor = executor
        if executor is not None:
            executor.begin_run()
        self._bad_odometry = ""  # why messages about the pose are not used
        self._hold = Hold(settings, moment.steady)
        self._pending = PendingRequest()
        self._announcer = Announcer(moment.steady)
        self._oscillation = OscillationDetector(_MOST_REPEATS, _MOST_REVERSALS)
        self._early: DecodeAnswer | Failure | None = None  # kept until the robot is at rest
        self._decided_at = Pose(0.0, 0.0, 0.0)
        self._decided_time = 0.0  # steady, when the action under way began
        self._past: list[RunStep] = []  # for the next request's history
        self._stuck_in_a_row = 0
        self._unverified_in_a_row = 0
        self._reply_s = math.inf  # how long the last reply took
        self._looked = 0  # the step during which a picture was last asked for in motion
        self._check_since: float | None = None  # None: the check has not been requested
        self._retrace: Retrace | None = None

    def adopt(self, settings: RunSettings, motion: MotionSettings) -> None:
        """Go on with other settings; the action under way goes on at its new speed."""
        self._settings, self._motion_settings = settings, motion
        self._hold.settings = settings
        if self._robot.motion is not None:
            self._robot.motion.settings = self._pace

    @property
    def _pace(self) -> MotionSettings:
        """The settings of the motion under way or next: slower for what the target has not verified."""
        verified = self.phase is Phase.SETTLING or (self.phase is Phase.EXECUTING and self.steps[-1].verified)
        return self._motion_settings if verified else self._motion_settings.slower(UNVERIFIED_SPEED)

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def distance(self) -> float:
        """Length of the path since the start, m, including the action under way."""
        return self._robot.distance

    @property
    def velocity(self) -> Velocity:
        """The robot's measured speed and turn rate, without signs; kept up to date after the end."""
        return self._robot.velocity

    @property
    def action(self) -> Action | None:
        """The action under way."""
        if self._retrace is not None:
            return self._retrace.leg
        return self.steps[-1].reply.action if self.phase is Phase.EXECUTING else None

    # -- events ---------------------------------------------------------------------------------

    def on_odometry(self, pose: Pose, twist: Velocity, moment: Moment, stamp: float | None = None) -> Velocity:
        """Process the robot's newest pose, true at ``stamp`` (None: now); returns the velocity command."""
        self._see(moment)
        robot, self._odometry_time = self._robot, moment.steady
        outward = self.phase is not Phase.RETRACING
        at = robot.on_pose(pose, twist, moment, stamp, self._motion_settings, outward)
        if robot.conflict:
            self.end(RunOutcome.ODOMETRY_LOST, robot.conflict)
        if self.ended:
            return AT_REST
        self._bad_odometry = ""
        if self.phase is Phase.SETTLING and self._hold.by_operator:
            self._abandon()  # no observation until the operator lets go
            return AT_REST
        motion = robot.motion or self._begin_motion(moment)
        if motion is None:
            return AT_REST
        command = robot.update(motion, at, moment)
        if self._observes_next():
            self._ask_early(motion, at, moment)
            if self._follow_answer(motion, moment):
                return AT_REST if robot.motion is None else robot.update(robot.motion, at, moment)
        if motion.finished or (motion.came_to_rest and self._answered_ahead):
            self._end_motion(motion, moment)
        elif self._hold.reason(moment.steady):
            motion.pause(moment.steady)
        else:
            return command
        return AT_REST

    def on_bad_odometry(self, why: str) -> None:
        """A message about the pose could not be used, which counts as none."""
        self._bad_odometry = f" {why}"

    def on_safety(self, report: SafetyReport, steady: float) -> None:
        """Process the supervisor's newest report, received at ``steady``."""
        if self.ended:
            return
        self._hold.on_report(report, steady)
        self._pending.on_report(report, steady)
        if report.latched:
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {report.sentence}")
        elif self._hold.by_operator and self.phase is not Phase.SETTLING:
            # The robot is no longer where the picture and the action belong.
            self._observe_anew()

    def on_answer(self, number: int, answer: DecodeAnswer, moment: Moment) -> None:
        """Process the answer to request ``number``; an answer to an older request is ignored."""
        self._see(moment)
        if not self._pending.awaits(number) or self._early is not None:
            return
        self._reply_s = self._pending.waited(moment.steady)
        if self.phase is Phase.DECODING:
            self._take(answer, moment)
        elif self._overtaken:
            self._compare(answer, moment)
        else:
            self._early = answer

    def on_failure(self, number: int, outcome: RunOutcome, sentence: str) -> None:
        """Process the failure of request ``number``."""
        if not self._pending.awaits(number) or self._early is not None:
            return
        if self._pending.ahead:  # asked again at rest
            self._pending.withdraw()
            if self.phase is Phase.DECODING:
                self.phase = Phase.SETTLING
        elif self._overtaken:
            self._pending.withdraw()
        elif self.phase is not Phase.DECODING:
            self._early = Failure(outcome, sentence)
        elif not self._pending.recovers(outcome, self._now):
            self._fail(outcome, sentence)

    def on_dropped(self, number: int) -> None:
        """Request ``number`` was dropped in favour of a withdrawn one, which had crossed it on the way."""
        if self._pending.awaits(number) and self._early is None:
            self._pending.resend(self._now)

    def on_arrival(self, arrived: bool, sentence: str) -> None:
        """Process the answer of the service check_arrival."""
        if self.phase is not Phase.CHECKING:
            return
        claim = "The model says that the goal is reached"
        if arrived:
            self.end(RunOutcome.ARRIVED, f"{claim}, and so does the check; the robot stands.")
        else:
            self.end(RunOutcome.NOT_THERE, f"{claim}, but that is not confirmed: {sentence}")

    def on_time(self, moment: Moment) -> None:
        """Apply the time-outs. Call at least a few times a second."""
        if self.ended:
            return
        self._see(moment)
        settings, now = self._settings, moment.steady
        held = self._hold.lasting(now, self.phase in (Phase.EXECUTING, Phase.RETRACING))
        if held and not self._goes_on_without_link(held):
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {held}")
        elif now - self._odometry_time > _ODOMETRY_S:
            sentence = f"The robot has not reported its pose for {_ODOMETRY_S:.1f} s."
            if self._clock.stands(now):
                sentence += " The clock of the stamps stands still, too: is the simulation paused?"
            self.end(RunOutcome.ODOMETRY_LOST, f"{sentence}{self._bad_odometry}")
        elif now - self._began > settings.time_limit_s:
            sentence = f"The run took longer than its {settings.time_limit_s:.0f} s."
            self.end(RunOutcome.TIME_BUDGET, sentence)
        elif self.phase is Phase.DECODING and self._pending.overdue(now):
            sentence = f"No verified reply came within {settings.decode_timeout_s:.1f} s."
            self._fail(RunOutcome.DECODE_TIMEOUT, sentence)
        elif self._check_since is not None and now - self._check_since > ARRIVAL_S:
            self.on_arrival(False, f"no answer of the check came within {ARRIVAL_S:.0f} s.")

    def cancel(self) -> None:
        """End at once at the operator's request."""
        self.end(RunOutcome.CANCELLED, "Cancelled by the operator.")

    def end(self, outcome: RunOutcome, sentence: str) -> None:
        """End with ``outcome``; only the first call counts."""
        if self.ended:
            return
        self._observe_anew()
        self.phase = Phase.ENDED
        self.outcome, self.sentence = outcome, sentence

    def _see(self, moment: Moment) -> None:
        """Note the time. When the stamps' clock was set, ask about a picture of the new time."""
        self._now = moment.steady
        if self._executor is not None:
            self._executor.on_time(self._now)
            if self._executor.lost:
                self.end(RunOutcome.EXECUTOR_FAILED, self._executor.lost)
        jump = self._clock.jump(moment)
        if not jump:
            return
        self._robot.on_clock_set(jump)
        self._early = None
        if self.phase is Phase.DECODING:
            self._pending.renew(moment)
        else:
            self._pending.withdraw()  # asked again at the next sample at rest

    # -- requests to the caller -----------------------------------------------------------------

    def take_request(self) -> DecodeRequest | None:
        """The decode to request now; handed out once, and again when the node that had it died."""
        return self._pending.take(self._now)

    def take_announcement(self) -> Announcement | None:
        """The action that begins, handed out once, before it is commanded."""
        waiting, self._announcer.waiting = self._announcer.waiting, None
        return waiting

    def take_check(self) -> bool:
        """Whether to check the arrival now; true once."""
        wanted = self.phase is Phase.CHECKING and self._check_since is None
        if wanted:
            self._check_since = self._now
        return wanted

    # -- motion ---------------------------------------------------------------------------------

    def _begin_motion(self, moment: Moment) -> MotionController | None:
        if self.phase is Phase.SETTLING:
            return self._robot.begin(Action(ActionKind.STOP), self._pace, moment)
        if self.phase is Phase.EXECUTING:
            step = self.steps[-1]
            return self._robot.begin(step.reply.action, self._pace, moment, step.seen_from)
        if self._retrace is not None:
            if self._retrace.leg is not None:
                return self._robot.begin(self._retrace.leg, self._pace, moment)
            if stands(self._robot.velocity):
                self._next_leg(self._retrace)
        return None

    def _ask_early(self, motion: MotionController, at: float, moment: Moment) -> None:
        """Request a decode when the robot is first measured standing, or when it is time to look ahead.

        A request made at rest is withdrawn if the robot moves again.
        """
        if self._pending.request is None or (motion.standing and self._overtaken):
            if motion.standing:
                self._ask(at, moment)
            elif self._looks_ahead(motion, at, moment):
                self._looked = len(self.steps)
                self._ask(at, moment, ahead=True)
        elif not (motion.standing or self._pending.ahead or self._overtaken):
            self._withdraw()

    def _withdraw(self) -> None:
        self._pending.withdraw()
        self._early = None

    def _observes_next(self) -> bool:
        """Whether an observation follows the motion under way, as far as is known."""
        if self.phase is not Phase.EXECUTING or len(self.steps) >= self._settings.max_steps:
            return self.phase is Phase.SETTLING
        return self.steps[-1].reply.action.kind is not ActionKind.STOP

    def _end_motion(self, motion: MotionController, moment: Moment) -> None:
        action = motion.action
        stuck = self._robot.finish()
        self._stuck_in_a_row = self._stuck_in_a_row + 1 if stuck else 0
        too_often = self._stuck_in_a_row >= _MOST_STUCK
        if self._retrace is not None:
            self._retrace.leg = None
            if too_often:
                sentence = f"{self._retrace.reason} The way back is blocked; the robot stands on it."
                self.end(RunOutcome.LINK_LOST, sentence)
            return
        if self.phase is Phase.EXECUTING and not stuck:
            if action.kind is ActionKind.STOP and self.steps[-1].verified:
                self._arrive()
                return
            self._oscillation.carried_out(self._decided_at, action)
        if too_often:
            times = f"blocked {self._stuck_in_a_row} times in a row."
            sentence = f"'{format_action(action)}' did not move the robot as it should: {times}"
            if motion.trouble:
                sentence += f" The last time {motion.trouble}."
            self.end(RunOutcome.STUCK, sentence)
        elif len(self.steps) >= self._settings.max_steps:
            sentence = f"The target was not reached within {self._settings.max_steps} actions."
            self.end(RunOutcome.STEP_BUDGET, sentence)
        elif stuck or not self._goes_on(moment):
            self.phase = Phase.DECODING
            request, early, self._early = self._pending.request, self._early, None
            oldest = moment.stamp - self._settings.max_observation_age_s
            late = isinstance(early, DecodeAnswer) and early.observed_at < oldest
            if request is None or late:  # the answer aged while the robot came to rest
                self._ask(moment.stamp, moment)
            elif isinstance(early, DecodeAnswer):
                self._take(early, moment)
            elif early is not None:
                self.on_failure(request.number, early.outcome, early.sentence)

    def _arrive(self) -> None:
        """End, or check the arrival: the target said stop, and the robot stands."""
        if self._settings.arrival_check == "service":
            self.phase = Phase.CHECKING
            return
        claim = "The model says that the goal is reached, which nothing else has checked"
        self.end(RunOutcome.ARRIVED, f"{claim}; the robot stands.")

    def _abandon(self) -> None:
        """Drop the motion, the announcement and the request."""
        self._robot.drop()
        self._announcer.waiting = None
        self._pending.withdraw()
        self._early = self._check_since = self._retrace = None

    def _observe_anew(self) -> None:
        """Drop everything under way, and what was observed so far."""
        self._abandon()
        self._past.clear()
        self.phase = Phase.SETTLING

    # -- looking ahead --------------------------------------------------------------------------

    def _looks_ahead(self, motion: MotionController, at: float, moment: Moment) -> bool:
        """Whether to ask for the next picture now, at stamp ``at``, in the middle of an action."""
        settings = self._settings
        if not (settings.look_ahead and self._executor is None and self.phase is Phase.EXECUTING):
            return False
        if self._looked == len(self.steps) or not self.steps[-1].verified or self._hold.reason(moment.steady):
            return False
        steady = self._robot.track.at(at, settings.look_ahead_turn_rate) is not None
        return steady and motion.look_now(self._reply_s)

    @property
    def _answered_ahead(self) -> bool:
        return self._pending.ahead and self._early is not None

    def _plan(self, answer: DecodeAnswer, action: Action) -> MotionController | None:
        """What is left of an action that is about a picture taken in motion; None: look again at rest.

        That is so where the picture was too unsteady, or its place is unknown or too far from here.
        """
        settings, pose = self._settings, self._robot.pose
        seen_from = self._robot.track.at(answer.observed_at, settings.look_ahead_turn_rate)
        if seen_from is None or not settings.look_ahead:
            return None
        plan = MotionController(action, self._motion_settings, pose, self._now, seen_from)
        return plan if plan.fits else None

    def _follow_answer(self, motion: MotionController, moment: Moment) -> bool:
        """Let the answer to a picture taken in motion shorten the motion, or replace it; returns whether it did that.

        An answer that must not be carried out is left for the rest, where it ends the run.
        """
        answer = self._early
        if not (self._pending.ahead and isinstance(answer, DecodeAnswer)) or self._hold.reason(moment.steady):
            return False
        if not self._robot.track.reaches(answer.observed_at):
            return False  # poses of its time are still to come
        try:
            action = self._with_goal(self._checked(answer, moment).action, answer.observed_at)
        except PointUnknown:
            return False
        except ReplyRefused as refused:
            if refused.outcome is RunOutcome.STALE_OBSERVATION:
                self._withdraw()
            return False
        plan = self._plan(answer, action)
        if plan is not None and plan.left and motion.goes_on_as(action):
            self._oscillation.carried_out(self._decided_at, motion.action)
            self._stuck_in_a_row = 0
            self._take(answer, moment)
            if not self.ended:
                self._begin_motion(moment)
            return True
        motion.shorten()
        if plan is None or not plan.left:
            self._withdraw()
        return False

    # -- replies --------------------------------------------------------------------------------

    def _ask(self, not_before: float, moment: Moment, ahead: bool = False) -> None:
        settings = self._settings
        unverified = settings.fallback == "draft_only" and self._unverified_in_a_row < MOST_UNVERIFIED and not ahead
        self._pending.ask(not_before, moment, settings.decode_timeout_s, unverified, tuple(self._past), ahead)

    def _checked(self, answer: DecodeAnswer, moment: Moment) -> ParsedReply:
        """The answer to the pending request, if it may be carried out; ReplyRefused."""
        assert self._pending.request is not None
        age, limit = moment.stamp - answer.observed_at, self._settings.max_observation_age_s
        return check_reply(answer, self._pending.request, age, limit, self._grammar)

    def _take(self, answer: DecodeAnswer, moment: Moment) -> None:
        """Carry out the answer to the pending request if it is admissible."""
        try:
            reply = self._checked(answer, moment)
        except ReplyRefused as refused:
            stale = refused.outcome is RunOutcome.STALE_OBSERVATION
            if stale and self._pending.ahead:
                self._ask(moment.stamp, moment)
            elif stale and self._clock.set_within(_CLOCK_SET_S, moment.steady):
                self._pending.renew(moment)  # its picture may be of before
            else:
                self.end(refused.outcome, str(refused))
            return
        located, robot, seen_from = self._located(reply, answer.observed_at), self._robot, None
        if located is None:
            return
        if not robot.stood_at(answer.observed_at):
            plan = self._plan(answer, located.action)
            if plan is None or not plan.left:
                self._ask(moment.stamp, moment)  # the robot moved since
                return
            seen_from = plan.seen_from
            if located.action.goal is not None:  # from here the robot turns there and drives
                located, seen_from = self._moved(located, seen_from, robot.pose), None
        age = moment.stamp - answer.observed_at
        step = RunStep(0, located, age, answer.observed_at, answer.verified, answer.details, seen_from)
        if self._begin_step(step, moment):
            self._withdraw()
            self._unverified_in_a_row = 0 if answer.verified else self._unverified_in_a_row + 1

    def _begin_step(self, step: RunStep, moment: Moment) -> bool:
        """Begin an action of a reply. False where it leads nowhere, which ends the run."""
        robot, reply, announcer = self._robot, step.reply, self._announcer
        self._decided_at, self._decided_time = step.seen_from or robot.pose, moment.steady
        nowhere = self._oscillation.refuses(self._decided_at, reply.action)
        if nowhere:
            self.end(RunOutcome.OSCILLATING, f"The robot gets nowhere: {nowhere}.")
            return False
        announcer.announce(reply.action, reply.reasoning, step.verified, self._now, robot.stood)
        self.steps.append(replace(step, number=announcer.count))
        self._past = [*self._past, self.steps[-1]][-HISTORY:]
        self.phase = Phase.EXECUTING
        return True

    # -- several actions a reply ----------------------------------------------------------------

    @property
    def _overtaken(self) -> bool:
        """Whether the request in force is about a picture from before the action under way: between two of a reply."""
        return self.phase is Phase.EXECUTING and self._pending.asked_by(self._decided_time)

    def _goes_on(self, moment: Moment) -> bool:
        """Begin the next action of the reply, if it has one and no newer reply has come; the robot stands.

        What was asked about the picture of this rest stays in force: its reply decides what follows the action.
        """
        last = self.steps[-1] if self.phase is Phase.EXECUTING else None
        if last is None or not (last.verified and last.reply.then) or isinstance(self._early, DecodeAnswer):
            return False
        newer = last.observed_at > self._past[-1].observed_at  # the picture, of a reply that agreed
        if newer and moment.stamp - last.observed_at > self._settings.max_observation_age_s:
            return False
        if self._early is not None or self._pending.ahead:
            self._withdraw()
        (action, *more), age = last.reply.then, moment.stamp - last.observed_at
        reply = self._moved(ParsedReply("", action, tuple(more)), self._decided_at, self._robot.pose)
        self._begin_step(replace(last, reply=reply, observation_age=age, seen_from=None), moment)
        return True

    def _moved(self, reply: ParsedReply, seen_from: Pose, here: Pose) -> ParsedReply:
        """The same reply for a robot that is ``here``: goals stay where they were ``seen_from``."""
        action, *then = (
            each if each.goal is None else replace(each, goal=goal_from(here, moved(seen_from, each.goal)))
            for each in (reply.action, *reply.then)
        )
        return replace(reply, action=action, then=tuple(then))

    def _compare(self, answer: DecodeAnswer, moment: Moment) -> None:
        """A reply about the rest before the action under way: go on by it if it begins with that action, else rest."""
        step = self.steps[-1]
        try:
            reply = self._checked(answer, moment)
        except ReplyRefused as refused:
            self._pending.withdraw()
            if refused.outcome is RunOutcome.UNPARSABLE_REPLY:
                self.end(refused.outcome, str(refused))
            return
        self._pending.withdraw()
        located = self._located(reply, answer.observed_at) if answer.verified else None
        if located is None:
            return
        if located.action.meaning != step.reply.action.meaning:
            self._observe_anew()
            return
        self.steps[-1] = replace(
            step,
            reply=replace(step.reply, then=located.then),
            observation_age=moment.stamp - answer.observed_at,
            observed_at=answer.observed_at,
            details=answer.details,
        )

    def _located(self, reply: ParsedReply, observed_at: float) -> ParsedReply | None:
        """The reply with the goals of its points; None where one is not known, which ends the run."""
        try:
            first, *then = (self._with_goal(action, observed_at) for action in (reply.action, *reply.then))
        except PointUnknown as error:
            self.end(RunOutcome.UNPARSABLE_REPLY, f"The robot stays where it is: {error}")
            return None
        return replace(reply, action=first, then=tuple(then))

    def _with_goal(self, action: Action, observed_at: float) -> Action:
        if action.point is None:
            return action
        if self._locate is None:
            raise PointUnknown("nothing here knows where a point of the picture is.")
        return replace(action, goal=self._locate(action.point, action.grammar.picture, observed_at))

    # -- without the link -----------------------------------------------------------------------

    def _fail(self, outcome: RunOutcome, sentence: str) -> None:
        """No reply will come; the robot stands."""
        sentence = f"{sentence.rstrip('. ')}."
        if outcome in _LOST and self._settings.fallback == "return":
            self._go_back(sentence)
        elif outcome in _LOST and self._unverified_in_a_row:
            sentence = f"{sentence} The last {self._unverified_in_a_row} replies were by the draft alone."
            self.end(RunOutcome.LINK_LOST, sentence)
        else:
            self.end(outcome, sentence)

    def _goes_on_without_link(self, held: str) -> bool:
        """Replace an action that only the lost link holds by what the fallback allows; False if it allows nothing."""
        if self.phase is not Phase.EXECUTING or not self._hold.only_by_link(self._now):
            return False
        if self._settings.fallback == "return":
            self._go_back(held)
            return True
        if self._settings.fallback == "draft_only" and self.steps[-1].verified:
            self._observe_anew()
            return True
        return False

    def _go_back(self, sentence: str) -> None:
        self._observe_anew()
        self._hold.forget()
        self._retrace = Retrace(self._robot.path.points, sentence, self._now)
        self._stuck_in_a_row = 0
        self.phase = Phase.RETRACING

    def _next_leg(self, retrace: Retrace) -> None:
        """Standing on the way back: begin its next leg, or go on with the run if the link is back."""
        pose, now = self._robot.pose, self._now
        if self._hold.link_back(now, retrace.since):
            self._robot.path.points = retrace.remaining_path(pose)
            self._observe_anew()
            return
        retrace.leg = retrace.next_action(pose)
        if retrace.leg is not None:
            self._announcer.announce(retrace.leg, WAY_BACK, False, now, None, retracing=True)
            return
        where = "stopped on its way back" if retrace.exhausted else "stands where it began"
        self.end(RunOutcome.LINK_LOST, f"{retrace.reason} The robot {where}.")
