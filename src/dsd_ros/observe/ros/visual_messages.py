"""Build the paths, markers and transforms that RViz shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path as FilePath
from xml.etree import ElementTree

from builtin_interfaces.msg import Time
from geometry_msgs.msg import Point, PoseStamped, Quaternion, TransformStamped
from nav_msgs.msg import Path
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker

from dsd_ros.observe.view.state import Overlay, Pose, ShownStep, motion_of
from dsd_ros.ros.base_messages import marker_at
from dsd_ros.ros.stamps import quaternion

MAP_FRAME, ODOM_FRAME = "map", "odom"
STEPS_SHOWN = 200
_GREEN = ColorRGBA(r=0.38, g=0.83, b=0.50, a=0.95)
_AMBER = ColorRGBA(r=0.96, g=0.75, b=0.32, a=0.95)
_RED = ColorRGBA(r=0.95, g=0.25, b=0.22, a=1.0)
_WHITE = ColorRGBA(r=0.95, g=0.95, b=0.95, a=1.0)


def path_message(poses: Iterable[Pose], header: Header) -> Path:
    """Poses on the floor as nav_msgs/Path."""
    path = Path(header=header)
    for x, y, yaw in poses:
        stamped = PoseStamped(header=header)
        stamped.pose.position.x, stamped.pose.position.y = x, y
        stamped.pose.orientation = quaternion(yaw)
        path.poses.append(stamped)
    return path


def intended_path(step: ShownStep | None, header: Header) -> Path:
    """Where the action under way leads; empty without one."""
    poses = motion_of(step.pose, step.ahead, step.turn) if step is not None else []
    return path_message(poses, header)


def fresh_start(header: Header) -> Marker:
    """A marker that deletes those of earlier runs."""
    return Marker(header=header, action=Marker.DELETEALL)


def step_markers(steps: Iterable[ShownStep], header: Header) -> list[Marker]:
    """The executed actions: namespace "steps", id: the action's number. They stay until the next run."""
    markers = []
    for step in list(steps)[-STEPS_SHOWN:]:
        marker = marker_at(header, "steps", step.number, Marker.ARROW, step.pose)
        marker.scale.x, marker.scale.y, marker.scale.z = 0.22, 0.05, 0.05
        marker.pose.orientation = quaternion(step.pose[2] + step.turn)
        marker.color = _GREEN if step.verified else _AMBER
        markers.append(marker)
    return markers


def present_markers(overlay: Overlay, step: ShownStep | None, pose: Pose, header: Header) -> list[Marker]:
    """The current state: "intended", "reply" and "safety", each with id 0; they fade unless sent again."""
    markers = []
    if step is not None:
        marker = marker_at(header, "intended", 0, Marker.LINE_STRIP, (0.0, 0.0, 0.0), fades=True)
        marker.scale.x = 0.04
        marker.color = _GREEN if step.verified else _AMBER
        reach = 0.35 if step.turn else 0.0  # a turn is drawn as the arc of the nose
        marker.points = [
            Point(x=x + reach * math.cos(yaw), y=y + reach * math.sin(yaw), z=0.03)
            for x, y, yaw in motion_of(step.pose, step.ahead, step.turn)
        ]
        if len(marker.points) < 2:
            marker.points = marker.points * 2  # a line strip needs two points
        markers.append(marker)
    text = overlay.action or overlay.reply.text[-80:]
    if text:
        markers.append(_text("reply", text, pose, 0.75, _WHITE, header))
    if overlay.causes:
        markers.append(_text("safety", overlay.causes[0], pose, 0.95, _RED, header))
    return markers


def fixed_transforms(urdf: str, stamp: Time, odom: bool = True) -> list[TransformStamped]:
    """The fixed joints of a URDF, and with ``odom`` map -> odom where they coincide.

    :raises ValueError: for a URDF whose joints are not all fixed.
    """
    transforms = []
    if odom:
        whole = TransformStamped(child_frame_id=ODOM_FRAME)
        whole.header.stamp, whole.header.frame_id = stamp, MAP_FRAME
        transforms.append(whole)
    for joint in ElementTree.fromstring(urdf).iter("joint"):
        name, parent, child = joint.get("name"), joint.find("parent"), joint.find("child")
        if joint.get("type") != "fixed" or parent is None or child is None:
            raise ValueError(
                f"The joint '{name}' of the robot's description is not fixed; only fixed joints are published here, "
                "so run robot_state_publisher for it and leave robot_description to that."
            )
        origin = joint.find("origin")
        attributes = origin.attrib if origin is not None else {}
        x, y, z = map(float, attributes.get("xyz", "0 0 0").split())
        roll, pitch, yaw = map(float, attributes.get("rpy", "0 0 0").split())
        transform = TransformStamped(child_frame_id=str(child.get("link")))
        transform.header.stamp, transform.header.frame_id = stamp, str(parent.get("link"))
        offset = transform.transform.translation
        offset.x, offset.y, offset.z = x, y, z
        transform.transform.rotation = quaternion_of(roll, pitch, yaw)
        transforms.append(transform)
    return transforms


def quaternion_of(roll: float, pitch: float, yaw: float) -> Quaternion:
    """Quaternion of URDF's roll, pitch, yaw: rotations (rad) about the fixed axes x, y, z in this order."""
    cr, sr = math.cos(roll / 2), math.sin(roll / 2)
    cp, sp = math.cos(pitch / 2), math.sin(pitch / 2)
    cy, sy = math.cos(yaw / 2), math.sin(yaw / 2)
    return Quaternion(
        x=sr * cp * cy - cr * sp * sy,
        y=cr * sp * cy + sr * cp * sy,
        z=cr * cp * sy - sr * sp * cy,
        w=cr * cp * cy + sr * sp * sy,
    )


def description(file: FilePath, base_height: float = 0.0) -> str:
    """A robot's URDF, with any joint to base_footprint set ``base_height`` (m) below base_link.

    :raises ValueError: when the file cannot be read or parsed.
    """
    try:
        root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The robot's description {file} cannot be read: {error}.") from error
    except ElementTree.ParseError as error:
        raise ValueError(f"The robot's description {file} is not valid XML: {error}.") from error
    for joint in root.iter("joint"):
        child, origin = joint.find("child"), joint.find("origin")
        if child is not None and origin is not None and child.get("link") == "base_footprint":
            origin.set("xyz", f"0 0 {-base_height}")
    return ElementTree.tostring(root, encoding="unicode")


def _text(name: str, text: str, pose: Pose, height: float, colour: ColorRGBA, header: Header) -> Marker:
    marker = marker_at(header, name, 0, Marker.TEXT_VIEW_FACING, pose, fades=True)
    marker.pose.position.z = height
    marker.scale.z = 0.13
    marker.color, marker.text = colour, text[:160]
    return marker
