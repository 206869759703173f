"""Pictures with their labels, and the shards that hold them on disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.worlds.guide import split_goal
from dsd_ros.robot.sim.looks import CAMERA_HEIGHT, CAMERA_PITCH

MODEL_WIDTH, MODEL_HEIGHT = 252, 168  # the picture as the models see it
FREE_WAYS = 36  # parts of the picture's width towards which the free way is labelled
SHARD_VERSION = 8
_SHAPE = (MODEL_HEIGHT, MODEL_WIDTH, 3)
_REMEDY = "delete it and its .npy, and they are made anew"


@dataclass
class Frame:
    """What one picture shows and what the expert answers for several goals."""

    seed: int
    pose: tuple[float, float, float]
    things: list[tuple[str, str, float, float, int]]  # kind, colour, column 0..1, gap m, pixels
    replies: list[tuple[str, str]]  # goal, reply; the first goal is the world's own or a seen one
    situation: str = "plain"
    camera: tuple[float, float] = (CAMERA_HEIGHT, CAMERA_PITCH)  # metres, radians downwards
    bearings: list[float] = field(default_factory=list)  # of the things from the base's centre, radians
    free: list[float] = field(default_factory=list)  # metres ahead towards each of FREE_WAYS parts
    before: str = ""  # the action that led here from the row before; "": that one is another run's
    searched: bool = False  # the first reply knows of a full round without its goal, which one picture cannot
    # Of each reply: the others that doubt.py gives, and how often; none where nothing was asked for.
    doubts: list[list[tuple[str, int]]] = field(default_factory=list)

    def find(self, goal: str) -> int | None:
        """Index in ``things`` of what a goal such as "red chair" or "left red chair" means; None: not in view."""
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
    labels: list[Frame] = field(default_factory=list)
    _roomy: np.ndarray | None = None  # what `images` is the beginning of, with room for more

    def add(self, more: Frames) -> None:
        """Append other pictures: into the room that :func:`load_frames` left, or with a copy of all."""
        first, count = len(self.labels), len(self.labels) + len(more.labels)
        if self._roomy is None or len(self._roomy) < count:
            self._roomy = np.concatenate([self.images, more.images])
        else:
            self._roomy[first:count] = more.images
        self.images = self._roomy[:count]
        self.labels = self.labels + more.labels


def save_shard(path: Path, images: list[np.ndarray], labels: list[Frame]) -> None:
    """Write pictures (.npy) and labels (.json) so that a kill leaves a whole shard or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under a name of its own: a worker that outlived a killed run may be writing the same shard.
    part = path.with_suffix(f".{os.getpid()}.part.npy")
    np.save(part, np.stack(images))
    os.replace(part, path.with_suffix(".npy"))
    text = path.with_suffix(f".{os.getpid()}.part.json")
    whole = {"version": SHARD_VERSION, "frames": [asdict(f) for f in labels]}
    text.write_text(json.dumps(whole))
    os.replace(text, path.with_suffix(".json"))


def load_frames(folder: Path, limit: int | None = None, room: int = 0) -> Frames:
    """All whole shards of a folder, in order, with room for so many pictures more (see :meth:`Frames.add`).

    :raises ValueError: when there are none, or one is old or damaged.
    """
    shards: list[tuple[Path, int]] = []
    labels: list[Frame] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".part.json"):
            continue
        some = _load_labels(path)
        shards.append((path, len(some)))
        labels += some
        if limit is not None and len(labels) >= limit:
            break
    if not shards:
        raise ValueError(f"No training pictures are in {folder}: generate them first.")
    # One array filled shard by shard: joining whole shards would take twice the memory.
    images = np.empty((len(labels) + room, *_SHAPE), np.uint8)
    first = 0
    for path, count in shards:
        images[first : first + count] = _load_images(path, count)
        first += count
    labels = labels[:limit]
    return Frames(images[: len(labels)], labels, images)


def _load_labels(path: Path) -> list[Frame]:
    try:
        whole = json.loads(path.read_text())
        version = whole["version"] if isinstance(whole, dict) else 1
        frames = [_frame(row) for row in whole["frames"]] if version == SHARD_VERSION else []
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if version != SHARD_VERSION:
        raise ValueError(
            f"The pictures of {path} are of version {version}, and this release reads {SHARD_VERSION}: {_REMEDY}."
        )
    return frames


def _load_images(path: Path, count: int) -> np.ndarray:
    try:
        images: np.ndarray = np.load(path.with_suffix(".npy"), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if images.shape != (count, *_SHAPE) or images.dtype != np.uint8:
        raise _damaged(path, f"an array of {images.shape} for {count} labels")
    return images


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"The pictures of {path} are damaged ({why}): {_REMEDY}.")


def _frame(row: dict[str, Any]) -> Frame:
    pairs = {
        "things": [tuple(t) for t in row["things"]],
        "replies": [tuple(r) for r in row["replies"]],
        "doubts": [[tuple(d) for d in others] for others in row["doubts"]],
    }
    return Frame(**{**row, **pairs, "pose": tuple(row["pose"]), "camera": tuple(row["camera"])})
