# SPDX-License-Identifier: Apache-2.0
"""The launch files with the real `launch`, where installed: there is no wheel, so this runs only on ROS 2."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsd_ros.ros import launching
from dsd_ros.ros.bringup import SYSTEMS, arguments_of, launch_file, plan, values_of

RUNNING = SimpleNamespace(is_shutdown=False)
SETTINGS = {
    "demo": [{}, {"transport": "websocket"}, {"memory": "auto", "rviz": "true"}],
    "robot": [
        {},
        {"view": "true", "visual": "true"},
        {"use_robot_state_pub": "true"},
        {"namespace": "go2_1", "record": "/bag", "visual": "true"},
        {"stack": "go2_ros2_sdk"},
    ],
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
        name = entity.node_executable if isinstance(entity, Node) else entity.cmd[1]
        yield launch.utilities.perform_substitutions(context, launch.utilities.normalize_to_list_of_substitutions(name))
        return
    for child in (entity.entities if hasattr(entity, "entities") else entity.visit(context)) or ():
        yield from visited(child, context)


@pytest.mark.parametrize(("system", "given"), [(system, given) for system in SYSTEMS for given in SETTINGS[system]])
def test_launch_starts_what_the_process_runner_starts(launch, system, given):
    context = launch.LaunchContext()
    context.launch_configurations.update(given)
    before, environment = dict(context.launch_configurations), dict(context.environment)
    started, values = [], {}
    for name in visited(describe(launch, system), context):
        started.append(name)
        values |= context.launch_configurations
        assert context.environment.get("ROS_DOMAIN_ID") == given.get("domain", environment.get("ROS_DOMAIN_ID"))
    assert started == [start.name for start in plan(system, given)]
    assert values.items() >= values_of(system, given).items()
    assert dict(context.launch_configurations) == before  # nothing is left for an including file
    assert dict(context.environment) == environment


@pytest.mark.parametrize("system", SYSTEMS)
def test_launch_has_the_same_arguments(launch, system):
    found = {argument.name: argument for argument in describe(launch, system).get_launch_arguments()}
    known = arguments_of(system)
    given_by_an_include = {"driver"} if system == "demo" else set()
    assert {argument.name for argument in known} == found.keys() - given_by_an_include
    for argument in known:
        real = found[argument.name]
        assert real.description.startswith(argument.help) and tuple(real.choices or ()) == argument.choices


@pytest.fixture
def group(launch):
    """Makes a group of processes: launch's event about the end of one of them."""
    made = []

    def make(name, respawn=True, ends_launch=False):
        launching._groups[name] = launching._Group(respawn, ends_launch)
        made.append(name)
        return lambda code: SimpleNamespace(
            returncode=code, process_name="draft_node-1", env={"DSD_LAUNCH_GROUP": name}
        )

    yield make
    for name in made:
        del launching._groups[name]


def test_crashes_are_forgiven_as_often_as_by_the_process_runner(launch, group):
    options, ended = launching.restarted(), group("one")
    assert options["respawn_delay"] > 0.0
    ends = [options["on_exit"](ended(-9), RUNNING) for _ in range(6)]
    assert ends[:5] == [None] * 5
    assert [type(action) for action in ends[5]] == [launch.actions.LogInfo, launch.actions.EmitEvent]
    for number, code in enumerate((0, 2)):
        ended = group(f"ends at once {number}")
        assert launching.restarted()["on_exit"](ended(code), RUNNING)
        assert launching.restarted()["on_exit"](ended(code), RUNNING) is None  # it ends already
    assert launching.restarted()["on_exit"](group("last")(0), SimpleNamespace(is_shutdown=True)) is None


def test_use_respawn_and_end_scope_decide_what_an_end_means(launch, group):
    assert launching.restarted()["on_exit"](group("no restarts", respawn=False)(-9), RUNNING)
    whole = launching.required()["on_exit"](group("all", ends_launch=True)(0), RUNNING)
    assert isinstance(whole, launch.actions.Shutdown)


FLEET = """
from launch import LaunchDescription
from launch.actions import GroupAction, OpaqueFunction, SetLaunchConfiguration
from dsd_ros.ros.launching import common_arguments, group, node, required, restarted

def robot(name):
    given = [SetLaunchConfiguration("namespace", name)]
    nodes = [node("supervisor_node", **required()), node("navigation_node", **restarted())]
    return GroupAction([*given, group(*common_arguments(), *nodes)])

def report(context):
    print("left behind:", sorted(context.launch_configurations), flush=True)

def generate_launch_description():
    return LaunchDescription([robot("one"), robot("two"), OpaqueFunction(function=report)])
"""
RUN = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
arguments = [tuple(each.split(":=", 1)) for each in sys.argv[2:]]
include = IncludeLaunchDescription(PythonLaunchDescriptionSource(sys.argv[1]), launch_arguments=arguments)
service = LaunchService(argv=sys.argv[2:], noninteractive=True)
service.include_launch_description(LaunchDescription([include]))
sys.exit(service.run())
"""


class Launched:
    """The real launch of a file, in a process of its own without a terminal."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.lines: list[str] = []
        environment = {**os.environ, "AMENT_PREFIX_PATH": sys.prefix, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(path), *arguments], text=True, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def until(self, pattern: str, count: int = 1, limit: float = 60.0) -> list[str]:
        """Lines that match, once there are so many."""
        deadline = time.monotonic() + limit
        while len(found := [line for line in self.lines if re.search(pattern, line)]) < count:
            assert time.monotonic() < deadline and (self.process.poll() is None or self.reader.is_alive()), self.lines
            time.sleep(0.05)
        return found

    def pid(self, process: str) -> int:
        return int(re.search(r"pid \[(\d+)\]", self.until(rf"\[{process}\]: process started")[-1])[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.reader.join(5)


@pytest.fixture
def fleet(launch, tmp_path):
    path = tmp_path / "fleet.launch.py"
    path.write_text(FLEET)
    return path


def test_the_end_of_a_node_ends_its_own_group(fleet):
    with Launched(fleet) as run:
        assert run.until("left behind:") == ["left behind: []"]
        run.until("process started", 4)
        run.until("navigation_node.*idle", 2)
        os.kill(run.pid("supervisor_node-1"), signal.SIGKILL)
        run.until(r"supervisor_node-1 ended by signal 9; ending the others")
        run.until(r"navigation_node-2\]: process has finished cleanly")
        os.kill(run.pid("navigation_node-4"), signal.SIGKILL)  # of the other robot: it is restarted
        run.until(r"navigation_node-4\]: process started", 2)
        assert run.process.poll() is None
        assert not [line for line in run.lines if re.search(r"supervisor_node-3.*(finished|died)", line)]
    assert not [line for line in run.lines if "\x1b" in line]


def test_the_end_of_a_node_ends_everything_where_the_argument_says_so(fleet):
    with Launched(fleet, "end_scope:=launch", "use_respawn:=false") as run:
        run.until("navigation_node.*idle", 2)
        os.kill(run.pid("navigation_node-2"), signal.SIGKILL)
        run.until("process has finished cleanly", 3)
        assert run.process.wait(20) == 0


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("speed:=fast", "speed:=fast is not allowed: speed .* takes a number from 0.05 to 1.5"),
        ("speed:=9", "speed:=9 is not allowed"),
        ("mode:=telepathy", '"mode" provided value "telepathy"'),
        ("params_file:=/no/file.yaml", "params_file:=/no/file.yaml is no file"),
        ("log_level:=loud", '"log_level" provided value "loud"'),
        ("verifier:=nowhere", "verifier: 'nowhere' is not a verifier address"),
    ],
)
def test_a_wrong_value_names_its_argument(launch, argument, words):
    with Launched(launch_file("robot"), argument, "driver:=none") as run:
        run.until(words)
        assert run.process.wait(20) == 1


def test_a_parameter_set_for_the_whole_launch_ends_no_node_that_lacks_it(launch, ros_domain):
    from launch_ros.actions import Node, SetParameter

    lines: list[str] = []
    wanted = (
        "'bridge_node' has no parameter 'require.imuu': ignored.",
        "'guard' has no parameter 'require.imuu' (did you mean 'require.imu'?): ignored.",
        "no link yet",
    )

    def missing():
        return [sentence for sentence in wanted if not any(sentence in line for line in lines)]

    def on_output(event):
        lines.extend(event.text.decode().splitlines())
        return None if missing() else launch.actions.Shutdown(reason="seen")

    def node(executable, **options):
        arguments = ["-m", "dsd_ros.ros.entry", executable]
        return Node(executable=sys.executable, arguments=arguments, output="screen", **options)

    service = launch.LaunchService()
    service.include_launch_description(
        launch.LaunchDescription(
            [
                SetParameter("require.imuu", False),
                launch.actions.RegisterEventHandler(launch.event_handlers.OnProcessIO(on_stderr=on_output)),
                node("bridge_node"),
                node("supervisor_node", name="guard"),
                launch.actions.TimerAction(period=90.0, actions=[launch.actions.Shutdown(reason="too late")]),
            ]
        )
    )
    service.run()
    assert not missing(), lines
