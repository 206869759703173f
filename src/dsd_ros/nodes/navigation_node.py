"""Serves the Navigate action: asks for a decode, carries the verified action out, until the model
says stop.

Publishes ``cmd_vel_nav``: what of it reaches the robot is the safety supervisor's to say. A thin
shell round :class:`dsd_ros.navigation.run.NavigationRun`, and a lifecycle node: goals are taken while
it is active, and deactivate stops the robot first. Nothing here waits without a limit, and every run
ends in a named outcome with the robot at rest. No model and no torch in this process.
"""

from __future__ import annotations

import math
import threading
import time

from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.task import Future
from std_msgs.msg import String

from dsd_msgs.action import Navigate
from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, SafetyState
from dsd_msgs.srv import Decode
from dsd_ros.navigation.controller import AT_REST, Velocity
from dsd_ros.navigation.records import Announcement, Answer, Moment, Phase
from dsd_ros.navigation.run import NavigationRun
from dsd_ros.navigation.safety import Cause, SafetyReport
from dsd_ros.navigation.settings import RunOutcome, checked_instruction
from dsd_ros.navigation.watchdog import Watchdog
from dsd_ros.nodes.goal_memory import STOPPED, GoalMemory, Resolved
from dsd_ros.nodes.navigation_calls import FAILURES, ArrivalCalls, DecodeCalls, action_message, cancelling
from dsd_ros.ros import health, qos
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.parameters import declare, refuse_unknown
from dsd_ros.ros.running import main as run_main
from dsd_ros.ros.settings import NavigationNodeSettings
from dsd_ros.ros.stamps import pose_of, seconds, to_twist, velocity_of

_REST_WAIT_S = 2.0  # the result waits this long for the robot to stand
_END_WAIT_S, _CLOSE_WAIT_S = (3.0, 0.4)  # for a run to be over, at deactivate and when the process ends
_START_WAIT_S = 1.0  # a goal that comes while the node is starting waits for it
_STILL = 0.03  # m/s and rad/s


class NavigationNode(ManagedNode):
    """See the module. ``_changed`` guards the run, the watchdog and the newest measurements."""

    def __init__(self) -> None:
        super().__init__("navigation_node", heartbeat=True)
        self._settings = settings = declare(self, NavigationNodeSettings)
        refuse_unknown(self)
        self._changed = threading.Condition()
        self._watchdog = Watchdog(settings.watchdog_timeout_s)
        self._run: NavigationRun | None = None
        self._goal: ServerGoalHandle | None = None
        self._instruction = ""
        self._measured = AT_REST
        self._safety = (SafetyReport(), -math.inf)  # and when it came
        self._quiet_after = 0.0  # steady time until which zero is repeated after a run
        self._progress = ""
        self._stats = DecodeStats()
        self._action = NavAction()

        motion, service = MutuallyExclusiveCallbackGroup(), ReentrantCallbackGroup()
        self._command = self.create_publisher(Twist, "cmd_vel_nav", qos.COMMAND)
        self._actions = self.create_publisher(NavAction, "nav_action", qos.STATE)
        self._told = self.create_publisher(String, "instruction", qos.LATCHED)
        self.create_subscription(Odometry, "odom", self._on_odometry, qos.NEWEST_STATE, callback_group=motion)
        self.create_subscription(ReplyProgress, "reply_progress", self._on_progress, qos.STATE, callback_group=service)
        self.create_subscription(SafetyState, "safety_state", self._on_safety, qos.LATCHED, callback_group=motion)
        self._decodes = DecodeCalls(self, service)
        self._checks = ArrivalCalls(self, service)
        self._memory = GoalMemory(self, settings.memory, service)
        # Steady clocks: a simulator that dies takes /clock with it, and the watchdog must outlive
        # it.
        self.create_timer(
            1.0 / settings.control_rate, self._tick, motion, clock=Clock(clock_type=ClockType.STEADY_TIME)
        )
        self._server = ActionServer(
            self,
            Navigate,
            "navigate",
            execute_callback=self._execute,
            goal_callback=lambda _: GoalResponse.ACCEPT,
            cancel_callback=self._on_cancel,
            callback_group=service,
        )
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def begin(self) -> None:
        self._health.report(health.OK, "idle")

    def end(self) -> None:
        """The robot stops, the run under way ends, and its result gets out."""
        with self._changed:
            if self._run is not None:
                self._run.end(RunOutcome.SHUTDOWN, "The navigation node was stopped.")
            self._halt()
            self._changed.notify_all()
        deadline = time.monotonic() + (_CLOSE_WAIT_S if self.closing else _END_WAIT_S)
        while self._goal is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._command.publish(Twist())

    def give_back(self) -> None:
        self._command.publish(Twist())

    def destroy_node(self) -> None:
        self._server.destroy()  # which rclpy's does not
        super().destroy_node()

    # -- motion --------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        return Moment(time.monotonic(), self.get_clock().now().nanoseconds * 1e-9)

    def _halt(self) -> None:
        self._watchdog.stop()
        self._command.publish(Twist())

    def _on_odometry(self, message: Odometry) -> None:
        pose, measured = pose_of(message), velocity_of(message)
        if not all(map(math.isfinite, (pose.x, pose.y, pose.yaw, measured.vx, measured.wz))):
            return  # counts as no odometry: the watchdog will see its absence
        with self._changed:
            moment = self._moment()
            self._measured = measured
            self._watchdog.odometry(moment.steady)
            if self._run is None:
                return
            stamp = seconds(message.header.stamp)
            command = self._run.on_odometry(pose, measured, moment, stamp)
            self._watchdog.command(command, moment.steady)
            self._follow()

    def _on_safety(self, message: SafetyState) -> None:
        report = SafetyReport(
            tuple(Cause(cause) for cause in message.causes if cause in _CAUSES),
            tuple(message.sentences),
            tuple(Cause(cause) for cause in message.waived if cause in _CAUSES),
        )
        with self._changed:
            self._safety = (report, time.monotonic())
            if self._run is not None:
                self._run.on_safety(*self._safety)
                self._follow()

    def _tick(self) -> None:
        with self._changed:
            moment = self._moment()
            if self._run is not None:
                self._run.on_time(moment)
                self._follow()
                self._quiet_after = moment.steady + 1.0
            if self._run is None or self._run.ended:
                self._watchdog.stop()
            if moment.steady < self._quiet_after:
                self._command.publish(to_twist(self._watchdog.output(moment.steady)))

    def _follow(self) -> None:
        """Carry out what the run asks for after an event; wakes the goal's thread at its end."""
        run = self._run
        assert run is not None
        if run.ended:
            self._watchdog.stop()
            self._changed.notify_all()
            return
        announcement = run.take_announcement()
        if announcement is not None:
            self._announce(run, announcement)
            self._changed.notify_all()
        request = run.take_request()
        if request is not None:
            self._progress = ""
            self._decodes.want(request)
        number = self._decodes.number
        absent = self._decodes.send(self._instruction, lambda number, done: self._on_decoded(run, number, done))
        if absent:
            run.on_failure(number, RunOutcome.LINK_LOST, absent)
        if run.take_check():
            self._checks.want()
        self._checks.send(self._instruction, lambda done: self._on_checked(run, done))

    def _announce(self, run: NavigationRun, announcement: Announcement) -> None:
        self._action = action_message(announcement)
        self._action.header.stamp = self.get_clock().now().to_msg()
        if not announcement.retracing:
            answer = run.steps[-1].details
            self._stats = answer.stats
            self._action.observation_stamp = answer.observation_stamp
        self._actions.publish(self._action)

    # -- answers -------------------------------------------------------------------------------

    def _on_decoded(self, run: NavigationRun, number: int, future: Future) -> None:
        with self._changed:
            if run is not self._run or future.cancelled():
                return  # the answer to a question of a run that is over
            answer = future.result()
            if answer is None:
                error = future.exception()
                run.on_failure(number, RunOutcome.INTERNAL_ERROR, f"The decode failed: {error}")
            elif answer.code == Decode.Response.CANCELED and not answer.success:
                run.on_dropped(number)
            elif not answer.success:
                outcome = FAILURES.get(answer.code, RunOutcome.INTERNAL_ERROR)
                run.on_failure(number, outcome, answer.message or "The decode failed.")
            else:
                observed = seconds(answer.observation_stamp)
                said = Answer(answer.text, observed, answer.verified, answer)
                run.on_answer(number, said, self._moment())
            self._follow()

    def _on_checked(self, run: NavigationRun, future: Future) -> None:
        with self._changed:
            if run is not self._run or future.cancelled():
                return
            answer = future.result()
            if answer is None:
                run.on_arrival(False, f"the check failed: {future.exception()}")
            else:
                run.on_arrival(answer.arrived, answer.message)
            self._follow()

    def _on_progress(self, message: ReplyProgress) -> None:
        with self._changed:
            if self._run is not None and self._run.phase is Phase.DECODING:
                self._progress = message.text[:1000]

    # -- the action ----------------------------------------------------------------------------

    def _on_cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        with self._changed:
            if goal is self._goal and self._run is not None:
                self._run.cancel()
                self._halt()
                self._changed.notify_all()
        return CancelResponse.ACCEPT

    def _execute(self, goal: ServerGoalHandle) -> Navigate.Result:
        refusal = self._reserve(goal)
        if refusal is not None:
            goal.abort()
            outcome, sentence = refusal
            return Navigate.Result(outcome=int(outcome), message=sentence)
        resolved = self._memory.resolve(self._instruction, lambda: self._over(goal))
        if not resolved.instruction or not self._begin(goal, resolved):
            return self._not_begun(goal, resolved)
        with self._changed:
            run = self._run
            assert run is not None
            while not run.ended:
                if goal.is_cancel_requested:
                    run.cancel()
                    break
                self._publish_feedback(goal, run)
                self._changed.wait(timeout=0.1)
            self._halt()
            self._decodes.forget()
            self._checks.forget()
        self._wait_for_rest()
        with self._changed:
            self._publish_feedback(goal, run)
        level = health.OK if run.outcome in _GOOD_ENDS else health.WARN
        self._health.report(level, f"{run.outcome.name}: {run.sentence}")
        if run.outcome is RunOutcome.ARRIVED:
            goal.succeed()
        elif run.outcome is RunOutcome.CANCELLED and cancelling(goal):
            goal.canceled()
        else:
            goal.abort()
        with self._changed:
            self._run = self._goal = None
            self._quiet_after = time.monotonic() + 1.0
        return Navigate.Result(
            outcome=int(run.outcome),
            message=resolved.told(goal.request.instruction, run.sentence)[:1000],
            instruction=resolved.instruction,
            answer=resolved.answer[:8000],
            steps=len(run.steps),
            distance_travelled=float(run.distance),
        )

    def _reserve(self, handle: ServerGoalHandle) -> tuple[RunOutcome, str] | None:
        """Take a goal; returns an outcome and a sentence when it can't be taken."""
        goal = handle.request
        try:
            text = checked_instruction(goal.instruction)
            self._settings.run.within(goal.max_steps, goal.time_limit)
        except ValueError as error:
            return RunOutcome.BAD_GOAL, str(error)
        deadline = time.monotonic() + _START_WAIT_S
        while not (self.active or self.closing) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._changed:
            if not self.active:
                return RunOutcome.SHUTDOWN, "The navigation node is not active."
            if self._goal is not None:
                return RunOutcome.BAD_GOAL, "Another run is under way; cancel it first."
            self._goal, self._instruction = handle, text
        return None

    def _over(self, goal: ServerGoalHandle) -> RunOutcome | None:
        """Why a goal that has not begun is not to begin."""
        if goal.is_cancel_requested:
            return RunOutcome.CANCELLED
        return None if self.active else RunOutcome.SHUTDOWN

    def _begin(self, handle: ServerGoalHandle, resolved: Resolved) -> bool:
        """Start the run of a goal that was taken; False when the node has been stopped meanwhile."""
        goal = handle.request
        settings = self._settings.run.within(goal.max_steps, goal.time_limit)
        with self._changed:
            if not self.active:
                return False
            self._instruction = resolved.instruction
            self._told.publish(String(data=self._instruction))
            self._progress = ""
            self._stats, self._action = DecodeStats(), NavAction()
            self._run = NavigationRun(settings, self._settings.motion, self._moment())
            self._run.on_safety(*self._safety)
        self._health.report(health.OK, f"carrying out: {self._instruction[:80]}")
        return True

    def _not_begun(self, goal: ServerGoalHandle, resolved: Resolved) -> Navigate.Result:
        """End a goal whose run never began. The robot stands: nothing has been commanded."""
        result = resolved.result() if not resolved.instruction else STOPPED.result()
        outcome = RunOutcome(result.outcome)
        self._health.report(health.OK if outcome in _GOOD_ENDS else health.WARN, f"{outcome.name}: {result.message}")
        if outcome is RunOutcome.CANCELLED and cancelling(goal):
            goal.canceled()
        else:
            goal.abort()
        with self._changed:
            self._goal = None
        return result

    def _publish_feedback(self, goal: ServerGoalHandle, run: NavigationRun) -> None:
        deciding = run.phase is Phase.DECODING
        goal.publish_feedback(
            Navigate.Feedback(
                reasoning=self._progress if deciding else self._action.reasoning,
                action=self._action,
                distance_travelled=float(run.distance),
                stats=self._stats,
            )
        )

    def _wait_for_rest(self) -> None:
        deadline = time.monotonic() + _REST_WAIT_S
        while time.monotonic() < deadline and not self.closing:
            with self._changed:
                alive = self._watchdog.odometry_age(time.monotonic()) < 0.2
                if alive and _still(self._measured):
                    return
            time.sleep(0.02)


_CAUSES = frozenset(Cause)
_GOOD_ENDS = (RunOutcome.ARRIVED, RunOutcome.CANCELLED, RunOutcome.SHUTDOWN)


def _still(velocity: Velocity) -> bool:
    return abs(velocity.vx) < _STILL and abs(velocity.wz) < _STILL


def main() -> None:
    run_main(NavigationNode, threads=6)
