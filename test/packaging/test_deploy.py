# SPDX-License-Identifier: Apache-2.0
"""The units and the Containerfile under deploy/: every option, path and file they name exists."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

import pytest
from every import every

from dsd_ros.bringup.systems import arguments_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = {
    "dsd-verifier": "on-failure",
    "dsd-robot": "always",
}  # name -> Restart; `ros2 launch` exits with 0 whatever ends
HARDENED = {
    "ProtectSystem": "strict", "ProtectHome": "yes", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "",
    "RestrictSUIDSGID": "yes", "LockPersonality": "yes", "UMask": "0077",
    "LoadCredential": "token:/etc/dsd/token",
}  # fmt: skip


def directives(name: str) -> dict[str, dict[str, list[str]]]:
    """Section -> directive -> values, in order."""
    sections: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in (DEPLOY / f"{name}.service").read_text().splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif line and not line.startswith(("#", ";")):
            key, found, value = line.partition("=")
            assert section and found, line
            sections.setdefault(section, {}).setdefault(key, []).append(value)
    return sections


@every(UNITS)
def test_units_are_hardened_and_bounded(name):
    unit = directives(name)
    service = unit["Service"]
    assert {key: service[key][-1] for key in HARDENED} == HARDENED and service["Restart"] == [UNITS[name]]
    assert {"MemoryMax", "TasksMax", "LimitNOFILE", "TimeoutStopSec", "RestartSec"} <= set(service)
    for order in ("Wants", "After"):  # certificates need a clock that is set
        assert "time-sync.target" in unit["Unit"][order][-1].split()
    assert "StartLimitBurst" in unit["Unit"] and unit["Install"]["WantedBy"]
    assert not any("token" in line.lower() for line in service["Environment"])  # no secrets there
    for page in unit["Unit"]["Documentation"]:
        assert (ROOT / page.removeprefix("file:/opt/dsd/")).is_file()


def test_the_verifiers_unit_runs_a_command_that_exists(capsys):
    from dsd_ros.cli import main

    service = directives("dsd-verifier")["Service"]
    given = dict(item.split("=", 1) for line in service["Environment"] for item in shlex.split(line))
    command = re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], service["ExecStart"][0])
    words = shlex.split(command.replace("%d", "/run/credentials/x").replace(" $DSD_OPTIONS", ""))
    assert words[0].endswith("/venv/bin/dsd") and service["DynamicUser"] == ["yes"]
    missing = ["--model", "/does/not/exist"]
    assert main.main([*words[1:], *missing]) == 2  # every option is understood
    assert "no model directory /does/not/exist" in capsys.readouterr().err


def test_the_robots_unit_gives_arguments_that_the_launch_file_has():
    service = directives("dsd-robot")["Service"]
    command = service["ExecStart"][0]
    names = {argument.name for argument in arguments_of("robot")}
    assert {word.partition(":=")[0].split()[-1] for word in re.findall(r"\w+:=", command)} <= names
    assert (ROOT / "launch" / "robot.launch.py").is_file() and "robot.launch.py" in command
    assert service["KillMode"] == ["mixed"] and service["KillSignal"] == ["SIGINT"]


@every(UNITS)
def test_systemd_finds_nothing_wrong(name, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / f"{name}.service").read_text()
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace("/opt/dsd/venv/bin/dsd", "/bin/true").replace("file:/opt", "file:/"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in found.stderr.splitlines() if unit.name in line]
    assert not complaints, complaints


RECIPE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
ROBOT_RECIPE = (DEPLOY / "Containerfile.robot").read_text().replace("\\\n", " ")


def sources_of(recipe: str) -> list[str]:
    """What a recipe copies from the repository."""
    sources = []
    for line in recipe.splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            sources += line.split()[1:-1]
    return sources


@every(["Containerfile", "Containerfile.robot"])
def test_the_recipe_copies_what_is_there_and_let_in(name):
    copied = sources_of((DEPLOY / name).read_text().replace("\\\n", " "))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = tracked.stdout.splitlines()
    rules = (DEPLOY / f"{name}.dockerignore").read_text().splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert len(copied) > 8
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == rule or source.startswith(f"{rule}/") for rule in allowed), source
        if tracked.returncode == 0:
            assert any(file == source or file.startswith(f"{source}/") for file in files), source
    for rule in allowed:
        assert any(fnmatch(source, rule) or source.startswith(f"{rule}/") for source in copied)


def test_the_robots_recipe_installs_what_is_pinned_and_starts_the_bring_up_as_nobody():
    for install in re.findall(r"pip install [^;&\n]*", ROBOT_RECIPE):
        assert "--require-hashes" in install or install.strip() == 'pip install --no-deps "$TORCH"', install
    assert "https://*.whl#sha256=*)" in ROBOT_RECIPE and "-r beside-ros.txt -r jetpack6.txt" in ROBOT_RECIPE
    assert re.search(r"^USER 10001:10001$", ROBOT_RECIPE, re.MULTILINE)
    assert "exec ros2 launch dsd_ros robot.launch.py" in ROBOT_RECIPE.splitlines()[-1]
    names = {argument.name for argument in arguments_of("robot")}
    assert {word[:-2] for word in re.findall(r"\w+:=", ROBOT_RECIPE)} <= names
    packages = {line.text for line in ElementTree.parse(ROOT / "package.xml").iter("exec_depend") if not line.attrib}
    part_of_ros_base = {
        "ament_index_python", "geometry_msgs", "launch", "launch_ros", "lifecycle_msgs", "nav_msgs", "rcl_interfaces",
        "rclpy", "rosgraph_msgs", "rosidl_default_runtime", "sensor_msgs", "std_srvs", "tf2_msgs",
    }  # fmt: skip
    by_pip = {"python3-numpy", "python3-yaml"}
    for name in packages - part_of_ros_base - by_pip:
        assert re.search(rf"\b(ros-humble-)?{name.replace('_', '-')}\b", ROBOT_RECIPE), name


def test_the_recipe_installs_what_is_pinned_and_runs_as_nobody():
    assert "-r requirements/cloud.txt" in RECIPE and "--no-deps ." in RECIPE
    user = re.search(r"^USER (\d+):(\d+)$", RECIPE, re.MULTILINE)
    assert user and int(user[1]) > 0
    assert re.search(r"^HEALTHCHECK .*healthcheck\.py", RECIPE, re.MULTILINE)
    assert re.search(r"^ARG VARIANT=cpu$", RECIPE, re.MULTILINE)
    entry = re.search(r"^ENTRYPOINT \[(.*)\]$", RECIPE, re.MULTILINE)
    assert entry and entry[1].startswith('"dsd", "verifier"')


def healthy(port: int) -> bool:
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), str(port)]
    return subprocess.run(command, timeout=60).returncode == 0


def test_the_health_check_takes_any_answer_and_nothing_else():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        assert healthy(port)
    assert not healthy(port)
