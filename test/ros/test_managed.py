# SPDX-License-Identifier: Apache-2.0
"""Lifecycle transitions in every order, on a node in the test's own process."""

from __future__ import annotations

import threading
import time

import pytest
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import MultiThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions

from dsd_ros.ros import managed
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.running import EXIT_BAD_START, RCLError
from dsd_ros.ros.settings import ManagedSettings
from dsd_ros.wire.channel import LinkClosed

# (state, transition) -> (state after it, hooks that are called); what is missing is refused.
TABLE = {
    ("unconfigured", "configure"): ("inactive", ["load"]),
    ("unconfigured", "shutdown"): ("finalized", ["unload"]),
    ("inactive", "activate"): ("active", ["begin"]),
    ("inactive", "cleanup"): ("unconfigured", ["unload"]),
    ("inactive", "shutdown"): ("finalized", ["unload"]),
    ("active", "deactivate"): ("inactive", ["end"]),
    ("active", "shutdown"): ("finalized", ["end", "unload"]),
}
NAMES = ("configure", "activate", "deactivate", "cleanup", "shutdown")
IDS = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
    "cleanup": Transition.TRANSITION_CLEANUP,
}
SHUTDOWNS = {
    "unconfigured": Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
    "inactive": Transition.TRANSITION_INACTIVE_SHUTDOWN,
    "active": Transition.TRANSITION_ACTIVE_SHUTDOWN,
}


class Recorder(ManagedNode):
    """Notes which hooks were called; ``raising`` makes one raise."""

    def __init__(self, context, autostart: bool = False, paused: bool = False) -> None:
        self.calls: list[str] = []
        self.raising: dict[str, Exception] = {}
        self.pause = threading.Event()
        if not paused:
            self.pause.set()
        self.overlapping = 0
        self.inside = threading.Lock()
        overrides = [Parameter("autostart", value=autostart)]
        super().__init__("recorder", ManagedSettings, context=context, parameter_overrides=overrides)
        self.autostart()

    def note(self, hook: str) -> None:
        free = self.inside.acquire(blocking=False)
        self.overlapping += not free
        try:
            self.calls.append(hook)
            self.pause.wait(30.0)
            if hook in self.raising:
                raise self.raising[hook]
        finally:
            if free:
                self.inside.release()

    def load(self) -> None:
        self.note("load")

    def begin(self) -> None:
        self.note("begin")

    def end(self) -> None:
        assert not self.active
        self.note("end")

    def unload(self) -> None:
        self.note("unload")

    def give_back(self) -> None:
        self.calls.append("give_back")

    def change(self, name: str) -> bool:
        """As the lifecycle service does it."""
        shutdown = SHUTDOWNS.get(self.state, Transition.TRANSITION_ACTIVE_SHUTDOWN)
        request = ChangeState.Request(transition=Transition(id=IDS.get(name, shutdown)))
        return self._on_change_state(request, ChangeState.Response()).success


@pytest.fixture
def context(ros_domain):
    made = rclpy.Context()
    rclpy.init(args=[], context=made, signal_handler_options=SignalHandlerOptions.NO)
    yield made
    rclpy.shutdown(context=made)


@pytest.fixture
def make(context, monkeypatch):
    # A process full of other tests' objects takes long to look through.
    monkeypatch.setattr(managed, "free_memory", lambda: None)
    nodes = []

    def make(**options):
        nodes.append(Recorder(context, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.pause.set()
        node.raising.clear()
        node.close()
        node.destroy_node()


def until(done, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def walk_of_all(names: tuple[str, ...], length: int) -> list[str]:
    """A walk in which every sequence of ``length`` names occurs (de Bruijn's, by greedily preferring the last)."""
    walk = [names[0]] * length
    seen = {tuple(walk)}
    while True:
        for name in reversed(names):
            word = (*walk[len(walk) - length + 1 :], name)
            if word not in seen:
                seen.add(word)
                walk.append(name)
                break
        else:
            assert len(seen) == len(names) ** length
            return walk


def test_transitions_in_every_order(make):
    node, state = make(), "unconfigured"
    for name in walk_of_all(NAMES[:-1], 4):
        before = len(node.calls)
        after, hooks = TABLE.get((state, name), (state, []))
        assert node.change(name) == ((state, name) in TABLE)
        assert (node.state, node.calls[before:]) == (after, hooks)
        assert node.active == (after == "active")
        state = after
    assert node.calls.count("begin") > 10


@pytest.mark.parametrize(
    ("state", "ways"), [("unconfigured", []), ("inactive", ["configure"]), ("active", ["configure", "activate"])]
)
def test_a_shutdown_ends_what_there_is_and_nothing_is_possible_after_it(make, state, ways):
    node = make()
    assert all(node.change(name) for name in ways) and node.state == state
    node.calls.clear()
    assert node.change("shutdown")
    assert node.state == "finalized" and not node.active
    assert node.calls == TABLE[state, "shutdown"][1]
    assert "shut down" in node.reason
    assert not any(node.change(name) for name in NAMES)


@pytest.mark.parametrize("state", ["unconfigured", "inactive", "active", "finalized"])
def test_the_end_of_the_process_ends_what_is_active(make, state):
    node = make()
    ways = {"inactive": ["configure"], "active": ["configure", "activate"], "finalized": ["shutdown"]}
    assert all(node.change(name) for name in ways.get(state, []))
    node.calls.clear()
    node.close()
    assert node.calls == (["end"] if state == "active" else []) + ["give_back"]


def test_what_a_hook_raises_is_the_reason(make):
    node = make()
    node.raising = {"load": ValueError("No such model.")}
    assert not node.change("configure")
    assert (node.state, node.reason) == ("unconfigured", "No such model.")
    assert node.calls == ["load", "unload"]
    node.raising = {"begin": LinkClosed("Nobody there.")}
    assert node.change("configure") and not node.change("activate")
    assert (node.state, node.reason, node.active) == ("inactive", "Nobody there.", False)
    node.raising = {"end": RuntimeError("The robot did not acknowledge the stop.")}
    assert node.change("activate") and not node.change("deactivate")
    assert (node.state, node.active) == ("unconfigured", False)  # by way of the error
    assert node.calls[-2:] == ["end", "unload"]
    node.raising = {"begin": ZeroDivisionError()}  # a defect, under somebody's eyes: told, and no end
    assert node.change("configure") and not node.change("activate")
    assert "ZeroDivisionError" in node.reason and node.failure is None
    node.raising.clear()
    assert node.change("activate") and node.active


def test_autostart_goes_on_until_it_works(make, context):
    node = make(autostart=True)
    until(lambda: node.active)
    late = make()
    late.raising = {"begin": LinkClosed("Nobody there.")}
    threading.Thread(target=late._start, daemon=True).start()
    until(lambda: late.calls.count("begin") >= 2)
    assert late.calls[0] == "load" and late.calls.count("load") == 1
    late.raising.clear()
    until(lambda: late.active)


def test_an_autostart_under_way_ends_before_its_node(context, monkeypatch):
    monkeypatch.setattr(managed, "_CLOSE_PATIENCE_S", 0.01)
    node = Recorder(context, autostart=True, paused=True)
    until(lambda: node.calls == ["load"])
    node.close()  # has no time to wait for the model
    threading.Timer(0.1, node.pause.set).start()
    node.destroy_node()
    assert node.calls == ["load", "give_back"]
    assert not any(thread.name == "autostart" for thread in threading.enumerate())


def test_autostart_gives_up_what_cannot_be_loaded_and_what_is_a_defect(make):
    node = make()
    node.raising = {"load": ValueError("No such model.")}
    node._start()
    assert (node.failure, node.exit_code) == ("No such model.", EXIT_BAD_START)
    defect = make()
    defect.raising = {"begin": KeyError("x")}
    defect._start()
    assert "KeyError('x')" in defect.failure and defect.exit_code not in (0, EXIT_BAD_START)


def test_a_transition_by_hand_ends_autostart(make):
    node = make()
    node.raising = {"begin": LinkClosed("Nobody there.")}
    thread = threading.Thread(target=node._start, daemon=True)
    thread.start()
    until(lambda: "begin" in node.calls)
    until(lambda: node.change("cleanup"))
    thread.join(30.0)
    assert not thread.is_alive() and node.state == "unconfigured"


def test_the_service_answers_what_is_refused_and_stays_in_reach_meanwhile(make, context):
    node = make()
    client_node = rclpy.create_node("client", context=context)
    executor = MultiThreadedExecutor(num_threads=3, context=context)
    executor.add_node(node)
    executor.add_node(client_node)
    thread = threading.Thread(target=executor.spin, daemon=True)
    thread.start()
    client = client_node.create_client(ChangeState, "recorder/change_state")

    def ask(name: str):
        request = ChangeState.Request(transition=Transition(id=IDS[name]))
        return client.call_async(request)

    try:
        assert client.wait_for_service(60.0)
        refused = ask("activate")
        until(refused.done)
        assert not refused.result().success
        node.pause.clear()
        slow, behind = ask("configure"), None
        until(lambda: node.calls == ["load"])
        behind = ask("activate")  # waits for its turn
        assert not slow.done() and not behind.done()
        node.pause.set()
        until(lambda: slow.done() and behind.done())
        assert slow.result().success and behind.result().success
        assert node.calls == ["load", "begin"] and node.overlapping == 0
    finally:
        node.pause.set()
        executor.shutdown(timeout_sec=1.0)
        thread.join(5.0)
        client_node.destroy_node()


def test_rclpys_own_triggers_refuse_as_ever(make):
    with pytest.raises(RCLError):
        make().trigger_activate()
