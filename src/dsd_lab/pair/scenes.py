# SPDX-License-Identifier: Apache-2.0
"""What pairs are measured on: pictures with a question and the expert's answer, and rooms for runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import numpy as np

from dsd_lab.train.data import TEST_SEEDS, beside_way, shared_offscreen, world_frames
from dsd_lab.train.frames import Frame
from dsd_lab.worlds.expert import reply
from dsd_lab.worlds.guide import View, walk
from dsd_lab.worlds.phrases import instructed, instruction_for
from dsd_lab.worlds.situations import Situation, Split, world_of
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import NoLayoutError, World

DEMO = "demo"  # the rooms of the demo and its recordings, which belong to no split
SITUATIONS = tuple(situation.value for situation in Situation)
NAMES = (*SITUATIONS, DEMO)
DEMO_SEED, DEMO_INSTRUCTION = 0, "find the silver bottle"
FIRST_RUN_SEED = 100  # lower seeds served to choose between weights
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
    on_way: bool  # taken on the expert's way to the goal, else beside it


def rooms(situation: str, first_seed: int, split: str = Split.TEST) -> Iterator[World]:
    """The rooms of a situation from a seed on, in the split's wordings; seeds without a room are skipped."""
    seed = first_seed
    while True:
        with suppress(NoLayoutError):
            yield _room(seed, situation, split)
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
    """The first ``count`` questions of a situation; larger counts begin with the same ones.

    Each room gives six about its own goal: three from the expert's way, and three from beside it (`beside_way`).
    """
    made = 0
    with closing(shared_offscreen()) as offscreen:
        for world in rooms(situation, TEST_SEEDS[0], split):
            with Simulator(world, offscreen=offscreen) as simulator:
                for number, pose in enumerate(_poses(world)):
                    if made >= count:
                        return
                    simulator.pose = pose
                    view, picture, goal = View.of(simulator), simulator.render(), world.goal
                    on_way, wanted = number % 2 == 0, reply(view, goal)
                    yield Scene(situation, picture, view, goal, world.instruction, wanted, on_way)
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
    with closing(shared_offscreen()) as offscreen:
        for seed in TEST_SEEDS:
            some, their = world_frames(seed, _PICTURES_PER_WORLD, offscreen)
            images += some
            labels += their
            if len(images) >= count:
                break
    return np.stack(images[:count]), labels[:count]
