# SPDX-License-Identifier: Apache-2.0
"""The systems that the launch files describe, read as the process runner reads them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsd_ros.paths import config_directory, share_directory
from dsd_ros.ros import bringup, entry as entries, launch_standin
from dsd_ros.ros.bringup import SYSTEMS, arguments_of, launch_file, plan, set_by_arguments
from dsd_ros.ros.launching import SWITCH
from dsd_ros.ros.settings import NODES, merged, parameter, write_parameters


def names(system: str, **overrides: str) -> list[str]:
    return [start.name for start in plan(system, overrides)]


def start_of(system: str, name: str, **overrides: str) -> bringup.Start:
    return next(start for start in plan(system, overrides) if start.name == name)


def nodes_of(system: str) -> set[str]:
    found = bringup._entities(launch_file(system))
    return {e.executable for e in found if isinstance(e, launch_standin.Node) and e.package == "dsd_ros"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_argument_sets_a_parameter_of_its_type(system):
    known = {argument.name: argument for argument in arguments_of(system)}
    for argument in known.values():
        assert argument.help and argument.name.isidentifier()
        assert not argument.choices or argument.default in argument.choices
    for node in nodes_of(system):
        file = bringup.Start(node).parameter_files[0]
        written = yaml.safe_load(file.read_text())[f"/**/{node}"]["ros__parameters"]
        for name, argument in set_by_arguments(system, node).items():
            spec = parameter(node, name)
            assert type(spec.read(known[argument].default)) is spec.kind
            assert set(known[argument].choices) <= {*spec.choices, *SWITCH}
            place = written
            for part in name.split("."):
                place = place[part]


def used_in(value: object) -> set[str]:
    """The launch configurations anywhere in an entity."""
    if isinstance(value, launch_standin.LaunchConfiguration):
        return {value.name}
    if isinstance(value, launch_standin.Substitution):  # a node's parameters
        return set(value.arguments.values()) | set().union(*map(used_in, value.given.values()))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name) for name in value.__dataclass_fields__]
    return set().union(*map(used_in, parts)) if parts else set()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_argument_is_used(system):
    used = set().union(*map(used_in, bringup._entities(launch_file(system))))
    used |= {"params_file", "use_sim_time", "end_scope"}  # read by functions; each has a test of its own
    assert {argument.name for argument in arguments_of(system)} <= used


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_launch_file_can_be_read(system):
    text = launch_file(system).read_text()
    assert len(text.splitlines()) <= 120
    for node in nodes_of(system):
        assert f'node("{node}"' in text or 'with_name("robot.launch.py")' in text
    assert bringup.about(system)


def test_no_launch_file_without_a_system():
    found = {path.name for path in (share_directory() / "launch").glob("*.launch.py")}
    assert found == {f"{name}.launch.py" for name in SYSTEMS}


def test_reading_removes_its_stand_ins():
    launch_standin.read.cache_clear()
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("launch", "launch_ros")}
    plan("demo")
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("launch", "launch_ros")}
    assert after == before


def test_what_the_stand_in_does_not_know_is_an_error():
    with pytest.raises(TypeError, match="sigterm_timeout"):
        launch_standin.Node(package="p", executable="e", sigterm_timeout="5")


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
    assert dds[0].parameters["seed"] == 7
    assert dds[3].parameters["decode.mode"] == "ar"
    websocket = names("demo", transport="websocket")
    assert "bridge_node" in websocket and "verifier_node" not in websocket and websocket[-1] == "verifier"


def test_views_are_started_where_they_are_wanted():
    assert not {*names("robot")} & {"visual_node", "view_node"}
    assert "visual_node" in names("robot", rviz="true") and "visual_node" in names("robot", visual="true")
    view = start_of("demo", "view_node", view="true", view_bind="127.0.0.1", view_open="false")
    assert view.optional  # a viewer must not stop the robot
    assert view.parameters == {"bind": "127.0.0.1", "open_browser": False, "visual": "false"}


@pytest.mark.parametrize("switch", ["visual", "rviz"])
def test_both_views_share_a_process(switch):
    view = start_of("robot", "view_node", view="true", **{switch: "true"})
    assert view.parameters["visual"] == "true"
    assert [file.name for file in view.parameter_files] == ["view.yaml", "visual.yaml"]
    assert "visual_node" not in names("robot", view="true", **{switch: "true"})
    alone = start_of("robot", "visual_node", **{switch: "true"})
    assert [file.name for file in alone.parameter_files] == ["visual.yaml"]


def test_rviz_follows_the_robots_namespace():
    rviz = start_of("robot", "rviz2", rviz="true", namespace="go2_1")
    assert rviz.command[:2] == ("rviz2", "-d") and rviz.command[2].endswith("config/dsd.rviz")
    assert "__ns:=/go2_1" in rviz.command and "/tf_static:=tf_static" in rviz.command
    assert rviz.optional and "rviz2" not in names("robot")
    plain = start_of("robot", "rviz2", rviz="true", rviz_config="/my.rviz", use_sim_time="true").command
    assert plain == ("rviz2", "-d", "/my.rviz", "--ros-args", "-p", "use_sim_time:=true")


def test_robot_state_publisher_gets_what_the_driver_would_publish(tmp_path, monkeypatch):
    assert "robot_state_publisher" not in names("robot")
    assert "publish_description" not in start_of("robot", "go2_node").parameters  # the parameter files decide
    file = tmp_path / "params.yaml"
    own = tmp_path / "own.urdf"
    links = "".join(f'<link name="{name}"/>' for name in ("trunk", "imu_link", "front_camera_optical_frame"))
    own.write_text(f'<robot name="r">{links}</robot>')
    file.write_text("go2_node: {ros__parameters: {base_frame: trunk}}")
    wanted = {"use_robot_state_pub": "true", "params_file": str(file), "frame_prefix": "go2_1/"}
    given = wanted | {"description": str(own), "namespace": "go2_1"}
    assert start_of("robot", "go2_node", **given).parameters["publish_description"] == "false"
    assert "robot_state_publisher" not in names("robot", driver="none", **wanted)
    path = tmp_path / "lib/robot_state_publisher/robot_state_publisher"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setenv("AMENT_PREFIX_PATH", f"/nowhere:{tmp_path}")
    command = start_of("robot", "robot_state_publisher", **given).command
    assert command[0] == str(path) and "__ns:=/go2_1" in command and "/tf_static:=tf_static" in command
    told = dict(word.split(":=", 1) for flag, word in itertools.pairwise(command) if flag == "-p")
    assert yaml.safe_load(told["frame_prefix"]) == "go2_1/"
    assert yaml.safe_load(told["robot_description"]) == own.read_text()


def test_arguments_reach_the_nodes_that_they_are_for():
    assert start_of("demo", "simulator_node", frame_prefix="go2_1/").parameters["frame_prefix"] == "go2_1/"
    draft = start_of("demo", "draft_node", constrain="grammar", grammar="navila", prompt="navila").parameters
    assert (draft["constrain"], draft["grammar"], draft["model.prompt"]) == ("grammar", "navila", "navila")


def test_a_namespace_parts_robots_and_a_domain_parts_networks():
    for start in plan("robot", {"namespace": "go2_1", "domain": "7"}):
        assert start.arguments[:2] == ["-r", "__ns:=/go2_1"] and "/tf:=tf" in start.arguments
        assert start.environment["ROS_DOMAIN_ID"] == "7"
    for start in plan("robot"):
        assert start.arguments == ["--log-level", "info"] and "ROS_DOMAIN_ID" not in start.environment


def test_a_bag_is_recorded_where_one_is_named():
    assert "record_node" not in names("robot")
    start = start_of("robot", "record_node", record="/data/monday")
    assert start.parameters == {"directory": "/data/monday"} and start.optional


@pytest.mark.parametrize(
    ("argument", "value"), [("namespace", "go2 1"), ("namespace", "1"), ("domain", "233"), ("domain", "-1")]
)
def test_a_namespace_or_domain_that_is_none_is_refused(argument, value):
    with pytest.raises(ValueError, match=f"'{value}' is no .*{argument}"):
        plan("robot", {argument: value})


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
        "import sys; from dsd_ros.ros.bringup import plan; plan('demo'); plan('robot'); plan('verifier');"
        "print(*{'torch', 'rclpy', 'launch', 'msgspec', 'cachetools', 'websockets', 'cyclopts'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result


def file_with(folder, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def settled(start: bringup.Start) -> dict:
    """The parameters that a process gets, as its runner merges them."""
    found, foreign = merged(start.name, start.namespace, [*(start.layers or start.parameter_files), start.parameters])
    return found | foreign


MINE = """
/**:
  ros__parameters: {use_sim_time: true, foreign: 3}
navigation_node:
  ros__parameters:
    motion: {speed: 0.3}
    run.max_steps: 7
/go2_2/navigation_node:
  ros__parameters: {motion.turn_rate: 0.2}
controller_server:
  ros__parameters: {run.time_limit_s: 1.0}
go2_1:
  supervisor_node:
    ros__parameters: {require: {imu: false}}
"""


@pytest.mark.parametrize("namespace", ["", "go2_1"])
def test_a_parameter_file_overrides_the_defaults_and_what_is_given_overrides_it(tmp_path, namespace):
    given = {"params_file": file_with(tmp_path, MINE), "namespace": namespace}
    found = settled(start_of("robot", "navigation_node", **given))
    assert found["motion.speed"] == 0.3 and found["run.max_steps"] == 7 and found["use_sim_time"] is True
    assert found["run.time_limit_s"] == parameter("navigation_node", "run.time_limit_s").default
    assert found["motion.turn_rate"] == parameter("navigation_node", "motion.turn_rate").default
    start = start_of("robot", "navigation_node", **given)
    written = write_parameters([start.name], namespace, start.layers, start.parameters)
    assert yaml.safe_load(written.read_text())["/**"]["ros__parameters"] == {"use_sim_time": True, "foreign": 3}
    written.unlink()
    assert settled(start_of("robot", "navigation_node", speed="0.4", **given))["motion.speed"] == 0.4
    supervisor = settled(start_of("robot", "supervisor_node", **given))
    assert supervisor["require.imu"] is (namespace != "go2_1")
    assert supervisor["limit.speed"] == parameter("supervisor_node", "limit.speed").default


def test_a_systems_own_default_gives_way_to_a_parameter_file(tmp_path):
    assert settled(start_of("demo", "navigation_node"))["run.arrival_check"] == "service"
    mine = file_with(tmp_path, "/**/navigation_node:\n  ros__parameters: {run: {arrival_check: model}}")
    assert settled(start_of("demo", "navigation_node", params_file=mine))["run.arrival_check"] == "model"
    given = settled(start_of("demo", "navigation_node", params_file=mine, arrival_check="service"))
    assert given["run.arrival_check"] == "service"


def test_a_clock_and_autostart_are_for_every_node():
    starts = plan("robot", {"use_sim_time": "True", "autostart": "false", "view": "true", "visual": "true"})
    for start in starts:
        assert settled(start)["use_sim_time"] is True
        assert settled(start).get("autostart", False) is False
    view = next(start for start in starts if start.name == "view_node")
    written = write_parameters([view.name, *view.guests], "", view.layers, view.parameters)
    sections = yaml.safe_load(written.read_text())
    written.unlink()
    assert sections["/**/visual_node"]["ros__parameters"]["use_sim_time"] is True


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "cannot be read: while parsing"),
        ("speed: 1", "has no section NODE: ros__parameters"),
        ("", "has no section"),
        ("- 1", "has no section"),
    ],
)
def test_a_file_that_is_no_parameter_file_is_refused(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=f"mine.yaml {sentence}"):
        settled(start_of("robot", "navigation_node", params_file=file_with(tmp_path, text)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"speed": "fast"}, "speed:=fast is not allowed: speed .* takes a number from 0.05 to 1.5"),
        ({"speed": "9"}, "speed:=9 is not allowed"),
        ({"history": "1.5"}, "history:=1.5 is not allowed: history .* takes an integer from 0 to"),
        ({"params_file": "/no/file"}, "params_file:=/no/file is no file; give the path"),
        ({"verifier": "nowhere"}, "verifier: 'nowhere' is not a verifier address"),
        ({"log_level": "loud"}, "'loud' is no log_level"),
    ],
)
def test_a_wrong_value_names_its_argument(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan("robot", given)


def test_log_level_and_use_respawn_reach_every_node():
    starts = plan("robot", {"log_level": "debug", "use_respawn": "False"})
    assert all(start.arguments[-2:] == ["--log-level", "debug"] and not start.respawn for start in starts)


def test_nav2_as_the_executor_may_command(tmp_path):
    assert settled(start_of("robot", "supervisor_node"))["require.commands"] == "navigation_node"
    assert settled(start_of("robot", "navigation_node", executor="nav2"))["executor"] == "nav2"
    allowed = settled(start_of("robot", "supervisor_node", executor="nav2"))["require.commands"].split(",")
    assert allowed[0] == "navigation_node" and "collision_monitor" in allowed
    mine = file_with(tmp_path, "supervisor_node:\n  ros__parameters: {require: {commands: mine}}")
    given = {"executor": "nav2", "params_file": mine}
    assert settled(start_of("robot", "supervisor_node", **given))["require.commands"] == "mine"


@pytest.mark.parametrize("stack", sorted(bringup.STACKS.keys() - {"none"}))
def test_the_preset_of_a_stack_sets_what_nodes_have(stack):
    file = config_directory() / "stacks" / f"{stack}.yaml"
    sections = yaml.safe_load(file.read_text())
    for pattern in sections:
        node = pattern.removeprefix("/**/")
        found, foreign = merged(node, "", [file])
        assert found and not foreign
        for name, value in found.items():
            assert parameter(node, name).allows(value), name
    started = plan("robot", {"stack": stack})
    assert all(file in start.parameter_files for start in started)
    for start in started:
        assert start.remappings[: len(bringup.STACKS[stack])] == bringup.STACKS[stack]


def test_a_stack_with_a_driver_of_its_own_needs_none_of_ours():
    assert "go2_node" not in names("robot", stack="go2_ros2_sdk") and "go2_node" in names("robot", stack="unitree_ros2")
    supervisor = start_of("robot", "supervisor_node", stack="go2_ros2_sdk")
    assert "cmd_vel:=cmd_vel_out" in supervisor.arguments and "cmd_vel_joy:=cmd_vel" in supervisor.arguments
    found = settled(supervisor)
    assert found["require.imu"] is False and found["stop_speed"] == 0.001
