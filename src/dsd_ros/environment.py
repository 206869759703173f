# SPDX-License-Identifier: Apache-2.0
"""What ROS needs of a process's environment, checked before ROS is loaded.

For what is found here, ROS ends the process without an exception or with a traceback. Imports nothing of ROS.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

from dsd_ros.paths import user_path
from dsd_ros.shown import shown

EXIT_BAD_START = 2  # of a node that cannot start as configured
LARGEST_DOMAIN = 232  # beyond it, DDS runs out of ports
_LOG_FOLDER = "ROS_LOG_DIR"


def check_environment() -> None:
    """ValueError, one sentence, where ROS cannot start; log files that cannot be kept go to a temporary folder."""
    check_domain(os.environ.get("ROS_DOMAIN_ID", ""))
    check_middleware(os.environ.get("RMW_IMPLEMENTATION", ""))
    check_rclpy()
    _keep_logs_somewhere()


def check_domain(text: str) -> int:
    """The ROS domain that ``text`` names, 0 for an empty one; ValueError, one sentence, for no domain."""
    if not text:
        return 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > LARGEST_DOMAIN:
        raise ValueError(f"'{shown(text)}' is no ROS domain; use a number from 0 to {LARGEST_DOMAIN} as ROS_DOMAIN_ID")
    return int(text)


def check_middleware(name: str) -> None:
    """ValueError, one sentence, for an RMW_IMPLEMENTATION that is not installed: ROS would end the process."""
    if not name:
        return
    prefixes = [*filter(None, os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep)), sys.prefix]
    index = Path("share", "ament_index", "resource_index", "rmw_typesupport")
    known = {found.name for prefix in prefixes for found in Path(prefix, index).glob("rmw_*")} - {"rmw_implementation"}
    folders = [Path(prefix, "lib") for prefix in prefixes]
    folders += [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each]
    plain = re.fullmatch(r"rmw_\w+", name)
    if name in known or (plain and any((folder / f"lib{name}.so").is_file() for folder in folders)):
        return
    raise ValueError(
        f"RMW_IMPLEMENTATION is '{shown(name)}', which is not installed here; unset it, "
        f"or use {' or '.join(sorted(known)) or 'one that is installed'}"
    )


def check_rclpy() -> None:
    """ValueError, one sentence, where this Python has no rclpy, or finds that of another Python."""
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        spec = importlib.util.find_spec("rclpy")
    except ValueError:  # a module without a spec, which a test put there
        return
    if spec is None or spec.origin is None:
        raise ValueError(
            f"{version} finds no rclpy; source your ROS 2 installation, or run `make setup` for the wheels"
        )
    folder = Path(spec.origin).parent
    fits = any((folder / f"_rclpy_pybind11{suffix}").is_file() for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    if not fits and (others := sorted(folder.glob("_rclpy_pybind11*"))):
        sourced = os.environ.get("ROS_DISTRO", "")
        raise ValueError(
            f"rclpy in {folder} is for another Python than this {version} ({others[0].name}); "
            f"{f'ROS {sourced} is sourced: ' if sourced else ''}use a shell without it, or the Python that it is for"
        )


def _keep_logs_somewhere() -> None:
    """Have ROS write its log files to a temporary folder where it cannot write them to its own."""
    try:
        if not os.environ.get("HOME"):  # ROS needs the variable; Python asks the system
            os.environ.pop("HOME", None)
            os.environ["HOME"] = str(user_path("~"))
        home = os.environ.get("ROS_HOME") or "~/.ros"
        folder = user_path(os.environ.get(_LOG_FOLDER) or Path(home, "log"))
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        try:
            os.environ[_LOG_FOLDER] = tempfile.mkdtemp(prefix="ros_log_")
        except OSError as nowhere:
            raise ValueError(f"ROS can write its log files nowhere ({nowhere}); set {_LOG_FOLDER}") from error
        print(f"ROS's log files go to {os.environ[_LOG_FOLDER]}: {error}", file=sys.stderr, flush=True)
