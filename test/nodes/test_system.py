# SPDX-License-Identifier: Apache-2.0
"""The whole chain in separate processes, and the outcome of a Navigate run when a part is missing."""

from __future__ import annotations

import signal
import time

import pytest
import yaml
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import ParameterType
from rcl_interfaces.srv import DescribeParameters, ListParameters
from ros_rig import GoalClient, OdometryRig

from dsd_msgs.msg import SafetyState
from dsd_ros.bringup.systems import Start
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.ros import qos
from dsd_ros.ros.settings import NODES, specs

# Declared by rclpy for every node, not by ours.
RCLPY_OWN = {"use_sim_time", "start_type_description_service"}


class SystemRig:
    """Simulator, navigation, draft and verifier, with a pair of models whose replies are gibberish."""

    def __init__(self, rig, pair, processes: bool = False) -> None:
        start = rig.start if processes else rig.host
        self.rig, self.pair = rig, pair
        self.odometry = OdometryRig(rig)
        self.client = GoalClient(rig)
        self.diagnostics: dict[str, int] = {}
        rig.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)
        start("simulator_node")
        start("supervisor_node")
        start("navigation_node", run__decode_timeout_s=5.0)
        self.verifier = self.start_verifier()
        self.draft = self.start_draft()
        rig.until_active()
        rig.until(lambda: self.client.ready() and self.odometry.samples)

    def start_verifier(self):
        return self.rig.start("verifier_node", model__path=self.pair[0])

    def start_draft(self):
        return self.rig.start(
            "draft_node",
            model__path=self.pair[1],
            decode__max_tokens=16,
            link__response_timeout_s=0.5,
            link__attempts=3,
            image_timeout_s=3.0,
        )

    def _on_diagnostics(self, message) -> None:
        for status in message.status:
            self.diagnostics[status.name] = status.level[0]

    def run(self) -> tuple[RunOutcome, str]:
        _, answer = self.client.result(self.client.send())()
        return RunOutcome(answer.outcome), answer.message

    def camera(self, on: bool) -> None:
        self.rig.fault("camera ok" if on else "camera freeze")


def test_every_loss_is_a_named_end_and_what_returns_works(rig, tiny_pair):
    system = SystemRig(rig, tiny_pair)
    start = system.odometry.pose
    # Gibberish moves nothing.
    assert system.run()[0] is RunOutcome.UNPARSABLE_REPLY

    system.camera(False)
    outcome, sentence = system.run()
    assert outcome is RunOutcome.NO_OBSERVATION and "camera" in sentence
    system.camera(True)
    assert system.run()[0] is RunOutcome.UNPARSABLE_REPLY

    system.verifier.process.send_signal(signal.SIGKILL)
    system.verifier.process.wait()
    outcome, sentence = system.run()
    assert outcome in (RunOutcome.LINK_LOST, RunOutcome.DECODE_TIMEOUT), sentence
    rig.until(lambda: system.diagnostics.get("draft_node", 0) > 0, what="diagnostics of the loss")
    system.start_verifier()
    # No decode runs: the session is restored in the background, so that the supervisor lets the robot go again.
    rig.until(lambda: system.diagnostics.get("draft_node") == 0, what="the session's return")
    rig.until(lambda: system.run()[0] is RunOutcome.UNPARSABLE_REPLY, what="the verifier's return")

    system.draft.process.send_signal(signal.SIGSTOP)
    outcome, sentence = system.run()
    assert outcome is RunOutcome.DECODE_TIMEOUT, sentence
    system.draft.process.send_signal(signal.SIGCONT)
    rig.until(lambda: system.run()[0] is RunOutcome.UNPARSABLE_REPLY, what="the draft's return")

    assert system.odometry.pose == start
    assert set(system.diagnostics) >= {
        "simulator_node", "supervisor_node", "navigation_node", "draft_node", "verifier_node",
    }  # fmt: skip
    assert not any("Traceback" in line for line in rig.lines)


@pytest.mark.slow
def test_nodes_that_were_frozen_for_longer_than_dds_keeps_them_are_no_strangers(rig, tiny_pair):
    SystemRig(rig, tiny_pair, processes=True)
    heard: list[SafetyState] = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", heard.append, qos.LATCHED)
    nodes = {child.name: child for child in rig.group.children}
    rig.until(lambda: heard and not heard[-1].causes, what="the robot free to move")
    for frozen in (("navigation_node", "draft_node", "verifier_node"), ("simulator_node",), ("supervisor_node",)):
        for name in frozen:
            nodes[name].signal(signal.SIGSTOP)
        time.sleep(25.0)  # DDS gives a participant up after 20 s
        for name in frozen:
            nodes[name].signal(signal.SIGCONT)
        heard.clear()
        rig.until(lambda: heard and not heard[-1].causes, what=f"the robot free again after {frozen} were frozen")
        rig.until(lambda: len(heard) > 20, what="further states")
        assert not any(Cause.FOREIGN_PUBLISHER in state.causes for state in heard)


def flat(tree: dict, prefix: str = "") -> dict:
    result = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


@pytest.mark.parametrize("executable", sorted(NODES))
def test_the_parameter_file_and_the_declarations_are_the_same(rig, tiny_pair, tmp_path, executable):
    content = yaml.safe_load(Start(executable).parameter_files[0].read_text())
    assert list(content) == [f"/**/{executable}"]
    written = flat(content[f"/**/{executable}"]["ros__parameters"])
    models = {"draft_node": tiny_pair[1], "verifier_node": tiny_pair[0]}
    extra = {"model__path": models[executable]} if executable in models else {}
    if executable == "record_node":
        extra["directory"] = tmp_path / "bag"
    rig.host(executable, **extra)  # a value out of its range would end it
    names = rig.ask(ListParameters, f"{executable}/list_parameters", ListParameters.Request())
    declared = set(names.result.names) - RCLPY_OWN
    known = {spec.name: spec for spec in specs(NODES[executable])}
    unset = {name for name in declared - set(written) if known[name].varies}  # a default that depends on the machine
    assert declared == set(written) | unset
    request = DescribeParameters.Request(names=sorted(declared))
    described = rig.ask(DescribeParameters, f"{executable}/describe_parameters", request)
    kinds = {
        ParameterType.PARAMETER_BOOL: bool,
        ParameterType.PARAMETER_INTEGER: int,
        ParameterType.PARAMETER_DOUBLE: float,
        ParameterType.PARAMETER_STRING: str,
    }
    for item in described.descriptors:
        assert item.description, item.name
        assert type(written.get(item.name, known[item.name].default)) is kinds[item.type], item.name
        change = known[item.name].change
        assert item.read_only == (change == "start"), item.name
        said = {"live": "Takes effect at once.", "configure": "at the next configure.", "start": "the node starts."}
        assert item.additional_constraints.endswith(said[change]), item.name


def test_an_ordinary_start_has_no_warning(rig, tiny_pair):
    """All nodes of a robot at once: the robot holds until they are there, and the log is calm."""
    states: list[SafetyState] = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", states.append, qos.LATCHED)
    rig.start("verifier_node", model__path=tiny_pair[0])
    rig.until_active("verifier_node")
    for name in ("supervisor_node", "simulator_node", "navigation_node"):
        rig.start(name)
    draft = rig.start("draft_node", model__path=tiny_pair[1])
    # The log has it for good; of a latched topic that is discovered late only the newest state comes.
    rig.until(lambda: any("No heartbeat of" in line for line in rig.lines), what="the supervisor holding the robot")
    rig.until_active()
    rig.until(lambda: states and list(states[-1].causes) in ([Cause.NO_ACTION], []), what="the robot being ready")
    loud = [line for line in rig.lines if "[WARN]" in line or "[ERROR]" in line]
    assert not loud
    draft.process.kill()
    rig.until(lambda: any("[WARN]" in line and "draft_node" in line for line in rig.lines), what="a warning")
