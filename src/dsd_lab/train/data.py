# SPDX-License-Identifier: Apache-2.0
"""Pictures and the expert's replies from the simulator, rendered by parallel processes into resumable shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsd_lab.train.frames import FREE_WAYS, MODEL_HEIGHT, MODEL_WIDTH, Frame, in_processes, save_shard, shrink
from dsd_lab.worlds.expert import doubts, reply
from dsd_lab.worlds.guide import View, free_way, full_round, split_goal, walk
from dsd_lab.worlds.situations import Situation, Split, may_meet, world_of
from dsd_ros.robot.sim.offscreen import Offscreen, import_mujoco
from dsd_ros.robot.sim.scene import CAMERA_FOVY, build_mjcf
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import COLOURS, KINDS, WHICH, NoLayoutError, World

# Worlds without a split: no training uses seeds below 10 000, and pictures for figures have those from 8000 on.
TEST_SEEDS = range(8_000, 10_000)
TRAIN_SEEDS = range(1_000_000, 2_000_000)
VALIDATION_SEEDS = range(2_000_000, 2_100_000)
# A split is part of a world's random stream, so no two splits share a layout.
SPLIT_SEEDS = {Split.TRAINING: TRAIN_SEEDS, Split.VALIDATION: VALIDATION_SEEDS, Split.TEST: range(3_000_000, 3_100_000)}
# Situations of 20 consecutive seeds: 4 plain, 3 search, 6 hidden (whose ways differ most), 4 two and 3 absent.
_MIX = tuple(
    {"p": Situation.PLAIN, "s": Situation.SEARCH, "h": Situation.HIDDEN, "t": Situation.TWO, "a": Situation.ABSENT}[c]
    for c in "phshtaptshhtapthshpa"
)

FRAMES_PER_WORLD = 16
_WORLDS_PER_SHARD = 40
_APART = math.radians(6.0)  # least angle between two things told apart by side
_CLEAR = 0.04  # metres between robot and anything else where a picture is taken
_TELLING = 0.25  # least difference in metres between two things told apart by distance


def label(view: View, rng: np.random.Generator, own: str | None, searched: bool = False) -> Frame:
    """Labels of a view: `own` as the first goal, then visible things, then some that are not in view.

    No goal is asked for beside a look-alike of another split. `searched`: no picture of a full turn showed `own`.
    """
    world = view.world
    things = []
    for index, pixels in view.pixels.items():
        thing = world.things[index]
        column = min(max(view.column(index), -0.5), 1.5)  # the middle of a near thing may lie outside the picture
        things.append((thing.kind, thing.colour, column, view.gap(index), pixels))
    seen = [world.things[index].name for index in view.pixels]
    names = [name for one in dict.fromkeys(seen) for name in _goals_of(view, one, rng)]
    goals = [own] if own is not None else []
    goals += [n for n in rng.permutation(names).tolist() if n != own][:5]
    goals += _not_in_view(view, seen, own, rng)
    replies = [(goal, reply(view, goal, searched and goal == own)) for goal in goals]
    shown = {world.things[index].name for index in (*view.pixels, *view.faint)}
    near = [n for n, goal in enumerate(goals) if split_goal(goal)[1] in shown and not (searched and goal == own)]
    doubted: list[list[tuple[str, int]]] = [[] for _ in goals]
    drawn = rng.spawn(1)[0]  # leaves the draws of poses and goals as they are
    for n, others in zip(near, doubts(view, [replies[n] for n in near], drawn), strict=True):
        doubted[n] = others
    return Frame(
        world.seed, view.pose, things, replies, world.situation, [view.bearing(index) for index in view.pixels],
        free_ways(view), searched, doubted,
    )  # fmt: skip


def free_ways(view: View) -> list[float]:
    """Free way in metres towards each of FREE_WAYS columns, from the left."""
    columns = ((part + 0.5) / FREE_WAYS for part in range(FREE_WAYS))
    focal = MODEL_HEIGHT / 2 / math.tan(CAMERA_FOVY / 2)  # of a level camera
    angles = (math.atan((0.5 - column) * MODEL_WIDTH / focal) for column in columns)  # positive to the left
    return [round(free_way(view, angle, None)[0], 2) for angle in angles]


def _goals_of(view: View, name: str, rng: np.random.Generator) -> list[str]:
    """Goals for a visible name, with "left" and so on where the world has several of it."""
    several = [i for i, thing in enumerate(view.world.things) if thing.name == name]
    if len(several) == 1:
        return [name]
    found = view.named(name)
    if len(found) == 1:
        return [f"{list(WHICH)[int(rng.integers(len(WHICH)))]} {name}"]
    bearings = [view.camera_bearing(i) for i in found]
    gaps = [view.gap(i) for i in found]
    goals = [f"left {name}", f"right {name}"] if max(bearings) - min(bearings) > _APART else []
    if max(gaps) - min(gaps) > _TELLING:
        goals += [f"nearer {name}", f"farther {name}"]
    return goals


def _not_in_view(view: View, seen: list[str], own: str | None, rng: np.random.Generator) -> list[str]:
    """Two goals that a view does not show, mostly look-alikes of what it shows."""
    look, present = view.world.look, {thing.name for thing in view.world.things}
    split = None if look is None else look.split
    taken = {*seen, own} if own is None else {*seen, split_goal(own)[1]}
    absent = [t.name for t in view.world.things if t.name not in taken]
    for _ in range(8):
        if seen and rng.random() < 0.8:
            colour, kind = str(rng.choice(seen)).split()
            if rng.random() < 0.5:
                colour = str(rng.choice(COLOURS))
            else:
                kind = str(rng.choice(KINDS))
        else:
            colour, kind = str(rng.choice(COLOURS)), str(rng.choice(KINDS))
        name = f"{colour} {kind}"
        if name not in taken and all(may_meet(split, name, one) for one in present):
            absent.append(name)
    chosen = list(dict.fromkeys(rng.permutation(absent).tolist()))[:2]
    if look is None:
        return chosen
    return [f"{list(WHICH)[int(rng.integers(4))]} {n}" if rng.random() < 0.2 else n for n in chosen]


def apply_action(simulator: Simulator, text: str, rng: np.random.Generator | None = None) -> bool:
    """Carry out a reply's action as the controller would, with 5 % noise given a generator; False when it is `stop`."""
    words = text.rsplit("Action: ", 1)[1].split()
    if words[0] == "stop":
        return False
    noise = 1.0 + (0.05 * rng.standard_normal() if rng is not None else 0.0)
    period = 0.05
    if words[0] == "forward":
        command, seconds = (0.5, 0.0, 0.0), int(words[1]) / 100 / 0.5
    else:
        rate = math.radians(30.0) * (1 if words[1] == "left" else -1)
        command, seconds = (0.0, 0.0, rate), int(words[2]) / 30
    for _ in range(round(seconds * noise / period)):
        simulator.step(period, *command)
    for _ in range(6):
        simulator.step(period, 0.0, 0.0, 0.0)
    return True


def _poses(world: World, rng: np.random.Generator, count: int) -> list[tuple[float, float, float]]:
    """Free poses: near a thing, looking at a thing, or anywhere."""
    poses: list[tuple[float, float, float]] = []
    for _ in range(100 * count):
        if len(poses) == count:
            break
        thing = world.things[rng.integers(len(world.things))]
        if len(poses) % 5 < 2:
            away = thing.radius + 0.3 + rng.uniform(0.05, 0.9)
            angle = rng.uniform(-math.pi, math.pi)
            x, y = thing.x + away * math.cos(angle), thing.y + away * math.sin(angle)
        else:
            x = rng.uniform(-world.half_x, world.half_x)
            y = rng.uniform(-world.half_y, world.half_y)
        if world.clearance(x, y) < _CLEAR:
            continue
        yaw = rng.uniform(-math.pi, math.pi)
        if len(poses) % 5 < 4:
            yaw = math.atan2(thing.y - y, thing.x - x) + rng.uniform(-0.65, 0.65)
        poses.append((float(x), float(y), math.remainder(float(yaw), 2 * math.pi)))
    return poses


def beside_way(world: World, pose: tuple[float, float, float], rng: np.random.Generator) -> tuple[float, float, float]:
    """A free pose up to 0.4 m away, turned by up to 40 degrees; only turned where nothing is free."""
    x, y, yaw = pose
    for _ in range(20):
        away, angle = rng.uniform(0.0, 0.4), rng.uniform(-math.pi, math.pi)
        aside = (x + away * math.cos(angle), y + away * math.sin(angle))
        if world.clearance(*aside) > _CLEAR:
            break
    else:
        aside = (x, y)
    turned = math.remainder(yaw + math.radians(rng.uniform(-40.0, 40.0)), 2 * math.pi)
    return (float(aside[0]), float(aside[1]), float(turned))


def situation_of(seed: int) -> Situation:
    """The situation of a seed in the training's mix."""
    return _MIX[seed % len(_MIX)]


def world_frames(
    seed: int,
    count: int = FRAMES_PER_WORLD,
    offscreen: Offscreen | None = None,
    situation: Situation | None = None,
    split: Split | None = None,
) -> tuple[list[np.ndarray], list[Frame]]:
    """Pictures and labels of one world: from scattered poses, from beside the expert's way, then along it.

    With a split, half of the pictures are along the way and a quarter beside it; without one the world is
    `World.from_seed`'s, and a third are along the way. The first goal is the world's own, at scattered poses any
    visible thing.
    """
    beside: list[tuple[float, float, float]] = []
    if split is None:
        world, on_way, rng = World.from_seed(seed), count // 3, np.random.default_rng([seed, 22])
    else:
        situation = situation or situation_of(seed)
        world, on_way = world_of(seed, situation, split), count // 2
        rng = np.random.default_rng([seed, 28, split.number, situation.number])
        way = [view.pose for view in walk(world).views]
        chosen = rng.integers(len(way), size=count // 4)
        beside = [beside_way(world, way[n], rng) for n in chosen]
    images: list[np.ndarray] = []
    labels: list[Frame] = []
    with Simulator(world, offscreen=offscreen) as simulator:
        scattered = _poses(world, rng, count - on_way - len(beside))
        for pose, goal in [*((p, None) for p in scattered), *((p, world.goal) for p in beside)]:
            simulator.pose = pose
            labels.append(label(view_of(simulator), rng, goal))
            images.append(shrink(simulator.render()))
        simulator.pose = world.start
        actions: list[str] = []
        seen: list[bool] = []
        while len(images) < count:
            view = view_of(simulator)
            seen.append(view.index_of(world.goal) is not None)
            frame = label(view, rng, world.goal, full_round(actions, seen))
            labels.append(frame)
            images.append(shrink(simulator.render()))
            text = frame.replies[0][1]
            actions.append(text.rsplit("Action: ", 1)[1])
            if not apply_action(simulator, text, rng):
                x, y, yaw = world.start
                simulator.pose = (x, y, yaw + rng.uniform(-1.5, 1.5))
                actions, seen = [], []
    return images, labels


def view_of(simulator: Simulator) -> View:
    """What the camera shows; by geometry, which is faster and differs in few pixels, in worlds with a look."""
    if simulator.world.look is None:
        return View.of(simulator)
    return View.at(simulator.world, simulator.pose)


def shared_offscreen() -> Offscreen:
    """A renderer for many worlds in turn; close it in the thread that made it."""
    # It keeps the first model's floor, and walls hide what lies outside a smaller room.
    hall = replace(World.from_seed(0), half_x=3.2, half_y=3.2)
    return Offscreen(import_mujoco().MjModel.from_xml_string(build_mjcf(hall)))


def _write_shard(path: Path, seeds: list[int], count: int, split: Split) -> int:
    images: list[np.ndarray] = []
    labels: list[Frame] = []
    with closing(shared_offscreen()) as offscreen:
        for seed in seeds:
            try:
                some, their = world_frames(seed, count, offscreen, split=split)
            except NoLayoutError:
                continue
            images += some
            labels += their
    if not images:
        raise NoLayoutError(seeds[-1])
    save_shard(path, images, labels)
    return len(images)


def generate(
    folder: Path,
    split: Split,
    worlds: int,
    workers: int,
    frames_per_world: int = FRAMES_PER_WORLD,
    report: Callable[[str, float], None] | None = None,
) -> None:
    """Render the first `worlds` worlds of a split; keeps existing shards, skips seeds without a room. ValueError."""
    seeds = SPLIT_SEEDS[split]
    if worlds > len(seeds):
        raise ValueError(f"The {split} split has {len(seeds)} worlds; {worlds} are too many.")
    jobs = []
    for first in range(0, worlds, _WORLDS_PER_SHARD):
        path = folder / f"shard{first // _WORLDS_PER_SHARD:05d}"
        if not path.with_suffix(".json").exists():
            some = list(seeds[first : min(first + _WORLDS_PER_SHARD, worlds)])
            jobs.append((path, some, frames_per_world, split))
    made = 0

    def done(count: int) -> None:
        nonlocal made
        made += count
        if report is not None:
            report(f"rendered {made} pictures", made / (worlds * frames_per_world))

    in_processes(_write_shard, jobs, workers, done)
