"""What verified replies have seen, and where: into the robot's own store, one sentence for each thing."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from dsd_ros.dragon.documents.memory import Memory, Sighting, seen
from dsd_ros.dragon.documents.store import Store
from dsd_ros.navigation.controller import Pose
from dsd_ros.robot.sim.world import COLOURS, KINDS, ROBOT_RADIUS

SOURCE = "what the robot has seen"
# The shipped target's words for where its goal is; what is said otherwise is not remembered.
_SEEN = re.compile(
    r"\bThe (?P<thing>\w+ \w+) is (?P<side>straight ahead|a little (?:left|right)|on the (?:left|right)|"
    r"far (?:left|right)), (?P<metres>\d+(?:\.\d+)?) m away\b"
)
_DEGREES = {"straight": 0.0, "a": 6.0, "on": 18.0, "far": 32.0}  # by the first word, about


def sightings(reasoning: str, pose: Pose, time: datetime) -> list[Sighting]:
    """The thing that a reply's words see at a distance, where it is if the robot stands at ``pose``; or none.

    Metres of the odometry frame. A thing that is said not to be in view is none.
    """
    found = _SEEN.search(reasoning)
    if found is None:
        return []
    side = found["side"]
    angle = math.radians(_DEGREES[side.split()[0]]) * (-1.0 if side.endswith("right") else 1.0)
    ahead = float(found["metres"]) + ROBOT_RADIUS
    return seen(found["thing"], pose.x, pose.y, pose.yaw + angle, time, COLOURS, KINDS, ahead=ahead)


class Remembering:
    """Keeps sightings in a store, those from before included. For one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        before = store.read(SOURCE)
        self.memory = Memory() if before is None else Memory.read(before.text)

    def take(self, reasoning: str, pose: Pose, stamp: float) -> list[Sighting]:
        """What is new in a verified reply of ``stamp`` (s); it is in the store when this returns."""
        new = [
            sighting
            for sighting in sightings(reasoning, pose, datetime.fromtimestamp(stamp, UTC))
            if self.memory.add(sighting)
        ]
        if new:
            self._store.add(self.memory.document(SOURCE))
        return new
