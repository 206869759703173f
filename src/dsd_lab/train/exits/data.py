"""What early exits learn from: a model's own replies to rendered scenes, or given conversations."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from dsd_lab.train.data import generate
from dsd_lab.train.exits.backbones import Backbone, Example, VlmBackbone
from dsd_lab.train.exits.conversations import Conversation, ConversationError, read_conversations
from dsd_lab.train.frames import MODEL_HEIGHT, MODEL_WIDTH, Frames, load_frames, write_json
from dsd_lab.train.replies import Speaker
from dsd_lab.train.stages import Report
from dsd_lab.worlds.phrases import instruction_for
from dsd_lab.worlds.situations import Split
from dsd_ros.vlm.errors import ImageError, ModelError
from dsd_ros.vlm.model import VisionLanguageModel

_LOG = logging.getLogger(__name__)
_HIDDEN_BYTES = 1 << 30
_BLOCK = 128


class Examples:
    """Examples, made from conversations on demand; None for a conversation that cannot be used."""

    def __init__(self, items: Sequence[Conversation | Example], backbone: Backbone, context: int) -> None:
        self.items, self.backbone = items, backbone
        self.context = min(context, backbone.max_length)

    def __len__(self) -> int:
        return len(self.items)

    def get(self, index: int) -> Example | None:
        item = self.items[index]
        if isinstance(item, Example):
            return item
        try:
            return self.backbone.example(item, self.context)
        except (ConversationError, ImageError) as error:
            _LOG.warning("%s is skipped: %s", item.where, error)
            return None


class HiddenStates:
    """Hidden states of examples by one pass of the frozen backbone per batch, kept while memory allows."""

    def __init__(self, examples: Examples, layers: Sequence[int], room: int = _HIDDEN_BYTES) -> None:
        self.examples = examples
        self.layers = (*layers, examples.backbone.num_layers)
        self._room = room
        self._kept: dict[int, torch.Tensor | None] = {}

    def of(self, indices: Iterable[int]) -> torch.Tensor | None:
        """Hidden states (exits + 1, tokens, hidden size) of examples' replies, the last after the final layer.

        None when no example of the batch can be used.
        """
        batch = list(indices)
        fresh: dict[int, torch.Tensor | None] = {index: None for index in batch if index not in self._kept}
        found = {index: example for index in fresh if (example := self.examples.get(index)) is not None}
        if found:
            hidden = self.examples.backbone.hidden_states(list(found.values()), self.layers)
            parts = hidden.float().split([len(example.reply) for example in found.values()], dim=1)
            fresh |= dict(zip(found, parts, strict=True))
        for index, states in fresh.items():
            size = 0 if states is None else states.numel() * 4
            if size <= self._room:
                self._room -= size
                self._kept[index] = None if states is None else states.clone()
        every = [self._kept[i] if i in self._kept else fresh[i] for i in batch]
        present = [part for part in every if part is not None]
        return torch.cat(present, dim=1) if present else None


def conversation_examples(
    path: Path, backbone: Backbone, context: int, held_out: int, seed: int
) -> tuple[Examples, Examples]:
    """Training and held-out examples of a data file; at most a tenth is held out, one at least."""
    items = read_conversations(path, images=backbone.reads_images)
    if len(items) < 2:
        raise ConversationError(f"{path} holds one conversation; training and report need two")
    order = np.random.default_rng([seed, 60]).permutation(len(items))
    count = max(1, min(held_out, len(items) // 10))
    held, rest = order[:count], sorted(order[count:])
    return (
        Examples([items[i] for i in rest], backbone, context),
        Examples([items[i] for i in held], backbone, context),
    )


def scene_examples(
    backbone: Backbone, cache: Path, worlds: int, held_out: int, workers: int, seed: int, report: Report
) -> tuple[Examples, Examples]:
    """The model's own greedy replies about rooms that it has not seen; pictures and replies are kept in the cache."""
    if not isinstance(backbone, VlmBackbone):
        raise ModelError(f"{backbone.directory} reads no pictures; name a file of conversations with --data")
    both = []
    # Splits that neither the pair's training nor its roll-outs have seen: replies there are as in use.
    for name, split, count in (
        ("train", Split.VALIDATION, worlds), ("held-out", Split.TEST, -(-held_out // 16)),
    ):  # fmt: skip
        report(f"rendering {count} rooms ({name})", 0.0)
        folder = cache / f"scenes-{split}-{count}"
        generate(folder, split, count, workers)
        frames = load_frames(folder)
        path = cache / backbone.fingerprint / f"replies-{name}-{count}-{seed}.json"
        asked, rows = _questions(frames, seed, held_out if name == "held-out" else None)
        images = frames.images[rows]
        replies = _kept_replies(path, Speaker(backbone.model), images, asked, report)
        both.append(Examples(_as_examples(backbone.model, images, asked, replies), backbone, 1 << 20))
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
    for first in range(0, len(asked), _BLOCK):
        report("the model answers", first / len(asked))
        replies += speaker.replies(list(images[first : first + _BLOCK]), asked[first : first + _BLOCK])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, replies)
    return replies


def _as_examples(
    model: VisionLanguageModel, images: np.ndarray, asked: list[str], replies: list[list[int]]
) -> list[Conversation | Example]:
    count = model.images.image_tokens(MODEL_HEIGHT, MODEL_WIDTH)
    examples: list[Conversation | Example] = []
    for image, text, reply in zip(images, asked, replies, strict=True):
        prompt = model.prompt_tokens(text, count)
        examples.append(Example(prompt + reply, list(range(len(prompt), len(prompt) + len(reply))), (image,)))
    return examples
