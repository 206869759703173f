"""Sizes of the shipped models: small Qwen2-VLs whose parts fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH

PATCH, MERGE = 14, 2
GRID_HEIGHT, GRID_WIDTH = MODEL_HEIGHT // PATCH, MODEL_WIDTH // PATCH
ROWS, COLUMNS = GRID_HEIGHT // MERGE, GRID_WIDTH // MERGE  # of image tokens
IMAGE_TOKENS = ROWS * COLUMNS
VOCABULARY = 512
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HEAD = 32  # size of an attention head, in tower and language model


@dataclass(frozen=True)
class Size:
    """Layers and widths of one model."""

    layers: int
    width: int
    inner: int
    kv_heads: int
    tower_layers: int = 8
    tower_width: int = 96


TARGET = Size(layers=6, width=192, inner=384, kv_heads=2)
DRAFT = Size(layers=2, width=128, inner=256, kv_heads=2)
# Target and draft by name. The draft looks through a copy of its target's tower, so these are equal.
SIZES = {
    "small": (
        Size(layers=4, width=128, inner=256, kv_heads=2, tower_layers=2, tower_width=64),
        Size(layers=1, width=96, inner=192, kv_heads=1, tower_layers=2, tower_width=64),
    ),
    "base": (TARGET, DRAFT),
    "large": (
        Size(layers=8, width=320, inner=896, kv_heads=2, tower_layers=8, tower_width=256),
        Size(layers=3, width=192, inner=512, kv_heads=2, tower_layers=8, tower_width=256),
    ),
}


def build_model(size: Size, seed: int = 0) -> Any:
    """A freshly initialized transformers Qwen2VLForConditionalGeneration of a size."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": size.width,
            "intermediate_size": size.inner,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.width // HEAD,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            # The default split of a small head leaves the picture's width no usable frequency.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, HEAD // 2 - 4]},
        },
        vision_config={
            "depth": size.tower_layers,
            "embed_dim": size.tower_width,
            "hidden_size": size.width,
            "num_heads": size.tower_width // HEAD,
            "mlp_ratio": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen2VLForConditionalGeneration(config)
