# SPDX-License-Identifier: Apache-2.0
"""Parameters of real nodes: which are refused, which are only warned of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rclpy
import yaml
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions

from dsd_ros.bringup.processes import ProcessGroup
from dsd_ros.bringup.systems import plan, ros_arguments
from dsd_ros.ros.running import RunnableNode
from dsd_ros.ros.settings import NODES, ManagedSettings, specs

Make = Callable[..., Any]


@pytest.fixture
def make(ros_domain: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Makes a node with command-line words, as in a process of its own; unconfigured if it is a lifecycle node."""
    made: list[RunnableNode] = []

    def begin(name: str, *words: str) -> RunnableNode:
        own = [f"{name}:autostart:=false"] if issubclass(NODES[name], ManagedSettings) else []
        if name == "record_node":
            own = [f"{name}:directory:={tmp_path / 'bag'}"]
        monkeypatch.setattr(sys, "argv", [name, "--ros-args", *(word for each in own for word in ("-p", each)), *words])
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        module = importlib.import_module(f"dsd_ros.nodes.{name}")
        kind = getattr(module, "".join(part.capitalize() for part in name.split("_")))
        made.append(kind())
        return made[-1]

    yield begin
    for node in made:
        node.close()
        for each in (*node.guests, node):
            each.destroy_node()
    if rclpy.ok():
        rclpy.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """Writes a parameter file: section -> parameters."""

    def write(sections: dict[str, Any]) -> str:
        path = tmp_path / "params.yaml"
        path.write_text(yaml.safe_dump({name: {"ros__parameters": given} for name, given in sections.items()}))
        return str(path)

    return write


@pytest.mark.parametrize("name", ["supervisor_node", "draft_node", "view_node"])
def test_parameters_for_other_nodes_are_warned_of(make, file, capfd, name):
    path = file({"/**": {"fleet": {"size": 3}}, "controller_server": {"odom_topic": "odom"}, "/**/other": {"x": 1}})
    node = make(name, "--params-file", path, "-p", "inflation:=0.3")
    warned = [line for line in capfd.readouterr().err.splitlines() if "has no parameter" in line]
    sentence = "has no parameter 'fleet.size', 'inflation': ignored."
    assert sorted(line.partition(": ")[2] for line in warned) == sorted(
        f"The node '{each.get_name()}' {sentence}" for each in (node, *node.guests)
    )


def test_a_warning_names_the_nearest_parameter(make, capfd):
    make("supervisor_node", "-p", "require.imuu:=false", "-p", "speed:=0.3")
    warned = capfd.readouterr().err
    assert "parameter 'require.imuu' (did you mean 'require.imu'?), 'speed' (did you mean 'limit.speed'?): ig" in warned


MINE = """
/**:
  ros__parameters: {use_sim_time: true, limit: {battery: 0.11}}
supervisor_node:
  ros__parameters: {limit: {tilt: 0.3, speed: 0.2}, fallback: draft_only}
/go2_1/supervisor_node:
  ros__parameters: {limit: {tilt: 0.4}}
controller_server:
  ros__parameters: {fallback: return}
"""


@pytest.mark.parametrize("namespace", ["", "go2_1"])
def test_what_is_given_overrides_the_users_file_and_that_the_nodes_own(make, tmp_path, namespace):
    """rcl keeps this order since the file of what is given names the node in full."""
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    given = {"params_file": str(path), "speed": "0.4", "namespace": namespace, "stack": "go2_ros2_sdk"}
    (start,) = (each for each in plan("robot", given) if each.name == "supervisor_node")
    group = ProcessGroup()
    files = [*start.parameter_files, *group._parameter_file(start)]
    node = make(
        start.name, *ros_arguments(start)[2:], *(word for file in files for word in ("--params-file", str(file)))
    )
    group.close()
    found = node._settings
    assert node.get_fully_qualified_name() == start.full_name
    assert node.get_parameter("use_sim_time").value is True and found.limit.battery == 0.11
    assert found.limit.speed == 0.4  # given
    assert (found.limit.tilt, found.fallback) == ((0.4, "stop") if namespace else (0.3, "draft_only"))
    assert found.require.imu is False  # the stack's file


def test_a_change_that_waits_for_the_next_configure(make):
    node = make("bridge_node")
    url = node._settings.url
    node.trigger_configure()
    (result,) = node.set_parameters([Parameter("url", value="ws://127.0.0.1:1")])
    assert result.successful and node.get_parameter("url").value == "ws://127.0.0.1:1"
    assert node._settings.url == url
    node.trigger_cleanup()
    node.trigger_configure()
    assert node._settings.url == "ws://127.0.0.1:1"
    # What the settings refuse does not wait: the sentence comes at once.
    (result,) = node.set_parameters([Parameter("url", value="http://127.0.0.1:1")])
    assert not result.successful and "url" in result.reason and "use ws://host:port" in result.reason
    assert node.get_parameter("url").value == "ws://127.0.0.1:1"


def test_several_parameters_change_together_or_not_at_all(make):
    node = make("supervisor_node")
    good, bad = Parameter("limit.speed", value=0.7), Parameter("limit.tilt", value=500.0)
    result = node.set_parameters_atomically([good, bad])
    assert not result.successful and "limit.tilt" in result.reason
    assert node.get_parameter("limit.speed").value == 0.5
    assert node.set_parameters_atomically([good, Parameter("limit.tilt", value=1.0)]).successful
    assert (node._settings.limit.speed, node._settings.limit.tilt) == (0.7, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "fast", None, True])
def test_a_value_that_is_none_is_refused(make, value):
    node = make("supervisor_node")
    (result,) = node.set_parameters([Parameter("limit.speed", value=value)])
    assert not result.successful and result.reason
    assert node.get_parameter("limit.speed").value == node._settings.limit.speed == 0.5


@pytest.mark.parametrize("name", NODES)
def test_every_live_parameter_is_a_parameter(name):
    names = [spec.name for spec in specs(NODES[name])]
    for live in (*getattr(NODES[name], "live", ()), *getattr(NODES[name], "fixed", ())):
        assert any(f"{each}.".startswith(f"{live}.") for each in names), live


def hidden(node: Any) -> list[str]:
    return sorted(name for name in node.get_node_names() if name.startswith("_"))


@pytest.mark.parametrize("name", ["draft_node", "memory_node"])
def test_companion_nodes_are_hidden_and_follow_their_owner(make, name):
    """`ros2 node list` leaves out names with a leading underscore."""
    node = make(
        name, "-r", "__node:=guard", "-r", "__ns:=/go2_1", "-p", "use_sim_time:=true", "-p", "autostart:=false",
        "-r", "odom:=odometry",
    )  # fmt: skip
    companions = hidden(node)
    assert companions and all(each.startswith("_guard_") for each in companions)
    assert set(node.get_node_names()) == {"guard", *companions}
    for each in companions:
        assert node.get_service_names_and_types_by_node(each, "/go2_1") == []
        assert all(
            topic.startswith("/go2_1/") or topic == "/parameter_events"
            for way in (node.get_publisher_names_and_types_by_node, node.get_subscriber_names_and_types_by_node)
            for topic, _ in way(each, "/go2_1")
        )
    if name == "memory_node":
        assert node.count_subscribers("/go2_1/odometry") == 1
