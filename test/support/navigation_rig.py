# SPDX-License-Identifier: Apache-2.0
"""Simulator, supervisor and navigation node with a scripted decode service, and a Navigate client."""

from __future__ import annotations

import threading
import time

from builtin_interfaces.msg import Time
from geometry_msgs.msg import Twist
from rclpy.callback_groups import ReentrantCallbackGroup
from ros_rig import GoalClient, OdometryRig, Remappings

from dsd_msgs.msg import NavAction, SafetyState
from dsd_msgs.srv import Decode
from dsd_ros.bringup.systems import REMAPPINGS
from dsd_ros.ros import qos

FORWARD = "I see it. Action: forward 25 cm"
LEFT = "It is left. Action: turn left 45 degrees"
STOP = "I am there. Action: stop"
HANG = object()  # the service does not answer before the test is over


class NavigationRig:
    """Simulator and navigation node, a decode service that follows ``script``, a Navigate client.

    :param apart: the node that is a process of its own, because the test stops or kills it.
    :param remappings: of the three nodes.
    """

    def __init__(
        self,
        rig,
        fallback: str = "stop",
        commands: str = "navigation_node",
        apart: str = "",
        remappings: Remappings = REMAPPINGS,
        **parameters,
    ) -> None:
        self.rig = rig
        self.script: list = []
        self.requests: list[Decode.Request] = []
        self.age = 0.0  # the answers' pictures are this much older than asked for
        self.release = threading.Event()
        self.commands: list[tuple[float, Twist]] = []
        self.actions: list[NavAction] = []
        self.feedback: list = []
        self.free = False  # the supervisor sees no cause to stop
        group = ReentrantCallbackGroup()
        self.service = rig.node.create_service(Decode, "dsd/decode", self._on_decode, callback_group=group)
        rig.node.create_subscription(
            Twist, "cmd_vel", lambda m: self.commands.append((time.monotonic(), m)), qos.COMMAND
        )
        actions = rig.node.create_subscription(NavAction, "dsd/nav_action", self.actions.append, qos.STATE)
        rig.node.create_subscription(SafetyState, "dsd/safety_state", self._on_safety, qos.LATCHED)
        self.odometry = OdometryRig(rig)
        self.client = GoalClient(rig)

        def start(node: str, **given):
            return (rig.start if node == apart else rig.host)(node, remappings, **given)

        limits = {name: parameters.pop(name) for name in [*parameters] if name.startswith("limit__")}  # supervisor's
        self.simulator = start("simulator_node")
        self.navigation = start("navigation_node", **parameters)
        # The draft node is this rig itself, and has no heart.
        words = {"grammar": parameters["grammar"]} if "grammar" in parameters else {}
        self.supervisor = start(
            "supervisor_node", require__heartbeats="navigation_node", require__link="draft_node",
            fallback=fallback, require__commands=commands, **words, **limits,
        )  # fmt: skip
        rig.until(lambda: self.odometry.samples and self.client.ready() and self.free)
        rig.until_linked("navigation_node", actions)

    def _on_safety(self, message) -> None:
        self.free = not message.causes

    def _on_decode(self, request, answer):
        self.requests.append(request)
        said = self.script.pop(0) if self.script else STOP
        if said is HANG:
            self.release.wait(60.0)
            said = FORWARD
        if isinstance(said, tuple):
            answer.code, answer.message = said
            return answer
        seconds_back = int(self.age)
        answer.success, answer.verified, answer.text = True, True, said
        answer.observation_stamp = Time(sec=request.not_before.sec - seconds_back, nanosec=request.not_before.nanosec)
        return answer

    def camera(self, on: bool) -> None:
        self.rig.fault("camera ok" if on else "camera freeze")

    def send(self, **goal):
        return self.client.send(self.feedback.append, **{"instruction": "find it"} | goal)

    def finish(self, handle):
        return self.client.result(handle)()

    def run(self, *script, **goal):
        """One run; checks that the robot stands at its end."""
        self.script = list(script)
        status, result = self.finish(self.send(**goal))
        assert result.message
        count = len(self.odometry.samples)
        self.rig.until(lambda: len(self.odometry.samples) > count + 2)
        assert abs(self.odometry.velocity.vx) < 0.03 and abs(self.odometry.velocity.wz) < 0.03
        return status, result
