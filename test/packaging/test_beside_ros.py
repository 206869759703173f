# SPDX-License-Identifier: Apache-2.0
"""The documented installation beside an apt ROS 2: docs/install.md's lines run in a stand-in for it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from jazzy_standin import Jazzy

ROOT = Path(__file__).resolve().parents[2]
SOURCED = ". /opt/ros/jazzy/setup.bash\n"
# What every process of the robot finds: apt's packages as they are, and nothing of them in the virtual environment.
MODULES = ("numpy", "cv2", "PIL", "yaml")


def blocks(page: str) -> list[str]:
    """The page's command lines, block by block."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return fenced + [
        re.sub(r"^    ", "", part, flags=re.MULTILINE) for part in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]


def block(page: str, start: str) -> str:
    """Of the block that has ``start``, the lines from there to the next empty one."""
    (found,) = (each[each.index(start) :] for each in blocks(page) if start in each)
    return found.split("\n\n")[0]


NEWCOMER = block("docs/install.md", "# Ubuntu 24.04")
INSTALL = block("docs/install.md", "# as root, on JetPack 7.2")
ROBOT_UNIT = block("docs/install.md", "sudo useradd")
CLOUD = block("docs/install.md", "sudo install -d /opt/dsd")


@pytest.fixture(scope="module")
def jazzy(tmp_path_factory: pytest.TempPathFactory) -> Jazzy:
    return Jazzy(tmp_path_factory.mktemp("jazzy"))


@pytest.fixture(scope="module")
def installed(jazzy: Jazzy) -> Jazzy:
    """The stand-in after docs/install.md's lines for a robot."""
    result = jazzy.run(INSTALL)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert re.search(r"^ok +torch", result.stdout, re.MULTILINE)  # of dsd doctor
    return jazzy


def directives(jazzy: Jazzy, unit: str) -> tuple[dict[str, str], str]:
    """The environment and the command line that systemd makes of an installed unit."""
    service = (jazzy.root / "etc" / "systemd" / "system" / f"{unit}.service").read_text()
    values = re.findall(r"^(Environment|ExecStart)=(.*)$", jazzy.here(service), re.MULTILINE)
    given = dict(word.split("=", 1) for key, value in values if key == "Environment" for word in shlex.split(value))
    for file in re.findall(r"^EnvironmentFile=-?(.*)$", jazzy.here(service), re.MULTILINE):
        if Path(file).is_file():
            given |= dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
    (command,) = (value for key, value in values if key == "ExecStart")
    return given, command


def test_the_newcomers_lines_are_at_most_five() -> None:
    lines = [line for line in NEWCOMER.splitlines() if line and not line.startswith("#")]
    assert 1 < len(lines) <= 5 and lines[-1].startswith("ros2 launch ")


def test_the_newcomers_lines_install_and_launch(jazzy: Jazzy) -> None:
    result = jazzy.run(SOURCED + "mkdir -p ~/ws/src && cd ~/ws\n" + NEWCOMER)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    started = re.findall(r"^start (\S+)/install/dsd_ros/lib/dsd_ros/(\w+)$", result.stdout, re.MULTILINE)
    assert {workspace for workspace, _ in started} == {str(jazzy.home / "ws")}
    assert {"simulator_node", "draft_node", "supervisor_node"} <= {name for _, name in started}
    assert f"in {jazzy.home}/ws/.venv/bin/python3\n" in result.stdout
    (site,) = (jazzy.home / "ws" / ".venv" / "lib").glob("python*/site-packages")
    assert len(list(site.iterdir())) > 100 and not {*MODULES, *(f"{name}.libs" for name in MODULES)} & {
        path.name for path in site.iterdir()
    }
    assert "rosdep install -y --ignore-src --from-paths src" in jazzy.calls


def test_installed_programs_run_in_the_active_environment(installed: Jazzy) -> None:
    programs = sorted((installed.root / "opt" / "dsd" / "install" / "dsd_ros" / "lib" / "dsd_ros").iterdir())
    assert len(programs) > 10
    assert {path.read_text().splitlines()[0] for path in programs} == {"#!/usr/bin/env python3"}
    sources = SOURCED + ". /opt/dsd/install/setup.bash\n"
    code = f"import {', '.join(MODULES)}; print(*(m.__file__ for m in ({', '.join(MODULES)})), sep='\\n')"
    result = installed.run(f'{sources}. /opt/dsd/.venv/bin/activate\ndsd --help\npython3 -c "{code}"')
    assert result.returncode == 0 and "doctor" in result.stdout, result.stderr
    assert all(line.startswith(f"{installed.root}/usr/") for line in result.stdout.splitlines()[-len(MODULES) :])


def test_a_program_outside_its_environment_says_so(installed: Jazzy) -> None:
    sources = SOURCED + ". /opt/dsd/install/setup.bash\n"
    for program, lacks in (("dsd --help", "cyclopts"), ("/opt/dsd/install/dsd_ros/lib/dsd_ros/draft_node", "")):
        result = installed.run(sources + program, ROS_DOMAIN_ID="0")
        assert result.returncode and "Traceback" not in result.stderr
        sentence = result.stderr.splitlines()[0]
        assert f"No module named '{lacks}" in sentence and "activate the virtual environment" in sentence
        assert str(installed.python) in sentence


def test_the_robots_unit_starts_what_was_installed(installed: Jazzy) -> None:
    (installed.home / "token").write_text("secret\n")
    (installed.home / "src").symlink_to(installed.root / "opt" / "dsd" / "src")
    assert (result := installed.run(ROBOT_UNIT)).returncode == 0, result.stderr
    assert "systemctl enable --now dsd-robot" in installed.calls
    given, command = directives(installed, "dsd-robot")
    assert given["DSD_VERIFIER"] == "wss://cloud.example:8765"  # of /etc/dsd/robot.env
    given["PATH"] = given["PATH"].replace("/usr/bin", f"{installed.root}/usr/bin:/usr/bin", 1)
    given |= {"CREDENTIALS_DIRECTORY": str(installed.root / "etc" / "dsd"), "DSD_ARGUMENTS": "speed:=0.4"}
    words = shlex.split(command)
    done = subprocess.run(
        words, cwd="/", env=given, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"start {installed.root}/opt/dsd/install/dsd_ros/lib/dsd_ros/supervisor_node" in done.stdout
    assert done.stdout.endswith(f"in {installed.root}/opt/dsd/.venv/bin/python3\n")


@pytest.mark.slow
def test_the_verifiers_unit_starts_what_was_installed(jazzy: Jazzy) -> None:
    """docs/install.md's lines for the cloud, without ROS, from a checkout."""
    checkout = "git clone -q <this repository> checkout && cd checkout\n"
    result = jazzy.run(checkout + CLOUD)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "systemctl enable --now dsd-verifier" in jazzy.calls
    given, command = directives(jazzy, "dsd-verifier")
    command = re.sub(
        r"\$\{(\w+)\}", lambda name: given[name[1]], command.replace("%d", str(jazzy.root / "etc" / "dsd"))
    )
    words = shlex.split(command.replace(" $DSD_OPTIONS", " --model /does/not/exist"))
    done = subprocess.run(words, cwd="/", env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no model directory /does/not/exist" in done.stderr, done.stderr
    assert (Path(given["DSD_MODEL"]) / "config.json").is_file()
