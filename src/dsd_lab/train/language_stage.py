"""Stage 2: teach a language model to answer from the tower's image tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.architecture import COLUMNS, IMAGE_TOKENS, ROWS
from dsd_lab.train.batches import EOS, IMAGE, Batch, Example, collate
from dsd_lab.train.data import Frames
from dsd_lab.train.devices import CPU, autocast, moved
from dsd_lab.train.forward import PLAIN, Passes, language_forward, tower_forward
from dsd_lab.train.goal_heads import GoalHeads
from dsd_lab.train.questions import Mixer
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_lab.train.vision_stage import Heads, loss_of, make_labels

__all__ = ["EOS", "Batch", "Example", "Mixer", "collate"]


@torch.inference_mode()
def image_tokens(tower: Any, images: np.ndarray, batch: int = 256) -> torch.Tensor:
    """The frozen tower's tokens of pictures: float16 (N, IMAGE_TOKENS, hidden), where the tower is."""
    device = tower.patch_embed.proj.weight.device
    size = (len(images), IMAGE_TOKENS, tower.config.hidden_size)
    out = torch.empty(size, dtype=torch.float16, device=device)
    for first in range(0, len(images), batch):
        some = moved(images[first : first + batch], device)
        with autocast(device):
            out[first : first + batch] = tower_forward(tower, some).half()
    return out


def positions(ids: torch.Tensor) -> torch.Tensor:
    """M-RoPE positions (3, N, length) of prompts with whole pictures of IMAGE_TOKENS image tokens in them.

    A picture's axes count on from the largest position before it, the text behind it from the largest in it.
    """
    is_image = ids == IMAGE
    before = is_image.cumsum(1) - is_image.long()  # image tokens in front
    inside = torch.where(is_image, before % IMAGE_TOKENS, 0)
    place = torch.arange(ids.shape[1], device=ids.device)[None] - inside
    place = place - (before // IMAGE_TOKENS) * (IMAGE_TOKENS - max(ROWS, COLUMNS))
    axes = [place, place + inside // COLUMNS, place + inside % COLUMNS]
    return torch.stack(axes)


def embed(language: Any, batch: Batch, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Embeddings with the image tokens put in, and rotary cosines and sines.

    `features` are those of all runs of image tokens, (runs, IMAGE_TOKENS, hidden).
    """
    hidden = language.embed_tokens(batch.ids)
    flat, width = hidden.flatten(0, 1), hidden.shape[-1]
    flat = flat.index_copy(0, batch.images, features.to(hidden.dtype).reshape(-1, width))
    cos, sin = language.rotary_emb(hidden, positions(batch.ids))
    return flat.view(hidden.shape), cos[:, None], sin[:, None]


def reply_loss(
    model: Any,
    goals: GoalHeads | None,
    batch: Batch,
    features: torch.Tensor,
    teacher: Callable[[Batch], torch.Tensor] | None = None,
    passes: Passes = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Weighted mean loss of the reply's tokens, the goal heads' loss, and the share of tokens right.

    The loss is the cross entropy with the targets and what could be said instead, by their shares, or the divergence
    from the logits that `teacher` gives (W, vocabulary).
    """
    language = model.model.language_model
    hidden, middle = passes.language(language, *embed(language, batch, features))
    goal_loss = 0.0 if goals is None else goals(middle, hidden, batch)
    logits = model.lm_head(hidden.flatten(0, 1)[batch.wanted]).float()
    right = (logits.detach().argmax(-1) == batch.targets).float().mean()
    said = logits.log_softmax(-1)
    if teacher is None:
        each = -said.gather(1, batch.targets[:, None])[:, 0]
        other = -said[batch.unsure, batch.instead]
        each = each.index_add(0, batch.unsure, batch.shares * (other - each[batch.unsure]))
    else:
        wanted = teacher(batch).float().log_softmax(-1)
        each = functional.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
    return (each * batch.weights).sum() / batch.weights.sum(), goal_loss, right


@torch.no_grad()
def reply_logits(model: Any, batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """What a model would say of each wanted token: logits (W, vocabulary)."""
    language = model.model.language_model
    hidden, _ = language_forward(language, *embed(language, batch, features))
    logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[batch.wanted])
    return logits


@dataclass
class Look:
    """How pictures become image tokens in training.

    `tokens(batch, step)` gives the tokens of the batch's runs of them, (runs, IMAGE_TOKENS, hidden), and a loss to
    be added; `modules` (name -> module, learning-rate factor) are trained along.
    """

    tokens: Callable[[Batch, int], tuple[torch.Tensor, torch.Tensor | float]]
    modules: dict[str, tuple[nn.Module, float]]


def cached_look(features: torch.Tensor, project: nn.Linear | None = None) -> Look:
    """Image tokens that a frozen tower gave, mapped by `project` to another width where that is given."""

    def tokens(batch: Batch, step: int) -> tuple[torch.Tensor, float]:
        found = features[batch.pictures].float()
        return (found if project is None else project(found))[batch.back], 0.0

    return Look(tokens, {} if project is None else {"project": (project, 1.0)})


def frozen_look(tower: Any, frames: Frames, device: torch.device = CPU, passes: Passes = PLAIN) -> Look:
    """A tower that stays as it is: it looks anew each time, since tokens of all pictures would fill the memory."""
    images = moved(frames.images, device)

    def tokens(batch: Batch, step: int) -> tuple[torch.Tensor, float]:
        with torch.no_grad():
            return passes.tower(tower, images[batch.pictures])[batch.back], 0.0

    return Look(tokens, {})


def live_look(
    tower: Any, heads: Heads | None, frames: Frames, seed: int, device: torch.device = CPU, passes: Passes = PLAIN
) -> Look:
    """A tower that learns along, kept honest by the vision stage's heads where they are given."""
    labels = make_labels(frames.labels if heads is not None else []).to(device)
    images = moved(frames.images, device)

    def tokens(batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        light = 0.9 + 0.2 * torch.rand(len(batch.pictures), 1, 1, 1, generator=generator)
        some = images[batch.pictures].float() * moved(light, device)
        found = passes.tower(tower, some.clamp(max=255.0))
        if heads is None:
            return found[batch.back], 0.0
        return found[batch.back], 0.1 * loss_of(heads(found), labels, batch.pictures)

    modules: dict[str, tuple[nn.Module, float]] = {"tower": (tower, 0.6)}
    return Look(tokens, modules if heads is None else {**modules, "heads": (heads, 0.6)})


def language_stage(
    name: str,
    model: Any,
    goals: GoalHeads | None,
    look: Look,
    mixer: Mixer,
    rate: float = 2e-3,
    captions: float = 0.0,
    teacher: Callable[[Batch], torch.Tensor] | None = None,
    averaged: bool = False,
    passes: Passes = PLAIN,
) -> Stage:
    """A stage that trains a model's language half, its goal heads where there are any, and what `look` brings.

    `captions`: share of the questions in the first two fifths that ask for all that is in view. `averaged`: as a
    `Stage` has it.
    """

    def draw(step: int, share: float) -> Batch:
        return mixer.draw(step, captions if share < 0.4 else 0.0)

    def losses(batch: Batch, step: int) -> Losses:
        tokens, extra = look.tokens(batch, step)
        loss, goal_loss, right = reply_loss(model, goals, batch, tokens, teacher, passes)
        return Losses(loss + 0.15 * goal_loss + extra, loss.detach(), right)

    modules = {"language": (model.model.language_model, 1.0), **look.modules}
    if goals is not None:
        modules["goals"] = (goals, 1.0)
    return Stage(name, modules, draw, losses, rate, averaged=averaged)


def train_language(
    model: Any,
    goals: GoalHeads | None,
    look: Look,
    mixer: Mixer,
    path: Path,
    minutes: float,
    steps: int | None = None,
    rate: float = 2e-3,
    captions: float = 0.0,
    name: str = "language",
    teacher: Callable[[Batch], torch.Tensor] | None = None,
    averaged: bool = False,
    passes: Passes = PLAIN,
    device: torch.device = CPU,
    after: str = "",
    report: Report | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Run `language_stage` as `run_stage` does, whose figures it returns."""
    stage = language_stage(name, model, goals, look, mixer, rate, captions, teacher, averaged, passes)
    model.lm_head.to(device)
    return run_stage(
        stage, path, minutes, steps, device=device, after=after, report=report, save_seconds=save_seconds
    )  # fmt: skip


def batches(count: int, size: int) -> Iterator[range]:
    """Consecutive ranges of at most `size` that cover `count`."""
    for first in range(0, count, size):
        yield range(first, min(first + size, count))
