# SPDX-License-Identifier: Apache-2.0
"""The robots' frames over DDS: a whole tree from each driver, the optical frame against the picture, parameters."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from nav_msgs.msg import Odometry
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CameraInfo, Image, Imu, Range
from std_msgs.msg import String
from tf2_msgs.msg import TFMessage

from dsd_msgs.msg import SafetyState
from dsd_ros.paths import config_directory
from dsd_ros.robot.driver import Posture, RobotState
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.robot.sim.driver import STANDING_HEIGHT
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.world import CAMERA_HEIGHT, CAMERA_PITCH, RADIUS, World
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import BasePublisher
from dsd_ros.ros.images import to_rgb

ROBOT = {  # child: parent
    "base_footprint": "odom",
    "base_link": "base_footprint",
    "imu_link": "base_link",
    "front_camera_link": "base_link",
    "front_camera_optical_frame": "front_camera_link",
}


def described(folder: Path, *changes: tuple[str, str]) -> str:
    """A description of one's own: the shipped one, changed."""
    text = (config_directory() / "go2.urdf").read_text()
    for one, other in changes:
        assert one in text
        text = text.replace(one, other)
    file = folder / "own.urdf"
    file.write_text(text)
    return str(file)


class Frames:
    """What a robot publishes of its frames, and the messages that are in them."""

    def __init__(self, rig) -> None:
        self._rig = rig
        self.parents: dict[str, str] = {}
        self.conflicts: set[str] = set()
        self._transforms: dict[str, np.ndarray] = {}
        self.heard: dict[str, list] = {}
        for topic, kind, profile in (
            ("odom", Odometry, qos.STATE), ("imu", Imu, qos.STATE), ("range", Range, qos.STATE),
            ("camera/image_raw", Image, qos.CAMERA), ("camera/camera_info", CameraInfo, qos.CAMERA),
            ("robot_description", String, qos.LATCHED),
        ):  # fmt: skip
            self.heard[topic] = []
            rig.node.create_subscription(kind, topic, self.heard[topic].append, profile)
        # As tf2's listener: of two robots' messages, a depth of one would keep the later one.
        static = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        for topic, profile in (("tf", qos.TRANSFORMS), ("tf_static", static)):
            rig.node.create_subscription(TFMessage, topic, self._on_transforms, profile)

    def _on_transforms(self, message: TFMessage) -> None:
        for each in message.transforms:
            child, parent = each.child_frame_id, each.header.frame_id
            if self.parents.setdefault(child, parent) != parent:
                self.conflicts.add(f"{child} below {self.parents[child]} and {parent}")
            q, t = each.transform.rotation, each.transform.translation
            self._transforms[child] = matrix((q.w, q.x, q.y, q.z), (t.x, t.y, t.z))

    def wait_for(self, expected: dict[str, str], *topics: str) -> None:
        """Wait for exactly these frames, and for a message on each topic."""
        self._rig.until(lambda: self.parents.keys() >= expected.keys(), what=f"the frames {sorted(expected)}")
        self._rig.until(lambda: all(self.heard[topic] for topic in topics), what=f"messages on {topics}")
        assert self.parents == expected and not self.conflicts

    def lookup(self, frame: str, root: str = "odom") -> np.ndarray:
        """The pose of a frame in another above it; fails for a circle."""
        found = np.eye(4)
        for _ in range(len(self.parents) + 1):
            if frame == root:
                return found
            found, frame = self._transforms[frame] @ found, self.parents[frame]
        raise AssertionError(f"{frame} goes round in a circle")


def matrix(wxyz, xyz) -> np.ndarray:
    w, x, y, z = wxyz
    found = np.eye(4)
    found[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    found[:3, 3] = xyz
    return found


def product(a, b) -> np.ndarray:
    """Of two quaternions (w, x, y, z)."""
    w, v = a[0] * b[0] - a[1:] @ b[1:], a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:])
    return np.array([w, *v])


def check_the_picture(frames: Frames, world: World) -> None:
    """The red ball of this world is where camera_info and the frames say."""
    picture, info = frames.heard["camera/image_raw"][-1], frames.heard["camera/camera_info"][-1]
    assert picture.header.frame_id == info.header.frame_id == "front_camera_optical_frame"
    ball = np.array([world.target.x, world.target.y, RADIUS["ball"], 1.0])
    x, y, z, _ = np.linalg.inv(frames.lookup(picture.header.frame_id)) @ ball
    assert z > 0.5, "the ball is ahead"
    u, v, w = np.array(info.k).reshape(3, 3) @ (x, y, z)
    pixels = to_rgb(picture).astype(int)
    rows, columns = np.nonzero(pixels[..., 0] > 2.5 * pixels[..., 1:].max(axis=-1))
    assert len(rows) > 200
    assert (u / w, v / w) == pytest.approx((columns.mean(), rows.mean()), abs=2.0)
    # A camera's axes by REP 103: right of the middle is +x, below it +y.
    assert (columns.mean() - picture.width / 2) * x > 0 and (rows.mean() - picture.height / 2) * y > 0


def test_the_simulated_robot_has_a_whole_tree_and_its_camera_an_optical_frame(rig):
    frames, seed = Frames(rig), 3  # the ball is to the right; in the next test to the left
    rig.host("simulator_node", seed=seed, instruction="find the red ball")
    frames.wait_for(ROBOT | {"front_range_link": "base_link"}, *frames.heard)
    assert frames.heard["imu"][-1].header.frame_id == "imu_link"
    assert frames.heard["range"][-1].header.frame_id == "front_range_link"
    odometry = frames.heard["odom"][-1]
    assert (odometry.header.frame_id, odometry.child_frame_id) == ("odom", "base_link")
    place = odometry.pose.pose.position
    assert frames.lookup("base_link")[:3, 3] == pytest.approx((place.x, place.y, place.z))
    footprint = frames.lookup("base_footprint")
    assert footprint[2, 3] == 0.0 and footprint[:3, 2] == pytest.approx((0.0, 0.0, 1.0))  # on the floor, and level
    links = {
        link.get("name") for link in ElementTree.fromstring(frames.heard["robot_description"][-1].data).iter("link")
    }
    assert links == frames.parents.keys() - {"odom", "front_range_link"}
    assert rig.node.count_publishers("/tf_static") == 1  # nothing is left to a viewer
    check_the_picture(frames, World.from_seed(seed, "find the red ball"))
    # How far odometry and IMU are to be trusted.
    imu = frames.heard["imu"][-1]
    pose = np.array(odometry.pose.covariance).reshape(6, 6)
    assert np.array_equal(pose, np.diag(np.diag(pose)))
    assert np.diag(pose) == pytest.approx([0.05**2] * 3 + [0.02**2] * 2 + [0.05**2])
    assert np.diag(np.array(odometry.twist.covariance).reshape(6, 6)) == pytest.approx([0.05**2] * 3 + [0.02**2] * 3)
    assert np.diag(np.reshape(imu.orientation_covariance, (3, 3))) == pytest.approx([0.02**2, 0.02**2, 0.05**2])
    assert np.diag(np.reshape(imu.angular_velocity_covariance, (3, 3))) == pytest.approx([0.02**2] * 3)
    assert np.diag(np.reshape(imu.linear_acceleration_covariance, (3, 3))) == pytest.approx([0.2**2] * 3)


def test_the_go2_has_the_same_tree_and_optical_frame(rig, tmp_path):
    frames = Frames(rig)
    rig.start("go2_standin_node", seed=8, instruction="find the red ball", lying=False)
    camera = f'xyz="{CAMERA_AHEAD} 0 {CAMERA_HEIGHT - STANDING_HEIGHT}" rpy="0 {CAMERA_PITCH} 0"'  # the stand-in's
    description = described(tmp_path, ('xyz="0.33 0 0.04" rpy="0 0 0"', camera))
    rig.host("go2_node", description=description, camera_fov=1.0472)
    topics = frames.heard.keys() - {"range"}
    frames.wait_for(ROBOT, *topics)
    check_the_picture(frames, World.from_seed(8, "find the red ball"))


def test_the_footprint_stays_level_below_a_tilted_base(rig):
    """The transforms from odom to base_link make up odometry's pose, roll and pitch included."""
    frames, base = Frames(rig), BasePublisher(rig.node)
    base.describe(FrameSettings())
    # Of yaw 2.0, pitch 0.3, roll -0.2 in this order.
    turned = np.array([math.cos(1.0), 0, 0, math.sin(1.0)])
    for angle, axis in ((0.3, 2), (-0.2, 1)):
        turn = np.zeros(4)
        turn[0], turn[axis] = math.cos(angle / 2), math.sin(angle / 2)
        turned = product(turned, turn)
    still = (0.0, 0.0, 0.0)
    state = RobotState(
        0.0,
        0.0,
        (1.0, -2.0, 0.3),
        tuple(map(float, turned)),
        (-0.2, 0.3, 2.0),
        still,
        0.0,
        still,
        still,
        Posture.MOVING,
    )

    def known() -> bool:
        base.publish(state, rig.node.get_clock().now().to_msg())
        return frames.parents.keys() >= ROBOT.keys()

    rig.until(known, what="the frames")
    frames.wait_for(ROBOT, "odom")
    footprint = frames.lookup("base_footprint")
    assert footprint == pytest.approx(matrix((math.cos(1.0), 0.0, 0.0, math.sin(1.0)), (1.0, -2.0, 0.0)))
    assert frames.lookup("base_link") == pytest.approx(matrix(turned, (1.0, -2.0, 0.3)))
    q = frames.heard["odom"][-1].pose.pose.orientation
    assert (q.w, q.x, q.y, q.z) == pytest.approx(tuple(turned))


def test_the_supervisor_speaks_of_the_frame_that_odometry_names(rig):
    states = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", states.append, qos.LATCHED)
    publisher = rig.node.create_publisher(Odometry, "odom", qos.STATE)
    rig.host("supervisor_node", realtime=False)
    message = Odometry(child_frame_id="go2_1/trunk")
    message.pose.pose.orientation.w = 1.0

    def named() -> bool:
        publisher.publish(message)
        return bool(states) and states[-1].header.frame_id == "go2_1/trunk"

    rig.until(named, what="the frame in safety_state")
    assert states[0].header.frame_id in ("base_link", "go2_1/trunk")


def test_frames_are_named_by_parameters_and_left_to_others_where_they_say_so(rig, tmp_path):
    """As beside robot_localization and robot_state_publisher, and a stack that has no footprint."""
    frames = Frames(rig)
    own = described(
        tmp_path, ('"base_link"', '"base"'), ('"imu_link"', '"imu"'), ('"front_camera_optical_frame"', '"eye"')
    )
    rig.host(
        "simulator_node", publish_tf=False, description=own, odom_frame="odom_legs", base_frame="base", imu_frame="imu",
        map_frame="map", camera_frame="eye",
    )  # fmt: skip
    named = {
        "odom_legs": "map", "base": "base_footprint", "imu": "base", "front_camera_link": "base",
        "eye": "front_camera_link", "front_range_link": "base",
    }  # fmt: skip
    frames.wait_for(named, "odom", "imu", "camera/image_raw")
    odometry = frames.heard["odom"][-1]
    assert (odometry.header.frame_id, odometry.child_frame_id) == ("odom_legs", "base")
    assert frames.heard["camera/image_raw"][-1].header.frame_id == "eye"


def test_without_footprint_and_description_one_transform_is_left(rig):
    frames = Frames(rig)
    rig.host("simulator_node", publish_description=False, footprint_frame="")
    frames.wait_for({"base_link": "odom"}, "odom", "camera/image_raw")
    place = frames.heard["odom"][-1].pose.pose.position
    assert frames.lookup("base_link")[:3, 3] == pytest.approx((place.x, place.y, STANDING_HEIGHT))
    assert not frames.heard["robot_description"] and rig.node.count_publishers("/robot_description") == 0


def test_two_robots_share_tf_by_their_prefixes(rig):
    frames = Frames(rig)
    rig.host("simulator_node", seed=3, frame_prefix="go2_1/", map_frame="map")
    rig.start("go2_standin_node", seed=4, world_frame="go2_2/odom")
    rig.host("go2_node", frame_prefix="go2_2/")
    first = {
        f"go2_1/{child}": f"go2_1/{parent}" for child, parent in (ROBOT | {"front_range_link": "base_link"}).items()
    }
    second = {f"go2_2/{child}": f"go2_2/{parent}" for child, parent in ROBOT.items()}
    frames.wait_for(first | second | {"go2_1/odom": "map"}, "imu", "camera/image_raw")
    assert frames.heard["imu"][0].header.frame_id.startswith("go2_")
    rig.until(lambda: {m.header.frame_id for m in frames.heard["odom"]} == {"go2_1/odom", "go2_2/odom"})
    assert not math.isclose(
        frames.lookup("go2_1/base_link", "map")[0, 3], frames.lookup("go2_2/base_link", "go2_2/odom")[0, 3]
    )


def test_bad_frames_end_it_with_a_sentence(rig):
    with pytest.raises(ValueError, match=r"The robot's description /nowhere/a\.urdf cannot be read"):
        rig.host("simulator_node", description="/nowhere/a.urdf")
