# SPDX-License-Identifier: Apache-2.0
"""tools/package.py: the same bytes from the same commit, and a wheel that works by itself; dsd_msgs ready for bloom."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from every import every

ROOT = Path(__file__).resolve().parents[2]
# Of rosdistro's rosdep/python.yaml; any other key is a ROS package of Humble and Jazzy.
ROSDEP = {"python3-numpy", "python3-opencv", "python3-pil", "python3-yaml", "python3-pytest"}
WANTED = (
    "models/target/model.safetensors", "models/draft/tokenizer.json", "config/draft.yaml",
    "launch/robot.launch.py", "package.xml",
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Path]]:
    """Two builds, apart in everything that must not matter: suffix -> file of each."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tool packs what git tracks")
    found = []
    for mask, zone in ((0o022, "UTC"), (0o077, "Asia/Tokyo")):
        dist = tmp_path_factory.mktemp("dist")
        given = {**os.environ, "TZ": zone, "PYTHONHASHSEED": str(mask)}
        given.pop("SOURCE_DATE_EPOCH", None)
        command = [sys.executable, str(ROOT / "tools" / "package.py"), str(dist)]
        done = subprocess.run(command, env=given, umask=mask, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append({path.suffix: path for path in dist.iterdir()})
    return found


def test_the_same_commit_gives_the_same_bytes(built: list[dict[str, Path]]) -> None:
    one, two = ({kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in each.items()} for each in built)
    assert one == two and one.keys() == {".gz", ".whl"}


def test_they_contain_what_they_need(built: list[dict[str, Path]]) -> None:
    with zipfile.ZipFile(built[0][".whl"]) as wheel:
        inside = wheel.namelist()
    for name in WANTED:
        assert any(each.endswith(f".data/data/share/dsd_ros/{name}") for each in inside), name
    assert not [name for name in inside if name.startswith(("dsd_lab", "test")) or name.endswith(".pyc")]
    with tarfile.open(built[0][".gz"]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    asked = {*WANTED, "LICENSE", "requirements/lock.txt", "src/dsd_msgs/msg/Draft.msg", "deploy/Containerfile.robot"}
    assert asked <= names, asked - names


def test_the_wheel_decodes_a_reply_in_an_empty_environment(built: list[dict[str, Path]], tmp_path: Path) -> None:
    place = tmp_path / "empty"
    venv.create(place)
    python = str(place / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built[0][".whl"])], check=True, timeout=120)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the wheel's own
    given = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [str(place / "bin" / "dsd"), "decode", "--instruction", "find the silver bottle"]
    command += ["--image", str(ROOT / "docs" / "images" / "view.png")]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Action:" in done.stdout, done.stderr
    code = "import dsd_ros.paths as paths; print(paths.__file__, paths.share_directory())"
    where = subprocess.run([python, "-c", code], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60)
    assert all(word.startswith(str(place)) for word in where.stdout.split()), where.stderr


@every([".", "src/dsd_msgs"])
def test_bloom_finds_what_it_releases(folder: str) -> None:
    package = ElementTree.parse(ROOT / folder / "package.xml").getroot()
    name, license_tag = package.findtext("name"), package.find("license")
    title = (ROOT / folder / "CHANGELOG.rst").read_text().splitlines()[1]
    assert title == f"Changelog for package {name}"
    assert license_tag is not None and (ROOT / folder / license_tag.get("file", "")).is_file()
    assert {url.get("type") for url in package.findall("url")} >= {"repository", "bugtracker"}
    keys = {each.text or "" for each in package if each.tag.endswith("depend")}
    assert {key for key in keys if key.startswith("python3-")} <= ROSDEP
