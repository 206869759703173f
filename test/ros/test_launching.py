"""The launch files with the real `launch`, where installed: there is no wheel, so this runs only on ROS 2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsd_ros.ros import launching
from dsd_ros.ros.bringup import SYSTEMS, arguments_of, launch_file, plan, values_of

RUNNING = SimpleNamespace(is_shutdown=False)
SETTINGS = {
    "demo": [{}, {"robot": "go2-standin", "transport": "websocket"}, {"memory": "auto", "rviz": "true"}],
    "robot": [{}, {"view": "true", "visual": "true"}, {"namespace": "go2_1", "record": "/bag", "visual": "true"}],
    "verifier": [{}, {"namespace": "go2_1", "domain": "7"}],
}


@pytest.fixture
def launch():
    pytest.importorskip("launch_ros")
    import launch.launch_description_sources

    return launch


def describe(launch, system):
    path = str(launch_file(system))
    return launch.launch_description_sources.get_launch_description_from_python_launch_file(path)


def visited(entity, context):
    """Every process that a description starts, as launch visits it."""
    from launch_ros.actions import Node

    import launch

    condition = getattr(entity, "condition", None)
    if condition is not None and not condition.evaluate(context):
        return
    if isinstance(entity, launch.actions.ExecuteProcess):
        name = entity.node_executable if isinstance(entity, Node) else entity.cmd[3]
        yield launch.utilities.perform_substitutions(context, launch.utilities.normalize_to_list_of_substitutions(name))
        return
    for child in (entity.entities if hasattr(entity, "entities") else entity.visit(context)) or ():
        yield from visited(child, context)


@pytest.mark.parametrize(("system", "given"), [(system, given) for system in SYSTEMS for given in SETTINGS[system]])
def test_launch_starts_what_the_process_runner_starts(launch, system, given):
    context = launch.LaunchContext()
    context.launch_configurations.update(given)
    started = list(visited(describe(launch, system), context))
    assert started == [start.name for start in plan(system, given)]
    values = values_of(system, given)
    assert {name: context.launch_configurations[name] for name in values} == values
    assert context.environment.get("ROS_DOMAIN_ID") == given.get("domain", context.environment.get("ROS_DOMAIN_ID"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_launch_has_the_same_arguments(launch, system):
    found = {argument.name: argument for argument in describe(launch, system).get_launch_arguments()}
    known = arguments_of(system)
    given_by_an_include = {"driver"} if system == "demo" else set()
    assert {argument.name for argument in known} == found.keys() - given_by_an_include
    for argument in known:
        real = found[argument.name]
        assert real.description.startswith(argument.help) and tuple(real.choices or ()) == argument.choices


def test_crashes_are_forgiven_as_often_as_by_the_process_runner(launch):
    options = launching.restarted()
    assert options["respawn"] and options["respawn_delay"] > 0.0

    def ended(code):
        return SimpleNamespace(returncode=code, process_name="draft_node-1")

    ends = [options["on_exit"](ended(-9), RUNNING) for _ in range(6)]
    assert ends[:5] == [None] * 5 and isinstance(ends[5], launch.actions.Shutdown)
    for code in (0, 2):
        assert isinstance(launching.restarted()["on_exit"](ended(code), RUNNING), launch.actions.Shutdown)
    assert launching.restarted()["on_exit"](ended(0), SimpleNamespace(is_shutdown=True)) is None
