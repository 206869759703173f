# SPDX-License-Identifier: Apache-2.0
"""A process that ROS cannot start in ends with exit code 2 and a sentence, never in a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dsd_ros.environment import check_domain, check_middleware


def run(*command: str, **environment: str | None) -> tuple[int, str]:
    """Exit code and output of `python -m COMMAND`; interrupted once a node has come up."""
    kept = {name: value for name, value in (os.environ | environment).items() if value is not None}
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "no link yet" in line:
                process.send_signal(signal.SIGINT)
        return process.wait(60), "".join(lines)
    finally:
        process.kill()


def node(name: str, *arguments: str, **environment: str | None) -> tuple[int, str]:
    return run("dsd_ros.ros.entry", name, *arguments, **environment)


@pytest.mark.parametrize("text", ["-1", "233", "abc", "7 ", "0x10", "\u0667", "9" * 5000])
def test_no_domain(text):
    with pytest.raises(ValueError, match="is no ROS domain; use a number from 0 to 232"):
        check_domain(text)


def test_a_domain():
    assert [check_domain(text) for text in ("", "0", "7", "007", "232")] == [0, 0, 7, 7, 232]


@pytest.mark.parametrize(
    "name", ["rmw_foo_cpp", "rmw", "../rmw_fastrtps_cpp", "rmw_implementation", "rmw_fastrtps_cpp "]
)
def test_no_middleware(name):
    with pytest.raises(ValueError, match="which is not installed here; unset it, or use .*rmw_fastrtps_cpp"):
        check_middleware(name)


def test_a_middleware(tmp_path, monkeypatch):
    check_middleware("")
    check_middleware("rmw_fastrtps_cpp")
    (tmp_path / "librmw_own_cpp.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:")
    check_middleware("rmw_own_cpp")


RMW = {"RMW_IMPLEMENTATION": "rmw_foo_cpp"}, "RMW_IMPLEMENTATION is 'rmw_foo_cpp'"
DOMAIN = {"ROS_DOMAIN_ID": "233"}, "'233' is no ROS domain"


@pytest.mark.parametrize(
    ("command", "environment", "sentence"),
    [
        (("dsd_ros.ros.entry", "bridge_node"), *RMW),
        (("dsd_ros.bringup.processes", "robot"), *DOMAIN),
        (("dsd_ros.cli", "demo", "--headless"), *RMW),
        (("dsd_ros.cli", "record", "nowhere"), *DOMAIN),
    ],
)
def test_what_ros_would_end_in_is_a_sentence(command, environment, sentence):
    code, output = run(*command, **environment)
    assert code == 2
    assert sentence in output and output.count("\n") == 1


@pytest.mark.parametrize("given", ["use_sim_time: 'true'", "start_type_description_service: 1"])
def test_a_parameter_of_ros_itself_has_its_type(tmp_path, ros_domain, given):
    (tmp_path / "own.yaml").write_text(f"/**:\n  ros__parameters:\n    {given}\n")
    code, output = node("bridge_node", "--ros-args", "--params-file", str(tmp_path / "own.yaml"))
    assert code == 2
    assert given.partition(":")[0] in output and "correct it in the parameter file" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("home", ["/proc/nohome", None])
def test_a_home_that_cannot_be_written_keeps_no_node_down(ros_domain, home):
    code, output = node("bridge_node", HOME=home, ROS_HOME=None, ROS_LOG_DIR=None)
    assert code == 0
    assert ("ROS's log files go to" in output) == (home == "/proc/nohome")
    assert "Traceback" not in output


@pytest.fixture
def humble(tmp_path):
    """The path of an rclpy that is built for Python 3.7."""
    folder = tmp_path / "rclpy"
    folder.mkdir()
    (folder / "__init__.py").write_text("from rclpy import _rclpy_pybind11\n")
    (folder / "_rclpy_pybind11.cpython-37m-x86_64-linux-gnu.so").touch()
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("command", [("dsd_ros.ros.entry", "draft_node"), ("dsd_ros.cli", "demo", "--headless")])
def test_another_pythons_ros_is_named(humble, command):
    code, output = run(*command, PYTHONPATH=humble, ROS_DISTRO="humble")
    assert code == 2
    assert "is for another Python than this" in output and "ROS humble is sourced" in output
    assert output.count("\n") == 1


def test_a_package_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "std_msgs").mkdir()
    (tmp_path / "std_msgs" / "__init__.py").write_text("import a_library_of_another_ros\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, output = node("supervisor_node", PYTHONPATH=path)
    assert code == 2
    assert "a_library_of_another_ros" in output and "dsd doctor --role robot" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("variable", ["RMW_IMPLEMENTATION", "PYTHONPATH"])
def test_doctor_survives_and_says_it(humble, variable):
    value = humble if variable == "PYTHONPATH" else "rmw_foo_cpp"
    code, output = run("dsd_ros.cli", "doctor", "--role", "robot", **{variable: value})
    assert code == 1
    (line,) = [line for line in output.splitlines() if "rclpy  " in line]
    assert line.startswith("MISSING") and ("rmw_foo_cpp" in line or "another Python" in line)


def test_a_renderer_that_is_none_is_named(ros_domain):
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "dsd_ros.ros.entry", "simulator_node"], env=os.environ | {"MUJOCO_GL": "vulkan"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, f"{output} after {time.monotonic() - began} s"
    assert "MUJOCO_GL=vulkan" in output and "set MUJOCO_GL to osmesa or egl" in output
    assert "Traceback" not in output
