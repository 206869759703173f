"""What pairs are measured on: pictures with a question and the expert's answer, and rooms to walk in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from dsd_lab.train.data import TEST_SEEDS, Frame, beside_way, shared_offscreen, world_frames
from dsd_lab.worlds.expert import reply
from dsd_lab.worlds.guide import View, walk
from dsd_lab.worlds.phrases import instructed, instruction_for
from dsd_lab.worlds.situations import Situation, Split, world_of
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import NoLayoutError, World

DEMO = "demo"  # the rooms of the demo and its recordings, which are of no split
SITUATIONS = tuple(situation.value for situation in Situation)
NAMES = (*SITUATIONS, DEMO)
DEMO_SEED, DEMO_INSTRUCTION = 0, "find the silver bottle"
FIRST_RUN_SEED = 100  # the seeds below served to choose between weights
_PICTURES_PER_WORLD = 6


@dataclass(frozen=True)
class Scene:
    """One question. picture: uint8 (224, 336, 3) RGB; view: what is truly there; reply: the expert's."""

    situation: str
    picture: np.ndarray
    view: View
    goal: str
    instruction: str
    reply: str
    on_way: bool  # the expert's own way to the goal; else somewhere beside it


def rooms(situation: str, first_seed: int, split: str = Split.TEST) -> Iterator[World]:
    """The rooms of a situation from a seed on, each with an instruction in one of the split's phrasings.

    Seeds that make no room are passed over.
    """
    seed = first_seed
    while True:
        try:
            world = _room(seed, situation, split)
        except NoLayoutError:
            world = None
        if world is not None:
            yield world
        seed += 1


def rooms_of(situation: str, count: int, split: str = Split.TEST) -> list[World]:
    """The rooms of ``count`` runs of a situation."""
    found = rooms(situation, FIRST_RUN_SEED, split)
    return [next(found) for _ in range(count)]


def _room(seed: int, situation: str, split: str) -> World:
    if situation == DEMO:
        world, rng = World.from_seed(seed), np.random.default_rng([seed, 60])
        return replace(world, instruction=instruction_for(world.goal, rng))
    return instructed(world_of(seed, Situation(situation), Split(split)))


def scenes_of(situation: str, count: int, split: str = Split.TEST) -> Iterator[Scene]:
    """The first ``count`` questions of a situation; larger counts begin alike.

    Six of each room, about its own goal: three from the expert's way to it, and three from beside that way, up to
    0.4 m off and turned by up to 40 degrees.
    """
    made = 0
    with offscreen() as shared:
        for world in rooms(situation, TEST_SEEDS[0], split):
            with Simulator(world, offscreen=shared) as simulator:
                for number, pose in enumerate(_poses(world)):
                    if made >= count:
                        return
                    simulator.pose = pose
                    view = View.of(simulator)
                    yield Scene(
                        situation,
                        simulator.render(),
                        view,
                        world.goal,
                        world.instruction,
                        reply(view, world.goal),
                        number % 2 == 0,
                    )
                    made += 1


def _poses(world: World) -> list[tuple[float, float, float]]:
    """Poses on the expert's way and beside it in turn."""
    rng = np.random.default_rng([world.seed, 61])
    way = [view.pose for view in walk(world).views]
    poses = []
    for n in np.linspace(0, len(way) - 1, _PICTURES_PER_WORLD // 2).round().astype(int):
        poses += [way[n], beside_way(world, way[n], rng)]
    return poses


def held_out_scenes(count: int) -> tuple[np.ndarray, list[Frame]]:
    """Pictures (count, MODEL_HEIGHT, MODEL_WIDTH, 3) and labels from rooms of the demo's kind that no training saw."""
    images: list[np.ndarray] = []
    labels: list[Frame] = []
    with offscreen() as shared:
        for seed in TEST_SEEDS:
            some, their = world_frames(seed, _PICTURES_PER_WORLD, shared)
            images += some
            labels += their
            if len(images) >= count:
                break
    return np.stack(images[:count]), labels[:count]


@contextmanager
def offscreen() -> Iterator[Offscreen]:
    """A renderer for many rooms in turn."""
    shared = shared_offscreen()
    try:
        yield shared
    finally:
        shared.close()
