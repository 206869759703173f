# SPDX-License-Identifier: Apache-2.0
"""What exits are trained on: a model's own replies, about rendered rooms or to questions that it writes itself.

A text model continues the beginning of a user's turn, which gives a question as users ask them, and then answers it
(Xu et al., Magpie, arXiv 2406.08464). Every second of these replies is greedy and the others are sampled, as in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dsd_lab.train.data import generate
from dsd_lab.train.forward import autocast
from dsd_lab.train.frames import Frames, load_frames, write_json
from dsd_lab.train.replies import Speaker
from dsd_lab.train.stages import Report
from dsd_lab.worlds.phrases import instruction_for
from dsd_lab.worlds.situations import Split
from dsd_ros.decoding.sampling import sample, transform
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.vlm.errors import ModelError, PromptError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence as TokenSequence, next_logits_together

BLOCK = 32  # questions that are written side by side
QUESTION_TOKENS = 96  # a longer question is dropped
REPLY_TOKENS = 128  # a longer reply ends there
_SAMPLING = SamplingSettings(1.0, top_p=0.9)  # small models say nonsense otherwise
_ANSWERED = 128  # pictures between two lines of progress
_HIDDEN_BYTES = 1 << 30


class Example(NamedTuple):
    """A prompt, its picture (uint8, (height, width, 3) RGB) if any, and the tokens of the model's reply."""

    picture: np.ndarray | None
    instruction: str
    reply: list[int]


class HiddenStates:
    """Hidden states of examples, each by one pass of the model as in use, kept while memory allows."""

    def __init__(self, model: VisionLanguageModel, examples: Sequence[Example], layers: Sequence[int]) -> None:
        """``layers``: 1-based, of the exits; the last layer's states are there, too."""
        self.model, self.examples, self.layers = model, examples, (*layers, model.num_layers)
        self._room = _HIDDEN_BYTES
        self._kept: dict[int, torch.Tensor] = {}

    def of(self, index: int) -> torch.Tensor:
        """Float32 (exits + 1, tokens, hidden size) before each token of the reply, the last after the final layer."""
        if index in self._kept:
            return self._kept[index]
        picture, instruction, reply = self.examples[index]
        found: list[torch.Tensor] = []

        def keep(layer: int, hidden: torch.Tensor) -> None:
            if layer + 1 in self.layers:
                found.append(hidden.float())

        with autocast(self.model.device, enabled=False):  # they are kept for the whole training
            self.model.prefill(picture, instruction).verify(reply[:-1], keep)
        states = torch.stack(found)
        if states.numel() * 4 <= self._room:
            self._room -= states.numel() * 4
            self._kept[index] = states
        return states


def scene_examples(
    model: VisionLanguageModel, cache: Path, worlds: int, held_out: int, workers: int, seed: int, report: Report
) -> tuple[list[Example], list[Example]]:
    """Training and held-out replies about rooms that the model has not seen; pictures and replies are kept."""
    both = []
    # Splits that neither the pair's training nor its roll-outs have seen: replies there are as in use.
    for name, split, count in (
        ("train", Split.VALIDATION, worlds), ("held-out", Split.TEST, -(-held_out // 16)),
    ):  # fmt: skip
        report(f"rendering {count} rooms ({name})", 0.0)
        folder = cache / f"scenes-{split}-{count}"
        generate(folder, split, count, workers)
        frames = load_frames(folder)
        path = cache / model.fingerprint / f"replies-{name}-{count}-{seed}.json"
        asked, rows = _questions(frames, seed, held_out if name == "held-out" else None)
        images = frames.images[rows]
        replies = _kept_replies(path, Speaker(model), images, asked, report)
        both.append([Example(*one) for one in zip(images, asked, replies, strict=True)])
    return both[0], both[1]


def _questions(frames: Frames, seed: int, limit: int | None) -> tuple[list[str], list[int]]:
    """An instruction per picture, two thirds of them for something in view; and the pictures' rows."""
    rng = np.random.default_rng([seed, 61])
    asked, rows = [], []
    for row in rng.permutation(len(frames.labels))[:limit].tolist():
        frame = frames.labels[row]
        seen = [goal for goal, _ in frame.replies if frame.find(goal) is not None]
        unseen = [goal for goal, _ in frame.replies if frame.find(goal) is None]
        choice = seen if seen and (not unseen or rng.random() < 0.68) else unseen
        if choice:
            asked.append(instruction_for(choice[int(rng.integers(len(choice)))], rng))
            rows.append(row)
    return asked, rows


def _kept_replies(
    path: Path, speaker: Speaker, images: np.ndarray, asked: list[str], report: Report
) -> list[list[int]]:
    if path.exists():
        kept: list[list[int]] = json.loads(path.read_text())
        if len(kept) == len(asked):
            return kept
    replies: list[list[int]] = []
    for first in range(0, len(asked), _ANSWERED):
        report("the model answers", first / len(asked))
        replies += speaker.replies(list(images[first : first + _ANSWERED]), asked[first : first + _ANSWERED])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, replies)
    return replies


def self_written_examples(
    model: VisionLanguageModel, cache: Path, count: int, held_out: int, seed: int, report: Report
) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples, about ``count`` in all, of which at most a tenth is held out.

    Each block has a file in the cache, so that an interrupted run continues; equal seeds write equal blocks.
    """
    written: list[Example] = []
    for block in range(-(-count // BLOCK)):
        path = cache / model.fingerprint / f"asked-{seed}-{block}.json"
        if not path.exists():
            report(f"the model writes conversations {block * BLOCK} to {(block + 1) * BLOCK}", block * BLOCK / count)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, list(_write(model, np.random.default_rng([seed, block]))))
        written += [Example(None, question, reply) for question, reply in json.loads(path.read_text())]
    held = max(1, min(held_out, len(written) // 10))
    if len(written) < 2:
        raise ModelError(f"{model.name} writes no questions, so its exits have nothing to be trained on")
    return written[:-held], written[-held:]


def _write(model: VisionLanguageModel, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Questions and replies of a block; fewer than BLOCK, since questions that cannot be asked are dropped."""
    texts = model.template.render_text("\0").split("\0")
    before, between = (model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    begun = [model.begin() for _ in range(BLOCK)]
    for sequence in begun:
        sequence.append(before)
    drawn = _continued(begun, between[:1], QUESTION_TOKENS, lambda row, p: sample(p, rng))
    asked = {}
    for tokens in drawn:
        if tokens[-1] == between[0]:
            text = "".join(c if c.isprintable() else " " for c in model.decode_text(tokens[:-1]))
            with suppress(PromptError):  # nothing, or what no user could send
                asked[text] = model.prefill(None, text)
    begun, ends = list(asked.values()), list(model.eos_token_ids)
    replies = _continued(begun, ends, REPLY_TOKENS, lambda row, p: sample(p, rng) if row % 2 else int(p.argmax()))
    yield from zip(asked, replies, strict=True)


def _continued(
    sequences: Sequence[TokenSequence], ends: Sequence[int], limit: int, choose: Callable[[int, torch.Tensor], int]
) -> list[list[int]]:
    """What follows in each sequence, up to an end or ``limit`` tokens; ``choose``: of row and probabilities."""
    said: list[list[int]] = [[] for _ in sequences]
    alive = list(range(len(sequences)))
    while alive:
        rows = transform(torch.stack(next_logits_together([sequences[row] for row in alive])), _SAMPLING)
        for row, p in zip(alive, rows, strict=True):
            said[row].append(choose(row, p))
            sequences[row].append(said[row][-1:])
        alive = [row for row in alive if said[row][-1] not in ends and len(said[row]) < limit]
    return said
