# SPDX-License-Identifier: Apache-2.0
"""How Fast DDS, the middleware that ROS 2 comes with, carries this process's messages: by UDP, never shared memory.

Through shared memory, a process that is killed at the wrong moment takes others with it: who opens a segment that it
had begun waits for ever, in its start or in the thread that receives its messages, in any ROS domain of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dsd_ros.paths import config_directory

_PROFILES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")  # the older name and the newer
LOCALHOST = "fastdds_localhost.xml"
_RANGE, _LOCAL = "ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_LOCALHOST_ONLY"  # since Iron, and before


def use_udp(environment: MutableMapping[str, str]) -> None:
    """Name a profile of ``config/`` for this process and its children, unless the environment names one.

    Call it with ``os.environ`` before ``rclpy.init``. For a process that is to find this machine's alone, rmw_fastrtps
    adds shared memory to every profile; the profile of :data:`LOCALHOST` does what it would, without.
    """
    if any(variable in environment for variable in _PROFILES):
        return
    alone = environment.get(_RANGE) == "LOCALHOST" or environment.get(_LOCAL) == "1"
    local = alone and not environment.get("ROS_STATIC_PEERS")
    if local:
        environment.pop(_LOCAL, None)
        environment[_RANGE] = "SYSTEM_DEFAULT"
    profile = config_directory() / (LOCALHOST if local else "fastdds.xml")
    environment.update(dict.fromkeys(_PROFILES, str(profile)))


def stays_here(environment: Mapping[str, str]) -> bool:
    """Whether :func:`use_udp` has confined this process to its machine."""
    return Path(environment.get(_PROFILES[1], "")).name == LOCALHOST
