"""What early exits learn from: the target's own replies to rendered scenes, or given conversations."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from dsd_lab.train.architecture import IMAGE_TOKENS, SPECIAL_TOKENS
from dsd_lab.train.conversations import Conversation, ConversationError, read_conversations
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH, Frames, generate, load_frames
from dsd_lab.train.devices import moved
from dsd_lab.train.exit_backbones import Backbone, Example, VlmBackbone
from dsd_lab.train.forward import tower_forward
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.text import instruction_for
from dsd_lab.worlds.situations import Split
from dsd_ros.vlm.errors import ImageError, ModelError
from dsd_ros.vlm.model import VisionLanguageModel

_LOG = logging.getLogger(__name__)
_REPLY_TOKENS = 64
_HIDDEN_BYTES = 1 << 30
_BLOCK = 128

Report = Callable[[str, float], None]


class Examples:
    """Examples made from their items when they are asked for; None for one that cannot be used."""

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
    """Hidden states of examples by one pass of the backbone per batch, kept where memory allows.

    The backbone is frozen, so that what was kept never ages.
    """

    def __init__(self, examples: Examples, layers: Sequence[int], room: int = _HIDDEN_BYTES) -> None:
        self.examples = examples
        self.layers = (*layers, examples.backbone.num_layers)
        self._room = room
        self._kept: dict[int, torch.Tensor | None] = {}

    def of(self, indices: Iterable[int]) -> torch.Tensor | None:
        """(exits + 1, tokens, hidden size) of examples, the last of them behind the final layer.

        Tokens are those of the replies, float32 on the backbone's device; None when no example of
        the batch can be used.
        """
        batch = list(indices)
        missing = [index for index in batch if index not in self._kept]
        fresh: dict[int, torch.Tensor | None] = {}
        found = [(index, self.examples.get(index)) for index in missing]
        usable = [(index, example) for index, example in found if example is not None]
        fresh |= {index: None for index, example in found if example is None}
        if usable:
            hidden = self.examples.backbone.hidden_states([e for _, e in usable], self.layers)
            parts = hidden.float().split([len(example.reply) for _, example in usable], dim=1)
            fresh |= {index: part for (index, _), part in zip(usable, parts, strict=True)}
        for index, states in fresh.items():
            size = 0 if states is None else states.numel() * 4
            if size <= self._room:
                self._room -= size
                self._kept[index] = None if states is None else states.clone()
        states = [self._kept[i] if i in self._kept else fresh[i] for i in batch]
        present = [part for part in states if part is not None]
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
    """The model's own greedy replies about rooms it has not seen; pictures and replies are kept."""
    if not isinstance(backbone, VlmBackbone):
        raise ModelError(f"{backbone.directory} reads no pictures; name a file of conversations with --data")
    both = []
    # Of splits that neither the pair's training nor its roll-outs have seen: replies there are as in use.
    jobs = (("train", Split.VALIDATION, worlds), ("held-out", Split.TEST, -(-held_out // 16)))
    for name, split, count in jobs:
        report(f"rendering {count} rooms ({name})", 0.0)
        folder = cache / f"scenes-{split}-{count}"
        generate(folder, split, count, workers)
        frames = load_frames(folder)
        path = cache / backbone.fingerprint / f"replies-{name}-{count}-{seed}.json"
        limit = held_out if name == "held-out" else None
        asked, rows = _questions(frames, seed, limit)
        replies = _kept_replies(path, backbone.model, frames, rows, asked, report)
        both.append(Examples(_as_examples(backbone.model, frames, rows, asked, replies), backbone, 1 << 20))
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
    path: Path, model: VisionLanguageModel, frames: Frames, rows: list[int], asked: list[str], report: Report
) -> list[list[int]]:
    if path.exists():
        kept: list[list[int]] = json.loads(path.read_text())
        if len(kept) == len(asked):
            return kept
    replies: list[list[int]] = []
    for first in range(0, len(asked), _BLOCK):
        report("the model answers", first / len(asked))
        images = frames.images[rows[first : first + _BLOCK]]
        replies += own_replies(model, images, asked[first : first + _BLOCK])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(replies))
    os.replace(part, path)
    return replies


@torch.inference_mode()
def own_replies(model: VisionLanguageModel, images: np.ndarray, instructions: list[str]) -> list[list[int]]:
    """A model's greedy replies (ids, up to 64) about uint8 pictures (N, height, width, 3).

    The shipped architecture answers many at once, any other one by one.
    """
    if _is_shipped_kind(model):
        features = tower_forward(model.hf.model.visual, moved(images, model.device))
        prompts = [model.prompt_tokens(text, IMAGE_TOKENS) for text in instructions]
        return greedy_replies(model.hf, features, prompts, max_tokens=_REPLY_TOKENS)
    replies = []
    for image, instruction in zip(images, instructions, strict=True):
        sequence = model.prefill(image, instruction)
        while len(sequence.tokens) < _REPLY_TOKENS:
            sequence.append([int(sequence.next_logits().argmax())])
            if sequence.tokens[-1] in model.eos_token_ids:
                break
        replies.append(sequence.tokens)
    return replies


def _is_shipped_kind(model: VisionLanguageModel) -> bool:
    """Whether the batched decoding of the pair's training fits: its image size, its tokens."""
    special = [model.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    return (
        special == list(range(len(SPECIAL_TOKENS)))
        and model.images.resized(MODEL_HEIGHT, MODEL_WIDTH) == (MODEL_HEIGHT, MODEL_WIDTH)
        and next(model.hf.parameters()).dtype == torch.float32
    )


def _as_examples(
    model: VisionLanguageModel, frames: Frames, rows: list[int], asked: list[str], replies: list[list[int]]
) -> list[Conversation | Example]:
    prompts: dict[str, list[int]] = {}
    count = model.images.image_tokens(MODEL_HEIGHT, MODEL_WIDTH)
    examples: list[Conversation | Example] = []
    for row, text, reply in zip(rows, asked, replies, strict=True):
        if text not in prompts:
            prompts[text] = model.prompt_tokens(text, count)
        prompt = prompts[text]
        places = list(range(len(prompt), len(prompt) + len(reply)))
        examples.append(Example(prompt + reply, places, (frames.images[row],)))
    return examples
