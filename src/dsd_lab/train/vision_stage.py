"""Stage 1: teach the vision tower what stands where, through heads that are thrown away after.

A picture's width is cut into FREE_WAYS columns, four to each column of image tokens. Every column gets a
vector from the image tokens above each other there (no position of its own), and from it: what
kind and colour stands there, how far and at which bearing from the base, and how far the robot could go that way, all
three as classes and exactly. A question "colour kind" is compared with all the columns' vectors and must pick the right
one, or "not here".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.architecture import COLUMNS, ROWS
from dsd_lab.train.data import FREE_WAYS, Frame, Frames, camera_angle
from dsd_lab.train.devices import CPU, moved
from dsd_lab.train.forward import PLAIN, Passes, tower_forward
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.world import COLOURS, KINDS, RADIUS, ROBOT_RADIUS

SLOTS = FREE_WAYS // COLUMNS  # columns of an image token
BINS = COLUMNS * SLOTS
# Edges between classes of distance (metres), bearing (degrees) and free way (metres): among them those of the stop,
# the steps and the turns of robot/guide.py; finer ones between them, since these are missed by little.
GAP_EDGES = (*(0.05 * k for k in range(1, 23)), 1.3, 1.5, 1.7, 1.9, 2.25, 2.75, 3.25, 3.75)
_ASIDE = (6.0, 10.0, 15.0, 20.0, 22.5, 30.0, 37.5)
TURN_EDGES = (*(-edge for edge in reversed(_ASIDE)), 0.0, *_ASIDE)
FREE = (0.3, 0.55, 0.8, 1.0, 1.3, 1.6, 2.2)
_TURNED = tuple(TURN_EDGES.index(sign * edge) for sign in (-1, 1) for edge in (10.0, 22.5, 37.5))
GAPS, TURNS = len(GAP_EDGES) + 1, len(TURN_EDGES) + 1
# Classes teach only by what stands near their edges; a number by everything. Their units weigh like some errors do:
_DEGREES = 4.0  # of bearing
_FARTHER = 1.125  # times as far from the robot's centre
_WIDTH = 64
_HEADS_FIRST = 300  # steps
_NAMES = [(kind, colour) for kind in KINDS for colour in COLOURS]


@dataclass
class Labels:
    """Per picture and column: kind, colour, gap and bearing class (-1 where nothing stands), and free way."""

    kind: torch.Tensor  # (N, BINS), 0 = nothing
    colour: torch.Tensor
    gap: torch.Tensor
    turn: torch.Tensor
    exact: torch.Tensor  # (N, BINS, 3), of `exactly`: bearing and gap (of what stands there), free way
    free: torch.Tensor
    place: torch.Tensor  # (N, 40): a named thing's column, BINS: not in view, -1: there are several

    def to(self, device: torch.device) -> Labels:
        """The same on a device."""
        return Labels(*(value.to(device) for value in vars(self).values()))


class Heads(nn.Module):
    """The throw-away heads."""

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
    """Of a labelled thing: column, distance class, turn class; bearing in 1/100 degree and distance in mm."""
    kind, _, column, distance, _ = frame.things[index]
    if frame.bearings:
        bearing = frame.bearings[index]
    else:
        angle = camera_angle(column)
        away = distance + RADIUS[kind] + ROBOT_RADIUS
        # Law of sines from the camera's bearing to the base's.
        aside = CAMERA_AHEAD * math.sin(angle) / away
        bearing = angle - math.asin(min(max(aside, -1.0), 1.0))
    b, far = min(max(int(column * BINS), 0), BINS - 1), gap_class(distance)
    exact = round(100 * math.degrees(bearing)), round(1000 * distance)
    return b, far, _turn_class(bearing), *exact


def exactly(measured: torch.Tensor) -> torch.Tensor:
    """A bearing (1/100 degree) and distances (mm), integers (..., 1 + D), as numbers of about one size.

    Those of distances are logarithms, since a camera tells near ones better; a metre is 0.
    """
    bearing, metres = measured[..., :1] / 100, measured[..., 1:] / 1000
    far = torch.log((metres + ROBOT_RADIUS) / (1.0 + ROBOT_RADIUS))
    return torch.cat([bearing / _DEGREES, far / math.log(_FARTHER)], dim=-1)


def gap_class(metres: float) -> int:
    """Distance class: 5 cm steps near by, coarser farther away."""
    return bisect_left(GAP_EDGES, metres)


def _turn_class(bearing: float) -> int:
    """Class of a bearing from the base (radians), from the right to the left."""
    return bisect_left(TURN_EDGES, math.degrees(bearing))


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
    # Sums under masks, not choices by masks: those would wait for a GPU.
    here, away = (place >= 0) & (place < BINS), place == BINS
    return total + _mean(each, here) + _mean(each, away)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean where a mask is True, 0 where it nowhere is."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def share_right(out: dict[str, torch.Tensor], labels: Labels, rows: torch.Tensor) -> torch.Tensor:
    """Share of the named things in view that are found within a column."""
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


def _turn(classes: torch.Tensor) -> torch.Tensor:
    """Which of the reply's seven turns (none among them) faces what stands in a class of bearings."""
    return torch.stack([classes > edge for edge in _TURNED]).sum(0)


@torch.inference_mode()
def measure(tower: Any, heads: Heads, images: np.ndarray, labels: Labels) -> dict[str, float]:
    """Shares right on pictures: the place within one column, absence, the turn that faces what is there, free ways.

    And mean errors: "bearing" in degrees, "gap" and "way" as shares of the distance from the robot's centre.
    """
    near = there = quiet = away = turned = things = clear = ways = 0
    device = labels.place.device
    off = torch.zeros(3, dtype=torch.float64, device=device)
    for first in range(0, len(images), 128):
        some = moved(images[first : first + 128], device)
        rows = slice(first, first + 128)
        out = heads(tower_forward(tower, some))
        place, guess = labels.place[rows], out["place"].argmax(-1)
        here = (place >= 0) & (place < BINS)
        near += int(((guess - place).abs() <= 1)[here & (guess < BINS)].sum())
        there += int(here.sum())
        quiet += int((guess == BINS)[place == BINS].sum())
        away += int((place == BINS).sum())
        turn = labels.turn[rows]
        turned += int((_turn(out["turn"].argmax(-1)) == _turn(turn))[turn >= 0].sum())
        things += int((turn >= 0).sum())
        error = (out["exact"].double() - labels.exact[rows]).abs()
        off[:2] += error[turn >= 0][:, :2].sum(0)
        off[2] += error[..., 2].sum()
        clear += int((out["free"].argmax(-1) == labels.free[rows]).sum())
        ways += labels.free[rows].numel()
    return {
        "place": near / there, "absent": quiet / away, "turn": turned / things, "free": clear / ways,
        "bearing": float(off[0]) / things * _DEGREES, "gap": float(off[1]) / things * math.log(_FARTHER),
        "way": float(off[2]) / ways * math.log(_FARTHER),
    }  # fmt: skip


@dataclass
class _Draw:
    """Which pictures a step sees, mirrored or not, and how bright."""

    rows: torch.Tensor
    light: torch.Tensor
    flip: bool

    def to(self, device: torch.device) -> _Draw:
        return _Draw(moved(self.rows, device), moved(self.light, device), self.flip)


def vision_stage(
    tower: Any,
    heads: Heads,
    frames: Frames,
    batch: int = 64,
    rate: float = 1.5e-3,
    seed: int = 0,
    device: torch.device = CPU,
    trained: bool = False,
    passes: Passes = PLAIN,
) -> Stage:
    """A stage that trains a tower and its heads on pictures that are kept on the device.

    A trained tower stays as it is until the heads, which begin anew, have caught up (A. Kumar et al., "Fine-tuning can
    distort pretrained features", 2022).
    """
    held = _HEADS_FIRST if trained else 0
    labels = make_labels(frames.labels).to(device)
    both = (labels, mirrored(labels))
    images = moved(frames.images, device)

    def draw(step: int, share: float) -> _Draw:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(frames.images), (batch,), generator=generator)
        flip = bool(torch.rand(1, generator=generator) < 0.5)
        light = 0.9 + 0.2 * torch.rand(batch, 1, 1, 1, generator=generator)
        return _Draw(rows, light, flip)

    def losses(drawn: _Draw, step: int) -> Losses:
        some = images[drawn.rows]
        some = some.flip(2) if drawn.flip else some
        with torch.set_grad_enabled(step >= held):
            tokens = passes.tower(tower, (some.float() * drawn.light).clamp(max=255.0))
        out = heads(tokens)
        wanted = both[int(drawn.flip)]
        loss = loss_of(out, wanted, drawn.rows)
        return Losses(loss, loss.detach(), share_right(out, wanted, drawn.rows))

    modules = {"tower": (tower, 1.0), "heads": (heads, 1.0)}
    return Stage("vision", modules, draw, losses, rate, 200, {"tower": held})


def train_vision(
    tower: Any,
    heads: Heads,
    frames: Frames,
    validation: Frames,
    path: Path,
    minutes: float,
    steps: int | None = None,
    batch: int = 64,
    rate: float = 1.5e-3,
    seed: int = 0,
    device: torch.device = CPU,
    trained: bool = False,
    passes: Passes = PLAIN,
    after: str = "",
    report: Report | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Run `vision_stage` as `run_stage` does; returns its figures, and the validation's of `measure`."""
    stage = vision_stage(tower, heads, frames, batch, rate, seed, device, trained, passes)
    figures = run_stage(
        stage, path, minutes, steps, device=device, after=after, report=report, save_seconds=save_seconds
    )  # fmt: skip
    held_out = make_labels(validation.labels).to(device)
    return {**figures, **measure(tower, heads, validation.images, held_out)}
