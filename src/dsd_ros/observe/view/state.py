"""What a view shows, as plain values: rounds, the reply they make up, the link, safety, the robot's path."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

PATH_SPACING_M = 0.03
PATH_TURN_RAD = 0.2
PATH_POINTS = 4000  # 120 m of walking; what is older is thinned out
ROUNDS_KEPT = 512

Pose = tuple[float, float, float]  # x, y (m), yaw (rad)


@dataclass(frozen=True)
class Round:
    """One round of a reply. Seconds are the robot's, ``verify`` the verifier's own.

    ``gained``: what the reply gained, the ``accepted`` drafted tokens first, then the target's own.
    ``exits``: (layer, seconds after the draft was sent) of early outcomes, in order of arrival.
    ``source``: of the draft, "exit" or "guess" (begun ahead), "flight" (sent ahead), "" (drafted in turn).
    """

    drafted: int = 0
    accepted: int = 0
    gained: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    source: str = ""
    ready: bool = False
    began: float = 0.0  # from the beginning of the reply
    draft: float = 0.0  # drafting while nothing else went on
    wait: float = 0.0  # from sending the draft to its outcome
    verify: float = 0.0  # in the target model
    model: float = 0.0  # making this draft took, whenever that was
    exits: tuple[tuple[int, float], ...] = ()
    first_exit: int = 0
    predrafts: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class ShownReply:
    """A reply as far as it is verified. ``picture``: stamp of the picture it is about, s."""

    instruction: str = ""
    text: str = ""
    rounds: tuple[Round, ...] = ()
    done: bool = False
    picture: float = 0.0

    def with_round(self, news: Round) -> ShownReply:
        """The reply one round later."""
        return replace(self, rounds=(*self.rounds[-(ROUNDS_KEPT - 1) :], news))

    @property
    def tokens(self) -> int:
        return sum(len(round_.gained) for round_ in self.rounds)

    @property
    def tau(self) -> float:
        """Tokens gained per round."""
        return self.tokens / len(self.rounds) if self.rounds else 0.0


@dataclass(frozen=True)
class ShownStep:
    """An action as it is announced. ``phrase``: e.g. "turn left 30 degrees"; ``pose`` where it begins."""

    number: int
    phrase: str
    ahead: float  # m to drive
    turn: float  # rad, to the left
    verified: bool
    pose: Pose
    reasoning: str = ""
    retracing: bool = False
    age: float = 0.0  # of the picture when the action was announced, s


@dataclass(frozen=True)
class Overlay:
    """All that is written over and under the robot's view; compared to see whether to draw anew."""

    reply: ShownReply = ShownReply()
    action: str = ""
    verified: bool = True
    link: str = ""  # what the link's nodes say
    link_ok: bool | None = None  # None: nothing said yet
    causes: tuple[str, ...] = ()  # why the robot is not to move, gravest first
    stopped: bool = False
    mode: str = ""
    tau: float = 0.0  # of the newest whole reply, like the rest
    seconds: float = 0.0
    age: float = 0.0


@dataclass
class Walk:
    """Where the robot went: poses a few centimetres apart."""

    poses: deque[Pose] = field(default_factory=deque)
    changes: int = 0  # grows with every pose kept

    def add(self, pose: Pose) -> bool:
        """Keep a pose if it is far enough from the last; whether it was."""
        if self.poses:
            x, y, yaw = self.poses[-1]
            turned = abs(math.remainder(pose[2] - yaw, 2 * math.pi))
            if math.hypot(pose[0] - x, pose[1] - y) < PATH_SPACING_M and turned < PATH_TURN_RAD:
                return False
        if len(self.poses) >= PATH_POINTS:
            self.poses = deque(list(self.poses)[::2])
        self.poses.append(pose)
        self.changes += 1
        return True


def motion_of(pose: Pose, ahead: float, turn: float, spacing: float = 0.05) -> list[Pose]:
    """The poses an action leads through from ``pose``: straight ahead (m), or on the spot (rad)."""
    x, y, yaw = pose
    if not ahead and not turn:
        return [pose]
    pieces = max(1, round(abs(ahead) / spacing), round(abs(turn) / math.radians(5.0)))
    shares = (piece / pieces for piece in range(pieces + 1))
    return [
        (x + share * ahead * math.cos(yaw), y + share * ahead * math.sin(yaw), yaw + share * turn) for share in shares
    ]
