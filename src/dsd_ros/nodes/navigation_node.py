"""Serves the Navigate action: asks for a decode, carries the verified action out, until the model
says stop.

Publishes ``cmd_vel_nav``: what of it reaches the robot is the safety supervisor's to say. A thin
shell round :class:`dsd_ros.navigation.run.NavigationRun`. Nothing here waits without a limit,
and every run ends in a named outcome with the robot at rest. No model and no torch in this process.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.task import Future

from dsd_msgs.action import Navigate
from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, SafetyState
from dsd_msgs.srv import Decode
from dsd_ros.navigation.actions import Action, ActionKind
from dsd_ros.navigation.controller import AT_REST, MotionSettings, Velocity, predict
from dsd_ros.navigation.run import (
    DecodeRequest,
    Moment,
    NavigationRun,
    Phase,
    RunOutcome,
    RunSettings,
)
from dsd_ros.navigation.safety import Cause, SafetyReport
from dsd_ros.navigation.watchdog import Watchdog
from dsd_ros.nodes import health, qos
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.nodes.stamps import pose_of, seconds, to_stamp, to_twist, velocity_of

MAX_INSTRUCTION_CHARS = 2000
_SERVICE_WAIT_S = 3.0  # a decode service that is absent this long ends the run
_ANSWER_MARGIN_S = 0.5  # the draft node gives up this much earlier, so that its own reason arrives
_REST_WAIT_S = 2.0  # the result waits this long for the robot to stand
_MAX_PREDICTION_S = 0.3
_STILL = 0.03  # m/s and rad/s

_KINDS = {
    ActionKind.STOP: NavAction.STOP,
    ActionKind.FORWARD: NavAction.FORWARD,
    ActionKind.TURN_LEFT: NavAction.TURN_LEFT,
    ActionKind.TURN_RIGHT: NavAction.TURN_RIGHT,
}
_FAILURES = {
    Decode.Response.INVALID_REQUEST: RunOutcome.BAD_GOAL,
    Decode.Response.NO_IMAGE: RunOutcome.NO_OBSERVATION,
    Decode.Response.TIMED_OUT: RunOutcome.DECODE_TIMEOUT,
    Decode.Response.LINK_LOST: RunOutcome.LINK_LOST,
    Decode.Response.REFUSED: RunOutcome.VERIFIER_REFUSED,
}


@dataclass(frozen=True)
class ControlSettings:
    """Parameters of the node itself."""

    control_rate: float = field(
        default=25.0,
        metadata={"help": "cmd_vel_nav messages per second", "min": 20.0, "max": 100.0},
    )
    watchdog_timeout_s: float = field(
        default=0.5,
        metadata={
            "help": "zero is sent this long after the last fresh command or odometry",
            "min": 0.1,
            "max": 0.5,
        },
    )


class NavigationNode(Node):
    """See the module. ``_changed`` guards the run, the watchdog and the newest measurements."""

    def __init__(self) -> None:
        super().__init__("navigation_node")
        self.failure: str | None = None
        self._control = declare(self, ControlSettings)
        self._run_settings = declare(self, RunSettings, "run.")
        self._motion_settings = declare(self, MotionSettings, "motion.")
        refuse_unknown(self)
        self._changed = threading.Condition()
        self._watchdog = Watchdog(self._control.watchdog_timeout_s)
        self._run: NavigationRun | None = None
        self._instruction = ""
        self._measured = AT_REST
        self._safety = (SafetyReport(), -math.inf)  # and when it came
        self._quiet_after = 0.0  # steady time until which zero is repeated after a run
        self._progress = ""
        self._stats = DecodeStats()
        self._action = NavAction()
        self._request: tuple[DecodeRequest, float] | None = None  # not yet sent, since when
        self._pending: Future | None = None
        self._closing = False

        motion, service = MutuallyExclusiveCallbackGroup(), ReentrantCallbackGroup()
        self._command = self.create_publisher(Twist, "cmd_vel_nav", qos.COMMAND)
        self._actions = self.create_publisher(NavAction, "nav_action", qos.STATE)
        self.create_subscription(
            Odometry, "odom", self._on_odometry, qos.NEWEST_STATE, callback_group=motion
        )
        self.create_subscription(
            ReplyProgress, "reply_progress", self._on_progress, qos.STATE, callback_group=service
        )
        self.create_subscription(
            SafetyState, "safety_state", self._on_safety, qos.LATCHED, callback_group=motion
        )
        self._decode = self.create_client(Decode, "decode", callback_group=service)
        self._health = health.Health(self, heartbeat=True)
        self._health.report(health.OK, "idle")
        # Steady clocks: a simulator that dies takes /clock with it, and the watchdog must outlive
        # it.
        self.create_timer(
            1.0 / self._control.control_rate,
            self._tick,
            motion,
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )
        self._server = ActionServer(
            self,
            Navigate,
            "navigate",
            execute_callback=self._execute,
            goal_callback=lambda _: GoalResponse.ACCEPT,
            cancel_callback=lambda _: CancelResponse.ACCEPT,
            callback_group=service,
        )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            if self._run is not None:
                self._run.end(RunOutcome.SHUTDOWN, "The navigation node was stopped.")
            self._watchdog.stop()
            self._command.publish(Twist())
            self._changed.notify_all()
        deadline = time.monotonic() + 0.4
        while self._run is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._command.publish(Twist())

    # -- motion --------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        return Moment(time.monotonic(), self.get_clock().now().nanoseconds * 1e-9)

    def _on_odometry(self, message: Odometry) -> None:
        pose, measured = pose_of(message), velocity_of(message)
        if not all(map(math.isfinite, (pose.x, pose.y, pose.yaw, measured.vx, measured.wz))):
            return  # counts as no odometry: the watchdog will see its absence
        with self._changed:
            moment = self._moment()
            age = moment.stamp - seconds(message.header.stamp)
            if (
                0.0 < age < _MAX_PREDICTION_S
            ):  # beyond: a stalled sender, or another machine's clock
                pose = predict(pose, measured, age)
            self._measured = measured
            self._watchdog.odometry(moment.steady)
            if self._run is None:
                return
            self._watchdog.command(self._run.on_odometry(pose, measured, moment), moment.steady)
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
        request = run.take_request()
        if request is not None:
            self._progress = ""
            self._request = (request, time.monotonic())
        if self._request is not None:
            self._send_request(run)

    # -- decoding ------------------------------------------------------------------------------

    def _send_request(self, run: NavigationRun) -> None:
        assert self._request is not None
        request, since = self._request
        if not self._decode.service_is_ready():
            if time.monotonic() - since > _SERVICE_WAIT_S:
                self._request = None
                sentence = (
                    f"No node offers the service '{self._decode.srv_name}': start the draft node."
                )
                run.on_failure(request.number, RunOutcome.LINK_LOST, sentence)
            return
        self._request = None
        call = Decode.Request(
            instruction=self._instruction,
            not_before=to_stamp(request.not_before),
            timeout=max(0.1, request.timeout - _ANSWER_MARGIN_S),
        )
        self._forget_pending()
        future = self._decode.call_async(call)
        self._pending = future
        future.add_done_callback(lambda done: self._on_decoded(run, request.number, done))

    def _on_decoded(self, run: NavigationRun, number: int, future: Future) -> None:
        with self._changed:
            if run is not self._run or future.cancelled():
                return  # the answer to a question of a run that is over
            answer = future.result()
            if answer is None:
                error = future.exception()
                run.on_failure(number, RunOutcome.INTERNAL_ERROR, f"The decode failed: {error}")
            elif not answer.success:
                outcome = _FAILURES.get(answer.code, RunOutcome.INTERNAL_ERROR)
                run.on_failure(number, outcome, answer.message or "The decode failed.")
            else:
                taken = len(run.steps)
                observed = seconds(answer.observation_stamp)
                run.on_answer(number, answer.text, observed, self._moment())
                if len(run.steps) > taken:
                    self._announce(run, answer)
            self._follow()
            self._changed.notify_all()

    def _announce(self, run: NavigationRun, answer: Decode.Response) -> None:
        step = run.steps[-1]
        self._stats = answer.stats
        self._action = action_message(step.reply.action)
        self._action.header.stamp = self.get_clock().now().to_msg()
        self._action.header.frame_id = "base_link"
        self._action.reasoning = step.reply.reasoning[:1000]
        self._action.observation_stamp = answer.observation_stamp
        self._action.verified = True
        self._action.step = step.number
        self._actions.publish(self._action)

    def _on_progress(self, message: ReplyProgress) -> None:
        with self._changed:
            if self._run is not None and self._run.phase is Phase.DECODING:
                self._progress = message.text[:1000]

    def _forget_pending(self) -> None:
        if self._pending is not None and not self._pending.done():
            self._decode.remove_pending_request(self._pending)
        self._pending = None

    # -- the action ----------------------------------------------------------------------------

    def _execute(self, goal: ServerGoalHandle) -> Navigate.Result:
        refusal = self._begin(goal.request)
        if refusal is not None:
            goal.abort()
            return Navigate.Result(outcome=int(RunOutcome.BAD_GOAL), message=refusal)
        with self._changed:
            run = self._run
            assert run is not None
            while not run.ended:
                if goal.is_cancel_requested:
                    run.cancel()
                    break
                self._publish_feedback(goal, run)
                self._changed.wait(timeout=0.1)
            self._watchdog.stop()
            self._command.publish(Twist())
            self._request = None
            self._forget_pending()
        self._wait_for_rest()
        with self._changed:
            self._publish_feedback(goal, run)
            self._run = None
            self._quiet_after = time.monotonic() + 1.0
        level = health.OK if run.outcome in _GOOD_ENDS else health.WARN
        self._health.report(level, f"{run.outcome.name}: {run.sentence}")
        if run.outcome is RunOutcome.ARRIVED:
            goal.succeed()
        elif run.outcome is RunOutcome.CANCELLED:
            goal.canceled()
        else:
            goal.abort()
        return Navigate.Result(
            outcome=int(run.outcome),
            message=run.sentence[:1000],
            steps=len(run.steps),
            distance_travelled=float(run.distance),
        )

    def _begin(self, goal: Navigate.Goal) -> str | None:
        """Start a run; returns a sentence when the goal can't be taken."""
        text = goal.instruction.strip()
        if not text:
            return "The instruction is empty: say what the robot should find."
        if len(text) > MAX_INSTRUCTION_CHARS:
            return (
                f"The instruction has {len(text)} characters; at most "
                f"{MAX_INSTRUCTION_CHARS} are allowed."
            )
        settings = self._run_settings
        if goal.max_steps:
            settings = replace(settings, max_steps=goal.max_steps)
        if not (math.isfinite(goal.time_limit) and goal.time_limit >= 0.0):
            return f"The time limit is {goal.time_limit} s; it must be 0 or more."
        if goal.time_limit > 0.0:
            settings = replace(settings, time_limit_s=goal.time_limit)
        with self._changed:
            if self._closing:
                return "The navigation node is being stopped."
            if self._run is not None:
                return "Another run is under way; cancel it first."
            self._instruction = text
            self._progress = ""
            self._stats, self._action = DecodeStats(), NavAction()
            self._run = NavigationRun(settings, self._motion_settings, self._moment())
            self._run.on_safety(*self._safety)
        self._health.report(health.OK, f"carrying out: {text[:80]}")
        return None

    def _publish_feedback(self, goal: ServerGoalHandle, run: NavigationRun) -> None:
        reasoning = self._progress
        if run.phase is not Phase.DECODING and run.steps:
            reasoning = run.steps[-1].reply.reasoning[:1000]
        goal.publish_feedback(
            Navigate.Feedback(
                reasoning=reasoning,
                action=self._action,
                distance_travelled=float(run.distance_travelled),
                stats=self._stats,
            )
        )

    def _wait_for_rest(self) -> None:
        deadline = time.monotonic() + _REST_WAIT_S
        while time.monotonic() < deadline and not self._closing:
            with self._changed:
                alive = self._watchdog.odometry_age(time.monotonic()) < 0.2
                if alive and _still(self._measured):
                    return
            time.sleep(0.02)


_CAUSES = frozenset(Cause)
_GOOD_ENDS = (RunOutcome.ARRIVED, RunOutcome.CANCELLED, RunOutcome.SHUTDOWN)


def action_message(action: Action) -> Any:
    """A NavAction with kind and amount filled in."""
    return NavAction(kind=_KINDS[action.kind], amount=action.amount)


def _still(velocity: Velocity) -> bool:
    return abs(velocity.vx) < _STILL and abs(velocity.wz) < _STILL


def main() -> None:
    run_main(NavigationNode, threads=5)
