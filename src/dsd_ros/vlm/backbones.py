"""What differs between the models used here: where their parts are, and how a prompt becomes hidden states.

Everything else (layers run one by one, caches, trees, batches) is the same for all of them: see ``model``.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.recent import Recent
from dsd_ros.vlm.errors import ImageError
from dsd_ros.vlm.images import ImageProcessor, check_image

_LOOKS = 64  # pictures that are shown again: of seven robots with eight earlier ones each
_LOOKS_BYTES = 128 << 20


class Picture(NamedTuple):
    """A picture as a vision tower reads it, and how many tokens of the prompt it takes.

    name: stands for the picture where what the tower sees of it is worth remembering. features: that,
    (tokens, hidden size), where it is known; there are no pixels then.
    """

    pixels: torch.Tensor
    grid: torch.Tensor
    tokens: int
    name: bytes = b""
    features: torch.Tensor | None = None


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

    def look(self, image: np.ndarray, again: bool = False) -> Picture:
        """Prepare a picture, RGB uint8 (height, width, 3); ImageError for one that cannot be shown.

        ``again``: it will be shown again, or has been.
        """
        pixels, grid = self.images(image)
        return Picture(pixels, grid, int(grid.prod()) // self.images.merge_size**2)

    def read(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> Prompt:
        """Token ids (1, n), with a place for each token of each picture in turn, as the layers read them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return Prompt(self.language.embed_tokens(tokens), positions, 0)

    def rotations(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        self._looks: Recent[bytes, Picture] = Recent(_LOOKS, _LOOKS_BYTES)
        self._looking = threading.Lock()

    def _language(self) -> Any:
        return self.hf.model.language_model

    @property
    def images(self) -> ImageProcessor:
        """How pictures are prepared."""
        return self._images

    def look(self, image: np.ndarray, again: bool = False) -> Picture:
        """See ``TextBackbone``. The weights must not change behind this object's back."""
        if not again:
            return super().look(image)
        check_image(image)
        digest = hashlib.blake2b(struct.pack("<II", *image.shape[:2]), digest_size=16)
        digest.update(np.ascontiguousarray(image).data)
        name = digest.digest()
        with self._looking:
            known = self._looks.get(name)
        return known or super().look(image)._replace(name=name)

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
        if picture.features is not None:
            return picture.features
        device = self.language.embed_tokens.weight.device
        pixels, grid = picture.pixels.to(device), picture.grid.to(device)
        seen = self.hf.model.get_image_features(pixels, grid, return_dict=True)
        features = torch.cat(list(seen.pooler_output))
        if picture.name:
            known = picture._replace(pixels=torch.empty(0), features=features)
            with self._looking:
                self._looks.put(picture.name, known, features.nbytes)
        return features

    def rotations(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TextBackbone``; also at positions (3, 1, n) of time, height and width."""
        if positions.ndim == 2:
            positions = positions.expand(3, 1, -1)
        return super().rotations(like, positions)
