# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported models: their parts, their pictures, and how a prompt becomes hidden states.

A picture is resized by qwen-vl-utils' rule (both sides a multiple of patch size x merge size, the number of pixels
within the model's bounds, the aspect ratio kept as closely as possible), then normalized and cut into patches by
transformers' image processor.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cachetools import LRUCache
from PIL import Image

from dsd_ros.limits import MAX_PIXELS
from dsd_ros.vlm.errors import ImageError, ModelError
from dsd_ros.vlm.prompts import read_json

MAX_ASPECT_RATIO = 200
_ATTENTION = "dsd_ros"  # the name of ``attend`` in transformers' registry
_FEATURES_BYTES = 128 << 20  # of pictures that are shown again
_FEATURES_PICTURES = 64  # those of seven robots with a history of eight each


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = 3136, max_pixels: int = 12845056
) -> tuple[int, int]:
    """The size (height, width) a picture is resized to; ImageError if a side is over 200 times the other."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"a picture of {width} x {height} pixels is too elongated for this model; "
            f"crop it to an aspect ratio below {MAX_ASPECT_RATIO}"
        )
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * stretch / factor) * factor
        new_width = math.ceil(width * stretch / factor) * factor
    return new_height, new_width


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """RGB uint8 (height, width, 3) at another size, as every model's pictures are."""
    if image.shape[:2] == (height, width):
        return image
    picture = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))


def check_image(image: np.ndarray) -> None:
    """ImageError unless ``image`` is a non-empty uint8 array of shape (height, width, 3), RGB."""
    if not isinstance(image, np.ndarray):
        raise ImageError(f"the image must be a numpy array, not {type(image).__name__}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ImageError(
            f"the image has shape {image.shape} and type {image.dtype}; "
            "give it as RGB of shape (height, width, 3) and type uint8"
        )


def picture_name(image: np.ndarray) -> str:
    """What a cache knows a picture by: the same for the same pixels, and for no others."""
    digest = hashlib.blake2b(struct.pack("<II", *image.shape[:2]), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


class ImageProcessor:
    """Prepares pictures for one model, by the bounds and patch sizes in its ``preprocessor_config.json``.

    transformers 5 saves them in ``processor_config.json``, which counts first.
    """

    def __init__(self, directory: str | Path) -> None:
        """ModelError when the directory has no usable file of these."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        path = Path(directory) / "processor_config.json"
        if not (path.exists() and "image_processor" in read_json(path)):
            path = path.with_name("preprocessor_config.json")
        if not path.exists():
            raise ModelError(f"{path} is missing; copy it from the original model")
        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(str(directory), local_files_only=True)
            size = self._processor.size
            self.min_pixels = int(size["shortest_edge"])
            self.max_pixels = int(size["longest_edge"])
            self.patch_size = int(self._processor.patch_size)
            self.merge_size = int(self._processor.merge_size)
        except Exception as error:
            raise ModelError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
        area = (self.patch_size * self.merge_size) ** 2
        if not (area > 0 and self.min_pixels <= self.max_pixels >= area and self.min_pixels <= MAX_PIXELS):
            raise ModelError(
                f"{path} has min_pixels {self.min_pixels} and max_pixels {self.max_pixels}; give up to {MAX_PIXELS}, "
                f"the second not below the first nor below {area}, the pixels of a token"
            )

    @property
    def side_factor(self) -> int:
        """Each side of a resized picture is a multiple of this, in pixels."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the resized picture, in pixels."""
        return smart_resize(height, width, self.side_factor, self.min_pixels, self.max_pixels)

    def image_tokens(self, height: int, width: int) -> int:
        """The number of prompt tokens that a picture of this size takes."""
        return math.prod(self.resized(height, width)) // self.side_factor**2

    def __call__(self, image: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn RGB uint8 (height, width, 3) into pixel values and their grid; ImageError for anything else.

        Returns float32 (patches, channels x temporal patch x patch x patch) and int64 (1, 3): time, height and width
        in patches.
        """
        check_image(image)
        height, width = image.shape[:2]
        image = resize(image, *self.resized(height, width))
        batch = self._processor(image, do_resize=False, input_data_format="channels_last", return_tensors="pt")
        return batch["pixel_values"], batch["image_grid_thw"]

    def raw(self, pixels: torch.Tensor) -> torch.Tensor:
        """The bytes (patches, ...) uint8 that ``pixels`` were made of, for engines that normalise them themselves."""
        processor = self._processor
        mean, std = (torch.tensor(numbers)[:, None] for numbers in (processor.image_mean, processor.image_std))
        values = (pixels.unflatten(1, (3, -1)) * std + mean) / processor.rescale_factor
        found: torch.Tensor = values.round().clamp(0, 255).to(torch.uint8).flatten(1)
        return found


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of a decoder layer: transformers' own, for each sequence by itself where a pass has several.

    query: (1, heads, n, head size). With a ``cache.BatchCache``, key, value and attention_mask are lists, one of each
    per sequence, whose queries stand one after another. A mask comes with the number of its rows; None is causal.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(key, list):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    counts, masks = zip(*attention_mask, strict=True)
    parts = zip(query.split(counts, 2), key, value, masks, strict=True)
    found = [sdpa_attention_forward(module, q, k, v, mask, **options)[0] for q, k, v, mask in parts]
    return torch.cat(found, 1), None


def _use_attend(config: Any) -> None:
    """Let the layers of a model with this text configuration call ``attend``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    config._attn_implementation = _ATTENTION


class Picture(NamedTuple):
    """A picture as the vision tower reads it, with the number of prompt tokens it takes.

    name: by ``picture_name``, if the features are worth keeping. features: (tokens, hidden size), once they are known;
    ``pixels`` is empty then. deep: (layers, tokens, hidden size), what DeepStack adds after the first decoder layers.
    """

    pixels: torch.Tensor
    grid: torch.Tensor
    tokens: int
    name: str = ""
    features: torch.Tensor | None = None
    deep: torch.Tensor | None = None


class Prompt(NamedTuple):
    """The input of the decoder layers for a prompt of n tokens.

    hidden: (1, n, hidden size). positions: as ``TextBackbone.rotations`` takes them. rope_delta: a following
    token's position minus its index. deep: (layers, n, hidden size), to be added after each of the first decoder
    layers; zero for text.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    rope_delta: int
    deep: torch.Tensor | None = None


class TextBackbone:
    """A transformers Llama or Qwen2: text only, one position per token."""

    reads_pictures = False

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.config: Any = hf.config.get_text_config()
        self.language: Any = hf.model
        _use_attend(self.config)

    @property
    def images(self) -> ImageProcessor:
        """The image processor; ImageError for a text-only model."""
        raise ImageError("this model reads text alone; ask it without a picture")

    def look(self, image: np.ndarray, reuse: bool = False) -> Picture:
        """Prepare a picture, RGB uint8 (height, width, 3); ImageError for one that cannot be shown.

        reuse: its features are kept, since it is shown again.
        """
        pixels, grid = self.images(image)
        return Picture(pixels, grid, int(grid.prod()) // self.images.merge_size**2)

    def read(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> Prompt:
        """Embed token ids (1, n), with a placeholder for each token of each picture in turn."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return Prompt(self.language.embed_tokens(tokens), positions, 0)

    def rotations(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, n, head size), of the type of ``like``, at positions (1, n)."""
        cos, sin = self.language.rotary_emb(like, positions)
        return cos, sin


class _Patches(torch.nn.Module):
    """Embeds patches by the weights of a convolution whose kernel is a whole patch, which is one matrix product.

    On a CPU, PyTorch's convolution takes seven times as long.
    """

    def __init__(self, convolution: torch.nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches (n, channels, frames, height, width) to features (n, width of the tower)."""
        return torch.nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class QwenVlBackbone(TextBackbone):
    """A transformers Qwen2-VL, Qwen2.5-VL or Qwen3-VL: text and pictures; positions have three axes (M-RoPE).

    A Qwen3-VL adds features of its vision tower after the first decoder layers too (DeepStack, arXiv 2406.04334).
    """

    reads_pictures = True

    def __init__(self, hf: Any, images: ImageProcessor) -> None:
        super().__init__(hf)
        self.language = hf.model.language_model
        embed = hf.model.visual.patch_embed
        embed.proj = _Patches(embed.proj)
        self._images = images
        self._image_token: int = hf.config.image_token_id
        # Each picture counts as at least a 64th of the room, which bounds their number too.
        self._known: LRUCache[str, Picture] = LRUCache(_FEATURES_BYTES, getsizeof=_kept_bytes)
        self._lock = threading.Lock()

    @property
    def images(self) -> ImageProcessor:
        """The image processor."""
        return self._images

    def look(self, image: np.ndarray, reuse: bool = False) -> Picture:
        """See ``TextBackbone``. The weights must not change while this object lives."""
        if not reuse:
            return super().look(image)
        check_image(image)
        name = picture_name(image)
        with self._lock:
            known = self._known.get(name)
        return known or super().look(image)._replace(name=name)

    def read(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> Prompt:
        """See ``TextBackbone``; the vision tower's features replace the placeholders."""
        if not pictures:
            return super().read(tokens, ())
        hidden = self.language.embed_tokens(tokens)
        is_image = tokens == self._image_token
        # One by one, so that a picture's features are the same bits whatever it is shown with.
        seen = [self._seen(picture) for picture in pictures]
        features = torch.cat([picture.features for picture in seen if picture.features is not None])
        hidden[is_image] = features.to(hidden.dtype)
        grid = torch.cat([picture.grid for picture in pictures]).to(tokens.device)
        positions, delta = self.hf.model.get_rope_index(tokens, is_image.int(), grid)
        return Prompt(hidden, positions, int(delta), self._deep(hidden, is_image[0], seen))

    def _deep(self, hidden: torch.Tensor, is_image: torch.Tensor, seen: Sequence[Picture]) -> torch.Tensor | None:
        """The pictures' deep features in their places; None for a model that has none."""
        found = [picture.deep for picture in seen if picture.deep is not None]
        if not found:
            return None
        features = torch.cat(found, 1)
        deep = hidden.new_zeros((len(features), *hidden.shape[1:]))
        deep[:, is_image] = features.to(hidden.dtype)
        return deep

    def _seen(self, picture: Picture) -> Picture:
        """The picture with the vision tower's features."""
        if picture.features is not None:
            return picture
        device = self.language.embed_tokens.weight.device
        pixels, grid = picture.pixels.to(device), picture.grid.to(device)
        tower = self.hf.model.get_image_features(pixels, grid, return_dict=True)
        layers = [torch.cat(list(layer)) for layer in getattr(tower, "deepstack_features", None) or ()]
        features, deep = torch.cat(list(tower.pooler_output)), torch.stack(layers) if layers else None
        seen = picture._replace(pixels=torch.empty(0), features=features, deep=deep)
        if picture.name and _feature_bytes(seen) <= _FEATURES_BYTES:
            with self._lock:
                self._known[picture.name] = seen
        return seen

    def rotations(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TextBackbone``; also at positions (3, 1, n) of time, height and width."""
        if positions.ndim == 2:
            positions = positions.expand(3, 1, -1)
        return super().rotations(like, positions)


def _feature_bytes(picture: Picture) -> int:
    return sum(tensor.nbytes for tensor in (picture.features, picture.deep) if tensor is not None)


def _kept_bytes(picture: Picture) -> int:
    return max(_feature_bytes(picture), _FEATURES_BYTES // _FEATURES_PICTURES)
