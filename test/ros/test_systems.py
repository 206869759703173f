# SPDX-License-Identifier: Apache-2.0
"""The table of the systems: arguments, and the nodes and parameters that follow from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsd_ros.bringup import systems as bringup
from dsd_ros.bringup.systems import SETS, SYSTEMS, arguments_of, plan, ros_arguments
from dsd_ros.paths import config_directory, share_directory
from dsd_ros.ros import entry as entries
from dsd_ros.ros.settings import NODES, ManagedSettings, parameter


def names(system: str, **overrides: str) -> list[str]:
    return [start.name for start in plan(system, overrides)]


def start_of(system: str, name: str, **overrides: str) -> bringup.Start:
    return next(start for start in plan(system, overrides) if start.name == name)


@pytest.mark.parametrize("node", NODES)
def test_every_argument_sets_a_parameter_of_its_type(node):
    written = yaml.safe_load(bringup.Start(node).parameter_files[0].read_text())[f"/**/{node}"]["ros__parameters"]
    arguments = {each.name: each for system in SYSTEMS for each in arguments_of(system)}
    for name, argument in SETS[node].items():
        spec, default = parameter(node, name), arguments[argument].default
        assert not default or type(spec.read(default)) is spec.kind
        assert set(arguments[argument].choices) <= {"", *spec.choices, *bringup.SWITCH}
        place = written
        for part in name.split("."):
            place = place[part]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_argument_is_used_and_has_its_default_among_its_choices(system):
    used = {argument for sets in SETS.values() for argument in sets.values()}
    source = Path(bringup.__file__).read_text()
    for argument in arguments_of(system):
        assert argument.help and argument.name.isidentifier()
        assert not argument.choices or argument.default in argument.choices
        assert argument.name in used or f'values["{argument.name}"]' in source or f'"{argument.name}",' in source
    assert len({argument.name for argument in arguments_of(system)}) == len(arguments_of(system))


@pytest.mark.parametrize("node", NODES)
def test_every_node_can_be_run(node):
    setup = (share_directory() / "setup.py").read_text()
    assert bringup.Start(node).parameter_files[0].is_file()
    assert f'"{node.removesuffix("_node")}"' in setup
    assert callable(getattr(entries, node))


def test_the_plan_follows_the_arguments():
    dds = plan("demo", {"seed": "7", "mode": "ar"})
    assert [start.name for start in dds] == [
        "simulator_node", "supervisor_node", "navigation_node", "draft_node", "verifier_node",
    ]  # fmt: skip
    assert dds[0].parameters["seed"] == 7 and "decode.temperature" not in dds[3].parameters
    assert dds[3].parameters["decode.mode"] == "ar"
    websocket = names("demo", transport="websocket")
    assert "bridge_node" in websocket and "verifier_node" not in websocket and websocket[-1] == "verifier"


def test_views_are_started_where_they_are_wanted():
    assert not {*names("robot")} & {"visual_node", "view_node"}
    assert "visual_node" in names("robot", rviz="true") and "visual_node" in names("robot", visual="True")
    view = start_of("demo", "view_node", view="true", view_bind="127.0.0.1", view_open="false")
    assert view.optional  # a viewer must not stop the robot
    assert view.parameters == {"bind": "127.0.0.1", "open_browser": False}


def test_rviz_follows_the_robots_namespace():
    rviz = start_of("robot", "rviz2", rviz="true", namespace="go2_1")
    assert rviz.command[:2] == ("rviz2", "-d") and rviz.command[2].endswith("config/dsd.rviz")
    assert "__ns:=/go2_1" in rviz.command and "/tf_static:=tf_static" in rviz.command
    assert rviz.optional and "rviz2" not in names("robot")
    plain = start_of("robot", "rviz2", rviz="true", rviz_config="/my.rviz", use_sim_time="true").command
    assert plain[:4] == ("rviz2", "-d", "/my.rviz", "--ros-args") and plain[-1] == "use_sim_time:=true"


def test_arguments_reach_the_nodes_that_they_are_for():
    assert start_of("demo", "simulator_node", frame_prefix="go2_1/").parameters["frame_prefix"] == "go2_1/"
    draft = start_of("demo", "draft_node", constrain="grammar", grammar="navila", prompt="navila").parameters
    assert (draft["constrain"], draft["grammar"], draft["model.prompt"]) == ("grammar", "navila", "navila")


def test_a_namespace_parts_robots():
    for start in plan("robot", {"namespace": "/go2_1"}):
        words = ros_arguments(start)
        assert "__ns:=/go2_1" in words and "/tf:=tf" in words and start.full_name == f"/go2_1/{start.name}"
    for start in plan("robot"):
        assert "__ns:=" not in "".join(ros_arguments(start)) and start.full_name == f"/{start.name}"


def test_a_bag_is_recorded_where_one_is_named():
    assert "record_node" not in names("robot")
    start = start_of("robot", "record_node", record="/data/monday")
    assert start.parameters == {"directory": "/data/monday"} and start.optional


def test_the_go2s_driver_belongs_to_the_robot():
    assert "go2_node" not in names("demo")
    assert "go2_node" in names("robot") and "go2_node" not in names("robot", driver="none")


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("moon", {}, "no system 'moon'; known are demo, robot, verifier"),
        ("demo", {"sede": "1"}, "no argument 'sede'"),
        ("demo", {"driver": "none"}, "no argument 'driver'"),
        ("demo", {"transport": "pigeon"}, "'pigeon' is no transport"),
        ("robot", {"mode": "telepathy"}, "'telepathy' is no mode; choose from stream, ar, dsd"),
    ],
)
def test_what_the_table_does_not_have_is_refused(name, overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(name, overrides)


def test_the_verifier_program_is_given_its_arguments():
    command = start_of("demo", "verifier", transport="websocket", verifier_port="0", target_model="/m").command
    assert Path(command[0]).name == "dsd" and command[1] == "verifier"
    assert command[command.index("--port") + 1] == "0" and command[command.index("--model") + 1] == "/m"


@pytest.mark.parametrize(
    "module",
    ["nodes.navigation_node", "nodes.supervisor_node", "nodes.simulator_node", "nodes.bridge_node", "cli.demo_run"],
)
def test_nodes_without_a_model_do_not_load_torch(module):
    program = f"import sys, dsd_ros.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_reading_the_systems_loads_nothing_of_ros_or_pip():
    """`ros2 launch` reads the launch files in the system's Python, which lacks all that pip brings."""
    program = (
        "import sys; from dsd_ros.bringup.systems import plan; plan('demo'); plan('robot'); plan('verifier');"
        "print(*{'torch', 'rclpy', 'launch', 'msgspec', 'cachetools', 'websockets', 'cyclopts'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result


def file_with(folder, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_only_what_is_given_overrides_the_parameter_files(tmp_path):
    file = file_with(tmp_path, "navigation_node: {ros__parameters: {motion.speed: 0.3}}")
    plain = start_of("robot", "navigation_node", params_file=file)
    assert plain.parameter_files == (config_directory() / "navigation.yaml", Path(file))
    assert plain.parameters == {"memory.when": "never"}
    assert start_of("robot", "navigation_node", params_file=file, speed="0.4").parameters["motion.speed"] == 0.4
    with pytest.raises(ValueError, match="params_file:=/no/file is no file; give the path"):
        plan("robot", {"params_file": "/no/file"})


def test_a_clock_and_autostart_are_for_every_node():
    for start in plan("robot", {"use_sim_time": "True", "autostart": "false", "view": "true", "visual": "true"}):
        assert start.parameters["use_sim_time"] is True
        assert start.parameters.get("autostart", False) is False
        assert ("autostart" in start.parameters) == issubclass(NODES[start.name], ManagedSettings)


def test_log_level_and_use_respawn_reach_every_node():
    starts = plan("robot", {"log_level": "debug", "use_respawn": "False"})
    assert all(ros_arguments(start)[:2] == ["--log-level", "debug"] and not start.respawn for start in starts)


def test_nav2_as_the_executor_may_command(tmp_path):
    assert start_of("robot", "navigation_node", executor="nav2").parameters["executor"] == "nav2"
    mine = file_with(tmp_path, "supervisor_node:\n  ros__parameters: {require: {commands: mine}}")
    found = start_of("robot", "supervisor_node", executor="nav2", params_file=mine, stack="go2_ros2_sdk").files
    assert [file.name for file in found] == ["nav2.yaml", "go2_ros2_sdk.yaml", "mine.yaml"]  # each over those before
    assert not start_of("robot", "supervisor_node").files


def flat(tree: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("stack", sorted(bringup.STACKS.keys() - {"none"}))
def test_the_preset_of_a_stack_sets_what_nodes_have(stack):
    file = config_directory() / "stacks" / f"{stack}.yaml"
    for pattern, section in yaml.safe_load(file.read_text()).items():
        for name, value in flat(section["ros__parameters"]).items():
            assert parameter(pattern.removeprefix("/**/"), name).allows(value), name
    for start in plan("robot", {"stack": stack}):
        assert start.files == (file,)
        assert start.remappings[: len(bringup.STACKS[stack])] == bringup.STACKS[stack]


def test_beside_nav2_the_supervisors_commands_have_a_name_of_their_own():
    """Jazzy's docking_server publishes cmd_vel, and would be a stranger there."""
    for start in plan("robot", {"executor": "nav2"}):
        assert ("cmd_vel", "cmd_vel_out") in start.remappings
    assert "cmd_vel:=cmd_vel_out" not in ros_arguments(start_of("robot", "supervisor_node"))


def test_a_stack_with_a_driver_of_its_own_needs_none_of_ours():
    assert "go2_node" not in names("robot", stack="go2_ros2_sdk") and "go2_node" in names("robot", stack="unitree_ros2")
    words = ros_arguments(start_of("robot", "supervisor_node", stack="go2_ros2_sdk"))
    assert "cmd_vel:=cmd_vel_out" in words and "cmd_vel_joy:=cmd_vel" in words
