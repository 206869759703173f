# SPDX-License-Identifier: Apache-2.0
"""The topics that a bag records, and how to subscribe to them."""

from __future__ import annotations

from collections.abc import Sequence

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime

from dsd_ros.ros.camera import CAMERA

PICTURES = f"{CAMERA}/compressed"  # recorded in its place
PICTURE_TYPE = "sensor_msgs/msg/CompressedImage"

# Relative name -> type. Subscribed to from the start, so that no first message is missed.
TOPICS: dict[str, str] = {
    CAMERA: "sensor_msgs/msg/Image",
    "camera/camera_info": "sensor_msgs/msg/CameraInfo",
    "odom": "nav_msgs/msg/Odometry",
    "dsd/instruction": "std_msgs/msg/String",
    "dsd/grammar": "std_msgs/msg/String",
    "dsd/session_request": "dsd_msgs/msg/SessionRequest",
    "dsd/session_reply": "dsd_msgs/msg/SessionReply",
    "dsd/session_close": "dsd_msgs/msg/SessionClose",
    "dsd/observation": "dsd_msgs/msg/Observation",
    "dsd/draft_tokens": "dsd_msgs/msg/DraftTokens",
    "dsd/verified_tokens": "dsd_msgs/msg/VerifiedTokens",
    "dsd/draft": "dsd_msgs/msg/Draft",
    "dsd/outcome": "dsd_msgs/msg/Outcome",
    "dsd/refusal": "dsd_msgs/msg/Refusal",
    "dsd/decode_stats": "dsd_msgs/msg/DecodeStats",
    "dsd/reply_progress": "dsd_msgs/msg/ReplyProgress",
    "dsd/nav_action": "dsd_msgs/msg/NavAction",
    "dsd/memory_answer": "dsd_msgs/msg/MemoryAnswer",
    "dsd/safety_state": "dsd_msgs/msg/SafetyState",
    "/diagnostics": "diagnostic_msgs/msg/DiagnosticArray",
    "/rosout": "rcl_interfaces/msg/Log",
}
# Required for a replay, with the tokens' topics of the mode.
CORE = frozenset({CAMERA, "dsd/instruction", "dsd/observation", "dsd/reply_progress", "dsd/nav_action"})
# Recorded with whatever type they have, once published.
WHERE_THERE = (
    "cmd_vel_dsd", "cmd_vel", "/tf", "/tf_static", "/clock", "imu", "ground_truth/collisions",
    "ground_truth/target_distance", "ground_truth/reached", "ground_truth/markers",
    "robot_description", "dsd/visual/markers", "dsd/visual/path_walked", "dsd/visual/path_intended",
)  # fmt: skip
_LATCHED = frozenset({
    "dsd/instruction", "dsd/memory_answer", "dsd/grammar", "dsd/safety_state", "dsd/session_request",
    "dsd/session_reply",
})  # fmt: skip
_DEPTH = 200  # messages queued for this process
_CAMERA_DEPTH = 20
_FOREVER = QosTime(9223372036, 854775807)


def profile(name: str, offered: Sequence[QoSProfile] = ()) -> QoSProfile:
    """A subscription's QoS, compatible with all these publishers; without any, that of this package's own ones.

    So nothing of theirs is missed while a subscription is replaced; what only others offer was not heard until then.
    """
    best_effort, latched = False, name in _LATCHED
    if offered:
        best_effort = any(q.reliability == ReliabilityPolicy.BEST_EFFORT for q in offered)
        latched = all(q.durability == DurabilityPolicy.TRANSIENT_LOCAL for q in offered)
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST,
        depth=_CAMERA_DEPTH if name == CAMERA else _DEPTH,
        reliability=ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE,
    )


def as_recorded(qos: QoSProfile) -> Qos:
    """A profile in the form that a bag stores."""
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
