# SPDX-License-Identifier: Apache-2.0
"""The frames of a robot (REP 103, 105, 120), and its URDF, which says where the sensors are.

    odom -> base_footprint -> base_link -> front_camera_link -> front_camera_optical_frame
                                        -> imu_link

A driver publishes the first two transforms from its odometry and the others, which are fixed, from the URDF. base_link
is the middle of the trunk; base_footprint is below it on the floor of odom, and level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree import ElementTree

from dsd_ros.options import check_options, option
from dsd_ros.paths import config_directory, user_path

CAMERA_LINK = "front_camera_link"  # x ahead; its child, the optical frame, has z ahead, x right, y down
RANGE_LINK = "front_range_link"  # of a range finder: level, x ahead
OPTICAL = (-math.pi / 2, 0.0, -math.pi / 2)  # roll, pitch, yaw of an optical frame in its camera's link

Xyz = tuple[float, float, float]


def check_frame(name: str) -> None:
    """:raises ValueError: for a name that tf2 refuses."""
    if name.startswith("/") or name != name.strip():
        raise ValueError(f"{name!r} is no frame; tf2 takes neither a leading slash nor blanks around it")


@dataclass(frozen=True)
class FrameSettings:
    """What a driver publishes of the robot's frames, and their names."""

    publish_tf: bool = option(
        True, "publish the transform from odom_frame; false where another node does, as robot_localization"
    )
    publish_description: bool = option(
        True, "publish robot_description and its fixed transforms; false where robot_state_publisher does"
    )
    description: str = option("", "URDF file of the robot, with links of these names; empty: config/go2.urdf")
    frame_prefix: str = option(
        "", "put before every frame, to tell robots that share /tf apart, e.g. go2_1/", check=check_frame
    )
    odom_frame: str = option("odom", "frame that odometry is in", check=check_frame)
    footprint_frame: str = option(
        "base_footprint", "the base's place on the floor; empty: odom_frame's child is base_frame", check=check_frame
    )
    base_frame: str = option("base_link", "the base, whose pose odometry is", check=check_frame)
    imu_frame: str = option("imu_link", "frame of imu", check=check_frame)
    camera_frame: str = option(
        "front_camera_optical_frame", "frame of pictures: z ahead, x right, y down", check=check_frame
    )

    def __post_init__(self) -> None:
        check_options(self)
        named = (self.odom_frame, self.base_frame, self.imu_frame, self.camera_frame)
        if not all(named):
            raise ValueError("odom_frame, base_frame, imu_frame and camera_frame must have a name")
        chain = (self.odom_frame, self.footprint_frame, self.base_frame)
        if len(set(chain)) < len(chain):
            raise ValueError(f"odom_frame, footprint_frame and base_frame must differ; they are {', '.join(chain)}")


@dataclass(frozen=True)
class Placed:
    """A frame's place in its parent: metres, and roll, pitch, yaw (rad) as a URDF has them."""

    parent: str
    child: str
    xyz: Xyz
    rpy: Xyz = (0.0, 0.0, 0.0)


class Description:
    """A robot's URDF: that of ``frames.description``, or the shipped Go2's.

    :raises ValueError: when it cannot be read, or lacks a link that ``frames`` names.
    """

    def __init__(self, frames: FrameSettings) -> None:
        file = user_path(frames.description) if frames.description else config_directory() / "go2.urdf"
        self._frames, self._about = frames, f"The robot's description {file}"
        try:
            self.text = file.read_text(encoding="utf-8")
            self._root = ElementTree.fromstring(self.text)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._about} cannot be read: {error}.") from error
        except ElementTree.ParseError as error:
            raise ValueError(f"{self._about} is not valid XML: {error}.") from error
        links = {link.get("name", "") for link in self._root.iterfind("link")}
        for name in (frames.base_frame, frames.imu_frame, frames.camera_frame):
            if name not in links:
                raise ValueError(
                    f"{self._about} has no link '{name}'; name one of its links ({', '.join(sorted(links))}) by "
                    "base_frame, imu_frame and camera_frame, or give a description that has it."
                )

    def fixed(self) -> list[Placed]:
        """The frames that stand still in their parent; not the base, for odometry says where it is.

        :raises ValueError: when a joint moves, since its state is not known here.
        """
        found = []
        for joint in self._root.iterfind("joint"):
            parent, child = _end(joint, "parent"), _end(joint, "child")
            if child == self._frames.base_frame:
                continue
            if child == self._frames.footprint_frame:
                raise ValueError(
                    f"{self._about} has {child} below another link, but odometry publishes it above "
                    f"{self._frames.base_frame}: set footprint_frame to an empty text."
                )
            if joint.get("type") != "fixed":
                raise ValueError(
                    f"{self._about} has a joint that moves, '{joint.get('name')}', and only fixed ones are published "
                    "here: run robot_state_publisher for it, and set publish_description to false."
                )
            found.append(Placed(parent, child, self._numbers(joint, "xyz"), self._numbers(joint, "rpy")))
        return found

    def _numbers(self, joint: ElementTree.Element, name: str) -> Xyz:
        origin = joint.find("origin")
        text = (origin.get(name) if origin is not None else None) or "0 0 0"
        try:
            x, y, z = map(float, text.split())
        except ValueError as error:
            raise ValueError(
                f"{self._about} has '{text}' as {name} of '{joint.get('name')}'; give three numbers."
            ) from error
        return x, y, z


def _end(joint: ElementTree.Element, which: str) -> str:
    """The link at a joint's "parent" or "child"; empty where it names none."""
    element = joint.find(which)
    return element.get("link", "") if element is not None else ""
