"""Pictures and replies from the simulator, made by parallel processes into resumable shards."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from dsd_ros.robot.offscreen import Offscreen, import_mujoco
from dsd_ros.robot.scene import build_mjcf
from dsd_ros.robot.simulator import Simulator
from dsd_ros.robot.world import COLOURS, KINDS, World

from .expert import View, reply

# Seeds below 10 000 are never trained on: the demo and closed-loop runs use those below 5000, the
# choice between weights pictures from 5000 to 7999, and the final figures pictures from 8000 on.
TEST_SEEDS = range(8_000, 10_000)
TRAIN_SEEDS = range(1_000_000, 2_000_000)
VALIDATION_SEEDS = range(2_000_000, 2_100_000)

MODEL_WIDTH, MODEL_HEIGHT = 168, 112  # the picture as the models see it
FRAMES_PER_WORLD = 16
_WORLDS_PER_SHARD = 40


@dataclass
class Frame:
    """What one picture shows and what the expert answers for several goals."""

    seed: int
    pose: tuple[float, float, float]
    things: list[tuple[str, str, float, float, int]]  # kind, colour, column 0..1, gap m, pixels
    replies: list[tuple[str, str]]  # goal, reply; the first goal is the world's own or a seen one


@dataclass
class Frames:
    """Pictures, uint8 (N, 112, 168, 3), with their labels."""

    images: np.ndarray
    labels: list[Frame] = field(default_factory=list)


def shrink(image: np.ndarray) -> np.ndarray:
    """A camera picture at the models' size, as the Qwen2-VL image processor would shrink it."""
    size = (MODEL_WIDTH, MODEL_HEIGHT)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))


def label(simulator: Simulator, view: View, rng: np.random.Generator, own: str | None) -> Frame:
    """Labels of a view: every visible thing as goal (and `own`), and some that are not in view."""
    things = []
    names = []
    for index, pixels in view.pixels.items():
        thing = view.world.things[index]
        offset = math.tan(view.camera_bearing(index)) * simulator.focal_length
        column = 0.5 - offset / simulator.width
        things.append((thing.kind, thing.colour, column, view.gap(index), pixels))
        names.append(thing.name)
    goals = [own] if own is not None else []
    goals += [n for n in rng.permutation(names).tolist() if n != own][:5]
    absent = [t.name for t in view.world.things if t.name not in names and t.name != own]
    for _ in range(8):  # look-alikes of what is seen make the hardest absent goals
        if names and rng.random() < 0.8:
            colour, kind = str(rng.choice(names)).split()
            if rng.random() < 0.5:
                colour = str(rng.choice(COLOURS))
            else:
                kind = str(rng.choice(KINDS))
        else:
            colour, kind = str(rng.choice(COLOURS)), str(rng.choice(KINDS))
        name = f"{colour} {kind}"
        if name not in names and name != own:
            absent.append(name)
    goals += list(dict.fromkeys(rng.permutation(absent).tolist()))[:2]
    return Frame(view.world.seed, view.pose, things, [(goal, reply(view, goal)) for goal in goals])


def apply_action(simulator: Simulator, text: str, rng: np.random.Generator | None = None) -> bool:
    """Carry out the action a reply ends in, as the controller would; False when it is `stop`.

    With a generator the motion is as noisy as a real robot's (5 %), which widens what is seen.
    """
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
        if world.clearance(x, y) < 0.04:
            continue
        yaw = rng.uniform(-math.pi, math.pi)
        if len(poses) % 5 < 4:
            yaw = math.atan2(thing.y - y, thing.x - x) + rng.uniform(-0.65, 0.65)
        poses.append((float(x), float(y), math.remainder(float(yaw), 2 * math.pi)))
    return poses


def world_frames(
    seed: int, count: int = FRAMES_PER_WORLD, offscreen: Offscreen | None = None
) -> tuple[list[np.ndarray], list[Frame]]:
    """Pictures and labels of one world: first scattered poses, then along the expert's way.

    A third of them are on the expert's way to the world's own target, which is then the first goal;
    at the scattered poses the first goal is any thing in view, if there is one.
    """
    on_way = count // 3
    world = World.from_seed(seed)
    rng = np.random.default_rng([seed, 22])
    images, labels = [], []
    own = world.target.name
    with Simulator(world, offscreen=offscreen) as simulator:
        for pose in _poses(world, rng, count - on_way):
            simulator.pose = pose
            labels.append(label(simulator, View.of(simulator), rng, None))
            images.append(shrink(simulator.render()))
        simulator.pose = world.start
        while len(images) < count:
            view = View.of(simulator)
            labels.append(label(simulator, view, rng, own))
            images.append(shrink(simulator.render()))
            if not apply_action(simulator, reply(view, own), rng):
                x, y, yaw = world.start
                simulator.pose = (x, y, yaw + rng.uniform(-1.5, 1.5))
    return images, labels


def shared_offscreen() -> Offscreen:
    """A renderer for many worlds in turn; close it in the thread that made it."""
    mujoco = import_mujoco()
    return Offscreen(mujoco.MjModel.from_xml_string(build_mjcf(World.from_seed(0))))


def _write_shard(path: Path, seeds: list[int], count: int) -> int:
    images: list[np.ndarray] = []
    labels: list[Frame] = []
    offscreen = shared_offscreen()
    for seed in seeds:
        some, their = world_frames(seed, count, offscreen)
        images += some
        labels += their
    offscreen.close()
    save_shard(path, images, labels)
    return len(images)


def save_shard(path: Path, images: list[np.ndarray], labels: list[Frame]) -> None:
    """Write pictures (.npy) and labels (.json) so that a kill leaves a whole shard or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npy")
    np.save(part, np.stack(images))
    os.replace(part, path.with_suffix(".npy"))
    rows = [asdict(f) for f in labels]
    text = path.with_suffix(".part.json")
    text.write_text(json.dumps(rows))
    os.replace(text, path.with_suffix(".json"))


def generate(
    folder: Path,
    seeds: range,
    worlds: int,
    workers: int,
    frames_per_world: int = FRAMES_PER_WORLD,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Render `worlds` worlds from the front of a seed range; shards already there are kept."""
    jobs = []
    for first in range(0, worlds, _WORLDS_PER_SHARD):
        path = folder / f"shard{first // _WORLDS_PER_SHARD:05d}"
        if not path.with_suffix(".json").exists():
            jobs.append((path, list(seeds[first : min(first + _WORLDS_PER_SHARD, worlds)])))
    if not jobs:
        return
    # spawn, since a forked OpenGL or torch can hang
    with ProcessPoolExecutor(
        workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_DFL)
    ) as pool:  # Ctrl-C ends the workers without a traceback each
        futures = [pool.submit(_write_shard, path, some, frames_per_world) for path, some in jobs]
        try:
            for future in as_completed(futures):
                count = future.result()
                if progress is not None:
                    progress(count)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or it would render all that is left
            raise


def load_frames(folder: Path, limit: int | None = None) -> Frames:
    """All whole shards of a folder, in order; ValueError when there are none."""
    images, labels = [], []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".part.json"):
            continue
        rows = json.loads(path.read_text())
        images.append(np.load(path.with_suffix(".npy"), allow_pickle=False))
        labels += [
            Frame(
                row["seed"],
                tuple(row["pose"]),
                [tuple(t) for t in row["things"]],
                [tuple(r) for r in row["replies"]],
            )
            for row in rows
        ]
        if limit is not None and len(labels) >= limit:
            break
    if not images:
        raise ValueError(f"No training pictures are in {folder}: generate them first.")
    return Frames(np.concatenate(images)[:limit], labels[:limit])
