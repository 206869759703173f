"""Stage 1: teach the vision tower what stands where, through heads that are thrown away after.

A picture's width is cut into 24 columns, four to each column of image tokens. Every column gets a
vector from the four image tokens above each other there (no position of its own), and from it: what
kind and colour stands there, how far, and which turn would face it. A question "colour kind" is
compared with all the columns' vectors and must pick the right one, or "not here".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dsd_ros.robot.scene import CAMERA_AHEAD, CAMERA_FOVY
from dsd_ros.robot.world import COLOURS, KINDS, RADIUS, ROBOT_RADIUS

from .architecture import COLUMNS, ROWS
from .checkpoint import load_state, save_state
from .data import MODEL_HEIGHT, MODEL_WIDTH, Frames
from .forward import tower_forward

SLOTS = 4  # columns of an image token
BINS = COLUMNS * SLOTS
GAPS = 20
TURNS = 7
_WIDTH = 64
_NAMES = [(kind, colour) for kind in KINDS for colour in COLOURS]


@dataclass
class Labels:
    """Per picture and column: kind, colour, gap and turn class (-1 where nothing stands)."""

    kind: torch.Tensor  # (N, BINS), 0 = nothing
    colour: torch.Tensor
    gap: torch.Tensor
    turn: torch.Tensor
    place: torch.Tensor  # (N, 40): the column of each named thing, BINS when it is not in view


class Heads(nn.Module):
    """The throw-away heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.columns = nn.Sequential(
            nn.Linear(ROWS * hidden, 256), nn.GELU(), nn.Linear(256, SLOTS * _WIDTH)
        )
        self.kind = nn.Linear(_WIDTH, len(KINDS) + 1)
        self.colour = nn.Linear(_WIDTH, len(COLOURS) + 1)
        self.gap = nn.Linear(_WIDTH, GAPS)
        self.turn = nn.Linear(_WIDTH, TURNS)
        self.question = nn.Linear(_WIDTH, _WIDTH)
        self.by_kind = nn.Embedding(len(KINDS), _WIDTH)
        self.by_colour = nn.Embedding(len(COLOURS), _WIDTH)
        self.absent = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits from image tokens (N, 24, hidden)."""
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
            "place": torch.cat([scores / 4.0, absent], dim=-1),
        }


def make_labels(frames: Frames) -> Labels:
    """Column labels of pictures."""
    count = len(frames.labels)
    kind = np.zeros((count, BINS), np.int64)
    colour = np.zeros((count, BINS), np.int64)
    gap = np.full((count, BINS), -1, np.int64)
    turn = np.full((count, BINS), -1, np.int64)
    place = np.full((count, len(_NAMES)), BINS, np.int64)
    pixels_at = np.zeros((count, BINS), np.int64)
    for n, frame in enumerate(frames.labels):
        for thing in frame.things:
            what, hue, pixels = thing[0], thing[1], thing[4]
            b, far, facing = thing_classes(thing)
            place[n, _NAMES.index((what, hue))] = b
            if pixels <= pixels_at[n, b]:
                continue
            pixels_at[n, b] = pixels
            kind[n, b] = 1 + KINDS.index(what)
            colour[n, b] = 1 + COLOURS.index(hue)
            gap[n, b] = far
            turn[n, b] = facing
    return Labels(*(torch.from_numpy(a) for a in (kind, colour, gap, turn, place)))


def thing_classes(thing: tuple[str, str, float, float, int]) -> tuple[int, int, int]:
    """Column, distance class and turn class of a labelled thing."""
    kind, _, column, distance, _ = thing
    focal = MODEL_HEIGHT / 2 / math.tan(CAMERA_FOVY / 2)
    angle = math.atan((0.5 - column) * MODEL_WIDTH / focal)
    turn = _turn_class(angle, distance + RADIUS[kind] + ROBOT_RADIUS)
    return min(max(int(column * BINS), 0), BINS - 1), gap_class(distance), turn


def gap_class(metres: float) -> int:
    """Distance class: 0.1 m steps near by, coarser farther away."""
    if metres < 1.0:
        return int(max(metres, 0.0) * 10)
    return min(10 + int((metres - 1.0) / 0.25), GAPS - 1)


def _turn_class(angle: float, distance: float) -> int:
    """Turn class 0..6 (right 45 ... left 45) for a camera bearing and a distance from the base."""
    # Law of sines from the camera's bearing to the base's.
    base = angle - math.asin(min(max(CAMERA_AHEAD * math.sin(angle) / distance, -1.0), 1.0))
    degrees = math.degrees(base)
    edges = (-37.5, -22.5, -10.0, 10.0, 22.5, 37.5)
    return sum(degrees > edge for edge in edges)


def loss_of(out: dict[str, torch.Tensor], labels: Labels, rows: torch.Tensor) -> torch.Tensor:
    """Sum of the heads' losses for the labels of some rows."""
    kind, colour = labels.kind[rows], labels.colour[rows]
    weight_kind = torch.ones(len(KINDS) + 1)
    weight_kind[0] = 0.15  # most columns are empty
    weight_colour = torch.ones(len(COLOURS) + 1)
    weight_colour[0] = 0.15
    total = functional.cross_entropy(out["kind"].float().flatten(0, 1), kind.flatten(), weight_kind)
    total = total + functional.cross_entropy(
        out["colour"].float().flatten(0, 1), colour.flatten(), weight_colour
    )
    for name in ("gap", "turn"):
        target = getattr(labels, name)[rows].flatten()
        total = total + 0.5 * functional.cross_entropy(
            out[name].float().flatten(0, 1), target, ignore_index=-1
        )
    place = labels.place[rows].flatten()
    each = functional.cross_entropy(out["place"].float().flatten(0, 1), place, reduction="none")
    here = place < BINS
    return total + each[here].sum() / here.sum().clamp(min=1) + each[~here].mean()


def mirrored(labels: Labels) -> Labels:
    """The labels of the pictures' mirror images."""
    turn = torch.where(labels.turn >= 0, TURNS - 1 - labels.turn, labels.turn).flip(1)
    place = torch.where(labels.place < BINS, BINS - 1 - labels.place, labels.place)
    return Labels(labels.kind.flip(1), labels.colour.flip(1), labels.gap.flip(1), turn, place)


@torch.inference_mode()
def measure(tower: Any, heads: Heads, frames: Frames, labels: Labels) -> dict[str, float]:
    """Shares right on pictures: the place within one column, absence, turn of what is there."""
    near = there = quiet = away = turned = things = 0
    for first in range(0, len(frames.images), 128):
        rows = torch.arange(first, min(first + 128, len(frames.images)))
        out = heads(tower_forward(tower, torch.from_numpy(frames.images[first : first + 128])))
        place, guess = labels.place[rows], out["place"].argmax(-1)
        here = place < BINS
        near += int(((guess - place).abs() <= 1)[here & (guess < BINS)].sum())
        there += int(here.sum())
        quiet += int((guess == BINS)[~here].sum())
        away += int((~here).sum())
        turn = labels.turn[rows]
        turned += int((out["turn"].argmax(-1) == turn)[turn >= 0].sum())
        things += int((turn >= 0).sum())
    return {"place": near / there, "absent": quiet / away, "turn": turned / things}


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
    report: Callable[[str, float], None] | None = None,
    save_seconds: float = 60.0,
) -> dict[str, float]:
    """Train a tower and its heads in place for some minutes (or exactly `steps`); resumes from `path`.

    Returns the validation figures of `measure` and the minutes spent.
    """
    labels, held_out = make_labels(frames), make_labels(validation)
    both = (labels, mirrored(labels))
    optimizer = torch.optim.AdamW(
        [*tower.parameters(), *heads.parameters()], lr=rate, betas=(0.9, 0.98), weight_decay=0.02
    )
    modules = {"tower": tower, "heads": heads}
    step, spent, running = 0, 0.0, 0.0
    figures: dict[str, float] = {}
    if path.exists():
        progress = load_state(path, modules, optimizer)
        step, spent, figures = progress["step"], progress["minutes"], progress["figures"]
        running = progress.get("loss", 0.0)
    saved = time.monotonic()
    while True:
        share = step / steps if steps is not None else spent / minutes
        if share >= 1.0:
            break
        began = time.monotonic()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(frames.images), (batch,), generator=generator)
        flip = bool(torch.rand(1, generator=generator) < 0.5)
        images = torch.from_numpy(frames.images[rows.numpy()])
        if flip:
            images = images.flip(2)
        light = 0.9 + 0.2 * torch.rand(batch, 1, 1, 1, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 200) * schedule(share)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = tower_forward(tower, (images.float() * light).clamp(max=255.0))
            out = heads(tokens)
        loss = loss_of(out, both[int(flip)], rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*tower.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        step += 1
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        spent += (time.monotonic() - began) / 60
        if time.monotonic() - saved > save_seconds:
            figures = measure(tower, heads, validation, held_out)
            if report is not None:
                report(f"vision step {step} loss {running:.3f} " + _short(figures), share)
            progress = {"step": step, "minutes": spent, "figures": figures, "loss": running}
            save_state(path, modules, optimizer, progress)
            saved = time.monotonic()
        if step % 20 == 0 and report is not None:
            report(f"vision step {step} loss {running:.3f}", share)
    figures = measure(tower, heads, validation, held_out)
    progress = {"step": step, "minutes": spent, "figures": figures, "loss": running}
    save_state(path, modules, optimizer, progress)
    return {**figures, "minutes": spent, "steps": step}


def schedule(share: float) -> float:
    """Learning-rate factor over the share of training done: flat, then down to nearly nothing."""
    return 1.0 if share < 0.3 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - 0.3) / 0.7))


def _short(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in figures.items())
