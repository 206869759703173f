from __future__ import annotations

import numpy as np

from dsd_ros.navigation.actions import parse_reply
from dsd_ros.robot.simulator import Simulator
from dsd_ros.robot.world import World
from dsd_ros.training.data import apply_action, shared_offscreen, world_frames
from dsd_ros.training.expert import View, reply


def test_the_expert_reaches_the_target_without_touching_anything() -> None:
    offscreen = shared_offscreen()
    for seed in range(10):
        instruction = "find the silver bottle" if seed == 0 else None
        world = World.from_seed(seed, instruction)
        simulator = Simulator(world, offscreen=offscreen)
        for _ in range(25):
            if not apply_action(simulator, reply(View.of(simulator), world.target.name)):
                break
        assert simulator.reached(), seed
        assert simulator.collisions == 0
    offscreen.close()


def test_every_reply_parses_and_names_its_goal() -> None:
    images, frames = world_frames(1_000_123, 12)
    assert len(images) == len(frames) == 12
    assert images[0].shape == (112, 168, 3) and images[0].dtype == np.uint8
    for frame in frames:
        names = {f"{colour} {kind}" for kind, colour, *_ in frame.things}
        for goal, text in frame.replies:
            assert goal in parse_reply(text).reasoning
            assert text.startswith("No ") == (goal not in names)


def test_the_same_seed_gives_the_same_pictures_and_replies() -> None:
    first, second = world_frames(1_000_007, 6), world_frames(1_000_007, 6)
    assert first[1] == second[1]
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))
