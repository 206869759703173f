"""The draft's lessons: the target's own replies, also to pictures that the draft met by itself.

What a draft must foretell is the target, not the expert, and where the robot gets to when both decode
together. So it learns from the target's greedy replies (on-policy as in R. Agarwal et al., "On-Policy
Distillation of Language Models", 2024), and on demand from the probabilities the target had at each of their
tokens (G. Hinton et al., "Distilling the Knowledge in a Neural Network", 2015).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.train.batches import Batch
from dsd_lab.train.data import Frame, Frames
from dsd_lab.train.language_stage import image_tokens, reply_logits
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.stages import Report
from dsd_lab.train.text import prompt_ids
from dsd_lab.worlds.phrases import instruction_for

GOALS = 3  # of a picture, at most, that the target is asked for
_BLOCK = 1024  # replies kept as one file
_ROWS = 16  # pictures taken together, so that histories stay whole


def some_pictures(frames: Frames, count: int, seed: int) -> Frames:
    """About `count` pictures in runs of 16, at random."""
    blocks = -(-len(frames.labels) // _ROWS)
    chosen = np.sort(np.random.default_rng([seed, 50]).permutation(blocks)[: -(-count // _ROWS)])
    rows = (chosen[:, None] * _ROWS + np.arange(_ROWS)[None]).flatten()
    rows = rows[rows < len(frames.labels)]
    return Frames(frames.images[rows], [frames.labels[int(row)] for row in rows])


def answered(
    model: Any, tokenizer: Any, frames: Frames, folder: Path, seed: int, report: Report | None = None
) -> tuple[list[Frame], torch.Tensor]:
    """The pictures' labels with the model's greedy replies for the expert's, and its image tokens.

    Replies are kept in `folder` in blocks, so that a kill costs one of them.
    """
    rng = np.random.default_rng([seed, 51])
    asked = [(n, goal) for n, f in enumerate(frames.labels) for goal, _ in f.replies[:GOALS]]
    prompts = [prompt_ids(tokenizer, instruction_for(goal, rng)) for _, goal in asked]
    features = image_tokens(model.model.visual, frames.images)
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for first in range(0, len(asked), _BLOCK):
        path = folder / f"replies{first // _BLOCK:05d}.json"
        if not path.exists():
            some = asked[first : first + _BLOCK]
            shown = [[n] for n, _ in some]
            ids = greedy_replies(model, features, prompts[first : first + _BLOCK], pictures=shown)
            part = path.with_suffix(".part")
            part.write_text(json.dumps([tokenizer.decode(i, skip_special_tokens=True) for i in ids]))
            os.replace(part, path)
        texts += json.loads(path.read_text())
        if report is not None:
            report("the target answers for the draft", first / len(asked))
    answers = iter(texts)
    labels = []
    for frame in frames.labels:
        frame = copy.copy(frame)
        frame.replies = [(goal, next(answers)) for goal, _ in frame.replies[:GOALS]]
        frame.doubts = []  # the expert's
        labels.append(frame)
    return labels, features


def teacher(model: Any, features: torch.Tensor) -> Callable[[Batch], torch.Tensor]:
    """What a target says of a batch's tokens, from its image tokens of the same pictures."""

    def logits(batch: Batch) -> torch.Tensor:
        return reply_logits(model, batch, features[batch.pictures].float()[batch.back])

    return logits
