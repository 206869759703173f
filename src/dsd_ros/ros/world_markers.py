"""A simulated world as markers, for RViz and the web view's map."""

from __future__ import annotations

from builtin_interfaces.msg import Duration
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from dsd_ros.robot.sim.scene import RGB
from dsd_ros.robot.sim.world import HEIGHT, World
from dsd_ros.ros.stamps import quaternion

_FADE_S = 2.5  # a marker that fades and is not sent again vanishes after this long
_Pose = tuple[float, float, float]  # x and y in metres, yaw in radians


def world_markers(world: World, header: Header) -> MarkerArray:
    """A simulated world: namespaces "walls", "furniture", "things" and, where it is there, "goal"; ids from 0."""
    markers = []
    hx, hy = world.half_x, world.half_y
    sides = ((hx, 0.0, 0.1, 2 * hy), (-hx, 0.0, 0.1, 2 * hy), (0.0, hy, 2 * hx, 0.1), (0.0, -hy, 2 * hx, 0.1))
    for number, (x, y, wide, deep) in enumerate(sides):
        wall = _solid(header, "walls", number, Marker.CUBE, (x, y, 0.0), (wide, deep, 0.3))
        wall.color = ColorRGBA(r=0.7, g=0.68, b=0.62, a=0.5)
        markers.append(wall)
    for number, item in enumerate(world.furniture):
        size = (2 * item.half_x, 2 * item.half_y, item.height)
        cabinet = _solid(header, "furniture", number, Marker.CUBE, (item.x, item.y, 0.0), size)
        cabinet.color = ColorRGBA(r=0.45, g=0.32, b=0.2, a=0.9)
        markers.append(cabinet)
    for number, thing in enumerate(world.things):
        size = (2 * thing.radius, 2 * thing.radius, HEIGHT[thing.kind])
        pose = (thing.x, thing.y, thing.yaw)
        marker = _solid(header, "things", number, Marker.CYLINDER, pose, size)
        red, green, blue = RGB[thing.colour]
        marker.color = ColorRGBA(r=red, g=green, b=blue, a=1.0)
        marker.text = thing.name
        markers.append(marker)
    if world.target_index is None:
        return MarkerArray(markers=markers)
    target = world.target
    ring = _solid(header, "goal", 0, Marker.CYLINDER, (target.x, target.y, 0.0), (0.9, 0.9, 0.02))
    ring.color = ColorRGBA(r=0.38, g=0.83, b=0.50, a=0.4)
    ring.text = world.goal
    markers.append(ring)
    return MarkerArray(markers=markers)


def _solid(header: Header, name: str, number: int, kind: int, pose: _Pose, size: tuple[float, float, float]) -> Marker:
    marker = marker_at(header, name, number, kind, pose)
    marker.scale.x, marker.scale.y, marker.scale.z = size
    marker.pose.position.z = size[2] / 2
    return marker


def marker_at(header: Header, name: str, number: int, kind: int, pose: _Pose, fades: bool = False) -> Marker:
    """A marker on the floor; with ``fades`` it vanishes unless it is sent again."""
    marker = Marker(header=header, ns=name, id=number, type=kind, action=Marker.ADD)
    marker.pose.position.x, marker.pose.position.y = pose[0], pose[1]
    marker.pose.orientation = quaternion(pose[2])
    if fades:
        marker.lifetime = Duration(sec=int(_FADE_S), nanosec=int(_FADE_S % 1 * 1e9))
    return marker
