# SPDX-License-Identifier: Apache-2.0
"""How Fast DDS, the middleware that ROS 2 comes with, carries this process's messages: by UDP, never shared memory.

Through shared memory, a process that is killed at the wrong moment takes others with it: who opens a segment that it
had begun waits for ever, in its start or in the thread that receives its messages, in any ROS domain of the machine.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from dsd_ros.paths import config_directory

_PROFILES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")  # the older name and the newer
_RANGE, _LOCAL = "ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_LOCALHOST_ONLY"  # since Iron, and before


def use_udp(environment: MutableMapping[str, str]) -> None:
    """Name a profile of ``config/`` for this process and its children, unless the environment names one.

    Call it with ``os.environ`` before ``rclpy.init``. For a process that is to find this machine's alone, rmw_fastrtps
    adds shared memory to every profile; the profile ``fastdds_localhost.xml`` does what it would, without.
    """
    if any(variable in environment for variable in _PROFILES):
        return
    local = environment.get(_RANGE) == "LOCALHOST" or environment.get(_LOCAL) == "1"
    if local:
        environment.pop(_LOCAL, None)
        environment[_RANGE] = "SYSTEM_DEFAULT"
    profile = config_directory() / ("fastdds_localhost.xml" if local else "fastdds.xml")
    environment.update(dict.fromkeys(_PROFILES, str(profile)))
