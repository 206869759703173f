# SPDX-License-Identifier: Apache-2.0
"""Models of real sizes with random weights, made on the device from their published configurations."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dsd_lab.report import BenchError
from dsd_ros.vlm.backbones import ImageProcessor, QwenVlBackbone
from dsd_ros.vlm.loading import quiet_transformers
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER, PromptTemplate

SIZES_FILE = Path(__file__).with_name("gpu_sizes.json")
_SPECIAL_TOKENS = {
    "image_token_id": IMAGE_PLACEHOLDER,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def read_sizes(path: Path = SIZES_FILE) -> dict[str, dict[str, Any]]:
    """Configurations by name, each with its transformers class as ``architecture``; BenchError, OSError."""
    try:
        sizes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(sizes, dict) or not all(
        isinstance(size, dict) and "architecture" in size for size in sizes.values()
    ):
        raise BenchError(f"{path.name} holds no model sizes; give each a name, its architecture and configuration")
    return sizes


def build_model(
    size: dict[str, Any], device: torch.device, dtype: torch.dtype, tokenizer: Path, *, layers: int | None = None
) -> VisionLanguageModel:
    """A model of this size with random weights; ``layers`` overrides the depth of the decoder.

    tokenizer: a model directory, whose tokenizer and prompt it gets. Rows of the vocabulary after the tokenizer's are
    padding: they are computed, and never chosen.
    """
    import transformers

    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    config = copy.deepcopy(size) | {key: words.token_to_id(token) for key, token in _SPECIAL_TOKENS.items()}
    if layers is not None:
        config["text_config"]["num_hidden_layers"] = layers
    kind = getattr(transformers, config.pop("architecture"))
    torch.manual_seed(0)
    with quiet_transformers(), _default_dtype(dtype), torch.device(device):
        hf = kind(kind.config_class(**config)).eval().requires_grad_(False)
    return VisionLanguageModel(
        QwenVlBackbone(hf, _image_processor(tokenizer, size["vision_config"]["patch_size"])),
        words,
        PromptTemplate.from_directory(tokenizer),
        name=kind.__name__,
        eos_token_ids=frozenset([words.token_to_id("<|im_end|>")]),
        fingerprint="random",
        tokenizer_fingerprint="random",
    )


def _image_processor(directory: Path, patch_size: int) -> ImageProcessor:
    """The processor of a model directory, with the bounds of real models: 4 to 1280 tokens of a picture."""
    given = json.loads((directory / "preprocessor_config.json").read_text(encoding="utf-8"))
    token = (patch_size * int(given.get("merge_size", 2))) ** 2  # pixels: 28 x 28, of a Qwen3-VL 32 x 32
    given |= {"patch_size": patch_size, "min_pixels": 4 * token, "max_pixels": 1280 * token}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "preprocessor_config.json").write_text(json.dumps(given), encoding="utf-8")
        return ImageProcessor(place)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
