# SPDX-License-Identifier: Apache-2.0
"""Stage 1: teach the vision tower what stands where, through heads that are thrown away afterwards.

Each of FREE_WAYS columns of the picture, four to a column of image tokens, gets a vector, and from it kind, colour,
distance and bearing of what stands there, and the free way. A question "colour kind" must pick the right column.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.forward import CPU, tower_forward
from dsd_lab.train.frames import COLUMNS, FREE_WAYS, ROWS, Frame, Frames
from dsd_lab.train.stages import Losses, Stage
from dsd_ros.robot.sim.world import COLOURS, KINDS, ROBOT_RADIUS

SLOTS = FREE_WAYS // COLUMNS  # columns of an image token
BINS = COLUMNS * SLOTS
# Edges between classes of distance (metres), bearing (degrees) and free way (metres): those of the guide's decisions,
# and finer ones between them.
GAP_EDGES = (*(0.05 * k for k in range(1, 23)), 1.3, 1.5, 1.7, 1.9, 2.25, 2.75, 3.25, 3.75)
_ASIDE = (6.0, 10.0, 15.0, 20.0, 22.5, 30.0, 37.5)
TURN_EDGES = (*(-edge for edge in reversed(_ASIDE)), 0.0, *_ASIDE)
FREE = (0.3, 0.55, 0.8, 1.0, 1.3, 1.6, 2.2)
GAPS, TURNS = len(GAP_EDGES) + 1, len(TURN_EDGES) + 1
# Classes teach only by what stands near their edges, numbers by everything. Units of the numbers:
_DEGREES = 4.0  # of bearing
_FARTHER = 1.125  # a ratio of distances from the robot's centre
_WIDTH = 64
_NAMES = [(kind, colour) for kind in KINDS for colour in COLOURS]
NOTHING = (-100, -100, -100, 0, 0, 0)  # goal_classes without a loss, as for captions


@dataclass
class Labels:
    """Labels per picture and column; gap and turn are -1 where nothing stands."""

    kind: torch.Tensor  # (N, BINS), 0 = nothing
    colour: torch.Tensor
    gap: torch.Tensor
    turn: torch.Tensor
    exact: torch.Tensor  # (N, BINS, 3) of `exactly`: bearing and gap of what stands there, free way
    free: torch.Tensor
    place: torch.Tensor  # (N, 40): the column of each name, BINS: not in view, -1: there are several

    def to(self, device: torch.device) -> Labels:
        """The same on a device."""
        return Labels(*(value.to(device) for value in vars(self).values()))


class Heads(nn.Module):
    """The heads of the vision stage."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.columns = nn.Sequential(nn.Linear(ROWS * hidden, 256), nn.GELU(), nn.Linear(256, SLOTS * _WIDTH))
        self.kind = nn.Linear(_WIDTH, len(KINDS) + 1)
        self.colour = nn.Linear(_WIDTH, len(COLOURS) + 1)
        self.gap = nn.Linear(_WIDTH, GAPS)
        self.turn = nn.Linear(_WIDTH, TURNS)
        self.exact = nn.Linear(_WIDTH, 3)
        self.free = nn.Linear(_WIDTH, len(FREE) + 1)
        self.question = nn.Linear(_WIDTH, _WIDTH)
        self.by_kind = nn.Embedding(len(KINDS), _WIDTH)
        self.by_colour = nn.Embedding(len(COLOURS), _WIDTH)
        self.absent = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits from image tokens (N, IMAGE_TOKENS, hidden)."""
        count = len(tokens)
        stacked = tokens.view(count, ROWS, COLUMNS, -1).transpose(1, 2).reshape(count, COLUMNS, -1)
        columns = self.columns(stacked).view(count, BINS, _WIDTH)
        active = functional.gelu(columns)
        names = (self.by_kind.weight[:, None] + self.by_colour.weight[None]).flatten(0, 1)
        scores = torch.einsum("nbw,qw->nqb", active, functional.gelu(self.question(names)))
        absent = self.absent.expand(count, len(_NAMES), 1)
        return {
            "kind": self.kind(active),
            "colour": self.colour(active),
            "gap": self.gap(active),
            "turn": self.turn(active),
            "exact": self.exact(active),
            "free": self.free(active),
            "place": torch.cat([scores / 4.0, absent], dim=-1),
        }


def make_labels(labels: Sequence[Frame]) -> Labels:
    """Column labels of pictures."""
    count = len(labels)
    kind = np.zeros((count, BINS), np.int64)
    colour = np.zeros((count, BINS), np.int64)
    gap = np.full((count, BINS), -1, np.int64)
    turn = np.full((count, BINS), -1, np.int64)
    measured = np.zeros((count, BINS, 3), np.int64)
    free = np.array([frame.free for frame in labels]).reshape(count, BINS)
    place = np.full((count, len(_NAMES)), BINS, np.int64)
    pixels_at = np.zeros((count, BINS), np.int64)
    for n, frame in enumerate(labels):
        for index, (what, hue, _, _, pixels) in enumerate(frame.things):
            b, far, facing, *exact = thing_classes(frame, index)
            name = _NAMES.index((what, hue))
            place[n, name] = b if place[n, name] == BINS else -1
            if pixels <= pixels_at[n, b]:
                continue
            pixels_at[n, b] = pixels
            kind[n, b] = 1 + KINDS.index(what)
            colour[n, b] = 1 + COLOURS.index(hue)
            gap[n, b] = far
            turn[n, b] = facing
            measured[n, b, :2] = exact
    measured[..., 2] = np.round(1000 * free)
    arrays = kind, colour, gap, turn, measured, np.digitize(free, FREE), place
    found = Labels(*(torch.from_numpy(a) for a in arrays))
    found.exact = exactly(found.exact)
    return found


def thing_classes(frame: Frame, index: int) -> tuple[int, int, int, int, int]:
    """A thing's column, distance class and turn class; its bearing in 1/100 degree and distance in mm."""
    _, _, column, distance, _ = frame.things[index]
    degrees = math.degrees(frame.bearings[index])
    place = min(max(int(column * BINS), 0), BINS - 1)
    turn = bisect_left(TURN_EDGES, degrees)
    return place, bisect_left(GAP_EDGES, distance), turn, round(100 * degrees), round(1000 * distance)


def goal_classes(frame: Frame, goal: str) -> tuple[int, ...]:
    """`thing_classes` of a goal in a picture (column BINS where it is not in view), and the free way ahead in mm."""
    index = frame.find(goal)
    if index is None:
        return (BINS, *NOTHING[1:])
    ahead = min(frame.free[(len(frame.free) - 1) // 2 : len(frame.free) // 2 + 1])
    return (*thing_classes(frame, index), round(1000 * ahead))


def exactly(measured: torch.Tensor) -> torch.Tensor:
    """A bearing (1/100 degree) and distances (mm), (..., 1 + D), as numbers of similar size; distances as logs."""
    bearing, metres = measured[..., :1] / 100, measured[..., 1:] / 1000
    far = torch.log((metres + ROBOT_RADIUS) / (1.0 + ROBOT_RADIUS))
    return torch.cat([bearing / _DEGREES, far / math.log(_FARTHER)], dim=-1)


def loss_of(out: dict[str, torch.Tensor], labels: Labels, rows: torch.Tensor) -> torch.Tensor:
    """Sum of the heads' losses for the labels of some rows."""
    kind, colour = labels.kind[rows], labels.colour[rows]
    total: Any = 0.0
    for name, wanted in (("kind", kind), ("colour", colour)):
        logits = out[name].float().flatten(0, 1)
        weight = torch.ones(logits.shape[1], device=logits.device)
        weight[0] = 0.15  # most columns are empty
        total = total + functional.cross_entropy(logits, wanted.flatten(), weight)
    for name in ("gap", "turn"):
        target = getattr(labels, name)[rows].flatten()
        logits = out[name].float().flatten(0, 1)
        each = functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
        total = total + 0.5 * each / (target >= 0).sum().clamp(min=1)
    off = (out["exact"].float() - labels.exact[rows]).abs()
    total = total + _mean(off[..., :2].sum(-1), labels.turn[rows] >= 0) + 0.5 * off[..., 2].mean()
    total = total + functional.cross_entropy(out["free"].float().flatten(0, 1), labels.free[rows].flatten())
    place = labels.place[rows].flatten()
    each = functional.cross_entropy(out["place"].float().flatten(0, 1), place, ignore_index=-1, reduction="none")
    # Sums under masks: indexing by a mask would wait for a GPU.
    here, away = (place >= 0) & (place < BINS), place == BINS
    return total + _mean(each, here) + _mean(each, away)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean where a mask is True; 0 where it is True nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def share_right(out: dict[str, torch.Tensor], labels: Labels, rows: torch.Tensor) -> torch.Tensor:
    """Share of the visible names that are found within one column."""
    place, guess = labels.place[rows], out["place"].argmax(-1)
    here = (place >= 0) & (place < BINS)
    return _mean(((guess - place).abs() <= 1).float(), here)


def mirrored(labels: Labels) -> Labels:
    """The labels of the pictures' mirror images."""
    turn = torch.where(labels.turn >= 0, TURNS - 1 - labels.turn, labels.turn).flip(1)
    exact = labels.exact.flip(1) * torch.tensor([-1.0, 1.0, 1.0], device=labels.exact.device)
    here = (labels.place >= 0) & (labels.place < BINS)
    place = torch.where(here, BINS - 1 - labels.place, labels.place)
    return Labels(
        labels.kind.flip(1), labels.colour.flip(1), labels.gap.flip(1), turn, exact, labels.free.flip(1),
        place,
    )  # fmt: skip


def vision_stage(
    tower: Any,
    heads: Heads,
    frames: Frames,
    batch: int,
    rate: float = 1.5e-3,
    seed: int = 0,
    device: torch.device = CPU,
) -> Stage:
    """A stage that trains a tower and its heads, on pictures and their mirror images in varying light."""
    labels = make_labels(frames.labels).to(device)
    both = (labels, mirrored(labels))
    images = torch.from_numpy(frames.images).to(device)

    def losses(step: int, share: float) -> Iterator[Losses]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(images), (batch,), generator=generator).to(device)
        flip = bool(torch.rand(1, generator=generator) < 0.5)
        some = images[rows]
        tokens = tower_forward(tower, lit(some.flip(2) if flip else some, generator))
        out = heads(tokens)
        wanted = both[int(flip)]
        loss = loss_of(out, wanted, rows)
        yield Losses(loss, loss, share_right(out, wanted, rows))

    return Stage("vision", {"tower": (tower, 1.0), "heads": (heads, 1.0)}, losses, rate, warm_up=200)


def lit(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures with their brightness varied by up to a tenth."""
    light = 0.9 + 0.2 * torch.rand(len(images), 1, 1, 1, generator=generator)
    return (images.float() * light.to(images.device)).clamp(max=255.0)
