# SPDX-License-Identifier: Apache-2.0
"""A folder that looks like Ubuntu 24.04 with ROS 2 Jazzy from apt, in which documented command lines really run.

``usr/bin/python3`` is a Python with a prefix of its own. It is externally managed (PEP 668), and its packages are
apt's: numpy, OpenCV, Pillow and PyYAML, under the versions of Ubuntu 24.04. ``opt/ros/jazzy`` has setup.bash, the ament
index, and the rclpy, messages and libraries of .venv. Replaced are only the edges: what pip would download is laid into
each new virtual environment, and some programs of the system are small scripts (``ros2``, ``rosdep``, ``sudo``, ...).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.prefix)
SITE = Path(sysconfig.get_path("purelib"))
# Distribution -> its version in Ubuntu 24.04 (empty: apt's package has no metadata that pip reads), and its modules.
APT = {
    "numpy": ("1.26.4", ("numpy", "numpy.libs")),
    "opencv-python-headless": ("", ("cv2", "opencv_python_headless.libs")),
    "pillow": ("10.2.0", ("PIL", "pillow.libs")),
    "pyyaml": ("6.0.1", ("yaml", "_yaml")),
}
OURS = {"dsd_ros", "dsd_lab", "unitree_api", "unitree_go"}  # what an apt Jazzy lacks; dsd_msgs is as from an underlay
NOT_DOWNLOADED = {*APT, "dsd-ros", "dsd-lab", "ros-wheels-bootstrapper"}
SETUP = """\
export ROS_DISTRO=jazzy ROS_VERSION=2 AMENT_PREFIX_PATH={prefix} CMAKE_PREFIX_PATH={prefix}
export PATH={prefix}/bin:$PATH PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}}
export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
"""
# What `ros2 launch` does with a launch file, up to the start of its programs: the file is read in the Python of ROS.
ROS2 = """\
#!{python}
import os, subprocess, sys
from pathlib import Path
command, package, file, *given = sys.argv[1:]
assert (command, package) == ("launch", "dsd_ros"), sys.argv
prefixes = [Path(each) for each in os.environ["AMENT_PREFIX_PATH"].split(":")]
prefix = next(each for each in prefixes if (each / "share" / package / "launch" / file).is_file())
from dsd_ros.bringup import systems as bringup
system = file.partition(".")[0]
assert (prefix / "share" / package / "launch" / file).is_file()
nodes = []
for start in bringup.plan(system, dict(word.split(":=", 1) for word in given)):
    program = start.command[0] if start.command else str(prefix / "lib" / package / start.name)
    assert os.access(program, os.X_OK), program
    nodes += [] if start.command else [start.name]
    print("start", program, *start.command[1:], flush=True)
# The nodes' executables begin with /usr/bin/env python3: that Python must have all that they import.
code = "import importlib, sys; [importlib.import_module('dsd_ros.nodes.' + name) for name in sys.argv[1:]]"
sys.exit(subprocess.run(["/usr/bin/env", "python3", "-c", code + "; print('in', sys.executable)", *nodes]).returncode)
"""


_VENV = re.compile(r"(python3 -m venv (--system-site-packages )?(\S+))")


def made_and_filled(line: str, root: Path) -> str:
    """A shell line; where it makes a virtual environment, what pip would download is laid into that as well."""

    def fill(found: re.Match[str]) -> str:
        site, folder = f"{found[3]}/lib/{SITE.parent.name}/site-packages", root / "downloads"
        files = f"{folder}/*" if found[2] else f"{folder}/* {folder}/apt/*"
        return f"{found[1]} && rm -rf {site}/* && cp -Pr {files} {site}/"

    return _VENV.sub(fill, line)


def link(folder: Path, sources: Iterable[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source.exists() and not (folder / source.name).exists():
            (folder / source.name).symlink_to(source)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def owners() -> dict[str, str]:
    """Top-level name in .venv's packages -> the distribution that it belongs to."""
    found = {}
    for record in SITE.glob("*.dist-info/RECORD"):
        name = record.parent.name.partition("-")[0].lower().replace("_", "-")
        with record.open() as lines:
            found |= dict.fromkeys((line.partition("/")[0].partition(",")[0] for line in lines), name)
    return found


class Jazzy:
    """The stand-in, in ``root``. :meth:`run` runs lines in it as in a person's terminal."""

    def __init__(self, root: Path) -> None:
        self.root, self.prefix, self.home = root, root / "opt" / "ros" / "jazzy", root / "home"
        self.python = root / "usr" / "bin" / "python3"
        self.home.mkdir(parents=True)
        (root / "etc" / "systemd" / "system").mkdir(parents=True)
        of_ros, downloads = [], []
        by_apt = {name for _, names in APT.values() for name in names}
        names = owners()
        for path in SITE.iterdir():
            owner = names.get(path.name, "")
            if path.name in by_apt | OURS or owner in NOT_DOWNLOADED or path.name.startswith("__"):
                continue
            (of_ros if owner.startswith("ros-") or path.name.endswith("_msgs") else downloads).append(path)
        link(root / "downloads", downloads)
        link(root / "downloads" / "apt", (p for p in SITE.iterdir() if p.name in by_apt or names.get(p.name) in APT))
        self._make_python()
        self._make_ros(of_ros)
        self._make_programs()
        self._make_repository()

    def _make_python(self) -> None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        lib = self.root / "usr" / "lib"
        self.python.parent.mkdir(parents=True)
        shutil.copy(Path(sys._base_executable).resolve(), self.python)
        apart = ("site-packages", "dist-packages", "EXTERNALLY-MANAGED")
        link(lib / stdlib.name, (path for path in stdlib.iterdir() if path.name not in apart))
        link(lib, Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*"))
        link(self.root / "usr" / "include", [Path(sysconfig.get_path("include"))])
        (lib / stdlib.name / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=These are apt's packages.\n")
        ask = [self.python, "-c", "import site; print(site.getsitepackages()[0])"]
        packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
        assert self.root in packages.parents, packages
        link(packages, [SITE / "pip"])
        for name, (release, modules) in APT.items():
            link(packages, (SITE / module for module in modules))
            if release:
                folder = packages / f"{name}-{release}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")

    def _make_ros(self, python_packages: list[Path]) -> None:
        packages = self.prefix / "lib" / SITE.parent.name / "site-packages"
        link(packages, python_packages)
        apart = {SITE.parent.name, "ament_index", *OURS}
        for kind in ("lib", "share"):
            link(self.prefix / kind, (path for path in (VENV / kind).iterdir() if path.name not in apart))
        index = Path("share") / "ament_index" / "resource_index"
        for kind in (VENV / index).iterdir():
            link(self.prefix / index / kind.name, (path for path in kind.iterdir() if path.name not in OURS))
        link(self.prefix, [VENV / "include"])
        libraries = ":".join(map(str, [self.prefix / "lib", *SITE.glob("ros_*.libs")]))
        text = SETUP.format(prefix=self.prefix, packages=packages, libraries=libraries)
        (self.prefix / "setup.bash").write_text(text)

    def _make_programs(self) -> None:
        folder = self.python.parent
        program(self.prefix / "bin" / "ros2", ROS2.format(python=self.python))
        program(folder / "colcon", f'#!/bin/sh\nexec {VENV}/bin/colcon "$@"\n')
        program(folder / "sudo", '#!/bin/sh\nexec "$@"\n')
        for name in ("rosdep", "useradd", "systemctl", "cmake"):
            program(folder / name, f'#!/bin/sh\necho {name} "$@" >> {self.root}/calls\n')

    def _make_repository(self) -> None:
        """A repository with the working tree as its one commit."""
        repository = self.root / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(lambda name: name and (ROOT / name).is_file(), listed.split("\0")):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, repository / name)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            subprocess.run([*git, *words], cwd=repository, check=True)

    @property
    def calls(self) -> list[str]:
        """How the replaced programs were called."""
        return (self.root / "calls").read_text().splitlines()

    def here(self, text: str) -> str:
        """``text`` with the system's folders in the stand-in, and the repository's address."""
        text = re.sub(r"(?<![\w.~}/])/(opt|etc)/", rf"{self.root}/\1/", text)
        return text.replace("<this repository>", str(self.root / "repository"))

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the lines of ``script`` in one bash, which ends at the first that fails. pip may not reach any index."""
        lines = []
        for line in self.here(script).replace("\\\n", " ").splitlines():
            failed = shlex.quote(f"failed: {line}")
            lines += [
                made_and_filled(line, self.root),
                f"code=$?; [ $code = 0 ] || {{ echo {failed} >&2; exit $code; }}",
            ]
        base = {
            "HOME": str(self.home), "PATH": f"{self.root}/usr/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-c", "\n".join(lines)], env=base | environment, cwd=self.home, capture_output=True, text=True,
            timeout=500,
        )  # fmt: skip
