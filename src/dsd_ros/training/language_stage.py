"""Stage 2: teach a language model to answer from the frozen tower's image tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .architecture import COLUMNS, IMAGE_TOKENS, ROWS, SPECIAL_TOKENS
from .checkpoint import load_state, save_state
from .data import Frames
from .forward import language_forward, tower_forward
from .goal_heads import NOTHING, GoalHeads, goal_classes
from .text import instruction_for, prompt_ids
from .vision_stage import Heads, loss_of, make_labels, schedule

EOS = SPECIAL_TOKENS.index("<|im_end|>")
IMAGE = SPECIAL_TOKENS.index("<|image_pad|>")
CAPTION = "describe the room"


@dataclass
class Example:
    """One question about a picture: the picture's row, goal (None: caption), ids of the reply."""

    row: int
    goal: str | None
    reply: list[int]
    classes: tuple[int, int, int] = NOTHING


@dataclass
class Batch:
    """Padded token rows; `targets` is -100 where no loss is taken."""

    rows: torch.Tensor  # (N,) pictures
    ids: torch.Tensor  # (N, length)
    image_at: torch.Tensor  # (N,) where the image tokens begin
    targets: torch.Tensor  # (N, length): the next token
    weights: torch.Tensor  # (N, length): what an error there costs
    classes: torch.Tensor  # (N, 3): where the goal stands


@torch.inference_mode()
def image_tokens(tower: Any, images: np.ndarray, batch: int = 256) -> torch.Tensor:
    """The frozen tower's tokens of pictures: float16 (N, 24, hidden)."""
    out = torch.empty(len(images), IMAGE_TOKENS, tower.config.hidden_size, dtype=torch.float16)
    for first in range(0, len(images), batch):
        some = torch.from_numpy(images[first : first + batch])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out[first : first + batch] = tower_forward(tower, some).half()
    return out


def caption(frame: Any) -> str:
    """All things in a picture from left to right."""
    parts = []
    for kind, colour, column, gap, _ in sorted(frame.things, key=lambda t: t[2]):
        side = "left" if column < 0.36 else "right" if column > 0.64 else "middle"
        parts.append(f"{colour} {kind} {side} {gap:.1f} m")
    return (", ".join(parts) or "nothing but the room") + "."


def token_weights(reply: list[int], marks: tuple[int, int, int]) -> list[float]:
    """What errors in a reply cost: most where the goal is and in the action, least in between.

    `marks` are the ids of ";", "," and " Action". The clause on the other things is the hardest to
    get right and matters least; at full weight its noise drowns what steers the robot.
    """
    semicolon, comma, action = marks
    if action not in reply:
        return [1.0] * len(reply)
    last = reply.index(action)
    mark = semicolon if semicolon in reply else comma
    first = reply.index(mark) if mark in reply else last
    return [2.0 if n < first or n > last else 0.4 for n in range(len(reply))]


def collate(
    examples: list[Example],
    prompts: list[list[int]],
    marks: tuple[int, int, int] = (-1, -1, -1),
) -> Batch:
    """Pad prompts and replies into one batch."""
    length = max(len(p) + len(e.reply) for e, p in zip(examples, prompts, strict=True)) - 1
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    targets = torch.full((len(examples), length), -100, dtype=torch.long)
    weights = torch.zeros(len(examples), length)
    image_at = torch.zeros(len(examples), dtype=torch.long)
    for n, (example, prompt) in enumerate(zip(examples, prompts, strict=True)):
        whole = prompt + example.reply
        ids[n, : len(whole) - 1] = torch.tensor(whole[:-1])
        targets[n, len(prompt) - 1 : len(whole) - 1] = torch.tensor(example.reply)
        weights[n, len(prompt) - 1 : len(whole) - 1] = torch.tensor(
            token_weights(example.reply, marks)
        )
        image_at[n] = prompt.index(IMAGE)
    rows = torch.tensor([e.row for e in examples])
    classes = torch.tensor([e.classes for e in examples])
    return Batch(rows, ids, image_at, targets, weights, classes)


def positions(image_at: torch.Tensor, length: int) -> torch.Tensor:
    """M-RoPE positions (3, N, length) of prompts whose image tokens begin at `image_at`."""
    place = torch.arange(length)[None] - image_at[:, None]
    inside = (place >= 0) & (place < IMAGE_TOKENS)
    # Text after the image goes on from the largest position in it.
    text = torch.where(place >= IMAGE_TOKENS, place - IMAGE_TOKENS + max(ROWS, COLUMNS), place)
    axes = []
    for offset in (torch.zeros_like(place), place // COLUMNS, place % COLUMNS):
        axes.append(torch.where(inside, offset, text) + image_at[:, None])
    return torch.stack(axes)


def embed(language: Any, batch: Batch, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Embeddings with the image tokens put in, and rotary cosines and sines."""
    hidden = language.embed_tokens(batch.ids)
    place = batch.image_at[:, None] + torch.arange(IMAGE_TOKENS)[None]
    hidden = hidden.scatter(
        1, place[..., None].expand(-1, -1, hidden.shape[-1]), features.to(hidden.dtype)
    )
    cos, sin = language.rotary_emb(hidden, positions(batch.image_at, batch.ids.shape[1]))
    return hidden, cos[:, None], sin[:, None]


def reply_loss(
    model: Any, goals: GoalHeads, batch: Batch, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Weighted mean cross entropy of the reply's tokens, the goal heads' loss, and the share of tokens right."""
    language = model.model.language_model
    hidden, middle = language_forward(language, *embed(language, batch, features))
    goal_loss = goals(middle, hidden, batch.image_at, batch.classes, batch.weights > 1.5)
    wanted = batch.targets >= 0
    logits = model.lm_head(hidden[wanted]).float()
    targets = batch.targets[wanted]
    right = float((logits.detach().argmax(-1) == targets).float().mean())
    weights = batch.weights[wanted]
    each = functional.cross_entropy(logits, targets, reduction="none")
    return (each * weights).sum() / weights.sum(), goal_loss, right


class Mixer:
    """Draws batches: mostly goals in view, some not, captions while training is young."""

    def __init__(
        self, frames: Frames, tokenizer: Any, batch: int, seed: int, per_picture: int = 1
    ) -> None:
        self.frames = frames
        self.tokenizer, self.batch, self.seed = tokenizer, batch, seed
        self.per_picture = per_picture
        self._prompts: dict[str, list[int]] = {}
        self.marks = tuple(self._encode(text)[0] for text in (";", ",", " Action"))

    def draw(self, step: int, caption_share: float) -> Batch:
        """The batch of a step; equal steps give equal batches."""
        rng = np.random.default_rng([self.seed, 30, step])
        pool: list[Example] = []
        while len(pool) < self.batch:
            row = int(rng.integers(len(self.frames.labels)))
            frame = self.frames.labels[row]
            names = {f"{colour} {kind}" for kind, colour, *_ in frame.things}
            seen = [pair for pair in frame.replies if pair[0] in names]
            unseen = [pair for pair in frame.replies if pair[0] not in names]
            for _ in range(self.per_picture):
                if rng.random() < caption_share:
                    pool.append(Example(row, None, self._encode(caption(frame))))
                    continue
                choice = seen if seen and rng.random() < 0.68 else unseen
                if choice:
                    goal, text = choice[int(rng.integers(len(choice)))]
                    classes = goal_classes(frame, goal)
                    pool.append(Example(row, goal, self._encode(text), classes))
        prompts = [self.prompt(e.goal, rng) for e in pool]
        return collate(pool, prompts, self.marks)

    def _encode(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, EOS]

    def prompt(self, goal: str | None, rng: np.random.Generator) -> list[int]:
        """Prompt ids that ask for a goal in one of many phrasings, or for a caption."""
        text = CAPTION if goal is None else instruction_for(goal, rng)
        if text not in self._prompts:
            self._prompts[text] = prompt_ids(self.tokenizer, text)
        return self._prompts[text]


@dataclass
class Look:
    """How pictures become image tokens in training.

    `tokens(batch, step)` gives the tokens of the batch's pictures, (N, 24, hidden), and a loss to be
    added; `modules` (name -> module, learning-rate factor) are trained along.
    """

    tokens: Callable[[Batch, int], tuple[torch.Tensor, torch.Tensor | float]]
    modules: dict[str, tuple[nn.Module, float]]


def cached_look(features: Callable[[], torch.Tensor], project: nn.Linear | None = None) -> Look:
    """Image tokens of a frozen tower, mapped by `project` to another width where that is given."""

    def tokens(batch: Batch, step: int) -> tuple[torch.Tensor, float]:
        found = features()[batch.rows].float()
        return (found if project is None else project(found)), 0.0

    return Look(tokens, {} if project is None else {"project": (project, 1.0)})


def live_look(tower: Any, heads: Heads, frames: Frames, seed: int) -> Look:
    """A tower that learns along, kept honest by the vision stage's heads."""
    labels = make_labels(frames)

    def tokens(batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, back = torch.unique(batch.rows, return_inverse=True)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        light = 0.9 + 0.2 * torch.rand(len(rows), 1, 1, 1, generator=generator)
        images = torch.from_numpy(frames.images[rows.numpy()]).float() * light
        found = tower_forward(tower, images.clamp(max=255.0))
        return found[back], 0.1 * loss_of(heads(found), labels, rows)

    return Look(tokens, {"tower": (tower, 0.6), "heads": (heads, 0.6)})


def train_language(
    model: Any,
    goals: GoalHeads,
    look: Look,
    mixer: Mixer,
    path: Path,
    minutes: float,
    steps: int | None = None,
    rate: float = 2e-3,
    captions: float = 0.3,
    report: Callable[[str, float], None] | None = None,
    save_seconds: float = 60.0,
) -> dict[str, float]:
    """Train a model's language half, its goal heads and what `look` brings; resumes from `path`.

    Returns the running loss, the share of reply tokens right, and the minutes spent.
    """
    language = model.model.language_model
    modules: dict[str, Any] = {"language": language, "goals": goals}
    groups: list[dict[str, Any]] = [
        {"params": [*language.parameters(), *goals.parameters()], "factor": 1.0}
    ]
    for name, (module, factor) in look.modules.items():
        modules[name] = module
        groups.append({"params": list(module.parameters()), "factor": factor})
    trained = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    step, spent, loss_mean, right_mean, goal_mean = 0, 0.0, 0.0, 0.0, 0.0
    if path.exists():
        progress = load_state(path, modules, optimizer)
        step, spent = progress["step"], progress["minutes"]
        loss_mean, right_mean = progress["loss"], progress["right"]
    saved = time.monotonic()

    def save() -> None:
        figures = {"step": step, "minutes": spent, "loss": loss_mean, "right": right_mean}
        save_state(path, modules, optimizer, figures)

    while True:
        share = step / steps if steps is not None else spent / minutes
        if share >= 1.0:
            break
        began = time.monotonic()
        batch = mixer.draw(step, captions if share < 0.4 else 0.0)
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * rate * min(1.0, (step + 1) / 100) * schedule(share)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens, extra = look.tokens(batch, step)
            loss, goal_loss, right = reply_loss(model, goals, batch, tokens)
        optimizer.zero_grad(set_to_none=True)
        (loss + 0.15 * goal_loss + extra).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        keep = min(0.98, 1 - 1 / step)
        loss_mean = keep * loss_mean + (1 - keep) * loss.item()
        goal_mean = keep * goal_mean + (1 - keep) * goal_loss.item()
        right_mean = keep * right_mean + (1 - keep) * right
        spent += (time.monotonic() - began) / 60
        if time.monotonic() - saved > save_seconds:
            save()
            saved = time.monotonic()
        if step % 10 == 0 and report is not None:
            report(
                f"language step {step} loss {loss_mean:.3f} goal {goal_mean:.3f} tokens right {right_mean:.3f}",
                share,
            )
    save()
    return {"loss": loss_mean, "right": right_mean, "minutes": spent, "steps": step}


def batches(count: int, size: int) -> Iterator[range]:
    """Consecutive ranges of at most `size` that cover `count`."""
    for first in range(0, count, size):
        yield range(first, min(first + size, count))
