# SPDX-License-Identifier: Apache-2.0
"""Node lifecycles in separate processes: during decodes, after kills, and in namespaces."""

from __future__ import annotations

import signal
import threading

import pytest
from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import State, Transition
from ros_rig import CameraRig, picture

from dsd_msgs.srv import Decode
from dsd_ros.bringup.systems import plan

INSTRUCTION = "find the silver bottle"
SOON = 0.05  # s, before a killed node is started again
HASTY = {"decode.max_tokens": "12", "link.response_timeout_s": "0.5", "link.attempts": "3"}
UP = (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE)
DOWN = (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP)


class Nodes:
    """Nodes of the demo system with the tiny pair, started as the bring-up starts them."""

    def __init__(self, rig, pair, *names: str, **arguments: str) -> None:
        self.rig = rig
        models = {"target_model": str(pair[0]), "draft_model": str(pair[1])}
        for start in plan("demo", models | arguments):
            if start.name not in names:
                continue
            if start.name == "draft_node":
                start.parameters.update(HASTY)
            rig.group.start_planned(start).respawn_delay_s = SOON

    def kill(self, name: str) -> None:
        """Kill a node, and wait until it is started again."""
        child = self.rig.group.child(name)
        pid = child.pid
        child.signal(signal.SIGKILL)
        self.rig.until(lambda: self.rig.group.ended() is None and child.pid != pid)


LOST = (Decode.Response.LINK_LOST, Decode.Response.TIMED_OUT)
NO_ANSWER = -1  # of a killed node, which DDS takes a while to miss


def decode_once(rig, camera, seed: int = 1, timeout: float = 1.5) -> int:
    try:
        return camera.ask(picture(seed), INSTRUCTION, timeout, patience=0.5).code
    except AssertionError:
        return NO_ANSWER


def lost(camera) -> bool:
    """Whether a living node says that there is no verifier; however late on a busy machine."""
    return camera.ask(picture(1), INSTRUCTION, 1.5, patience=60.0).code in LOST


@pytest.mark.slow
def test_a_killed_node_decodes_again(rig, tiny_pair):
    nodes = Nodes(rig, tiny_pair, "draft_node", "verifier_node")
    camera = CameraRig(rig)
    works = lambda: decode_once(rig, camera) == Decode.Response.OK  # noqa: E731
    rig.until(works)
    for number in (1, 2):
        for name in ("draft_node", "verifier_node"):
            nodes.kill(name)
            rig.until(works, what=f"a decode with the new {name}")
            assert rig.group.child(name).restarted == number


def test_a_session_that_is_being_opened_is_given_up_for_a_transition(rig, tiny_pair):
    said: set[str] = set()

    def on_diagnostics(message: DiagnosticArray) -> None:
        said.update(status.message for status in message.status)

    rig.node.create_subscription(DiagnosticArray, "/diagnostics", on_diagnostics, 10)
    rig.host("draft_node", model__path=tiny_pair[1], link__response_timeout_s=600.0)
    rig.until(lambda: rig.state("draft_node") == State.TRANSITION_STATE_ACTIVATING)

    def interrupted() -> bool:
        # Refused, so that the node goes on trying by itself: this may have come between two attempts.
        assert not rig.change("draft_node", Transition.TRANSITION_CONFIGURE)
        return any("opening the session was interrupted" in message for message in said)  # "starting: ..." for a minute

    rig.until(interrupted)


def test_killed_or_led_through_its_states_a_verifier_answers_again(rig, tiny_pair):
    nodes = Nodes(rig, tiny_pair, "draft_node", "verifier_node")
    camera = CameraRig(rig)
    works = lambda: decode_once(rig, camera) == Decode.Response.OK  # noqa: E731
    rig.until(works)
    nodes.kill("verifier_node")
    rig.until(works, what="a decode with the new verifier")
    assert rig.group.child("verifier_node").restarted == 1

    # A verifier that does not answer is no verifier; one that has freed its model loads it again.
    assert rig.change("verifier_node", *DOWN)
    assert rig.state("verifier_node") == State.PRIMARY_STATE_UNCONFIGURED
    assert lost(camera)
    assert not rig.change("verifier_node", Transition.TRANSITION_ACTIVATE)
    assert rig.change("verifier_node", *UP)
    assert not rig.change("verifier_node", Transition.TRANSITION_CONFIGURE)
    rig.until(works, what="a decode with the verifier active again")

    # Taken down in the middle of decodes, whichever of the two it is: each decode ends, and the next ones work.
    for name in ("verifier_node", "draft_node"):
        codes: list[int] = []
        stop = threading.Event()

        def go_on(codes=codes, stop=stop) -> None:
            while not stop.is_set():
                codes.append(decode_once(rig, camera, len(codes)))

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            rig.until(lambda: Decode.Response.OK in codes)  # noqa: B023
            assert rig.change(name, *DOWN)
            count = len(codes)
            # Behind the decode that was under way; on a busy machine an answer may be late.
            rig.until(lambda: any(code in LOST for code in codes[count + 1 :]))  # noqa: B023
            assert Decode.Response.OK not in codes[count + 1 :]
            assert rig.change(name, *UP)
        finally:
            stop.set()
            thread.join(30.0)
        assert not thread.is_alive()
        rig.until(works)
    assert rig.change("verifier_node", Transition.TRANSITION_ACTIVE_SHUTDOWN)
    assert lost(camera)
    assert not any("Traceback" in line for line in rig.lines)


@pytest.mark.slow
def test_bridge_and_remote_verifier_come_back(rig, tiny_pair):
    def planned(port: str):
        arguments = {"transport": "websocket", "verifier_port": port, "target_model": str(tiny_pair[0])}
        return next(start for start in plan("demo", arguments) if start.name == "verifier")

    said: list[str] = []
    verifier = rig.group.start_planned(planned("0"), on_line=said.append)
    verifier.respawn_delay_s = SOON
    url = rig.until(lambda: next((s.split()[-1] for s in said if "ws://" in s), None))
    verifier.command = list(planned(url.rpartition(":")[2]).command)
    nodes = Nodes(rig, tiny_pair, "draft_node", "bridge_node", transport="websocket", verifier=url)
    camera = CameraRig(rig)
    works = lambda: decode_once(rig, camera) == Decode.Response.OK  # noqa: E731
    rig.until(works)
    for name in ("bridge_node", "verifier"):
        nodes.kill(name)
        rig.until(works, what=f"a decode with the new {name}")
    assert rig.change("bridge_node", *DOWN)
    assert lost(camera)
    assert rig.change("bridge_node", *UP)
    rig.until(works)
    assert rig.group.ended() is None
    assert not any("Traceback" in line for line in rig.lines)


SHARED = {"/diagnostics", "/rosout", "/parameter_events"}


@pytest.mark.slow
def test_two_namespaces_in_one_domain_do_not_hear_each_other(rig, tiny_pair):
    everybody = ("draft_node", "verifier_node", "supervisor_node", "navigation_node")
    Nodes(rig, tiny_pair, *everybody, namespace="go2_1")
    Nodes(rig, tiny_pair, "draft_node", namespace="/go2_2")
    camera_of_one, camera_of_other = CameraRig(rig, "go2_1/"), CameraRig(rig, "go2_2/")
    rig.until(lambda: decode_once(rig, camera_of_one) == Decode.Response.OK)
    # The other's draft has been in the domain with a verifier for as long, and has not found it.
    assert lost(camera_of_other)
    assert rig.state("go2_2/draft_node") != State.PRIMARY_STATE_ACTIVE
    request = Decode.Request(instruction=INSTRUCTION, timeout=Duration(sec=1))
    camera_of_other.show(picture(1))
    request.not_before = rig.node.get_clock().now().to_msg()
    assert rig.call(Decode, "go2_1/dsd/decode", request).code == Decode.Response.NO_IMAGE
    Nodes(rig, tiny_pair, "verifier_node", namespace="go2_2")
    rig.until(lambda: decode_once(rig, camera_of_other) == Decode.Response.OK)
    assert rig.change("go2_1/verifier_node", *DOWN)
    assert lost(camera_of_one)
    rig.until(lambda: decode_once(rig, camera_of_other) == Decode.Response.OK)
    names = {name for name, _ in rig.node.get_topic_names_and_types()}
    assert {name for name in names if not name.startswith(("/go2_1/", "/go2_2/"))} <= SHARED
    assert {"/go2_1/cmd_vel", "/go2_1/dsd/draft", "/go2_2/dsd/draft"} <= names
    assert rig.group.child("go2_2/draft_node").running
