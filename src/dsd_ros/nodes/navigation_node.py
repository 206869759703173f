# SPDX-License-Identifier: Apache-2.0
"""Serves the Navigate action: requests a decode, carries out the verified action, repeats until the model says stop.

A thin shell around :class:`dsd_ros.navigation.run.run.NavigationRun`, as a lifecycle node: it accepts goals while it is
active, and deactivate stops the robot first. It publishes ``cmd_vel_dsd``, or hands the actions to Nav2 (``executor``),
whose commands then come on that topic; the safety supervisor decides what of them reaches the robot. Every wait has a
limit, and every run ends in a named outcome with the robot at rest. No model and no torch in this process.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import CallbackGroup, MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.task import Future
from std_msgs.msg import String

from dsd_msgs.action import Navigate
from dsd_msgs.msg import MemoryAnswer, NavAction, SafetyState
from dsd_msgs.srv import Ask, CheckArrival, Decode
from dsd_ros.navigation.run import goals
from dsd_ros.navigation.run.actions import KINDS, ActionKind, format_actions, read_grammar
from dsd_ros.navigation.run.controller import Velocity
from dsd_ros.navigation.run.decode_request import DECODE_NODE
from dsd_ros.navigation.run.goals import ResolvedGoal
from dsd_ros.navigation.run.records import Announcement, DecodeAnswer, DecodeRequest
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.run.settings import RunOutcome, checked_instruction
from dsd_ros.navigation.safety.causes import STARTING, Cause, SafetyReport
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.navigation.safety.watchdog import Watchdog
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.ros import health, qos
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.nav2 import Nav2
from dsd_ros.ros.points import PointFinder
from dsd_ros.ros.running import run_main, steady_timer
from dsd_ros.ros.settings import NavigationNodeSettings
from dsd_ros.ros.stamps import (
    clock_trouble,
    command_message,
    command_type,
    moment_of,
    pose_of,
    seconds,
    to_duration,
    to_stamp,
    to_twist,
    velocity_of,
)

_CONTROL_S = 0.04  # between two velocity commands
_WATCHDOG_S = 0.5  # zero is sent this long after the last command or odometry
_REST_WAIT_S = 2.0  # how long the result waits for the robot to stand
_END_WAIT_S, _CLOSE_WAIT_S = (3.0, 0.4)  # for the run to end, at deactivate and when the process ends
_START_WAIT_S = 1.0  # a goal that comes while the node is starting waits this long
_SUPERVISOR_S = 1.0  # what the supervisor said longer ago is no longer so
_SERVICE_WAIT_S = 3.0  # a decode service that is absent this long counts as a lost link
_DECODE_MARGIN_S = 0.5  # the draft node gives up this much earlier, so that its own reason arrives
_MEMORY_MARGIN_S = 1.0  # the memory node likewise
_POLL_S = 0.02
_FEEDBACK_S = 1.0  # between two feedbacks in which phase and action are the same
_STILL = 0.03  # m/s and rad/s
_CAUSES = frozenset(Cause)
_GOOD_ENDS = (RunOutcome.ARRIVED, RunOutcome.CANCELLED, RunOutcome.SHUTDOWN)
_FAILURES = {
    Decode.Response.INVALID_REQUEST: RunOutcome.BAD_GOAL,
    Decode.Response.NO_IMAGE: RunOutcome.NO_OBSERVATION,
    Decode.Response.TIMED_OUT: RunOutcome.DECODE_TIMEOUT,
    Decode.Response.LINK_LOST: RunOutcome.LINK_LOST,
    Decode.Response.REFUSED: RunOutcome.VERIFIER_REFUSED,
}


class NavigationNode(ManagedNode[NavigationNodeSettings]):
    """See the module. ``_changed`` guards the run and the watchdog."""

    def __init__(self) -> None:
        super().__init__("navigation_node", NavigationNodeSettings, heartbeat=True)
        settings = self._settings
        self._changed = threading.Condition()
        self._watchdog = Watchdog(_WATCHDOG_S)
        self._run: NavigationRun | None = None
        self._goal: ServerGoalHandle | None = None
        self._began = 0.0  # steady time at which the goal was taken
        self._said = ("", 0), 0.0  # phase and step of the newest feedback, and when
        self._instruction = ""
        self._safety = (SafetyReport(), -math.inf)  # and when it came
        self._quiet_after = 0.0  # steady time until which zero is repeated after a run
        self._action = NavAction()
        self._base_frame = FrameSettings.base_frame  # until odometry names the robot's

        motion, service = MutuallyExclusiveCallbackGroup(), ReentrantCallbackGroup()
        nav2 = settings.executor == "nav2"
        kind = command_type(settings.enable_stamped_cmd_vel)
        self._command = None if nav2 else self.create_publisher(kind, "cmd_vel_dsd", qos.COMMAND)
        self._nav2 = Nav2(self, settings.nav2, motion, self._changed) if nav2 else None
        self._actions = self.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
        self._instructions = self.create_publisher(String, "dsd/instruction", qos.LATCHED)
        self._memories = self.create_publisher(MemoryAnswer, "dsd/memory_answer", qos.LATCHED)
        self._grammar = read_grammar(settings.grammar)
        points = any(phrase.kind is ActionKind.GO_TO for phrase in self._grammar.phrases)
        self._points = PointFinder(self, lambda: self._settings.point) if points else None
        self._grammars = self.create_publisher(String, "dsd/grammar", qos.LATCHED)
        self._grammars.publish(String(data=json.dumps(self._grammar.data)))  # for bags
        self.create_subscription(Odometry, "odom", self._on_odometry, qos.SENSOR, callback_group=motion)
        self.create_subscription(SafetyState, "dsd/safety_state", self._on_safety, qos.LATCHED, callback_group=motion)
        self._decode = LatestCall(self, Decode, "dsd/decode", service)
        self._request = 0  # number of the newest decode request
        self._check = LatestCall(self, CheckArrival, "dsd/check_arrival", service)
        self._ask = self.create_client(Ask, "dsd/ask", callback_group=service)
        # Steady clocks: a simulator that dies takes /clock with it, and the watchdog must outlive it.
        steady_timer(self, _CONTROL_S, self._tick, motion)
        callbacks: dict[str, Any] = {"goal_callback": lambda _: GoalResponse.ACCEPT, "cancel_callback": self._on_cancel}
        self._server = ActionServer(self, Navigate, "dsd/navigate", self._execute, callback_group=service, **callbacks)
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def begin(self) -> None:
        self._health.report(health.OK, "idle")

    def change(self, settings: NavigationNodeSettings) -> None:
        with self._changed:
            if self._run is not None and self._goal is not None:
                goal = self._goal.request
                self._run.adopt(settings.run.within(goal.max_steps, seconds(goal.time_limit)), settings.motion)

    def end(self) -> None:
        """Stop the robot, end the run under way, and let its result get out."""
        with self._changed:
            if self._run is not None:
                self._run.end(RunOutcome.SHUTDOWN, "The navigation node was stopped.")
            self._halt()
            self._changed.notify_all()
        deadline = time.monotonic() + (_CLOSE_WAIT_S if self.closing else _END_WAIT_S)
        while self._goal is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._send(Twist())

    def give_back(self) -> None:
        self._send(Twist())

    def destroy_node(self) -> None:
        self._server.destroy()  # rclpy's own destroy_node does not
        if self._nav2 is not None:
            self._nav2.destroy()
        super().destroy_node()

    # -- motion --------------------------------------------------------------------------------

    def _halt(self) -> None:
        self._watchdog.stop()
        self._send(Twist())

    def _send(self, command: Twist) -> None:
        if self._command is not None:
            self._command.publish(command_message(command, self, self._settings.enable_stamped_cmd_vel))

    def _on_odometry(self, message: Odometry) -> None:
        try:
            pose, twist = pose_of(message), velocity_of(message)
        except OdometryError as error:  # counts as no odometry: the watchdog will notice its absence
            self.get_logger().warning(str(error), throttle_duration_sec=5.0)
            with self._changed:
                if self._run is not None:
                    self._run.on_bad_odometry(str(error))
            return
        with self._changed:
            self._base_frame = message.child_frame_id or self._base_frame
            moment = moment_of(self)
            self._watchdog.odometry(moment.steady)
            if self._nav2 is not None:
                self._nav2.frame = message.header.frame_id
            if self._run is None:
                return
            stamp = seconds(message.header.stamp)
            command = self._run.on_odometry(pose, twist, moment, stamp)
            self._watchdog.command(command, moment.steady)
            self._follow()
            if self._nav2 is not None:
                self._nav2.carry_out()

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
            moment = moment_of(self)
            if self._run is not None:
                self._run.on_time(moment)
                self._follow()
                self._quiet_after = moment.steady + 1.0
            if self._run is None or self._run.ended:
                self._watchdog.stop()
            if moment.steady < self._quiet_after:
                self._send(to_twist(self._watchdog.output(moment.steady)))
            if self._nav2 is not None:
                self._nav2.executor.on_time(moment.steady)
                self._nav2.carry_out()

    def _follow(self) -> None:
        """Do what the run asks for after an event; wake the goal's thread at its end."""
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
            self._request = request.number
            number = request.number
            message = decode_message(self._instruction, request)
            self._decode.put(message, lambda done: self._on_decoded(run, number, done))
        if self._decode.send() > _SERVICE_WAIT_S:
            self._decode.wait_again()
            sentence = f"No node offers the service '{self._decode.name}': start the draft node."
            run.on_failure(self._request, RunOutcome.LINK_LOST, sentence)
        if run.take_check():
            message = CheckArrival.Request(instruction=self._instruction)
            self._check.put(message, lambda done: self._on_checked(run, done))
        self._check.send()

    def _announce(self, run: NavigationRun, announcement: Announcement) -> None:
        self._action = action_message(announcement, self._base_frame)
        self._action.header.stamp = self.get_clock().now().to_msg()
        if not announcement.retracing:
            self._action.observation_stamp = run.steps[-1].details.observation_stamp
        self._actions.publish(self._action)

    # -- answers -------------------------------------------------------------------------------

    def _on_decoded(self, run: NavigationRun, number: int, future: Future) -> None:
        with self._changed:
            if run is not self._run or future.cancelled():
                return  # the answer belongs to a run that is over
            answer = future.result()
            if answer is None:
                error = future.exception()
                run.on_failure(number, RunOutcome.INTERNAL_ERROR, f"The decode failed: {error}")
            elif answer.code == Decode.Response.CANCELED and not answer.success:
                run.on_dropped(number)
            elif not answer.success:
                outcome = _FAILURES.get(answer.code, RunOutcome.INTERNAL_ERROR)
                run.on_failure(number, outcome, answer.message or "The decode failed.")
            else:
                observed = seconds(answer.observation_stamp)
                run.on_answer(number, DecodeAnswer(answer.text, observed, answer.verified, answer), moment_of(self))
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
        resolved = self._resolve(goal)
        self._tell(goal, resolved)
        ended = self._await_draft(goal) if resolved.instruction else resolved
        if ended is not None or not self._begin(goal, resolved):
            return self._not_begun(goal, ended or goals.STOPPED)
        with self._changed:
            run = self._run
            assert run is not None
            while not run.ended:
                if goal.is_cancel_requested:
                    run.cancel()
                    break
                self._publish_feedback(goal, run.phase.value, run.distance)
                self._changed.wait(timeout=0.1)
            self._halt()
            self._decode.forget()
            self._check.forget()
        self._wait_for_rest(run)
        with self._changed:
            self._publish_feedback(goal, run.phase.value, run.distance)
        self._finish(goal, run.outcome, run.sentence)
        with self._changed:
            self._run = self._goal = None
            self._quiet_after = time.monotonic() + 1.0
        return Navigate.Result(
            outcome=int(run.outcome),
            message=resolved.explain(goal.request.instruction, run.sentence)[:1000],
            instruction=resolved.instruction,
            answer=resolved.answer[:8000],
            sources=list(resolved.sources),
            steps=len(run.steps),
            distance_travelled=float(run.distance),
        )

    def _reserve(self, handle: ServerGoalHandle) -> tuple[RunOutcome, str] | None:
        """Take a goal; returns an outcome and a sentence if it cannot be taken."""
        goal = handle.request
        try:
            text = checked_instruction(goal.instruction)
            self._settings.run.within(goal.max_steps, seconds(goal.time_limit))
        except ValueError as error:
            return RunOutcome.BAD_GOAL, str(error)
        deadline = time.monotonic() + _START_WAIT_S
        while not ((self.active and not clock_trouble(self)) or self.closing) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        trouble = clock_trouble(self)
        with self._changed:
            if not self.active:
                return RunOutcome.SHUTDOWN, "The navigation node is not active."
            if trouble:
                return RunOutcome.BAD_GOAL, trouble
            if self._goal is not None:
                return RunOutcome.BAD_GOAL, "Another run is under way; cancel it first."
            self._goal, self._instruction, self._began = handle, text, time.monotonic()
            self._action, self._said = NavAction(), (("", 0), 0.0)
        return None

    def _resolve(self, goal: ServerGoalHandle) -> ResolvedGoal:
        """The instruction to carry out: the goal's own, or what the service ``dsd/ask`` says it means."""
        settings, client = self._settings.memory, self._ask
        if not goals.needs_memory(self._instruction, settings.when):
            return ResolvedGoal(self._instruction)
        began = time.monotonic()
        deadline = began + settings.timeout_s
        while not client.service_is_ready():
            if ended := self._ended(goal):
                return ended
            if time.monotonic() > began + min(_SERVICE_WAIT_S, settings.timeout_s):
                return goals.unknown(
                    self._instruction, f"No node offers the service '{client.srv_name}': start the memory node."
                )
            time.sleep(_POLL_S)
        timeout = max(0.5, deadline - time.monotonic() - _MEMORY_MARGIN_S)
        answered = threading.Event()
        self._publish_feedback(goal, "asking")
        future = client.call_async(Ask.Request(question=self._instruction, timeout=to_duration(timeout)))
        future.add_done_callback(lambda _: answered.set())
        while not answered.wait(_POLL_S):
            ended = self._ended(goal)
            if ended is not None or time.monotonic() >= deadline:
                client.remove_pending_request(future)
                return ended or goals.unknown(
                    self._instruction, f"Memory did not answer within {settings.timeout_s:g} s."
                )
            self._publish_feedback(goal, "asking")
        answer = future.result()
        if answer is None:
            return goals.unknown(self._instruction, "Memory failed.")
        return goals.resolve_answer(self._instruction, answer.success, answer.message, answer.text, answer.sources)

    def _tell(self, goal: ServerGoalHandle, resolved: ResolvedGoal) -> None:
        """Tell whoever looks on what the goal means, or what the robot asks because it does not know."""
        memory = MemoryAnswer(
            goal=goal.request.instruction,
            answer=resolved.answer[:8000],
            sources=list(resolved.sources),
            instruction=resolved.instruction,
            question=resolved.question,
        )
        memory.header.stamp = self.get_clock().now().to_msg()
        self._memories.publish(memory)
        if resolved.question:
            self.get_logger().warning(f"the robot asks: {resolved.question}")
        elif resolved.answer:
            self.get_logger().info(f"memory: {resolved.answer}")

    def _await_draft(self, goal: ServerGoalHandle) -> ResolvedGoal | None:
        """Wait as long as the draft node says that it starts, and while it is silent as long as a start may take.

        The supervisor says so. Returns why the goal must not begin, None if it may.
        """
        began = time.monotonic()
        while (ended := self._ended(goal)) is None:
            (report, came), now = self._safety, time.monotonic()
            said = dict(zip(report.causes, report.sentences, strict=False))
            starts = f"{DECODE_NODE}: {STARTING}" in said.get(Cause.LINK_LOST, "") and now - came < _SUPERVISOR_S
            silent = DECODE_NODE in said.get(Cause.NODE_SILENT, "")
            unheard = came == -math.inf and now - began < _SERVICE_WAIT_S  # the supervisor starts, too
            if not (starts or unheard) or (silent and now > self._calm_until):
                return None
            self._publish_feedback(goal, STARTING)
            time.sleep(_POLL_S)
        return ended

    def _ended(self, goal: ServerGoalHandle) -> ResolvedGoal | None:
        """Why a goal must not begin any more; None while it may."""
        if goal.is_cancel_requested:
            return goals.CANCELLED
        return None if self.active else goals.STOPPED

    def _begin(self, handle: ServerGoalHandle, resolved: ResolvedGoal) -> bool:
        """Start the run of a goal that was taken; False if the node has been stopped in the meantime."""
        goal = handle.request
        settings = self._settings.run.within(goal.max_steps, seconds(goal.time_limit))
        with self._changed:
            if not self.active:
                return False
            self._instruction = resolved.instruction
            self._instructions.publish(String(data=self._instruction))
            executor = None if self._nav2 is None else self._nav2.executor
            locate = self._points.locate if self._points is not None else None
            now, motion = moment_of(self), self._settings.motion
            self._run = NavigationRun(settings, motion, now, executor, self._grammar, locate)
            self._run.on_safety(*self._safety)
        self._health.report(health.OK, f"carrying out: {self._instruction[:80]}")
        return True

    def _not_begun(self, goal: ServerGoalHandle, why: ResolvedGoal) -> Navigate.Result:
        """End a goal whose run never began. The robot stands: nothing has been commanded."""
        sentence = why.sentence[:1000]
        self._finish(goal, why.outcome, sentence)
        with self._changed:
            self._goal = None
        return Navigate.Result(
            outcome=int(why.outcome),
            message=sentence,
            answer=why.answer[:8000],
            sources=list(why.sources),
            question=why.question,
        )

    def _finish(self, goal: ServerGoalHandle, outcome: RunOutcome, sentence: str) -> None:
        level = health.OK if outcome in _GOOD_ENDS else health.WARN
        self._health.report(level, f"{outcome.name}: {sentence}")
        self._health.publish()  # at once: a caller that waits for the end may then stop this process
        if outcome is RunOutcome.ARRIVED:
            goal.succeed()
        elif outcome is RunOutcome.CANCELLED and _cancelling(goal):
            goal.canceled()
        else:
            goal.abort()

    def _publish_feedback(self, goal: ServerGoalHandle, phase: str, distance: float = 0.0) -> None:
        """Publish what is new; the same again once in _FEEDBACK_S."""
        state, now = (phase, self._action.step), time.monotonic()
        if state == self._said[0] and now - self._said[1] < _FEEDBACK_S:
            return
        self._said = state, now
        feedback = Navigate.Feedback(phase=phase, distance_travelled=float(distance))
        feedback.elapsed_time = to_duration(now - self._began)
        for name in ("step", "kind", "distance", "angle"):
            setattr(feedback, name, getattr(self._action, name))
        goal.publish_feedback(feedback)

    def _wait_for_rest(self, run: NavigationRun) -> None:
        deadline = time.monotonic() + _REST_WAIT_S
        while time.monotonic() < deadline and not self.closing:
            with self._changed:
                alive = self._watchdog.odometry_age(time.monotonic()) < 0.2
                busy = self._nav2 is not None and self._nav2.executor.busy
                if alive and _still(run.velocity) and not busy:
                    return
            time.sleep(_POLL_S)


class LatestCall:
    """A service client with at most one request: a newer one replaces it, and the old answer is dropped."""

    def __init__(self, node: Node, kind: type, name: str, group: CallbackGroup) -> None:
        self._client = node.create_client(kind, name, callback_group=group)
        self._waiting: tuple[object, Callable[[Future], None]] | None = None
        self._since = 0.0
        self._pending: Future | None = None

    @property
    def name(self) -> str:
        return str(self._client.srv_name)

    def put(self, request: object, answered: Callable[[Future], None]) -> None:
        """Replace any request by this one; the executor calls ``answered``."""
        self.forget()
        self._waiting = (request, answered)
        self.wait_again()

    def send(self) -> float:
        """Send the waiting request if the service is there; else how long it has waited, s."""
        if self._waiting is None:
            return 0.0
        if not self._client.service_is_ready():
            return time.monotonic() - self._since
        (request, answered), self._waiting = self._waiting, None
        self._pending = self._client.call_async(request)
        self._pending.add_done_callback(answered)
        return 0.0

    def wait_again(self) -> None:
        """Count the waiting time from now on."""
        self._since = time.monotonic()

    def forget(self) -> None:
        """Drop the request, and its answer."""
        self._waiting = None
        if self._pending is not None and not self._pending.done():
            self._client.remove_pending_request(self._pending)
        self._pending = None


def action_message(announced: Announcement, frame: str) -> NavAction:
    """The message that announces an action; the caller adds the stamps."""
    move = announced.action
    action = NavAction(kind=KINDS.index(move.kind), distance=move.metres, angle=move.radians)
    action.header.frame_id, action.reasoning = frame, announced.reasoning[:1000]
    action.step, action.verified, action.retracing = announced.number, announced.verified, announced.retracing
    action.step_time = to_duration(announced.step_seconds)
    action.standing_time = to_duration(announced.standing_seconds)
    return action


def decode_message(instruction: str, request: DecodeRequest) -> Decode.Request:
    """The message of a run's request. A step's details are its answer, so stamps go out exactly as they came in.

    Actions about one picture are one entry of the history.
    """
    past = [list(steps) for _, steps in itertools.groupby(request.history, key=lambda step: step.observed_at)]
    return Decode.Request(
        instruction=instruction,
        not_before=to_stamp(request.not_before),
        timeout=to_duration(max(0.1, request.timeout - _DECODE_MARGIN_S)),
        allow_unverified=request.allow_unverified,
        history_stamps=[steps[0].details.observation_stamp for steps in past],
        history_actions=[format_actions([step.reply.action for step in steps]) for steps in past],
    )


def _cancelling(goal: ServerGoalHandle) -> bool:
    """Whether the goal's state is cancelling; the run may learn of the request first."""
    deadline = time.monotonic() + 1.0
    while not goal.is_cancel_requested and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(goal.is_cancel_requested)


def _still(velocity: Velocity) -> bool:
    return velocity.vx < _STILL and velocity.wz < _STILL


def main() -> None:
    run_main(NavigationNode, threads=6)
