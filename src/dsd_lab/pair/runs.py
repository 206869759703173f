"""A model in the simulator's loop, step by step, with all that is needed to tell how a run went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsd_lab.pair.scenes import offscreen
from dsd_lab.pair.speakers import Speaker
from dsd_lab.pair.truth import claims_of
from dsd_lab.train.data import apply_action
from dsd_lab.worlds.expert import reply
from dsd_lab.worlds.guide import View, full_round
from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World

MAX_STEPS = 25
_SIDE_BY_SIDE = 100  # rooms at once: replies are computed together where prompts are of one length


@dataclass
class Run:
    """One run: where the robot was, what was said at each step, and how it ended.

    ended: "stopped" by itself, "searched" all round without seeing the goal, as navigation ends it, "unparsable",
    or the step "budget".
    """

    world: World
    path: list[tuple[float, float]]
    poses: list[tuple[float, float, float]] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    expert: list[str] = field(default_factory=list)
    reached: bool = False
    collided: bool = False
    ended: str = "budget"

    @property
    def length(self) -> float:
        """Metres of the path."""
        return sum(math.dist(a, b) for a, b in zip(self.path, self.path[1:], strict=False))

    @property
    def steps(self) -> int:
        return len(self.replies)


def action_of(text: str) -> str:
    """The action of a reply, "" when it does not parse."""
    try:
        return format_action(parse_reply(text).action)
    except UnparsableReply:
        return ""


class _Driver:
    """One room being walked through."""

    def __init__(self, world: World, shared: Offscreen, history: int) -> None:
        self.history = history
        self.run = Run(world, [world.start[:2]])
        self.simulator = Simulator(world, offscreen=shared)
        self.actions: list[str] = []
        self.pictures: list[np.ndarray] = []
        self._said: list[bool] = []  # whether the goal was seen, by the replies
        self._seen: list[bool] = []  # and truly
        self.goes_on = True

    def look(self) -> np.ndarray:
        """What the camera shows now; the expert's reply to it is noted."""
        world, goal = self.run.world, self.run.world.goal
        # By geometry where training's labels are, which is quicker.
        view = View.of(self.simulator) if world.look is None else View.at(world, self.simulator.pose)
        self._seen.append(view.index_of(goal) is not None)
        self.run.poses.append(self.simulator.pose)
        self.run.expert.append(reply(view, goal, full_round(self.actions, self._seen)))
        self.pictures = [*self.pictures, self.simulator.render()][-1 - self.history :]
        return self.pictures[-1]

    def past(self) -> list[tuple[np.ndarray, str]]:
        """The last pictures before the present one, each with what was done then."""
        earlier = self.pictures[:-1]
        return list(zip(earlier, self.actions[len(self.actions) - len(earlier) :], strict=True))

    def act(self, text: str) -> None:
        """Carry a reply out."""
        run, action = self.run, action_of(text)
        run.replies.append(text)
        if not action:
            self._end("unparsable")
            return
        self._said.append(claims_of(text).seen)
        if full_round(self.actions, self._said):
            self._end("searched")
        elif apply_action(self.simulator, f"Action: {action}"):
            self.actions.append(action)
            run.path.append(self.simulator.pose[:2])
        else:
            self._end("stopped")

    def _end(self, how: str) -> None:
        self.run.ended, self.goes_on = how, False

    def finish(self) -> Run:
        """The run with its verdicts."""
        run = self.run
        run.collided = self.simulator.collisions > 0
        if run.world.target_index is None:
            denied = bool(self._said) and not self._said[-1]
            run.reached = run.ended in ("stopped", "searched") and denied and not run.collided
        else:
            run.reached = run.ended == "stopped" and self.simulator.reached()
        return run


def drive(
    speaker: Speaker,
    worlds: Sequence[World],
    max_steps: int = MAX_STEPS,
    history: int = 0,
    tell: Callable[[float], None] | None = None,
) -> list[Run]:
    """Run a model in some rooms, without noise: the same model and rooms give the same runs.

    A run has reached its goal when the robot stopped by itself within 0.6 m of it and touched nothing; where there is
    no such thing, when it ended by saying so, or after a full round in which no reply saw any. ``history``: how
    many earlier pictures a prompt shows at most. ``tell(share)`` hears how far it is.
    """
    runs: list[Run] = []
    with offscreen() as shared:
        for first in range(0, len(worlds), _SIDE_BY_SIDE):
            some = worlds[first : first + _SIDE_BY_SIDE]
            drivers = [_Driver(world, shared, history) for world in some]
            for step in range(max_steps):
                active = [driver for driver in drivers if driver.goes_on]
                if not active:
                    break
                if tell is not None:
                    tell((first + len(drivers) * step / max_steps) / len(worlds))
                said = speaker.replies(
                    [driver.look() for driver in active],
                    [driver.run.world.instruction for driver in active],
                    [driver.past() for driver in active],
                )
                for driver, tokens in zip(active, said, strict=True):
                    driver.act(speaker.text(tokens))
            runs += [driver.finish() for driver in drivers]
    return runs


def expert_length(world: World, max_steps: int = 40) -> float | None:
    """Metres of the expert's path in a room, without pictures; None when it does not get there."""
    simulator = Simulator(world)
    actions: list[str] = []
    seen: list[bool] = []
    path = [world.start[:2]]
    for _ in range(max_steps):
        view = View.at(world, simulator.pose)
        seen.append(view.index_of(world.goal) is not None)
        said = reply(view, world.goal, full_round(actions, seen))
        if not apply_action(simulator, said):
            break
        actions.append(action_of(said))
        path.append(simulator.pose[:2])
    if world.target_index is None or not simulator.reached():
        return None
    return sum(math.dist(a, b) for a, b in zip(path, path[1:], strict=False))
