"""What differs between the models used here: where their parts are, and how a prompt becomes hidden states.

Everything else (layers run one by one, caches, trees, batches) is the same for all of them: see ``model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_ros.vlm.errors import ImageError
from dsd_ros.vlm.images import ImageProcessor


class Picture(NamedTuple):
    """A picture as a vision tower reads it, and how many tokens of the prompt it takes."""

    pixels: torch.Tensor
    grid: torch.Tensor
    tokens: int


class Prompt(NamedTuple):
    """What the decoder layers read of a prompt.

    hidden: (1, n, hidden size). positions: as ``TextBackbone.rotations`` takes them. rope_delta: the
    distance between a following token's position and its place.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    rope_delta: int


class TextBackbone:
    """A transformers Llama or Qwen2: text alone, one position a token."""

    reads_pictures = False

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.config: Any = hf.config.get_text_config()
        self.language: Any = self._language()

    def _language(self) -> Any:
        return self.hf.model

    @property
    def images(self) -> ImageProcessor:
        """How pictures are prepared; ImageError for a model that sees none."""
        raise ImageError("this model reads text alone; ask it without a picture")

    def look(self, image: np.ndarray) -> Picture:
        """Prepare a picture, RGB uint8 (height, width, 3); ImageError for one that cannot be shown."""
        pixels, grid = self.images(image)
        return Picture(pixels, grid, int(grid.prod()) // self.images.merge_size**2)

    def read(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> Prompt:
        """Token ids (1, n), with a place for each token of each picture in turn, as the layers read them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return Prompt(self.language.embed_tokens(tokens), positions, 0)

    def rotations(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, n, head size), of the type of ``like``, at positions (1, n)."""
        cos, sin = self.language.rotary_emb(like, positions)
        return cos, sin


class QwenVlBackbone(TextBackbone):
    """A transformers Qwen2-VL: text and pictures; positions have three axes (M-RoPE)."""

    reads_pictures = True

    def __init__(self, hf: Any, images: ImageProcessor) -> None:
        super().__init__(hf)
        self._images = images
        self._image_token: int = hf.config.image_token_id

    def _language(self) -> Any:
        return self.hf.model.language_model

    @property
    def images(self) -> ImageProcessor:
        """How pictures are prepared."""
        return self._images

    def read(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> Prompt:
        """See ``TextBackbone``; the vision tower's features stand where the pictures' tokens are."""
        if not pictures:
            return super().read(tokens, ())
        hidden = self.language.embed_tokens(tokens)
        is_image = tokens == self._image_token
        # One by one: a picture's features are then the same to the bit, whatever it is shown with.
        features = torch.cat([self._features(picture) for picture in pictures])
        hidden[is_image] = features.to(hidden.dtype)
        grid = torch.cat([picture.grid for picture in pictures]).to(tokens.device)
        positions, delta = self.hf.model.get_rope_index(tokens, is_image.int(), grid)
        return Prompt(hidden, positions, int(delta))

    def _features(self, picture: Picture) -> torch.Tensor:
        """What the vision tower sees (tokens, hidden size)."""
        device = self.language.embed_tokens.weight.device
        pixels, grid = picture.pixels.to(device), picture.grid.to(device)
        seen = self.hf.model.get_image_features(pixels, grid, return_dict=True)
        return torch.cat(list(seen.pooler_output))

    def rotations(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TextBackbone``; also at positions (3, 1, n) of time, height and width."""
        if positions.ndim == 2:
            positions = positions.expand(3, 1, -1)
        return super().rotations(like, positions)
