# SPDX-License-Identifier: Apache-2.0
"""Pictures with their labels, in shards on disk, and the processes that make them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dsd_lab.workers import begin_worker
from dsd_lab.worlds.guide import split_goal

MODEL_WIDTH, MODEL_HEIGHT = 252, 168  # the picture as the models see it
PATCH, MERGE = 14, 2
GRID_HEIGHT, GRID_WIDTH = MODEL_HEIGHT // PATCH, MODEL_WIDTH // PATCH
ROWS, COLUMNS = GRID_HEIGHT // MERGE, GRID_WIDTH // MERGE  # of image tokens
FREE_WAYS = 36  # columns of the picture for which the free way is labelled
SHARD_VERSION = 9
_SHAPE = (MODEL_HEIGHT, MODEL_WIDTH, 3)


def shrink(image: np.ndarray) -> np.ndarray:
    """A camera picture at the models' size, as the Qwen2-VL image processor would shrink it."""
    return np.asarray(Image.fromarray(image).resize((MODEL_WIDTH, MODEL_HEIGHT), Image.Resampling.BICUBIC))


@dataclass
class Frame:
    """What one picture shows, and the expert's answers for several goals."""

    seed: int
    pose: tuple[float, float, float]
    things: list[tuple[str, str, float, float, int]]  # kind, colour, column 0..1, gap in metres, pixels
    replies: list[tuple[str, str]]  # goal, reply; the first goal is the world's own or a visible one
    situation: str = "plain"
    bearings: list[float] = field(default_factory=list)  # of the things from the base's centre, radians
    free: list[float] = field(default_factory=list)  # free way in metres towards each of FREE_WAYS columns
    searched: bool = False  # the first reply ends a full turn, which one picture cannot tell
    # For each reply: the different replies of misjudged views with their counts (expert.doubts).
    doubts: list[list[tuple[str, int]]] = field(default_factory=list)

    def find(self, goal: str) -> int | None:
        """Index in ``things`` of what a goal such as "left red chair" means; None: not in view."""
        which, name = split_goal(goal)
        found = [i for i, (kind, colour, *_) in enumerate(self.things) if f"{colour} {kind}" == name]
        if not found:
            return None
        axis = 2 if which in ("left", "right") else 3  # column or gap
        best = max if which in ("right", "farther") else min
        return best(found, key=lambda i: self.things[i][axis])


@dataclass
class Frames:
    """Pictures, uint8 (N, MODEL_HEIGHT, MODEL_WIDTH, 3), with their labels."""

    images: np.ndarray
    labels: list[Frame]

    def at(self, rows: Sequence[int]) -> Frames:
        """The pictures of some rows."""
        return Frames(self.images[list(rows)], [self.labels[row] for row in rows])


def save_shard(path: Path, images: Sequence[np.ndarray], labels: Sequence[Frame]) -> None:
    """Write pictures (.npy) and labels (.json) so that a kill leaves a whole shard or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: a worker that outlived a killed run may be writing the same shard.
    part = path.with_suffix(f".{os.getpid()}.part.npy")
    np.save(part, np.stack(images))
    part.replace(path.with_suffix(".npy"))
    write_json(path.with_suffix(".json"), {"version": SHARD_VERSION, "frames": [asdict(f) for f in labels]})


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value) + "\n")
    part.replace(path)


def load_frames(*folders: Path) -> Frames:
    """All shards of some folders, in order; ValueError for none, or a damaged one or one of another version."""
    paths = [path for folder in folders for path in sorted(folder.glob("shard*.json"))]
    if not paths:
        raise ValueError(f"No training pictures are in {folders[0]}: render them first.")
    labels: list[Frame] = []
    images = []
    for path in paths:
        try:
            whole = json.loads(path.read_text())
            if whole["version"] != SHARD_VERSION:
                raise ValueError(f"version {whole['version']}, not {SHARD_VERSION}")
            some = [_frame(row) for row in whole["frames"]]
            # Mapped, so that only the array of all of them takes memory.
            found = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
            if found.shape != (len(some), *_SHAPE) or found.dtype != np.uint8:
                raise ValueError(f"an array of {found.shape} for {len(some)} labels")
        except (OSError, KeyError, TypeError, ValueError, EOFError) as error:
            raise ValueError(
                f"The pictures of {path} are damaged or of another version ({type(error).__name__}: {error}): "
                "delete it and its .npy to render them again."
            ) from error
        labels += some
        images.append(found)
    return Frames(np.concatenate(images), labels)


def _frame(row: dict[str, Any]) -> Frame:
    pairs = {
        "things": [tuple(t) for t in row["things"]],
        "replies": [tuple(r) for r in row["replies"]],
        "doubts": [[tuple(d) for d in others] for others in row["doubts"]],
    }
    return Frame(**{**row, **pairs, "pose": tuple(row["pose"])})


def in_processes(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int, done: Callable[[Any], None]
) -> None:
    """Call a function with each job's arguments, in parallel processes if that pays; `done` hears of each result."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            done(function(*job))
        return
    # Spawned, because a forked OpenGL or torch can hang.
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), begin_worker) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                done(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or the rest would still run
            raise
