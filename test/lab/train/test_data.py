# SPDX-License-Identifier: Apache-2.0
"""Pictures of situations and splits: what their labels say, and what a shard holds."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsd_lab.train import data
from dsd_lab.train.data import SPLIT_SEEDS, beside_way, free_ways, generate, shared_offscreen, world_frames
from dsd_lab.train.frames import FREE_WAYS, MODEL_HEIGHT, MODEL_WIDTH, SHARD_VERSION, Frame, load_frames
from dsd_lab.worlds.guide import View
from dsd_lab.worlds.situations import NAMES, Situation, Split, may_meet, world_of
from dsd_ros.navigation.run.actions import parse_reply
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import ROBOT_RADIUS, NoLayoutError, Thing, World

COUNT = 10


@pytest.fixture(scope="module")
def offscreen():
    made = shared_offscreen()
    yield made
    made.close()


def frames_of(situation: Situation, split: Split, offscreen: Offscreen) -> list[Frame]:
    return world_frames(2, COUNT, offscreen, situation, split)[1]


@pytest.mark.parametrize("situation", Situation)
def test_labels_of_a_situation(situation: Situation, offscreen: Offscreen) -> None:
    for split in (Split.TRAINING, Split.TEST):
        frames = frames_of(situation, split, offscreen)
        for frame in frames:
            assert frame.situation == situation.value
            assert len(frame.bearings) == len(frame.things)
            assert all(-0.5 <= thing[2] <= 1.5 for thing in frame.things)
            assert len(frame.free) == FREE_WAYS and all(0.0 <= way <= 4.0 for way in frame.free)
            for goal, text in frame.replies:
                assert " ".join(goal.split()[-2:]) in NAMES
                assert goal in parse_reply(text).reasoning
                assert text.startswith("No ") == (frame.find(goal) is None), (goal, text)
        beside = frames[COUNT - COUNT // 2 - COUNT // 4 : COUNT - COUNT // 2]
        goal = world_of(2, situation, split).goal
        assert beside and all(f.replies[0][0] == goal for f in beside)


def test_a_search_for_what_is_absent_ends_by_saying_so(offscreen: Offscreen) -> None:
    _, frames = world_frames(2, 2 * 8, offscreen, Situation.ABSENT, Split.VALIDATION)
    way = frames[8:]
    assert [frame.searched for frame in way] == [False] * 7 + [True]
    goal, last = way[-1].replies[0]
    assert last == f"No {goal} anywhere here, so I stop. Action: stop"
    assert all(frame.replies[0][1].endswith("turn left 45 degrees") for frame in way[:-1])


def test_frames_find_what_is_meant_by_place() -> None:
    things = [("chair", "red", 0.8, 1.0, 500), ("chair", "red", 0.2, 2.0, 300), ("ball", "red", 0.5, 0.5, 90)]
    frame = Frame(0, (0.0, 0.0, 0.0), things, [])
    meant = {"left red chair": 1, "right red chair": 0, "nearer red chair": 0, "farther red chair": 1}
    meant |= {"red ball": 2, "left red ball": 2}
    assert {goal: frame.find(goal) for goal in meant} == meant
    assert frame.find("blue ball") is None and frame.find("left blue ball") is None


def test_no_goal_is_asked_for_beside_a_look_alike_of_another_split(offscreen: Offscreen) -> None:
    asked = 0
    for situation in (Situation.PLAIN, Situation.TWO):
        for split in Split:
            present = {t.name for t in world_of(2, situation, split).things}
            for frame in frames_of(situation, split, offscreen):
                for goal, text in frame.replies:
                    name = " ".join(goal.split()[-2:])
                    assert all(may_meet(split, name, one) for one in present), (goal, text)
                    asked += name not in present
    assert asked > 20


def test_beside_the_way_is_near_it_and_free() -> None:
    world, rng = World.from_seed(3), np.random.default_rng(3)
    for _ in range(200):
        x, y, yaw = beside_way(world, world.start, rng)
        assert math.dist((x, y), world.start[:2]) <= 0.4
        assert abs(math.remainder(yaw - world.start[2], 2 * math.pi)) <= math.radians(40.0)
        assert world.clearance(x, y) > 0.04 or (x, y) == world.start[:2]
    thing = world.things[0]
    inside = (thing.x, thing.y, 0.0)
    crowded = replace(world, things=tuple(replace(thing, x=thing.x + 0.2 * i, y=thing.y + 0.2 * k)
                                          for i in range(-4, 5) for k in range(-4, 5)))  # fmt: skip
    assert beside_way(crowded, inside, rng)[:2] == inside[:2]


def test_free_ways_end_at_what_stands_in_them() -> None:
    ball = Thing("ball", "red", 1.5, 0.0, 0.0)
    room = replace(World.from_seed(0), half_x=3.0, half_y=3.0, things=(ball,), furniture=())
    ways = free_ways(View.at(room, (0.0, 0.0, 0.0)))
    middle = FREE_WAYS // 2
    # To the ball's middle less both radii and the margin; beside it to the wall.
    assert ways[middle] == pytest.approx(1.5 - 0.15 - ROBOT_RADIUS - 0.04, abs=0.03)
    assert ways == ways[::-1] and min(ways) == ways[middle] and ways[0] > 2.5


def test_a_shared_renderer_draws_what_a_worlds_own_draws(offscreen: Offscreen) -> None:
    for world in (World.from_seed(7), world_of(3, Situation.PLAIN, Split.VALIDATION)):
        with Simulator(world, offscreen=offscreen) as shared, Simulator(world) as own:
            drawn, true = shared.render(), own.render()
        differ = (np.abs(drawn.astype(int) - true) > 2).any(axis=-1)
        assert differ.mean() < 1e-3


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    generate(tmp_path, Split.VALIDATION, 1, workers=1, frames_per_world=4)
    offscreen = shared_offscreen()  # one world's own draws the floor a little otherwise
    seed = SPLIT_SEEDS[Split.VALIDATION][0]
    images, labels = world_frames(seed, 4, offscreen, split=Split.VALIDATION)
    offscreen.close()
    loaded = load_frames(tmp_path)  # equal arguments give equal pictures and labels
    assert loaded.labels == labels and np.array_equal(loaded.images, np.stack(images))
    with pytest.raises(ValueError, match="The validation split has 100000 worlds; 100001 are too many"):
        generate(tmp_path, Split.VALIDATION, 100_001, workers=1)


def test_seeds_of_which_no_room_comes_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rarely(seed: int, situation: Situation, split: Split) -> World:
        if seed != 1_000_001:
            raise NoLayoutError(seed)
        return world_of(seed, situation, split)

    monkeypatch.setattr(data, "world_of", rarely)
    seeds = [1_000_000, 1_000_001, 1_000_002]
    assert data._write_shard(tmp_path / "shard00000", seeds, 4, Split.TRAINING) == 4
    assert {frame.seed for frame in load_frames(tmp_path).labels} == {1_000_001}
    with pytest.raises(ValueError, match="world's seed 1000002; take another seed") as raised:
        data._write_shard(tmp_path / "shard00001", seeds[2:], 4, Split.TRAINING)
    assert not (tmp_path / "shard00001.json").exists()
    again = pickle.loads(pickle.dumps(raised.value))  # as a process that renders hands it on
    assert str(again) == str(raised.value)


def test_whole_shards_are_kept_and_folders_are_read_one_after_the_other(tmp_path: Path) -> None:
    for _ in range(2):
        generate(tmp_path, Split.TRAINING, 1, workers=1, frames_per_world=3)
        first = (tmp_path / "shard00000.npy").stat().st_mtime_ns
        (tmp_path / "shard00001.1.part.npy").write_bytes(b"cut off")
    assert (tmp_path / "shard00000.npy").stat().st_mtime_ns == first
    frames = load_frames(tmp_path, tmp_path)
    assert frames.images.shape == (6, MODEL_HEIGHT, MODEL_WIDTH, 3) and frames.labels[3:] == frames.labels[:3]
    assert frames.at([4, 0]).labels == [frames.labels[1], frames.labels[0]]
    with pytest.raises(ValueError, match="render them first"):
        load_frames(tmp_path / "nowhere")
    # A damaged or old shard says so and what to do.
    labels, pictures = tmp_path / "shard00000.json", tmp_path / "shard00000.npy"
    whole = labels.read_text()
    for harm in (
        lambda: pictures.write_bytes(pictures.read_bytes()[:300]),
        lambda: np.save(pictures, np.zeros((1, MODEL_HEIGHT, MODEL_WIDTH, 3), np.uint8)),
        lambda: labels.write_text(whole[:60]),
        lambda: labels.write_text(json.dumps({"version": SHARD_VERSION + 1, "frames": []})),
    ):
        harm()
        with pytest.raises(ValueError, match=r"shard00000.json are damaged or of another version.*delete it and its"):
            load_frames(tmp_path)
