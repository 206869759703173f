"""Installs dsd_ros, by pip as well as by colcon (ament_python); the dependencies are kept in requirements/."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

NAME = "dsd_ros"
HERE = Path(__file__).resolve().parent
NODES = (
    "simulator",
    "draft",
    "memory",
    "verifier",
    "bridge",
    "navigation",
    "supervisor",
    "go2",
    "go2_standin",
    "record",
    "visual",
    "view",
)
EXTRAS = ("cloud", "robot", "ros", "sim", "train", "dev", "real-models", "go2", "text-model", "rag", "view")


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


setup(
    name=NAME,
    version="0.1.0",
    description="Distributed speculative decoding for on-robot VLM control",
    license="Apache-2.0",
    maintainer="dsd_ros maintainers",
    maintainer_email="maintainers@dsd-ros.org",
    python_requires=">=3.11",
    package_dir={"": "src"},
    packages=find_packages("src", include=[NAME, f"{NAME}.*"]),
    include_package_data=True,
    package_data={NAME: ["py.typed"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/hook", ["resource/path.dsv"]),
        *shared("launch", "*.launch.py"),
        *shared("config", "**/*.yaml"),
        *shared("config", "**/*.rviz"),
        *shared("config", "**/*.urdf"),
        *shared("config", "**/*.xml"),
        *shared("config", "documents/**/*.md"),
        *shared("models", "**/*"),
    ],
    install_requires=["setuptools"],
    extras_require={name: requirements(name) for name in EXTRAS} | {"test": requirements("dev")},
    zip_safe=False,
    entry_points={
        "console_scripts": [
            "dsd = dsd_ros.cli.main:run",
            *(f"{node}_node = dsd_ros.ros.entry:{node}_node" for node in NODES),
        ]
    },
)
