# SPDX-License-Identifier: Apache-2.0
"""A model without its weights: what a verifier says of it, and how its prompts are made.

For targets whose weights are in another process. ``loading.load_front`` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.constraint import Constrainer
from dsd_ros.decoding.generation import TokenOptions
from dsd_ros.vlm.backbones import ImageProcessor, picture_name
from dsd_ros.vlm.errors import ContextError, ImageError
from dsd_ros.vlm.prompts import PromptTemplate, prompt_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PreparedPicture(NamedTuple):
    """A picture as an engine takes it.

    name: what a cache knows it by. pixels: float32 (patches, ...). grid: int64 (1, 3). offset: of its first token in
    the prompt, of which it takes ``tokens``.
    """

    name: str
    pixels: torch.Tensor
    grid: torch.Tensor
    offset: int
    tokens: int


class PreparedPrompt(NamedTuple):
    """A whole prompt: token ids, with a placeholder for each token of each picture, and the pictures."""

    tokens: list[int]
    pictures: list[PreparedPicture]


class ModelFront:
    """A model's tokenizer, prompts and figures, without its weights. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        config: Any,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        images: ImageProcessor | None,
        *,
        name: str,
        eos_token_ids: frozenset[int],
        fingerprint: str,
        tokenizer_fingerprint: str,
        token_options: TokenOptions | None = None,
    ) -> None:
        """``kind``: the model type of config.json; ``config``: what transformers reads there."""
        text = config.get_text_config()
        self.directory, self.kind, self.name = directory, kind, name
        self.tokenizer, self.template, self.images = tokenizer, template, images
        self.constrainer = Constrainer(tokenizer)
        self.eos_token_ids = eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = fingerprint, tokenizer_fingerprint
        self.token_options = token_options
        self.vocab_size: int = text.vocab_size
        self.num_layers: int = text.num_hidden_layers
        self.max_length: int = text.max_position_embeddings
        self.image_token: int | None = getattr(config, "image_token_id", None)
        self.known_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)  # the rest is padding

    def prompt(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]] = ()
    ) -> PreparedPrompt:
        """See ``VisionLanguageModel.prefill``, whose errors this raises."""
        check_pictures(self.name, self.images is not None, image, history)
        shown = [earlier for earlier, _ in history] + ([] if image is None else [image])
        prepared = [self.images(picture) for picture in shown] if self.images is not None else []
        merged = self.images.merge_size**2 if self.images is not None else 1
        counts = [int(grid.prod()) // merged for _, grid in prepared]
        past = [(count, action) for count, (_, action) in zip(counts, history, strict=False)]
        text = self.template.render(instruction, counts[-1] if image is not None else 0, past)
        ids = prompt_ids(self.tokenizer, text)
        check_prompt_length(self.name, self.max_length, len(ids), len(past))
        pictures, offset = [], 0
        for picture, (pixels, grid), count in zip(shown, prepared, counts, strict=True):
            assert self.image_token is not None  # ``_check_fit``
            offset = ids.index(self.image_token, offset)
            pictures.append(PreparedPicture(picture_name(picture), pixels, grid, offset, count))
            offset += count
        return PreparedPrompt(ids, pictures)


def check_pictures(
    name: str, reads_pictures: bool, image: np.ndarray | None, history: Sequence[tuple[np.ndarray, str]]
) -> None:
    """ImageError for pictures that model ``name`` cannot be shown."""
    if image is not None and not reads_pictures and not history:
        raise ImageError(f"{name} reads text alone; ask it without a picture")
    if history and not reads_pictures:
        raise ImageError(f"{name} reads text alone; ask it without earlier pictures")
    if history and image is None:
        raise ImageError("earlier pictures are given without a present one; give one, or no history")


def check_prompt_length(name: str, most: int, tokens: int, earlier_pictures: int) -> None:
    """ContextError for a prompt that leaves no room for a reply."""
    if tokens >= most:
        remedy = "fewer of them" if earlier_pictures else "a shorter instruction or a smaller image"
        with_pictures = f" with {earlier_pictures} earlier pictures" * bool(earlier_pictures)
        raise ContextError(f"the prompt takes {tokens} tokens{with_pictures} and {name} holds {most}; use {remedy}")
