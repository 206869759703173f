"""A goal's instruction made plain by memory: asked of the service ``ask`` before the run begins.

What the answer ends in behind ``Go:`` becomes the run's instruction. An answer without it, none in time, or none at all
is the outcome NOT_KNOWN; the robot has not moved for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node

from dsd_msgs.action import Navigate
from dsd_msgs.srv import Ask
from dsd_ros.navigation.goals import instruction_in, needs_memory
from dsd_ros.navigation.settings import RunOutcome
from dsd_ros.nodes.navigation_calls import SERVICE_WAIT_S
from dsd_ros.ros.settings import GoalMemorySettings

_MARGIN_S = 1.0  # the memory node gives up first, so that its own reason arrives
_POLL_S = 0.02


class Resolved(NamedTuple):
    """``instruction`` is what to carry out; empty: ``outcome`` and ``sentence`` say why there is nothing to."""

    instruction: str
    answer: str = ""
    outcome: RunOutcome = RunOutcome.UNKNOWN
    sentence: str = ""

    def told(self, original: str, sentence: str) -> str:
        """A run's sentence, with what became of the goal's own words."""
        if self.instruction == original:
            return sentence
        return f"'{original}' is '{self.instruction}'. {sentence}"

    def result(self) -> Navigate.Result:
        """Of a goal that came to nothing."""
        return Navigate.Result(outcome=int(self.outcome), message=self.sentence[:1000], answer=self.answer[:8000])


class GoalMemory:
    """Asks about one goal at a time, from the goal's own thread."""

    def __init__(self, node: Node, settings: GoalMemorySettings, group: CallbackGroup) -> None:
        self._settings = settings
        self._client = None if settings.when == "never" else node.create_client(Ask, "ask", callback_group=group)

    def resolve(self, instruction: str, ended: Callable[[], RunOutcome | None]) -> Resolved:
        """What to carry out for a goal. ``ended`` is polled: an outcome ends the asking with it."""
        if self._client is None or not needs_memory(instruction, self._settings.when):
            return Resolved(instruction)
        deadline = time.monotonic() + self._settings.timeout_s
        there = time.monotonic() + min(SERVICE_WAIT_S, self._settings.timeout_s)
        while not self._client.service_is_ready():
            outcome = ended()
            if outcome is not None:
                return _over(outcome)
            if time.monotonic() > there:
                name = self._client.srv_name
                return _unknown(f"No node offers the service '{name}': start the memory node.")
            time.sleep(_POLL_S)
        request = Ask.Request(question=instruction, timeout=max(0.5, deadline - time.monotonic() - _MARGIN_S))
        answered = threading.Event()
        future = self._client.call_async(request)
        future.add_done_callback(lambda _: answered.set())
        while not answered.wait(_POLL_S):
            outcome = ended()
            if outcome is None and time.monotonic() < deadline:
                continue
            self._client.remove_pending_request(future)
            if outcome is not None:
                return _over(outcome)
            return _unknown(f"Memory did not answer within {self._settings.timeout_s:g} s.")
        return _read(future.result())


def _read(answer: Ask.Response | None) -> Resolved:
    if answer is None:
        return _unknown("Memory failed.")
    if not answer.success:
        return _unknown(f"Memory did not answer: {answer.message}", answer.text)
    instruction = instruction_in(answer.text)
    if not instruction:
        return _unknown(f"Memory does not say where to go: {answer.text}", answer.text)
    return Resolved(instruction, answer.text)


def _unknown(sentence: str, answer: str = "") -> Resolved:
    return Resolved("", answer, RunOutcome.NOT_KNOWN, sentence)


def _over(outcome: RunOutcome) -> Resolved:
    if outcome is not RunOutcome.CANCELLED:
        return STOPPED
    return Resolved("", "", outcome, "Cancelled by the client.")


STOPPED = Resolved("", "", RunOutcome.SHUTDOWN, "The navigation node was stopped.")
