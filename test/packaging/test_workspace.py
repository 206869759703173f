"""The repository in a ROS 2 workspace: what colcon, rosdep and bloom find; tests beside ROS's own pytest plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from catkin_pkg.changelog import get_changelog_from_path
from docutils.core import publish_string

import dsd_ros

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_is_one_that_bloom_reads() -> None:
    """REP 132: versions with a date, newest first; what is not released yet is Forthcoming."""
    publish_string((ROOT / "CHANGELOG.rst").read_text(), settings_overrides={"report_level": 2, "halt_level": 2})
    changelog = get_changelog_from_path(str(ROOT), "dsd_ros")
    versions = [version for version, _, _ in changelog.foreach_version()]
    assert dsd_ros.__version__ in versions
    assert changelog.get_content_of_version(versions[0])
    assert changelog.rst.count("\nForthcoming\n-----------\n") == 1


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
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "test/packaging/test_supply_chain.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
