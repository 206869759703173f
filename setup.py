# SPDX-License-Identifier: Apache-2.0
"""Installs dsd_ros, by pip as well as by colcon (ament_python); the dependencies are kept in requirements/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Command, find_packages, setup
from setuptools.command.develop import develop
from setuptools.command.install import install

NAME = "dsd_ros"
HERE = Path(__file__).resolve().parent
MANIFEST = (HERE / "package.xml").read_text(encoding="utf-8")  # the one place for version, maintainer and pages
NODES = (
    "simulator",
    "draft",
    "serve",
    "memory",
    "verifier",
    "bridge",
    "navigation",
    "supervisor",
    "go2",
    "record",
    "visual",
    "view",
)
EXTRAS = ("cloud", "robot", "beside-ros", "ros", "sim", "train", "dev", "real-models", "go2", "text-model", "rag")


def stated(element: str, attribute: str = "") -> str:
    """What package.xml gives as the text of its first ``element``, or as one of its attributes."""
    inside = rf'[^>]*\b{attribute}="([^"]+)"' if attribute else r"[^>]*>([^<]+)"
    return re.search(rf"<{element}\b{inside}", MANIFEST)[1].strip()


def requirements(name: str) -> list[str]:
    """The requirements of requirements/<name>.txt, files it includes by -r included."""
    found: list[str] = []
    for line in (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found += requirements(line[3:].strip().removesuffix(".txt"))
        elif line and not line.startswith("-"):
            found.append(line)
    return list(dict.fromkeys(found))


def shared(folder: str, pattern: str) -> list[tuple[str, list[str]]]:
    """Files of ``folder`` matching ``pattern``, as data files at the same place below share/dsd_ros."""
    places: dict[str, list[str]] = {}
    for path in sorted(glob(f"{folder}/{pattern}", root_dir=HERE, recursive=True)):  # noqa: PTH207  # relative to HERE
        if (HERE / path).is_file():
            places.setdefault(str(Path("share") / NAME / Path(path).parent), []).append(path)
    return list(places.items())


def install_messages(command: Command) -> None:
    """Build src/dsd_msgs and install it where ``command`` installs dsd_ros.

    colcon, rosdep and bloom look no deeper than this folder's package.xml, so none of them finds src/dsd_msgs. pip
    builds wheels without ROS: there `make setup` provides the messages.
    """
    if {"bdist_wheel", "editable_wheel"} & set(command.distribution.commands):
        return
    cmake, prefixes = shutil.which("cmake"), os.environ.get("AMENT_PREFIX_PATH")
    if not (cmake and prefixes):
        sys.exit("dsd_ros: dsd_msgs needs cmake and ROS 2; source /opt/ros/DISTRO/setup.bash and build again")
    root = command.get_finalized_command("install").root or "/"
    prefix = f"/{os.path.relpath(command.get_finalized_command('install_data').install_dir, root)}"
    build = Path(command.get_finalized_command("build").build_base).resolve() / "dsd_msgs"
    # colcon's sitecustomize changes sys.prefix, which would mislead cmake about where Python is.
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [path for path in paths if not (Path(path) / "sitecustomize.py").is_file()]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "DESTDIR": root if root != "/" else ""}
    changed["CMAKE_PREFIX_PATH"] = os.pathsep.join([prefixes, os.environ.get("CMAKE_PREFIX_PATH", "")])
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ, **changed}
    options = [f"-DCMAKE_INSTALL_PREFIX={prefix}", f"-DPython3_EXECUTABLE={sys.executable}", "-DBUILD_TESTING=OFF"]
    for step in (
        ["-S", str(HERE / "src" / "dsd_msgs"), "-B", str(build), *options],
        ["--build", str(build)],
        ["--install", str(build)],
    ):
        if subprocess.run([cmake, *step], env=environment, check=False).returncode:
            sys.exit("dsd_ros: dsd_msgs could not be built; cmake gives the reason above")


class Install(install):
    def run(self) -> None:
        install_messages(self)
        super().run()


class Develop(develop):
    def run(self) -> None:
        if not self.uninstall:
            install_messages(self)
        super().run()

    def write_script(self, script_name: str, contents: str, *rest: Any) -> None:
        """Begin a script as setup.cfg says for others: develop ignores [build_scripts]."""
        (_, line) = self.distribution.get_option_dict("build_scripts")["executable"]
        super().write_script(script_name, f"#!{line}\n{contents.partition(chr(10))[2]}", *rest)


setup(
    name=NAME,
    version=stated("version"),
    description="Distributed speculative decoding for on-robot VLM control",
    license=stated("license"),
    maintainer=stated("maintainer"),
    maintainer_email=stated("maintainer", "email"),
    url=stated("url"),
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src", include=[NAME, f"{NAME}.*"]),
    include_package_data=True,
    package_data={NAME: ["py.typed", "observe/bag/report.html", "observe/view/page.html"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/hook", ["resource/path.dsv"]),
        *shared("launch", "*.launch.py"),
        *shared("config", "**/*"),
        *(place for place in shared("models", "**/*") if "draft-smollm2" not in place[0]),  # the laboratory's
        *shared("docs/images", "view.png"),
    ],
    install_requires=["setuptools"],
    extras_require={name: requirements(name) for name in EXTRAS} | {"test": requirements("dev")},
    zip_safe=False,
    cmdclass={"install": Install, "develop": Develop},
    entry_points={
        "console_scripts": [
            "dsd = dsd_ros.cli.main:run",
            *(f"{node}_node = dsd_ros.ros.entry:{node}_node" for node in NODES),
        ],
        "vllm.general_plugins": ["dsd_ros = dsd_ros.cloud.vllm:register"],
    },
)
