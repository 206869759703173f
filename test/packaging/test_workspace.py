# SPDX-License-Identifier: Apache-2.0
"""The repository in a ROS 2 workspace: what colcon, rosdep and bloom find; tests beside ROS's own pytest plugins."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from catkin_pkg.changelog import get_changelog_from_path
from catkin_pkg.package import Package, parse_package
from catkin_pkg.packages import find_packages
from docutils.core import publish_string
from every import every
from packaging.utils import canonicalize_name

import dsd_ros

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = ROOT / "src" / "dsd_msgs"
# Packages released for Jazzy, and rosdep's own keys (ros/rosdistro: jazzy/distribution.yaml, rosdep/*.yaml).
RESOLVED = {
    *("action_msgs", "ament_cmake", "ament_index_python", "builtin_interfaces", "cv_bridge", "diagnostic_msgs"),
    *("geometry_msgs", "launch", "launch_ros", "lifecycle_msgs", "nav_msgs", "rcl_interfaces", "rclpy"),
    *("rosgraph_msgs", "rosidl_default_generators", "rosidl_default_runtime"),
    *("sensor_msgs", "std_msgs"),
    *("std_srvs", "tf2_msgs", "visualization_msgs"),
    *("python3-numpy", "python3-opencv", "python3-pil", "python3-pytest", "python3-yaml"),
}
KEYS = {"PIL": "python3-pil", "cv2": "python3-opencv", "numpy": "python3-numpy", "pytest": "python3-pytest"}
KEYS["yaml"] = "python3-yaml"
NOT_ALWAYS_INSTALLED = {"unitree_sdk2py": "unitree-sdk2py-dimos"}  # module -> what pip calls it


def dependencies(package: Package) -> set[str]:
    """All that the manifest asks for, whatever its conditions say."""
    kinds = ("build", "buildtool", "build_export", "buildtool_export", "exec", "test")
    return {one.name for kind in kinds for one in getattr(package, f"{kind}_depends")}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace that holds this repository as src/dsd_ros."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "dsd_ros").symlink_to(ROOT)
    return tmp_path


def environment(home: Path, **changes: str) -> dict[str, str]:
    """This process's, as in a shell where a ROS 2 is sourced."""
    prefix = os.environ.get("AMENT_PREFIX_PATH") or sys.prefix
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "AMENT_PREFIX_PATH": prefix, "PATH": path, "HOME": str(home), "PYTHONPATH": "", **changes}


def colcon(words: str, folder: Path) -> str:
    command = [sys.executable, "-m", "colcon", *words.split()]
    result = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=570, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout


def test_colcon_and_rosdep_find_what_they_can_build(workspace: Path) -> None:
    assert colcon("list --names-only", workspace).split() == ["dsd_ros"]
    assert colcon("list --names-only --base-paths src/dsd_ros/src", workspace).split() == ["dsd_msgs"]
    found = find_packages(str(workspace / "src"))
    wanted = set()
    for package in found.values():
        package.evaluate_conditions({})
        kinds = ("build", "buildtool", "exec", "test")
        depends = [one for kind in kinds for one in getattr(package, f"{kind}_depends")]
        wanted |= {one.name for one in depends if one.evaluated_condition}
    missing = wanted - {package.name for package in found.values()} - RESOLVED
    assert not missing, f"`rosdep install --from-paths src` cannot resolve {', '.join(sorted(missing))}"


def test_copies_of_foreign_messages_are_no_packages_to_anybody_else() -> None:
    assert [package.name for package in find_packages(str(ROOT / "src")).values()] == ["dsd_msgs"]
    assert not find_packages(str(ROOT / "tools"))


def test_the_manifest_declares_what_the_build_of_the_messages_needs() -> None:
    package, messages = parse_package(str(ROOT)), parse_package(str(MESSAGES))
    assert dependencies(messages) <= dependencies(package)
    for one in (package, messages):
        assert {url.type for url in one.urls} == {"website", "repository", "bugtracker"}
        assert [group.name for group in one.member_of_groups] == ["rosidl_interface_packages"]
    assert (MESSAGES / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def modules(folder: str) -> set[str]:
    """First names of the modules that a folder's files import, at their top or later."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    own = {path.stem for path in (ROOT / "test").rglob("*.py")} | {"dsd_ros", "dsd_lab", "dsd_msgs", "tools"}
    return found - own - set(sys.stdlib_module_names)


@every(["src/dsd_ros", "launch", "test"])
def test_every_import_is_declared(folder: str) -> None:
    """In package.xml what ROS and apt have; in requirements/ what pip installs (vLLM: in an environment of its own)."""
    declared = dependencies(parse_package(str(ROOT)))
    if folder == "test":
        declared |= {
            path.name for path in (ROOT / "tools" / "msgs").iterdir()
        }  # what a stand-in for another stack needs
    lock = re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)
    lock += re.findall(r"^([\w.-]+)[=>]=", (ROOT / "requirements" / "vllm.txt").read_text(), re.MULTILINE)
    from_pip = {canonicalize_name(name) for name in lock if not name.startswith("ros-")}
    distributions = packages_distributions()
    for module in sorted(modules(folder)):
        of_pip = NOT_ALWAYS_INSTALLED.get(module) or distributions.get(module, [module])[0]
        assert KEYS.get(module, module) in declared or canonicalize_name(of_pip) in from_pip, (
            f"{folder} imports {module}: declare it in package.xml, or in requirements/ if pip installs it"
        )


def test_launch_files_start_declared_packages_only() -> None:
    declared = dependencies(parse_package(str(ROOT))) | {"dsd_ros"}
    for path in (*(ROOT / "launch").glob("*.py"), *(ROOT / "src" / "dsd_ros" / "ros").glob("*.py")):
        assert set(re.findall(r'package="(\w+)"', path.read_text())) <= declared, path.name


def test_there_is_one_version() -> None:
    laboratory = (ROOT / "src" / "dsd_lab" / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', laboratory, re.MULTILINE)[1] == dsd_ros.__version__
    assert parse_package(str(MESSAGES)).version == parse_package(str(ROOT)).version == dsd_ros.__version__
    assert dsd_ros.__version__ not in (ROOT / "setup.py").read_text()


def test_every_python_file_names_its_licence() -> None:
    """An SPDX line comes first, or after `#!`: scanners look there, and ament_copyright's long header is not needed."""
    folders = ("src", "launch", "tools", "test", "examples", "deploy")
    files = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    line = "# SPDX-License-Identifier: Apache-2.0"
    lacking = [str(path.relative_to(ROOT)) for path in files if line not in path.read_text().splitlines()[:2]]
    assert not lacking, f"write '{line}' as the first line of {', '.join(lacking)}"


def test_ament_flake8_asks_for_no_other_line_length_than_ruff() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings.getint("flake8", "max-line-length") == ruff["line-length"]
    for line in settings["flake8"]["per-file-ignores"].strip().splitlines():
        assert list(ROOT.glob(line.split(":")[0])), f"setup.cfg: {line} is about no file"


def test_a_build_without_ros_says_what_to_source(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "install", "--root", str(tmp_path)]
    env = environment(tmp_path, AMENT_PREFIX_PATH="")
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1 and not any(tmp_path.iterdir())
    assert "dsd_msgs needs cmake and ROS 2; source /opt/ros/DISTRO/setup.bash and build again" in result.stderr


@pytest.mark.slow
def test_plain_colcon_builds_and_tests_everything(tmp_path: Path) -> None:
    """`colcon build`, with --symlink-install too, and `colcon test`, on a copy, with whatever ROS 2 is here."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", ".", ":!models"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            target = tmp_path / "src" / "dsd_ros" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    installed = tmp_path / "install" / "dsd_ros"
    for option, code in (("", installed), (" --symlink-install", tmp_path / "build" / "dsd_ros" / "src")):
        colcon(f"build{option}", tmp_path)
        programs = {path.name for path in (installed / "lib" / "dsd_ros").iterdir()}
        entry_points = next(tmp_path.glob("**/dsd_ros*.egg-info*/entry_points.txt")).read_text()
        scripts = configparser.ConfigParser()
        scripts.read_string(entry_points)
        assert programs == set(scripts["console_scripts"])
        check = "import dsd_msgs.action, dsd_ros; print(dsd_msgs.__file__); print(dsd_ros.__file__)"
        script = f'. install/local_setup.sh && command -v dsd && cd / && python -c "{check}"'
        result = subprocess.run(
            script, shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
        )
        dsd, messages, product = map(Path, result.stdout.split())
        assert dsd == installed / "lib" / "dsd_ros" / "dsd" and messages.is_relative_to(installed), result.stderr
        assert product.is_relative_to(code)
        assert (installed / "share" / "dsd_ros" / "config").is_dir()
    colcon("test --return-code-on-test-failure --pytest-args test/packaging/test_packaging.py -k path", tmp_path)
    assert "0 errors, 0 failures" in colcon("test-result --all", tmp_path)


def test_the_changelog_is_one_that_bloom_reads() -> None:
    """REP 132: versions with a date, newest first; what is not released yet is Forthcoming."""
    publish_string((ROOT / "CHANGELOG.rst").read_text(), settings_overrides={"report_level": 2, "halt_level": 2})
    changelog = get_changelog_from_path(str(ROOT), "dsd_ros")
    versions = [version for version, _, _ in changelog.foreach_version()]
    assert dsd_ros.__version__ in versions
    assert changelog.get_content_of_version(versions[0])
    assert changelog.rst.count("\nForthcoming\n-----------\n") <= 1


def test_tests_run_beside_the_pytest_plugins_of_a_sourced_ros(tmp_path: Path) -> None:
    """launch_testing's hook has arguments that pytest 9 no longer passes, and launch_testing_ros needs that hook."""
    (tmp_path / "old_hook.py").write_text("def pytest_pycollect_makemodule(path, parent):\n    return None\n")
    (tmp_path / "new_hook.py").write_text(
        "def pytest_launch_collect_makemodule(path, parent, entrypoint):\n    return 0\n"
    )
    information = tmp_path / "ros-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ros\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[pytest11]\nlaunch_testing = old_hook\nlaunch_ros = new_hook\n")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "test/packaging/test_supply_chain.py"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
