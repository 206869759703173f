"""One Navigate run as a pure state machine: rest, observe and decode, check, execute, rest, ...

The caller feeds it odometry, answers, failures and the passing of time, and carries out what it
asks for. Whatever happens, a run ends in exactly one :class:`RunOutcome` with a sentence, and from
then on commands only zero.

    SETTLING --at rest--> DECODING
    DECODING --answer that parses and is fresh--> EXECUTING
    EXECUTING --at rest--> DECODING, or CHECKING after a stop where the arrival is to be checked
    DECODING --link lost, fallback "return"--> RETRACING --link back--> SETTLING
        every phase --cancel, time-out, failure, lost odometry, safety stop--> ENDED

The next decode is asked for as soon as the robot is first measured standing, while its rest is
still being confirmed; with ``look_ahead_s`` even before. The answer waits for the rest.

While the safety supervisor holds the robot, a run commands zero. A hold that lasts while there is
an action to carry out, or that is latched, ends the run; after an operator has driven the robot it
observes anew. docs/navigation.md tells all of it.
"""

from __future__ import annotations

from dsd_ros.navigation.actions import Action, ActionKind, format_action
from dsd_ros.navigation.controller import AT_REST, MotionController, MotionSettings, Pose, Velocity
from dsd_ros.navigation.decode_request import Asking
from dsd_ros.navigation.holds import Hold
from dsd_ros.navigation.lookahead import fits
from dsd_ros.navigation.motion import Walk
from dsd_ros.navigation.oscillation import Oscillation
from dsd_ros.navigation.records import Announcement, Announcer, Answer, DecodeRequest, Failure, Moment, Phase, Step
from dsd_ros.navigation.replies import Refused, checked
from dsd_ros.navigation.retrace import Retrace
from dsd_ros.navigation.safety import SafetyReport
from dsd_ros.navigation.settings import RunOutcome, RunSettings

HISTORY = 8  # steps that a request tells of
WAY_BACK = "back the way it came"
ARRIVAL_S = 2.0  # the service check_arrival may take
_LOST = (RunOutcome.LINK_LOST, RunOutcome.DECODE_TIMEOUT)


class NavigationRun:
    """See the module. Not thread-safe: the caller serialises the calls."""

    def __init__(self, settings: RunSettings, motion: MotionSettings, moment: Moment) -> None:
        self.phase = Phase.SETTLING
        self.outcome = RunOutcome.UNKNOWN
        self.sentence = ""
        self.steps: list[Step] = []
        self._settings = settings
        self._motion_settings = motion
        self._slow_settings = motion.slower(settings.fallback_speed)
        self._now = self._began = self._odometry_time = moment.steady
        self._walk = Walk()
        self._hold = Hold(settings, moment.steady)
        self._asking = Asking()
        self._announcer = Announcer(moment.steady)
        self._oscillation = Oscillation(settings.max_repeats, settings.max_reversals)
        self._ahead = False  # the request came before the rest
        self._early: Answer | Failure | None = None  # what waits for the rest
        self._origin: Pose | None = None  # where the accepted action counts from, if not from here
        self._decided_at = Pose(0.0, 0.0, 0.0)
        self._past: list[Step] = []  # what the next request tells of
        self._stuck_in_a_row = 0
        self._unverified_in_a_row = 0
        self._check_since: float | None = None  # None: not yet handed out
        self._retrace: Retrace | None = None

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def distance(self) -> float:
        """Metres of path since the start, the action under way included."""
        return self._walk.distance

    @property
    def action(self) -> Action | None:
        """What is being carried out now."""
        if self._retrace is not None:
            return self._retrace.leg
        return self.steps[-1].reply.action if self.phase is Phase.EXECUTING else None

    # -- what happens --------------------------------------------------------------------------

    def on_odometry(self, pose: Pose, measured: Velocity, moment: Moment, stamp: float | None = None) -> Velocity:
        """Take the robot's newest pose, true at ``stamp`` (None: now); returns the command for it."""
        if self.ended:
            return AT_REST
        self._now = self._odometry_time = moment.steady
        walk = self._walk
        at = walk.on_pose(pose, measured, moment, stamp, self.phase is not Phase.RETRACING)
        if self.phase is Phase.SETTLING and self._hold.by_operator:
            self._abandon()  # nothing is observed before the operator lets go
            return AT_REST
        motion = walk.motion or self._begin_motion(measured, moment)
        if motion is None:
            return AT_REST
        command = walk.update(motion, measured, at, moment)
        if self._observes_next():
            self._ask_early(motion, at, moment)
        if motion.finished:
            self._end_motion(motion.action, moment)
        elif self._hold.reason(moment.steady):
            motion.pause(moment.stamp)
        else:
            return command
        return AT_REST

    def on_safety(self, report: SafetyReport, steady: float) -> None:
        """The supervisor's newest verdict, which came at ``steady``."""
        if self.ended:
            return
        self._hold.on_report(report, steady)
        self._asking.on_report(report, steady)
        if report.latched:
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {report.sentence}")
        elif self._hold.by_operator and self.phase is not Phase.SETTLING:
            # Moved by hand, the robot no longer is where picture and action belong.
            self._observe_anew()

    def on_answer(self, number: int, answer: Answer, moment: Moment) -> None:
        """The reply to request ``number``; ignored unless that is the newest: what it saw is past."""
        if not self._asking.awaits(number) or self._early is not None:
            return
        self._now = moment.steady
        if self.phase is Phase.DECODING:
            self._take(answer, moment)
        else:
            self._early = answer

    def on_failure(self, number: int, outcome: RunOutcome, sentence: str) -> None:
        """Request ``number`` can't be answered."""
        if not self._asking.awaits(number) or self._early is not None:
            return
        if self.phase is not Phase.DECODING:
            self._early = Failure(outcome, sentence)
        elif not self._asking.recovers(outcome, self._now):
            self._fail(outcome, sentence)

    def on_dropped(self, number: int) -> None:
        """Request ``number`` was dropped for one that was withdrawn: they have crossed on their way."""
        if self._asking.awaits(number) and self._early is None:
            self._asking.again(self._now)

    def on_arrival(self, arrived: bool, sentence: str) -> None:
        """What the service check_arrival says."""
        if self.phase is not Phase.CHECKING:
            return
        said = "The model says that the target is reached"
        if arrived:
            self.end(RunOutcome.ARRIVED, f"{said}, and so does the check; the robot stands.")
        else:
            self.end(RunOutcome.NOT_THERE, f"{said}, but that is not confirmed: {sentence}")

    def on_time(self, moment: Moment) -> None:
        """Let the time-outs act. Call a few times a second at least."""
        if self.ended:
            return
        settings, now = self._settings, moment.steady
        self._now = now
        held = self._hold.lasting(now, self.phase in (Phase.EXECUTING, Phase.RETRACING))
        if held and not self._goes_on_without_link(held):
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {held}")
        elif now - self._odometry_time > settings.odometry_timeout_s:
            said = f"The robot has not reported its pose for {settings.odometry_timeout_s:.1f} s."
            self.end(RunOutcome.ODOMETRY_LOST, said)
        elif now - self._began > settings.time_limit_s:
            said = f"The run took longer than its {settings.time_limit_s:.0f} s."
            self.end(RunOutcome.TIME_BUDGET, said)
        elif self.phase is Phase.DECODING and self._asking.overdue(now):
            said = f"No verified reply came within {settings.decode_timeout_s:.1f} s."
            self._fail(RunOutcome.DECODE_TIMEOUT, said)
        elif self._check_since is not None and now - self._check_since > ARRIVAL_S:
            self.on_arrival(False, f"no answer of the check came within {ARRIVAL_S:.0f} s.")

    def cancel(self) -> None:
        """End at once by the operator's wish."""
        self.end(RunOutcome.CANCELLED, "Cancelled by the operator.")

    def end(self, outcome: RunOutcome, sentence: str) -> None:
        """End with ``outcome``; the first end is the one that counts."""
        if self.ended:
            return
        self._observe_anew()
        self.phase = Phase.ENDED
        self.outcome, self.sentence = outcome, sentence

    # -- what it asks for ----------------------------------------------------------------------

    def take_request(self) -> DecodeRequest | None:
        """A decode that is to be asked for now; handed out once, and again when its server died."""
        return self._asking.take(self._now)

    def take_announcement(self) -> Announcement | None:
        """An action that begins, handed out once, before it is commanded."""
        return self._announcer.take()

    def take_check(self) -> bool:
        """Whether the arrival is to be checked now; true once."""
        wanted = self.phase is Phase.CHECKING and self._check_since is None
        if wanted:
            self._check_since = self._now
        return wanted

    # -- motion --------------------------------------------------------------------------------

    def _begin_motion(self, measured: Velocity, moment: Moment) -> MotionController | None:
        settings = self._motion_settings
        if self.phase is Phase.SETTLING:
            return self._walk.begin(Action(ActionKind.STOP), settings, moment)
        if self.phase is Phase.EXECUTING:
            step, origin = self.steps[-1], self._origin
            settings = settings if step.verified else self._slow_settings
            return self._walk.begin(step.reply.action, settings, moment, origin)
        if self._retrace is not None:
            if self._retrace.leg is not None:
                return self._walk.begin(self._retrace.leg, self._slow_settings, moment)
            if settings.still(measured):
                self._next_leg(self._retrace)
        return None

    def _ask_early(self, motion: MotionController, at: float, moment: Moment) -> None:
        """Ask as soon as the robot stands, or a little before; withdraw it when it moves again."""
        if self._asking.request is None:
            ahead = motion.time_left <= self._settings.look_ahead_s > 0.0
            if motion.standing or ahead:
                self._ask(at, moment, ahead=not motion.standing)
        elif not (motion.standing or self._ahead):
            self._asking.withdraw()
            self._early = None

    def _observes_next(self) -> bool:
        """Whether what is under way is followed by an observation, as far as that is known."""
        if self.phase is not Phase.EXECUTING or len(self.steps) >= self._settings.max_steps:
            return self.phase is Phase.SETTLING
        return self.steps[-1].reply.action.kind is not ActionKind.STOP

    def _end_motion(self, action: Action, moment: Moment) -> None:
        stuck = self._walk.finish()
        self._stuck_in_a_row = self._stuck_in_a_row + 1 if stuck else 0
        too_often = self._stuck_in_a_row >= self._settings.max_stuck
        if self._retrace is not None:
            self._retrace.leg = None
            if too_often:
                said = f"{self._retrace.reason} The way back is blocked; the robot stands on it."
                self.end(RunOutcome.LINK_LOST, said)
            return
        if self.phase is Phase.EXECUTING and not stuck:
            if action.kind is ActionKind.STOP and self.steps[-1].verified:
                self._arrive()
                return
            self._oscillation.carried_out(self._decided_at, action)
        if too_often:
            said = f"blocked {self._stuck_in_a_row} times in a row."
            said = f"'{format_action(action)}' did not move the robot as it should: {said}"
            self.end(RunOutcome.STUCK, said)
        elif len(self.steps) >= self._settings.max_steps:
            said = f"The target was not reached within {self._settings.max_steps} actions."
            self.end(RunOutcome.STEP_BUDGET, said)
        else:
            self.phase = Phase.DECODING
            request, early, self._early = self._asking.request, self._early, None
            oldest = moment.stamp - self._settings.max_observation_age_s
            late = isinstance(early, Answer) and early.observed_at < oldest
            if request is None or late:  # not the answer was late, but the rest
                self._ask(moment.stamp, moment)
            elif isinstance(early, Answer):
                self._take(early, moment)
            elif early is not None:
                self.on_failure(request.number, early.outcome, early.sentence)

    def _arrive(self) -> None:
        """The target says stop, and the robot stands."""
        if self._settings.arrival_check == "service":
            self.phase = Phase.CHECKING
            return
        said = "The model says that the target is reached, which nothing else has checked"
        self.end(RunOutcome.ARRIVED, f"{said}; the robot stands.")

    def _abandon(self) -> None:
        """Nothing is under way or asked for any more."""
        self._walk.drop()
        self._announcer.take()
        self._asking.withdraw()
        self._origin = self._early = self._check_since = self._retrace = None

    def _observe_anew(self) -> None:
        """Whatever is under way belongs to the past, and what was seen before is of no use."""
        self._abandon()
        self._past.clear()
        self.phase = Phase.SETTLING

    # -- replies -------------------------------------------------------------------------------

    def _ask(self, not_before: float, moment: Moment, ahead: bool = False) -> None:
        settings = self._settings
        unverified = settings.fallback == "draft_only" and self._unverified_in_a_row < settings.fallback_replies
        self._ahead, past = ahead, tuple(self._past)
        self._asking.ask(not_before, moment, settings.decode_timeout_s, unverified, past)

    def _take(self, answer: Answer, moment: Moment) -> None:
        """Carry out the answer to the request in force, if it may be; the robot stands."""
        assert self._asking.request is not None
        age, limit = moment.stamp - answer.observed_at, self._settings.max_observation_age_s
        try:
            reply = checked(answer, self._asking.request, age, limit)
        except Refused as refused:
            self.end(refused.outcome, str(refused))
            return
        walk, action, origin = self._walk, reply.action, None
        if not walk.stood_at(answer.observed_at):
            origin = walk.track.at(answer.observed_at)
            if origin is None or not fits(action, origin, walk.pose):
                self._ask(moment.stamp, moment)  # the robot moved too much since; it stands now
                return
        self._origin, self._decided_at = origin, origin or walk.pose
        nowhere = self._oscillation.refuses(self._decided_at, action)
        if nowhere:
            self.end(RunOutcome.OSCILLATING, f"The robot gets nowhere: {nowhere}.")
            return
        self._asking.withdraw()
        self._unverified_in_a_row = 0 if answer.verified else self._unverified_in_a_row + 1
        announcer = self._announcer
        announcer.announce(action, reply.reasoning, answer.verified, self._now, walk.stood)
        step = Step(announcer.count, reply, age, answer.observed_at, answer.verified, answer.details)
        self.steps.append(step)
        self._past = [*self._past, step][-HISTORY:]
        self.phase = Phase.EXECUTING

    # -- without the link ----------------------------------------------------------------------

    def _fail(self, outcome: RunOutcome, sentence: str) -> None:
        """No reply comes; the robot stands."""
        sentence = f"{sentence.rstrip('. ')}."
        if outcome in _LOST and self._settings.fallback == "return":
            self._walk_back(sentence)
        elif outcome in _LOST and self._unverified_in_a_row:
            said = f"{sentence} The last {self._unverified_in_a_row} replies were by the draft alone."
            self.end(RunOutcome.LINK_LOST, said)
        else:
            self.end(outcome, sentence)

    def _goes_on_without_link(self, held: str) -> bool:
        """Whether an action that only the lost link holds is given up for what the fallback allows."""
        if self.phase is not Phase.EXECUTING or not self._hold.only_by_link(self._now):
            return False
        if self._settings.fallback == "return":
            self._walk_back(held)
            return True
        if self._settings.fallback == "draft_only" and self.steps[-1].verified:
            self._observe_anew()
            return True
        return False

    def _walk_back(self, sentence: str) -> None:
        self._observe_anew()
        self._hold.forget()
        self._retrace = Retrace(self._walk.path.points, sentence, self._now)
        self._stuck_in_a_row = 0
        self.phase = Phase.RETRACING

    def _next_leg(self, retrace: Retrace) -> None:
        """The robot stands on its way back: go on with it, or with the run when the link is back."""
        pose, now = self._walk.pose, self._now
        if self._hold.link_back(now, retrace.since):
            self._walk.path.points = retrace.remaining_path(pose)
            self._observe_anew()
            return
        retrace.leg = retrace.next_action(pose)
        if retrace.leg is not None:
            self._announcer.announce(retrace.leg, WAY_BACK, False, now, None, retracing=True)
            return
        where = "stopped on its way back" if retrace.exhausted else "stands where it began"
        self.end(RunOutcome.LINK_LOST, f"{retrace.reason} The robot {where}.")
