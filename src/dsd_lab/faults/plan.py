"""Which faults `dsd-lab bench faults` provokes, in which order, and when: reproducible from a seed, and free of ROS."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from dsd_ros.ros.bringup import TRANSPORTS

SIMULATOR, SUPERVISOR, NAVIGATION = "simulator_node", "supervisor_node", "navigation_node"
DRAFT, BRIDGE = "draft_node", "bridge_node"
# What runs behind the link: a node over DDS, the program `dsd verifier` behind a websocket.
VERIFIER = {"dds": "verifier_node", "websocket": "verifier"}


class Kind(Enum):
    """What is done."""

    KILL = "kill -9"
    PAUSE = "SIGSTOP"
    RESTART = "restart"
    CUT = "link cut"
    SILENCE = "link silent"
    LOSS = "5 % loss"
    JITTER = "300 ms jitter"
    FREEZE = "camera silent"
    REPEAT = "camera frozen"  # the last picture again and again, its stamp with it
    GARBAGE_UP = "garbage up"
    GARBAGE_DOWN = "garbage down"
    NOISE_UP = "noise in the stream up"
    NOISE_DOWN = "noise in the stream down"


class Moment(Enum):
    """When in the robot's cycle."""

    MOVING = "moving"  # an action is being carried out
    DECIDING = "deciding"  # it stands, and the models decode


@dataclass(frozen=True)
class Fault:
    """One provocation. ``seconds``: how long it lasts; of a killed process, for how long nothing is expected of
    it. ``delay``: how long after the beginning of its moment, s.
    """

    kind: Kind
    target: str = ""  # the process, for kill, pause and restart
    moment: Moment = Moment.MOVING
    seconds: float = 0.0
    delay: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind.value} {self.target}".strip()

    @property
    def stops_at_once(self) -> bool:
        """Whether the robot must stand within half a second of the fault itself: what keeps it safe is gone.

        The others are faults of the link: the action under way has been verified, and the robot stops once the
        loss is known, or needs not stop at all.
        """
        on_robot = self.target in (SIMULATOR, SUPERVISOR, NAVIGATION, DRAFT)
        camera = self.kind in (Kind.FREEZE, Kind.REPEAT)
        return camera or (self.kind in (Kind.KILL, Kind.PAUSE) and on_robot)

    @property
    def ends_the_system(self) -> bool:
        """Whether it is a process without which nothing may go on: everything is ended, and started by hand."""
        return self.kind is Kind.KILL and self.target in (SIMULATOR, SUPERVISOR)


def variants(transport: str) -> list[tuple[Kind, str]]:
    """Every fault that there is over a transport."""
    processes = [SIMULATOR, SUPERVISOR, NAVIGATION, DRAFT, VERIFIER[transport]]
    if transport == "websocket":
        processes.append(BRIDGE)
    found = [(kind, process) for kind in (Kind.KILL, Kind.PAUSE) for process in processes]
    found += [(Kind.RESTART, VERIFIER[transport]), (Kind.FREEZE, ""), (Kind.REPEAT, "")]
    found += [(Kind.GARBAGE_UP, ""), (Kind.GARBAGE_DOWN, "")]
    if transport == "websocket":
        link = (Kind.CUT, Kind.SILENCE, Kind.LOSS, Kind.JITTER, Kind.NOISE_UP, Kind.NOISE_DOWN)
        found += [(kind, "") for kind in link]
    return found


_SECONDS = {  # shortest and longest
    Kind.PAUSE: (1.0, 4.0),
    Kind.CUT: (0.5, 4.0),
    Kind.SILENCE: (0.5, 5.0),
    Kind.LOSS: (4.0, 8.0),
    Kind.JITTER: (4.0, 8.0),
    Kind.FREEZE: (1.0, 4.0),
    Kind.REPEAT: (1.0, 4.0),
}
_LATEST = {Moment.MOVING: 0.8, Moment.DECIDING: 0.3}  # delay, s


def plan(count: int, seed: int, transport: str) -> list[Fault]:
    """``count`` faults in random order, every variant once before any comes again. ValueError for bad input."""
    if count < 1:
        raise ValueError(f"count is {count}; use 1 or more")
    if transport not in TRANSPORTS:
        raise ValueError(f"unknown transport {transport!r}; choose from {', '.join(TRANSPORTS)}")
    source = random.Random(f"faults/{transport}/{seed}")
    deck: list[tuple[Kind, str]] = []
    faults = []
    for _ in range(count):
        if not deck:
            deck = variants(transport)
            source.shuffle(deck)
        kind, target = deck.pop()
        # What must stop the robot is best tried while it moves.
        moment = source.choices((Moment.MOVING, Moment.DECIDING), (3, 1))[0]
        seconds = source.uniform(*_SECONDS.get(kind, (0.0, 0.0)))
        delay = source.uniform(0.0, _LATEST[moment])
        faults.append(Fault(kind, target, moment, round(seconds, 3), round(delay, 3)))
    return faults
