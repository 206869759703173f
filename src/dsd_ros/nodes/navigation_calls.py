"""What the navigation node asks of others: decodes of the draft node, and whether the robot has arrived. And tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.task import Future

from dsd_msgs.msg import NavAction
from dsd_msgs.srv import CheckArrival, Decode
from dsd_ros.navigation.actions import ActionKind, format_action
from dsd_ros.navigation.records import Announcement, DecodeRequest
from dsd_ros.navigation.settings import RunOutcome
from dsd_ros.ros.stamps import to_stamp

SERVICE_WAIT_S = 3.0  # a decode service that is absent this long counts as a lost link
_ANSWER_MARGIN_S = 0.5  # the draft node gives up this much earlier, so that its own reason arrives

FAILURES = {
    Decode.Response.INVALID_REQUEST: RunOutcome.BAD_GOAL,
    Decode.Response.NO_IMAGE: RunOutcome.NO_OBSERVATION,
    Decode.Response.TIMED_OUT: RunOutcome.DECODE_TIMEOUT,
    Decode.Response.LINK_LOST: RunOutcome.LINK_LOST,
    Decode.Response.REFUSED: RunOutcome.VERIFIER_REFUSED,
}

_KINDS = {
    ActionKind.STOP: NavAction.STOP,
    ActionKind.FORWARD: NavAction.FORWARD,
    ActionKind.TURN_LEFT: NavAction.TURN_LEFT,
    ActionKind.TURN_RIGHT: NavAction.TURN_RIGHT,
}


def action_message(announced: Announcement) -> Any:
    """What is told of an action as it begins; stamp and observation are the caller's to add."""
    action = NavAction(kind=_KINDS[announced.action.kind], amount=announced.action.amount)
    action.header.frame_id = "base_link"
    action.reasoning = announced.reasoning[:1000]
    action.verified = announced.verified
    action.retracing = announced.retracing
    action.step = announced.number
    action.step_seconds = announced.step_seconds
    action.standing_seconds = announced.standing_seconds
    return action


def decode_call(instruction: str, request: DecodeRequest) -> Any:
    """The message of a run's request. A step's details are its answer: stamps go out as they came in."""
    return Decode.Request(
        instruction=instruction,
        not_before=to_stamp(request.not_before),
        timeout=max(0.1, request.timeout - _ANSWER_MARGIN_S),
        allow_unverified=request.allow_unverified,
        history_stamps=[step.details.observation_stamp for step in request.history],
        history_actions=[format_action(step.reply.action) for step in request.history],
    )


class DecodeCalls:
    """At most one decode is under way: a newer one takes its place, also at the draft node."""

    def __init__(self, node: Node, group: CallbackGroup) -> None:
        self._client = node.create_client(Decode, "decode", callback_group=group)
        self._waiting: tuple[DecodeRequest, float] | None = None  # not yet sent, since when
        self._pending: Future | None = None

    def want(self, request: DecodeRequest) -> None:
        """``request`` is to be sent as soon as there is a draft node."""
        self.forget()
        self._waiting = (request, time.monotonic())

    def send(self, instruction: str, answered: Callable[[int, Future], None]) -> str:
        """Send what waits to be sent, if that is possible; returns why it will not be, or nothing.

        ``answered`` is called with the request's number, from the executor.
        """
        if self._waiting is None:
            return ""
        request, since = self._waiting
        if not self._client.service_is_ready():
            if time.monotonic() - since <= SERVICE_WAIT_S:
                return ""
            self._waiting = (request, time.monotonic())
            return f"No node offers the service '{self._client.srv_name}': start the draft node."
        self._waiting = None
        self._pending = self._client.call_async(decode_call(instruction, request))
        self._pending.add_done_callback(lambda done: answered(request.number, done))
        return ""

    @property
    def number(self) -> int:
        """Of the request that waits to be sent; 0: none."""
        return 0 if self._waiting is None else self._waiting[0].number

    def forget(self) -> None:
        """Nobody waits for an answer any more."""
        self._waiting = None
        if self._pending is not None and not self._pending.done():
            self._client.remove_pending_request(self._pending)
        self._pending = None


class ArrivalCalls:
    """Asks the service check_arrival, which simulators offer."""

    def __init__(self, node: Node, group: CallbackGroup) -> None:
        self._client = node.create_client(CheckArrival, "check_arrival", callback_group=group)
        self._wanted = False
        self._pending: Future | None = None

    def want(self) -> None:
        self._wanted = True

    def send(self, instruction: str, answered: Callable[[Future], None]) -> None:
        """Ask, if that is wanted and possible."""
        if self._wanted and self._client.service_is_ready():
            self._wanted = False
            self._pending = self._client.call_async(CheckArrival.Request(instruction=instruction))
            self._pending.add_done_callback(answered)

    def forget(self) -> None:
        self._wanted = False
        if self._pending is not None and not self._pending.done():
            self._client.remove_pending_request(self._pending)
        self._pending = None


def cancelling(goal: ServerGoalHandle) -> bool:
    """Whether the goal's state has followed the wish to cancel it, which may come first."""
    deadline = time.monotonic() + 1.0
    while not goal.is_cancel_requested and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(goal.is_cancel_requested)
