# SPDX-License-Identifier: Apache-2.0
"""Frozen models as the training of early exits sees them: text cut into examples, hidden states out.

One pass over a padded batch gives, for each position before a reply's token, the hidden states after each layer with an
exit and after the last.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dsd_lab.train.data import generate
from dsd_lab.train.exits.conversations import Conversation, ConversationError, read_conversations
from dsd_lab.train.frames import MODEL_HEIGHT, MODEL_WIDTH, Frames, load_frames, write_json
from dsd_lab.train.replies import Speaker
from dsd_lab.train.stages import Report
from dsd_lab.worlds.phrases import instruction_for
from dsd_lab.worlds.situations import Split
from dsd_ros.pictures import PictureError, read_picture
from dsd_ros.vlm.errors import ImageError, ModelError
from dsd_ros.vlm.loading import ModelSettings, load_model, model_fingerprint, resolve_directory
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER

# Vicuna's format, for text models without a chat template of their own.
_VICUNA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@dataclass
class Example:
    """Token ids, the places of reply tokens in them, and the pictures or their files."""

    ids: list[int]
    reply: list[int]  # ascending indices into ids, none of them 0
    images: tuple[np.ndarray | Path, ...] = ()


class Backbone:
    """A frozen Llama-shaped text model (Llama, Vicuna, Qwen2, SmolLM2 ...) whose exits are trained."""

    reads_images = False

    def __init__(self, hf: Any, directory: Path, fingerprint: str, tokenizer: Any) -> None:
        self.hf, self.directory, self.fingerprint, self.tokenizer = hf, directory, fingerprint, tokenizer
        text = hf.config.get_text_config()
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.max_length: int = text.max_position_embeddings
        self.parameters_count = sum(parameter.numel() for parameter in hf.parameters())
        self.language: Any = getattr(hf.model, "language_model", hf.model)

    @classmethod
    def load(cls, directory: Path, device: str, dtype: str) -> Backbone:
        """The text model of a directory; ModelError if it is none."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options = {"use_safetensors": True, "local_files_only": True}
        try:
            hf: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype), **options)
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the model in {directory} cannot be loaded: {reason}") from error
        if not all(hasattr(hf.model, name) for name in ("layers", "norm")):
            raise ModelError(f"{directory} holds no Llama-shaped model: it lacks layers or norm")
        return cls(hf.eval().requires_grad_(False).to(device), directory, model_fingerprint(directory), tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.language.embed_tokens.weight.device

    def head(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Final norm and LM head, (n, hidden size) to (n, vocabulary) float32; ``ids``: of these tokens alone."""
        weight = self.hf.lm_head.weight if ids is None else self.hf.lm_head.weight[ids]
        return functional.linear(self.language.norm(hidden.to(weight.dtype)), weight).float()

    def example(self, conversation: Conversation, context: int) -> Example:
        """A conversation as tokens, cut to ``context``; ConversationError when no reply is left."""
        tokenizer = self.tokenizer
        pieces = _pieces(conversation, self.render, tuple(filter(None, tokenizer.all_special_tokens)))
        encoded = ((tokenizer.encode(text, add_special_tokens=False), is_reply) for text, is_reply in pieces)
        return _cut(*_joined(encoded, frozenset({tokenizer.eos_token_id})), context, ())

    def render(self, messages: list[dict[str, Any]], ask: bool) -> str:
        """Messages as the model's chat template writes them; ``ask``: with the beginning of a reply."""
        marks = {name: getattr(self.tokenizer, name) or "" for name in ("bos_token", "eos_token")}
        return _rendered(messages, ask, self.tokenizer.chat_template or _VICUNA, **marks)

    @torch.no_grad()
    def hidden_states(self, examples: Sequence[Example], layers: Sequence[int]) -> torch.Tensor:
        """One pass: (len(layers), reply tokens of all examples, hidden size), before the final norm."""
        given = self._inputs(examples, *_pad(examples, self.device))
        # Hooks on the layers: transformers' last hidden state is normed. Padding comes last, so it needs no mask.
        with _taps(self.language.layers, examples, layers) as taps:
            self.language(**given, use_cache=False)
        return torch.stack(taps)

    def _inputs(self, examples: Sequence[Example], tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": tokens}


class VlmBackbone(Backbone):
    """A Qwen2-VL whose exits are trained."""

    reads_images = True

    def __init__(self, model: VisionLanguageModel, directory: Path) -> None:
        super().__init__(model.hf, directory, model.fingerprint, model.tokenizer)
        self.model = model
        self.known_tokens = model.tokenizer.get_vocab_size(with_added_tokens=True)

    def head(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Backbone``; without the vocabulary's padding."""
        return super().head(hidden, ids) if ids is not None else super().head(hidden)[:, : self.known_tokens]

    def example(self, conversation: Conversation, context: int) -> Example:
        """See ``Backbone``; images take as many tokens as the model's image processor gives them."""
        sizes = [read_picture(path).shape[:2] for path in conversation.images]
        counts = iter([self.model.images.image_tokens(*size) for size in sizes])

        def encoded() -> Iterator[tuple[list[int], bool]]:
            for text, is_reply in _pieces(conversation, self.render, ("<|", "|>")):
                while IMAGE_PLACEHOLDER in text and not is_reply:
                    before, after = text.split(IMAGE_PLACEHOLDER, 1)
                    text = before + "\0" * next(counts) + after
                text = text.replace("\0", IMAGE_PLACEHOLDER)
                yield self.tokenizer.encode(text, add_special_tokens=False).ids, is_reply

        ids, reply = _joined(encoded(), self.model.eos_token_ids)
        image, said = self.hf.config.image_token_id, set(reply)
        if any(ids[place] == image and place not in said for place in range(context, len(ids))):
            raise ConversationError(f"its images do not fit into {context} tokens of context")
        return _cut(ids, reply, context, conversation.images)

    def render(self, messages: list[dict[str, Any]], ask: bool) -> str:
        """See ``Backbone``."""
        return _rendered(messages, ask, self.model.template.chat_template)

    def _inputs(self, examples: Sequence[Example], tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        model, hidden = self.hf.model, self.language.embed_tokens(tokens)
        is_image = tokens == self.hf.config.image_token_id
        for row, example in enumerate(examples):  # image tokens in a reply are no pictures
            is_image[row, [place for place in example.reply if place < tokens.shape[1]]] = False
        positions = None
        images = [image for example in examples for image in example.images]
        if images:
            read = [self.model.images(read_picture(image) if isinstance(image, Path) else image) for image in images]
            pixels = torch.cat([p for p, _ in read]).to(self.device, hidden.dtype)
            grids = torch.cat([g for _, g in read]).to(self.device)
            features = model.get_image_features(pixels, grids, return_dict=True).pooler_output
            hidden[is_image] = torch.cat(list(features)).to(hidden.dtype)
            positions, _ = model.get_rope_index(tokens, is_image.int(), grids, attention_mask=mask)
        return {"inputs_embeds": hidden, "position_ids": positions}


def load_backbone(path: str, device: str = "cpu", dtype: str = "float32") -> Backbone:
    """The model of a directory or hub id, of either kind; ModelError if it is neither."""
    directory = resolve_directory(path)
    try:
        kind = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{directory} has no readable config.json: {error}") from error
    if kind != "qwen2_vl":
        return Backbone.load(directory, device, dtype)
    settings = ModelSettings(str(directory), device=device, dtype=dtype)
    return VlmBackbone(load_model(settings, exits=False), directory)


def _joined(pieces: Iterable[tuple[list[int], bool]], ends: frozenset[int]) -> tuple[list[int], list[int]]:
    """The tokens of all pieces, and the places of those that the model says: up to and with the end token."""
    ids: list[int] = []
    reply: list[int] = []
    for tokens, is_reply in pieces:
        if is_reply:
            spoken = next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))
            reply += range(len(ids), len(ids) + spoken)
        ids += tokens
    return ids, reply


def _rendered(messages: list[dict[str, Any]], ask: bool, template: str, **variables: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([messages], chat_template=template, add_generation_prompt=ask, **variables)
    return str(rendered[0][0])


def _pieces(
    conversation: Conversation, render: Callable[[list[dict[str, Any]], bool], str], marks: tuple[str, ...]
) -> Iterator[tuple[str, bool]]:
    """The conversation as a chat template writes it: (text, whether it is a reply) in turn."""
    for turn in conversation.turns:
        if any(mark in turn.text for mark in marks) or "\0" in turn.text:
            raise ConversationError("a turn contains one of the model's chat markers")
    messages = [turn.as_message() for turn in conversation.turns]

    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, whole = render(messages[:index], True), render(messages[: index + 1], False)
        if not asked.startswith(done) or not whole.startswith(asked):
            raise ConversationError("the model's chat template rewrites earlier turns")
        yield asked[len(done) :], False
        yield whole[len(asked) :], True
        done = whole


def _cut(ids: list[int], reply: list[int], context: int, images: tuple[np.ndarray | Path, ...]) -> Example:
    kept = [place for place in reply if 0 < place < context]
    if not kept:
        raise ConversationError(f"no reply token is within {context} tokens of context")
    # The last token is predicted, never read.
    return Example(ids[: kept[-1] + 1], kept, images)


def _pad(examples: Sequence[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (N, length) without each example's last one, padded at the end; and a mask of what is no padding."""
    length = max(len(example.ids) for example in examples) - 1
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        count = len(example.ids) - 1
        ids[row, :count] = torch.tensor(example.ids[:-1])
        mask[row, :count] = 1
    return ids.to(device), mask.to(device)


@contextmanager
def _taps(modules: Any, examples: Sequence[Example], layers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """While open, collects the output of the given 1-based layers at the positions before reply tokens."""
    rows = [row for row, example in enumerate(examples) for _ in example.reply]
    places = [place - 1 for example in examples for place in example.reply]
    found: list[torch.Tensor] = []

    def keep(module: Any, given: Any, said: Any) -> None:
        hidden = said[0] if isinstance(said, tuple) else said
        found.append(hidden[rows, places])

    handles = [modules[layer - 1].register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
        except (ConversationError, ImageError, PictureError) as error:
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
