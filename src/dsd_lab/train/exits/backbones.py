"""Frozen models as the training of early exits sees them: text cut into examples, hidden states out.

One pass over a padded batch gives, for each position before a reply's token, the hidden states after each layer with an
exit and after the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dsd_lab.train.exits.conversations import Conversation, ConversationError
from dsd_ros.vlm.backbones import read_image
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import ExitBackbone
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


class Backbone(ExitBackbone, Protocol):
    """A frozen model whose exits are trained."""

    directory: Path
    fingerprint: str
    reads_images: bool
    parameters_count: int
    max_length: int

    @property
    def device(self) -> torch.device: ...

    def example(self, conversation: Conversation, context: int) -> Example:
        """A conversation as tokens, cut to ``context``; ConversationError when no reply is left."""
        ...

    def hidden_states(self, examples: Sequence[Example], layers: Sequence[int]) -> torch.Tensor:
        """One pass: (len(layers), reply tokens of all examples, hidden size), before final norm."""
        ...


class VlmBackbone:
    """A Qwen2-VL as a ``Backbone``."""

    reads_images = True

    def __init__(self, model: VisionLanguageModel, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.fingerprint = model.fingerprint
        self.hidden_size, self.num_layers = model.hidden_size, model.num_layers
        self.parameters_count, self.max_length = _count(model.hf), model.max_length
        self.known_tokens = model.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits without the vocabulary's padding."""
        return self.model.head(hidden.to(self.model.hf.lm_head.weight.dtype))[:, : self.known_tokens]

    def example(self, conversation: Conversation, context: int) -> Example:
        """See ``Backbone``; images take as many tokens as the model's image processor gives them."""
        sizes = [read_image(path).shape[:2] for path in conversation.images]
        counts = iter([self.model.images.image_tokens(*size) for size in sizes])
        template = self.model.template.chat_template
        ids: list[int] = []
        reply: list[int] = []
        for text, is_reply in _pieces(conversation, template, {}, ("<|", "|>")):
            while IMAGE_PLACEHOLDER in text and not is_reply:
                before, after = text.split(IMAGE_PLACEHOLDER, 1)
                text = before + "\0" * next(counts) + after
            text = text.replace("\0", IMAGE_PLACEHOLDER)
            tokens = self.model.tokenizer.encode(text, add_special_tokens=False).ids
            if is_reply:
                reply += range(len(ids), len(ids) + _spoken(tokens, self.model.eos_token_ids))
            ids += tokens
        image = self.model.hf.config.image_token_id
        said = set(reply)
        if any(ids[place] == image and place not in said for place in range(context, len(ids))):
            raise ConversationError(f"its images do not fit into {context} tokens of context")
        return _cut(ids, reply, context, conversation.images)

    @torch.no_grad()
    def hidden_states(self, examples: Sequence[Example], layers: Sequence[int]) -> torch.Tensor:
        """See ``Backbone``."""
        model = self.model.hf.model
        tokens, mask = _pad(examples, self.device)
        hidden = model.language_model.embed_tokens(tokens)
        is_image = tokens == self.model.hf.config.image_token_id
        for row, example in enumerate(examples):  # image tokens in a reply are no pictures
            is_image[row, [place for place in example.reply if place < tokens.shape[1]]] = False
        positions = None
        read = [self._picture(image) for example in examples for image in example.images]
        if read:
            pixels = torch.cat([p for p, _ in read]).to(self.device, hidden.dtype)
            grids = torch.cat([g for _, g in read]).to(self.device)
            features = model.get_image_features(pixels, grids, return_dict=True).pooler_output
            hidden[is_image] = torch.cat(list(features)).to(hidden.dtype)
            positions, _ = model.get_rope_index(tokens, is_image.int(), grids, attention_mask=mask)
        with _taps(model.language_model.layers, examples, layers) as taps:
            # Padding comes last, so causal attention needs no mask for it.
            model.language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False)
        return torch.stack(taps)

    def _picture(self, image: np.ndarray | Path) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.images(read_image(image) if isinstance(image, Path) else image)


class LlamaBackbone:
    """A Llama-shaped text model (Llama, Vicuna, Qwen2, SmolLM2 ...) as a ``Backbone``."""

    reads_images = False

    def __init__(self, directory: Path, device: str = "cpu", dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            self.hf: Any = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True
            )
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the model in {directory} cannot be loaded: {reason}") from error
        if not all(hasattr(self.hf.model, name) for name in ("layers", "norm")):
            raise ModelError(f"{directory} holds no Llama-shaped model: it lacks layers or norm")
        self.hf.eval().requires_grad_(False).to(device)
        self.directory = directory
        self.fingerprint = model_fingerprint(directory)
        self.hidden_size: int = self.hf.config.hidden_size
        self.num_layers: int = self.hf.config.num_hidden_layers
        self.parameters_count = _count(self.hf)
        self.max_length: int = self.hf.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.hf.lm_head.weight.device
        return device

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head, (n, hidden size) to (n, vocabulary) float32."""
        weight = self.hf.lm_head.weight
        logits: torch.Tensor = self.hf.lm_head(self.hf.model.norm(hidden.to(weight.dtype)))
        return logits.float()

    def example(self, conversation: Conversation, context: int) -> Example:
        """See ``Backbone``."""
        tokenizer = self.tokenizer
        template = tokenizer.chat_template or _VICUNA
        marks = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
        special = tuple(token for token in tokenizer.all_special_tokens if token)
        ids: list[int] = []
        reply: list[int] = []
        for text, is_reply in _pieces(conversation, template, marks, special):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if is_reply:
                spoken = _spoken(tokens, frozenset({tokenizer.eos_token_id}))
                reply += range(len(ids), len(ids) + spoken)
            ids += tokens
        return _cut(ids, reply, context, ())

    @torch.no_grad()
    def hidden_states(self, examples: Sequence[Example], layers: Sequence[int]) -> torch.Tensor:
        """See ``Backbone``. Hooks on the layers, because transformers' last hidden state is already normed."""
        tokens, _ = _pad(examples, self.device)
        with _taps(self.hf.model.layers, examples, layers) as taps:
            self.hf.model(input_ids=tokens, use_cache=False)
        return torch.stack(taps)


def load_backbone(path: str, device: str = "cpu", dtype: str = "float32") -> Backbone:
    """The model of a directory or hub id, of either kind; ModelError if it is neither."""
    directory = resolve_directory(path)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{directory} has no readable config.json: {error}") from error
    if kind == "qwen2_vl":
        settings = ModelSettings(str(directory), device=device, dtype=dtype)
        return VlmBackbone(load_model(settings, exits=False), directory)
    return LlamaBackbone(directory, device, dtype)


def _pieces(
    conversation: Conversation, template: str, variables: dict[str, str], marks: tuple[str, ...]
) -> Iterator[tuple[str, bool]]:
    """The conversation as a chat template writes it: (text, whether it is a reply) in turn."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for turn in conversation.turns:
        if any(mark in turn.text for mark in marks) or "\0" in turn.text:
            raise ConversationError("a turn contains one of the model's chat markers")
    messages = [turn.as_message() for turn in conversation.turns]

    def render(count: int, ask: bool) -> str:
        rendered: Any = render_jinja_template(
            [messages[:count]], chat_template=template, add_generation_prompt=ask, **variables
        )
        return str(rendered[0][0])

    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, whole = render(index, True), render(index + 1, False)
        if not asked.startswith(done) or not whole.startswith(asked):
            raise ConversationError("the model's chat template rewrites earlier turns")
        yield asked[len(done) :], False
        yield whole[len(asked) :], True
        done = whole


def _spoken(tokens: list[int], ends: frozenset[int]) -> int:
    """How many tokens of a reply's turn the model says itself: up to and with the end token."""
    return next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))


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


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
