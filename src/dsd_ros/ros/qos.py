# SPDX-License-Identifier: Apache-2.0
"""Quality of service of every topic, in one place."""

from __future__ import annotations

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy


def _keep_last(depth: int, reliability: ReliabilityPolicy, durability: DurabilityPolicy) -> QoSProfile:
    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth, reliability=reliability, durability=durability)


_VOLATILE = DurabilityPolicy.VOLATILE

# Only the newest picture matters. A large one is many datagrams, and without repeats it nearly never arrives whole.
CAMERA = _keep_last(1, ReliabilityPolicy.RELIABLE, _VOLATILE)
STATE = _keep_last(10, ReliabilityPolicy.RELIABLE, _VOLATILE)  # odometry, imu, statistics
NEWEST_STATE = _keep_last(1, ReliabilityPolicy.RELIABLE, _VOLATILE)  # to steer by: never a backlog
# To subscribe to what is repeated anyway (odometry, IMU, range, scan, battery, cmd_vel): best effort hears every
# publisher, a reliable subscription only reliable ones. What is said once (nav_action, the protocol, a change in
# /diagnostics) keeps a reliable subscription, since a loss would matter.
SENSOR = _keep_last(1, ReliabilityPolicy.BEST_EFFORT, _VOLATILE)
REPEATED = _keep_last(10, ReliabilityPolicy.BEST_EFFORT, _VOLATILE)  # the same where several nodes share a topic
COMMAND = _keep_last(1, ReliabilityPolicy.RELIABLE, _VOLATILE)  # cmd_vel: an old one must not queue
LINK = _keep_last(50, ReliabilityPolicy.RELIABLE, _VOLATILE)  # drafts and observations: all of them
# A session opens as soon as its two ends have discovered each other, perhaps before a recorder is discovered: the
# publishers keep these for it. The two ends subscribe as to LINK, and so receive nothing of an earlier session.
SESSION = _keep_last(10, ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL)
# With an exit after every layer and several rounds in flight, a final outcome must not be dropped.
OUTCOMES = _keep_last(300, ReliabilityPolicy.RELIABLE, _VOLATILE)
# Fast DDS asks for an acknowledgement at once only where one sample fills the writer's history, otherwise after 3 s.
EARLY_OUTCOMES = _keep_last(1, ReliabilityPolicy.RELIABLE, _VOLATILE)
# Tokens that are sent, and shown, as they come: either side may be many ahead while the other is slow to read.
PROPOSALS = _keep_last(200, ReliabilityPolicy.RELIABLE, _VOLATILE)
CLOCK = _keep_last(1, ReliabilityPolicy.BEST_EFFORT, _VOLATILE)
TRANSFORMS = _keep_last(100, ReliabilityPolicy.RELIABLE, _VOLATILE)
LATCHED = _keep_last(1, ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL)
LOG = _keep_last(
    100, ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL
)  # /rosout keeps some seconds of lines
# The Go2's topics. Best effort for its state matches either kind of writer; only the newest matters.
ROBOT_STATE = _keep_last(1, ReliabilityPolicy.BEST_EFFORT, _VOLATILE)
ROBOT_SERVICE = _keep_last(20, ReliabilityPolicy.RELIABLE, _VOLATILE)  # requests and answers
