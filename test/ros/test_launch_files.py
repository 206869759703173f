# SPDX-License-Identifier: Apache-2.0
"""The launch files start what the table of the systems says; with the real `launch` where it is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launch_standin import launched

from dsd_ros.bringup.systems import SYSTEMS, Start, arguments_of, plan
from dsd_ros.paths import share_directory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = [
    ("demo", {}),
    ("demo", {"transport": "websocket", "frame_prefix": "go2_1/", "use_respawn": "False"}),
    ("demo", {"memory": "auto", "rviz": "true", "device": "cuda"}),
    ("robot", {}),
    ("robot", {"view": "true", "visual": "True", "log_level": "warn"}),
    ("robot", {"namespace": "go2_1", "record": "/bag", "use_sim_time": "True", "autostart": "false", "rviz": "true"}),
    ("robot", {"stack": "go2_ros2_sdk", "executor": "nav2", "speed": "0.4", "params_file": "config/nav2.yaml"}),
    ("robot", {"stack": "unitree_ros2", "transport": "dds", "temperature": "1", "draft_model": "1"}),
    ("verifier", {}),
    ("verifier", {"namespace": "go2_1", "target_model": "/m", "dtype": "bfloat16"}),
]

REQUIRED = ("go2_node", "supervisor_node", "simulator_node")  # without which nothing may move


def launch_file(system: str) -> Path:
    return share_directory() / "launch" / f"{system}.launch.py"


def described(process: Any) -> tuple[Any, ...]:
    """What a launch file says of a process: name, place, parameters, remappings, program, and what its end does."""
    ends = (process.respawn, process.on_exit is not None)  # started again; its end ends all
    if not hasattr(process, "executable"):
        return process.name, tuple(process.cmd), *ends
    if process.package != "dsd_ros":
        (clock,) = process.parameters
        return process.executable, process.namespace, tuple(process.arguments), process.remappings, clock, *ends
    files = [each for each in process.parameters if isinstance(each, str)]
    own = dict(*process.parameters[len(files) :])
    values = {name: getattr(value, "value", value) for name, value in own.items()}
    types = {name: getattr(value, "value_type", type(value)) for name, value in own.items()}
    assert process.name == process.executable
    return process.name, process.namespace, files, values, types, process.remappings, process.ros_arguments, *ends


def planned(start: Start) -> tuple[Any, ...]:
    """The same of what the table says."""
    # Under launch the end of what may be restarted ends nothing, the runner's ends all where use_respawn is false.
    ends = (start.respawn, not start.optional and start.name in REQUIRED)
    if start.name == "rviz2":
        words = list(start.command)
        options = words.index("--ros-args")
        namespace = next((w.removeprefix("__ns:=/") for w in words if w.startswith("__ns:=")), "")
        clock = {"use_sim_time": words[-1] == "use_sim_time:=true"}
        return start.name, namespace, tuple(words[1:options]), start.remappings, clock, *ends
    if start.command:
        return start.name, start.command, *ends
    values = start.typed_parameters
    types = {name: type(value) for name, value in values.items()}
    files = list(map(str, start.parameter_files))
    level = ["--log-level", start.log_level]
    return start.name, start.namespace, files, values, types, start.remappings, level, *ends


@pytest.mark.parametrize(("system", "arguments"), SETTINGS)
def test_the_launch_files_start_what_the_table_says(system, arguments, monkeypatch):
    monkeypatch.chdir(share_directory())
    found = list(map(described, launched(launch_file(system), arguments)))
    assert found == list(map(planned, plan(system, arguments)))


@pytest.mark.parametrize("stack", ["go2_ros2_sdk", "unitree_ros2"])
def test_an_example_is_the_robot_beside_its_stack(stack):
    found = launched(EXAMPLES / f"{stack}.launch.py", {"transport": "dds"})
    starts = plan("robot", {"stack": stack, "speed": "0.4", "transport": "dds"})
    assert list(map(described, found)) == list(map(planned, starts))


def test_there_is_a_launch_file_for_each_system():
    assert {path.name for path in (share_directory() / "launch").glob("*.py")} == {
        f"{name}.launch.py" for name in SYSTEMS
    }


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
        prefix = os.environ.get("AMENT_PREFIX_PATH") or sys.prefix  # a workspace's, which has dsd_ros, too
        environment = {**os.environ, "AMENT_PREFIX_PATH": prefix, "PYTHONPATH": os.pathsep.join(sys.path)}
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
def real(ros_domain):
    return pytest.importorskip("launch_ros")


@pytest.mark.parametrize("system", SYSTEMS)
def test_launch_has_the_same_arguments(real, system):
    from launch.launch_description_sources import get_launch_description_from_python_launch_file

    description = get_launch_description_from_python_launch_file(str(launch_file(system)))
    found = {argument.name: argument for argument in description.get_launch_arguments()}
    assert set(found) == {argument.name for argument in arguments_of(system)}
    for argument in arguments_of(system):
        assert found[argument.name].description.startswith(argument.help)
        assert tuple(found[argument.name].choices or ()) == argument.choices


def test_a_killed_node_is_restarted_and_the_end_of_the_supervisor_ends_all(real):
    with Launched(launch_file("robot"), "driver:=none", "transport:=dds", "allow_unauthenticated:=true") as run:
        run.until("process started", 3)
        run.until("navigation_node.*idle")
        os.kill(run.pid("navigation_node-2"), signal.SIGKILL)
        run.until(r"navigation_node-2\]: process started", 2)
        os.kill(run.pid("supervisor_node-1"), signal.SIGKILL)
        assert run.process.wait(20) == 0
    assert not [line for line in run.lines if "\x1b" in line]


def test_a_signal_ends_everything_within_two_seconds(real):
    with Launched(launch_file("robot"), "driver:=none", "transport:=dds", "allow_unauthenticated:=true") as run:
        run.until("navigation_node.*idle")
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(20) == 0
        assert time.monotonic() - began < 4.0  # with room for a busy machine


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("speed:=9", "'motion.speed'|'limit.speed'"),
        ("mode:=telepathy", '"mode" provided value "telepathy"'),
        ("params_file:=/no/file.yaml", "params_file:=/no/file.yaml is no file"),
    ],
)
def test_a_wrong_value_ends_the_launch(real, argument, words):
    with Launched(launch_file("robot"), argument, "driver:=none") as run:
        run.until(words)
        run.process.wait(30)
