# SPDX-License-Identifier: Apache-2.0
"""The shipped pair's models: small Qwen2-VLs whose parts fit each other, and what training does to whole models."""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dsd_lab.train.frames import MERGE, PATCH
from dsd_lab.train.stages import MEAN
from dsd_lab.train.tokenizer import SPECIAL_TOKENS, VOCABULARY, write_processor_files
from dsd_ros.vlm.loading import quiet_transformers

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
# Target and draft by name. The draft has a copy of its target's tower, so the towers' sizes are equal.
SIZES = {
    "small": (
        Size(layers=4, width=128, inner=256, kv_heads=2, tower_layers=2, tower_width=64),
        Size(layers=1, width=96, inner=192, kv_heads=1, tower_layers=2, tower_width=64),
    ),
    "base": (TARGET, DRAFT),
}


def build_model(size: Size, seed: int = 0) -> Any:
    """A freshly initialized Qwen2VLForConditionalGeneration of a size."""
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
            # By default a small head leaves the picture's width no usable frequency.
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


def digest(path: Path) -> str:
    """A short name for a checkpoint's content, by which the next stage knows what it builds on."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()[:16]


def load_start(model: Any, folder: Path) -> str:
    """Load a model directory's weights into a model; returns their digest. ValueError for none or of another size."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"There is no {path} to continue from; name the folder of a trained pair.")
    with quiet_transformers():
        other = type(model).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise ValueError(f"The model in {folder} has another size; name it with --size.") from error
    return digest(path)


def average(model: Any, paths: Sequence[Path]) -> None:
    """Give a model the mean of checkpoints' averaged weights, later ones weighing more ("Model soups", 2022)."""
    states = [load_file(path) for path in paths]
    weights = torch.tensor([1.5**k for k in range(len(states))], dtype=torch.float64)
    weights /= weights.sum()
    for name, module in (("language", model.model.language_model), ("tower", model.model.visual)):
        mean = {
            key: sum(float(w) * state[f"{MEAN}{name}/{key}"] for w, state in zip(weights, states, strict=True))
            for key in module.state_dict()
        }
        module.load_state_dict(mean)


def fold(small: Any, tower: Any, project: nn.Linear) -> None:
    """Give a draft the target's tower, with the projection to the draft's width folded into its last layer."""
    state = tower.state_dict()
    last = tower.merger.mlp[2]
    with torch.no_grad():
        state["merger.mlp.2.weight"] = project.weight @ last.weight
        state["merger.mlp.2.bias"] = project.weight @ last.bias + project.bias
    small.model.visual.load_state_dict(state)


def unfold(small: Any, tower: Any) -> nn.Linear:
    """The projection that `fold` put into a draft, recovered from its tower and the target's."""
    last, own = tower.merger.mlp[2], small.model.visual.merger.mlp[2]
    project = nn.Linear(last.out_features, own.out_features)
    with torch.no_grad():
        project.weight.copy_(own.weight @ torch.linalg.pinv(last.weight))
        project.bias.copy_(own.bias - project.weight @ last.bias)
    return project


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model directory (float16 weights) beside the old one, then swap them; the card stays."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with quiet_transformers():
        copy.deepcopy(model).half().cpu().save_pretrained(part)
    write_processor_files(part, tokenizer)  # replaces the generation settings of save_pretrained
    (part / "model.safetensors").chmod(0o644)
    swap_directory(part, folder)


def swap_directory(part: Path, folder: Path) -> None:
    """Replace a model directory by a new one, keeping its card."""
    if (folder / "README.md").exists():
        shutil.copy(folder / "README.md", part / "README.md")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
