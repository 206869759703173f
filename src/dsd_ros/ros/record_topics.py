"""What a bag of a run holds: the system's topics, and those of the robot that happen to be there."""

from __future__ import annotations

from collections.abc import Sequence

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime

CAMERA = "camera/image_raw"
PICTURES = "camera/image_raw/compressed"  # what is kept of it; image_transport's name
PICTURE_TYPE = "sensor_msgs/msg/CompressedImage"

# Relative name -> type. Subscribed to from the beginning, so that nothing said at first is missed.
TOPICS: dict[str, str] = {
    CAMERA: "sensor_msgs/msg/Image",
    "camera/camera_info": "sensor_msgs/msg/CameraInfo",
    "odom": "nav_msgs/msg/Odometry",
    "instruction": "std_msgs/msg/String",
    "session_request": "dsd_msgs/msg/SessionRequest",
    "session_reply": "dsd_msgs/msg/SessionReply",
    "session_close": "dsd_msgs/msg/SessionClose",
    "observation": "dsd_msgs/msg/Observation",
    "draft": "dsd_msgs/msg/Draft",
    "outcome": "dsd_msgs/msg/Outcome",
    "refusal": "dsd_msgs/msg/Refusal",
    "decode_stats": "dsd_msgs/msg/DecodeStats",
    "reply_progress": "dsd_msgs/msg/ReplyProgress",
    "nav_action": "dsd_msgs/msg/NavAction",
    "safety_state": "dsd_msgs/msg/SafetyState",
    "cmd_vel_nav": "geometry_msgs/msg/Twist",
    "cmd_vel": "geometry_msgs/msg/Twist",
    "/diagnostics": "diagnostic_msgs/msg/DiagnosticArray",
    "/rosout": "rcl_interfaces/msg/Log",
}
# Without these no run can be replayed.
CORE = frozenset({CAMERA, "instruction", "observation", "draft", "outcome", "reply_progress", "nav_action"})
# Recorded with whatever type they have, once somebody publishes them.
WHERE_THERE = (
    "/tf", "/tf_static", "/clock", "imu", "collision", "ground_truth/target_distance",
    "ground_truth/reached", "simulator/fault",
)  # fmt: skip
_LATCHED = frozenset({"instruction", "safety_state"})
_BEST_EFFORT = frozenset({CAMERA, "camera/camera_info"})
_DEPTH = 200  # messages that wait for this process
_CAMERA_DEPTH = 20
_FOREVER = QosTime(9223372036, 854775807)


def first_profile(name: str) -> QoSProfile:
    """How to listen to a topic before its publishers are known."""
    return profile(name, name in _BEST_EFFORT, name in _LATCHED)


def profile(name: str, best_effort: bool, latched: bool) -> QoSProfile:
    """A subscription's quality of service that publishers of the kind named will serve."""
    reliable, lasting = ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST,
        depth=_CAMERA_DEPTH if name == CAMERA else _DEPTH,
        reliability=ReliabilityPolicy.BEST_EFFORT if best_effort else reliable,
        durability=lasting if latched else DurabilityPolicy.VOLATILE,
    )


def fitting_profile(name: str, offered: Sequence[QoSProfile]) -> QoSProfile:
    """How to listen so that every one of these publishers is heard."""
    best_effort = any(q.reliability == ReliabilityPolicy.BEST_EFFORT for q in offered)
    latched = all(q.durability == DurabilityPolicy.TRANSIENT_LOCAL for q in offered)
    return profile(name, best_effort, latched)


def as_recorded(qos: QoSProfile) -> Qos:
    """A profile as a bag says it was offered."""
    latched = qos.durability == DurabilityPolicy.TRANSIENT_LOCAL
    best_effort = qos.reliability == ReliabilityPolicy.BEST_EFFORT
    return Qos(
        history=QosHistory.KEEP_LAST,
        depth=qos.depth,
        reliability=QosReliability.BEST_EFFORT if best_effort else QosReliability.RELIABLE,
        durability=QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE,
        deadline=_FOREVER,
        lifespan=_FOREVER,
        liveliness=QosLiveliness.AUTOMATIC,
        liveliness_lease_duration=_FOREVER,
        avoid_ros_namespace_conventions=False,
    )
