"""Throw-away heads that make a language model look where its goal stands.

The reply's words alone teach slowly which image tokens an instruction means. So, in training only:
half-way up, the image tokens' hidden states must mark the goal's column; and at the top, every token
of the reply that tells of the goal or the action must know the goal's column, distance and turn, and exactly
its bearing, its distance and how far the way ahead is free.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.architecture import COLUMNS, IMAGE_TOKENS, ROWS
from dsd_lab.train.batches import NOTHING, Batch
from dsd_lab.train.data import Frame
from dsd_lab.train.vision_stage import BINS, GAPS, SLOTS, TURNS, exactly, thing_classes


def goal_classes(frame: Frame, goal: str | None) -> tuple[int, ...]:
    """`thing_classes` of a goal in a picture (column BINS when it is not in view), and the free way ahead in mm."""
    if goal is None:
        return NOTHING
    index = frame.find(goal)
    if index is None:
        return (BINS, *NOTHING[1:])
    ahead = min(frame.free[(len(frame.free) - 1) // 2 : len(frame.free) // 2 + 1])
    return (*thing_classes(frame, index), round(1000 * ahead))


class GoalHeads(nn.Module):
    """The heads for a language model of some width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mark = nn.Linear(ROWS * width, SLOTS)
        self.absent = nn.Parameter(torch.zeros(1))
        self.known = nn.Linear(width, BINS + 1 + GAPS + TURNS + 3)

    def forward(self, middle: torch.Tensor, top: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Loss from hidden states half-way and at the top, both (N, length, width)."""
        count, length, width = middle.shape
        offsets = torch.arange(IMAGE_TOKENS, device=middle.device)
        place = (batch.image_at[:, None] + offsets[None])[..., None].expand(-1, -1, width)
        stacked = middle.gather(1, place).view(count, ROWS, COLUMNS, width).transpose(1, 2)
        marks = self.mark(stacked.flatten(2)).flatten(1).float()
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
    """Mean over the wanted targets, 0 when there are none."""
    total = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
