"""The bring-up table, and that launch files and process runner cannot drift from it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import yaml

from dsd_ros.paths import share_directory
from dsd_ros.ros import bringup
from dsd_ros.ros import entry as entries

SYSTEMS = list(bringup.SYSTEMS.values())
NAMES = [system.name for system in SYSTEMS]


@pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)
def test_every_argument_sets_a_parameter_that_a_file_has(system):
    for argument in system.arguments:
        assert argument.help and argument.name.isidentifier()
        if argument.choices:
            assert argument.default in argument.choices
        for target in argument.targets:
            node, _, parameter = target.partition(".")
            entry = next(entry for entry in system.nodes if entry.executable == node)
            content = yaml.safe_load(entry.parameter_file.read_text())
            value = content[f"/**/{node}"]["ros__parameters"]
            for part in parameter.split("."):
                value = value[part]


@pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)
def test_every_argument_is_used(system):
    chooses = {item.only_with[0] for item in (*system.nodes, *system.programs) if item.only_with}
    options = {name for program in system.programs for _, name in program.options}
    for argument in system.arguments:
        used = argument.targets or argument.environment or argument.name == "namespace"
        assert used or argument.name in chooses | options


@pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)
def test_each_system_has_a_launch_file_that_reads_the_table(system):
    path = share_directory() / "launch" / f"{system.name}.launch.py"
    tree = ast.parse(path.read_text(), str(path))
    compile(tree, str(path), "exec")
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.name == "generate_launch_description"
    assert ast.unparse(function.body[-1]) == f"return describe('{system.name}')"
    imported = {
        node.module: [name.name for name in node.names] for node in tree.body if isinstance(node, ast.ImportFrom)
    }
    assert imported["dsd_ros.ros.launching"] == ["describe"]


def test_no_launch_file_without_a_system():
    found = {path.name for path in (share_directory() / "launch").glob("*.launch.py")}
    assert found == {f"{name}.launch.py" for name in NAMES}


@pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)
def test_every_node_can_be_run(system):
    setup = (share_directory() / "setup.py").read_text()
    for entry in system.nodes:
        assert entry.parameter_file.is_file()
        assert f'"{entry.executable.removesuffix("_node")}"' in setup
        assert callable(getattr(entries, entry.executable))


def test_the_plan_follows_the_arguments():
    dds = bringup.plan("demo", {"seed": "7", "mode": "ar"})
    assert [start.entry.executable for start in dds] == [
        "simulator_node", "supervisor_node", "navigation_node", "draft_node", "verifier_node",
    ]  # fmt: skip
    assert dds[0].parameters["seed"] == "7"
    assert dds[3].parameters["decode.mode"] == "ar"
    websocket = bringup.plan("demo", {"transport": "websocket"})
    assert "bridge_node" in [start.entry.executable for start in websocket]
    assert "verifier_node" not in [start.entry.executable for start in websocket]


def test_views_are_started_where_they_are_wanted():
    def names(**overrides):
        return {start.entry.executable for start in bringup.plan("robot", overrides)}

    assert not names() & {"visual_node", "view_node"}
    assert "visual_node" in names(rviz="true") and "visual_node" in names(visual="true")
    view = next(s for s in bringup.plan("demo", {"view": "true"}) if s.entry.executable == "view_node")
    assert view.entry.optional  # who looks on must not stop the robot
    assert view.parameters == {"bind": "127.0.0.1", "open_browser": "false", "visual": "false"}


@pytest.mark.parametrize("switch", ["visual", "rviz"])
def test_both_views_share_a_process(switch):
    starts = bringup.plan("robot", {"view": "true", switch: "true"})
    assert [s.entry for s in starts if s.guests] == [bringup.VIEW]
    view = next(s for s in starts if s.entry is bringup.VIEW)
    assert view.guests == (bringup.VISUAL,) and view.parameters["visual"] == "true"
    assert bringup.VISUAL not in [s.entry for s in starts]
    alone = next(s for s in bringup.plan("robot", {switch: "true"}) if s.entry is bringup.VISUAL)
    assert alone.guests == ()


def test_rviz_follows_the_robots_namespace():
    system = bringup.SYSTEMS["robot"]
    values = bringup.values_of(system, {"rviz": "true", "namespace": "go2_1"})
    command = bringup.program_command(bringup.RVIZ, values)
    assert command[:2] == ["rviz2", "-d"] and command[2].endswith("config/dsd.rviz")
    assert "__ns:=/go2_1" in command and "/tf_static:=tf_static" in command
    assert bringup.RVIZ.wanted(values) and bringup.RVIZ.optional
    plain = bringup.program_command(bringup.RVIZ, bringup.values_of(system))
    assert len(plain) == 3 and not bringup.RVIZ.wanted(bringup.values_of(system))


def test_a_bag_is_recorded_where_one_is_named():
    assert "record_node" not in [start.entry.executable for start in bringup.plan("robot")]
    start = next(
        start for start in bringup.plan("robot", {"record": "/data/monday"}) if start.entry.executable == "record_node"
    )
    assert start.parameters == {"directory": "/data/monday"} and start.entry.optional


@pytest.mark.parametrize(
    ("argument", "value"), [("namespace", "go2 1"), ("namespace", "1"), ("domain", "233"), ("domain", "-1")]
)
def test_a_namespace_or_domain_that_is_none_is_refused(argument, value):
    with pytest.raises(ValueError, match=f"'{value}' is no .*{argument}"):
        bringup.plan("robot", {argument: value})


def test_the_go2s_driver_belongs_to_the_stand_in_and_to_the_robot():
    started = [start.entry.executable for start in bringup.plan("demo", {"robot": "go2-standin"})]
    assert started[:2] == ["go2_standin_node", "go2_node"] and "simulator_node" not in started
    assert "go2_node" in [start.entry.executable for start in bringup.plan("robot")]
    without = bringup.plan("robot", {"driver": "none"})
    assert "go2_node" not in [start.entry.executable for start in without]


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("moon", {}, "no system 'moon'; known are demo, robot, verifier"),
        ("demo", {"sede": "1"}, "no argument 'sede'"),
        ("demo", {"transport": "pigeon"}, "'pigeon' is no transport"),
        ("demo", {"robot": "cat"}, "'cat' is no robot"),
    ],
)
def test_what_the_table_does_not_have_is_refused(name, overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        bringup.plan(name, overrides)


def test_a_programs_empty_options_are_left_out():
    program = bringup.DEMO.programs[0]
    values = bringup.values_of(bringup.DEMO, {"verifier_port": "0"})
    assert bringup.program_command(program, values)[-2:] == ["--port", "0"]


@pytest.mark.parametrize(
    "module",
    ["nodes.navigation_node", "nodes.supervisor_node", "nodes.simulator_node", "nodes.bridge_node", "cli.demo_run"],
)
def test_nodes_without_a_model_do_not_load_torch(module):
    program = f"import sys, dsd_ros.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
