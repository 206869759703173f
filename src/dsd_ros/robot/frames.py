# SPDX-License-Identifier: Apache-2.0
"""The frames of a robot (REP 103, 105, 120), and its URDF, which says where the sensors are.

    odom -> base_footprint -> base_link -> front_camera_link -> front_camera_optical_frame
                                        -> imu_link

A driver publishes the first two transforms from its odometry and the others, which are fixed, from the URDF. base_link
is the middle of the trunk; base_footprint is below it on the floor of odom, and level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
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
class StandardDeviations:
    """Standard deviations of odometry and IMU; their covariances are the squares."""

    position: float = option(0.05, "of the position in odometry, m", 1e-6, 1e3)
    tilt: float = option(0.02, "of roll and pitch, rad", 1e-6, 10.0)
    yaw: float = option(0.05, "of the heading, rad", 1e-6, 10.0)
    velocity: float = option(0.05, "of the velocity, m/s", 1e-6, 1e3)
    angular_velocity: float = option(0.02, "of the angular velocity, rad/s", 1e-6, 1e3)
    acceleration: float = option(0.2, "of the linear acceleration, m/s^2", 1e-6, 1e3)


@dataclass(frozen=True)
class FrameSettings:
    """What a driver publishes of the robot's frames, and their names."""

    publish_tf: bool = option(
        True, "publish the transform from odom_frame; false where another node does, as robot_localization"
    )
    publish_description: bool = option(
        True, "publish robot_description and its fixed transforms; false where robot_state_publisher does"
    )
    description: str = option("", "URDF file of the robot; empty: config/go2.urdf")
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
    stddev: StandardDeviations = field(default_factory=StandardDeviations)

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


def placed_by(text: str, child: str, parent: str) -> tuple[Placed, ...]:
    """A frame at "x y z roll pitch yaw" (m, rad) in its parent; none for an empty text.

    :raises ValueError: for another text.
    """
    if not text.strip():
        return ()
    try:
        x, y, z, *rpy = map(float, text.split())
        roll, pitch, yaw = rpy
    except ValueError as error:
        raise ValueError(
            f"'{text}' does not place {child}; give six numbers, x y z in m and roll pitch yaw in rad"
        ) from error
    return (Placed(parent, child, (x, y, z), (roll, pitch, yaw)),)


class Description:
    """A robot's URDF: the shipped Go2's, whose links get the names in ``frames``, or that of ``frames.description``.

    :param placed: links to put elsewhere than the file says, or to add.
    :raises ValueError: when it cannot be read, or its links are not one tree below the base that has every frame.
    """

    def __init__(self, frames: FrameSettings, placed: tuple[Placed, ...] = ()) -> None:
        file = user_path(frames.description) if frames.description else config_directory() / "go2.urdf"
        self._frames, self._about = frames, f"The robot's description {file}"
        self._root = self._read(file)
        if not frames.description:
            self._rename()
        for each in placed:
            self._place(each)
        self._joints = self._tree()

    @property
    def text(self) -> str:
        """The URDF."""
        return ElementTree.tostring(self._root, encoding="unicode")

    def fixed(self) -> list[Placed]:
        """The frames that stand still in their parent.

        :raises ValueError: when a joint moves, since its state is not known here.
        """
        found = []
        for child, joint in self._joints.items():
            if child == self._frames.base_frame:
                continue  # odometry says where it is
            if joint.get("type") != "fixed":
                raise ValueError(
                    f"{self._about} has a joint that moves, '{joint.get('name')}', and only fixed ones are published "
                    "here: run robot_state_publisher for it, and set publish_description to false."
                )
            found.append(Placed(_end(joint, "parent"), child, self._numbers(joint, "xyz"), self._numbers(joint, "rpy")))
        return found

    def _read(self, file: Path) -> ElementTree.Element:
        try:
            return ElementTree.fromstring(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._about} cannot be read: {error}.") from error
        except ElementTree.ParseError as error:
            raise ValueError(f"{self._about} is not valid XML: {error}.") from error

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

    def _rename(self) -> None:
        frames = ("footprint_frame", "base_frame", "imu_frame", "camera_frame")
        names = {getattr(FrameSettings, each): getattr(self._frames, each) for each in frames}
        for element in self._root.iter():
            key = "name" if element.tag == "link" else "link"
            if element.tag in ("link", "parent", "child"):
                element.set(key, names.get(element.get(key, ""), element.get(key, "")))
        for element in list(self._root):  # without a name there is no footprint frame
            if not element.get("name") or (element.tag == "joint" and not _end(element, "parent")):
                self._root.remove(element)

    def _place(self, placed: Placed) -> None:
        for element in list(self._root):
            if element.tag == "joint" and _end(element, "child") == placed.child:
                self._root.remove(element)
        if all(link.get("name") != placed.child for link in self._root.iterfind("link")):
            ElementTree.SubElement(self._root, "link", name=placed.child)
        joint = ElementTree.SubElement(self._root, "joint", name=f"{placed.child}_joint", type="fixed")
        ElementTree.SubElement(joint, "parent", link=placed.parent)
        ElementTree.SubElement(joint, "child", link=placed.child)
        ElementTree.SubElement(joint, "origin", xyz=_text(placed.xyz), rpy=_text(placed.rpy))

    def _tree(self) -> dict[str, ElementTree.Element]:
        """Link -> the joint above it."""
        frames, links = self._frames, {link.get("name", "") for link in self._root.iterfind("link")}
        joints: dict[str, ElementTree.Element] = {}
        for joint in self._root.iterfind("joint"):
            child = _end(joint, "child")
            if child in joints or not {child, _end(joint, "parent")} <= links:
                raise ValueError(f"{self._about} has a joint '{joint.get('name')}' to a link it lacks or joins twice.")
            joints[child] = joint
        for name in (frames.base_frame, frames.imu_frame, frames.camera_frame):
            if name not in links:
                raise ValueError(
                    f"{self._about} has no link '{name}'; name one of its links ({', '.join(sorted(links))}) by "
                    "base_frame, imu_frame and camera_frame."
                )
        if frames.footprint_frame in joints:
            raise ValueError(
                f"{self._about} has {frames.footprint_frame} below another link, but odometry publishes it above "
                f"{frames.base_frame}: set footprint_frame to an empty text."
            )
        top = {frames.base_frame, frames.footprint_frame}
        for name in links:
            seen = name
            for _ in range(len(links)):
                seen = _end(joints[seen], "parent") if seen in joints else seen
            if seen not in top:
                raise ValueError(
                    f"{self._about} has a link '{name}' that is not below {frames.base_frame}; set base_frame to the "
                    "link at its top."
                )
        return joints


def _end(joint: ElementTree.Element, which: str) -> str:
    """The link at a joint's "parent" or "child"; empty where it names none."""
    element = joint.find(which)
    return element.get("link", "") if element is not None else ""


def _text(values: Xyz) -> str:
    return " ".join(f"{value:.9g}" for value in values)
