# SPDX-License-Identifier: Apache-2.0
"""Stage 2: teach a language model to answer from the tower's image tokens.

Throw-away heads (`GoalHeads`) teach it sooner than replies alone which image tokens an instruction means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.forward import CPU, embed, language_forward, tower_forward
from dsd_lab.train.frames import COLUMNS, ROWS, Frames
from dsd_lab.train.questions import Batch, Questions
from dsd_lab.train.stages import Losses, Stage
from dsd_lab.train.tokenizer import IMAGE, IMAGE_TOKENS
from dsd_lab.train.vision import BINS, GAPS, NOTHING, SLOTS, TURNS, Heads, exactly, lit, loss_of, make_labels

Modules = dict[str, tuple[nn.Module, float]]


class Look:
    """How pictures become image tokens in training: (rows, step) -> tokens (N, IMAGE_TOKENS, hidden) and a loss."""

    def __init__(
        self, tokens: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | float]], modules: Modules
    ) -> None:
        self.tokens, self.modules = tokens, modules  # `modules` are trained along


def cached_look(features: torch.Tensor, project: nn.Linear) -> Look:
    """A frozen tower's cached tokens, projected to another width."""
    return Look(lambda rows, step: (project(features[rows].float()), 0.0), {"project": (project, 1.0)})


def frozen_look(tower: Any, frames: Frames, device: torch.device = CPU) -> Look:
    """A frozen tower, which looks each time, since the tokens of all pictures would fill the memory."""
    images = torch.from_numpy(frames.images).to(device)

    def tokens(rows: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
        with torch.no_grad():
            return tower_forward(tower, images[rows]), 0.0

    return Look(tokens, {})


def live_look(tower: Any, heads: Heads | None, frames: Frames, seed: int, device: torch.device = CPU) -> Look:
    """A tower that trains along, kept honest by the vision stage's heads where these are given."""
    labels = make_labels(frames.labels if heads is not None else []).to(device)
    images = torch.from_numpy(frames.images).to(device)

    def tokens(rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        found = tower_forward(tower, lit(images[rows], generator))
        return found, 0.0 if heads is None else 0.1 * loss_of(heads(found), labels, rows)

    modules: Modules = {"tower": (tower, 0.6)}
    return Look(tokens, modules if heads is None else {**modules, "heads": (heads, 0.6)})


class GoalHeads(nn.Module):
    """Heads that make a language model look where its goal stands.

    Half-way up, the image tokens' hidden states must mark the goal's column. At the top, each token that tells of the
    goal or the action must know its column, distance, bearing and the free way ahead.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mark = nn.Linear(ROWS * width, SLOTS)
        self.absent = nn.Parameter(torch.zeros(1))
        self.known = nn.Linear(width, BINS + 1 + GAPS + TURNS + 3)

    def forward(self, middle: torch.Tensor, top: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Loss from hidden states half-way and at the top, both (N, length, width)."""
        count, length, width = middle.shape
        first = (batch.ids == IMAGE).long().argmax(1)
        place = first[:, None] + torch.arange(IMAGE_TOKENS, device=middle.device)[None]
        seen = middle.gather(1, place[..., None].expand(-1, -1, width)).view(count, ROWS, COLUMNS, width)
        marks = self.mark(seen.transpose(1, 2).flatten(2)).flatten(1).float()
        marks = torch.cat([marks, self.absent.expand(count, 1)], dim=1)
        loss = _cross_entropy(marks, batch.classes[:, 0])
        known = self.known(top.flatten(0, 1)[batch.telling]).float()
        wanted = batch.classes[batch.telling // length]
        *parts, exact = known.split((BINS + 1, GAPS, TURNS, 3), dim=-1)
        for part, axis in zip(parts, wanted[:, :3].unbind(-1), strict=True):
            loss = loss + _cross_entropy(part, axis)
        in_view = wanted[:, 2] != NOTHING[2]
        off = (exact - exactly(wanted[:, 3:])).abs().sum(-1)
        return loss + 0.5 * (off * in_view).sum() / in_view.sum().clamp(min=1)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the wanted targets, 0 where there are none."""
    total = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def reply_loss(
    model: Any, goals: GoalHeads | None, batch: Batch, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Weighted mean loss of the replies' tokens, the goal heads' loss, and the share of tokens right."""
    language = model.model.language_model
    hidden, middle = language_forward(language, *embed(language, batch.ids, features))
    goal_loss = 0.0 if goals is None else goals(middle, hidden, batch)
    logits = model.lm_head(hidden.flatten(0, 1)[batch.wanted]).float()
    right = (logits.detach().argmax(-1) == batch.targets).float().mean()
    said = logits.log_softmax(-1)
    each = -said.gather(1, batch.targets[:, None])[:, 0]
    other = -said[batch.unsure, batch.instead]
    each = each.index_add(0, batch.unsure, batch.shares * (other - each[batch.unsure]))
    return (each * batch.weights).sum() / batch.weights.sum(), goal_loss, right


def language_stage(
    name: str,
    model: Any,
    goals: GoalHeads | None,
    look: Look,
    questions: Questions,
    rate: float = 2e-3,
    captions: float = 0.0,
    averaged: bool = False,
    device: torch.device = CPU,
) -> Stage:
    """A stage that trains a model's language half, its goal heads if any, and what `look` brings along.

    `captions`: share of the questions in the first two fifths that ask for all that is in view.
    """
    model.lm_head.to(device)

    def losses(step: int, share: float) -> Iterator[Losses]:
        batch = questions.draw(step, captions if share < 0.4 else 0.0).to(device)
        tokens, extra = look.tokens(batch.pictures, step)
        loss, goal_loss, right = reply_loss(model, goals, batch, tokens)
        yield Losses(loss + 0.15 * goal_loss + extra, loss, right)

    modules: Modules = {"language": (model.model.language_model, 1.0), **look.modules}
    if goals is not None:
        modules["goals"] = (goals, 1.0)
    return Stage(name, modules, losses, rate, averaged=averaged)
