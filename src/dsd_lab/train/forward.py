# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL's forward passes for batches of equal pictures and texts, with transformers' modules and arithmetic.

Without a loop over pictures, training on a CPU is several times faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dsd_lab.train.frames import COLUMNS, GRID_HEIGHT, GRID_WIDTH, MERGE, PATCH, ROWS
from dsd_lab.train.tokenizer import IMAGE, IMAGE_TOKENS, MEAN, STD

CPU = torch.device("cpu")
KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer


def torch_device(name: str) -> torch.device:
    """The device called cpu, cuda or cuda:N; ValueError where this machine does not have it."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"This machine has {count} GPUs and no {name}: name another one, or use --device cpu.")
        device = torch.device("cuda", device.index or 0)
    return device


def autocast(device: torch.device, enabled: bool = True) -> Any:
    """bfloat16 where the device has instructions for it; a CPU without them would be 50 times slower."""
    quick = device.type != "cpu" or any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and quick)


def patches(images: torch.Tensor) -> torch.Tensor:
    """Normalized patches (N, patches, 3*14*14) of pictures with values 0..255, the four of an image token together."""
    mean, std = (torch.tensor(values, device=images.device) for values in (MEAN, STD))
    pixels = (images.float() / 255.0 - mean) / std
    pixels = pixels.permute(0, 3, 1, 2).reshape(len(images), 3, ROWS, MERGE, PATCH, COLUMNS, MERGE, PATCH)
    pixels = pixels.permute(0, 2, 5, 3, 6, 1, 4, 7)
    return pixels.reshape(len(images), GRID_HEIGHT * GRID_WIDTH, 3 * PATCH * PATCH)


def tower_positions(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the tower's two-dimensional rotary positions, (patches, head size)."""
    device = tower.patch_embed.proj.weight.device
    grid = torch.meshgrid(
        torch.arange(GRID_HEIGHT, device=device), torch.arange(GRID_WIDTH, device=device), indexing="ij"
    )
    blocks = [axis.reshape(ROWS, MERGE, COLUMNS, MERGE).permute(0, 2, 1, 3).flatten() for axis in grid]
    cos, sin = tower.rotary_pos_emb(torch.zeros(1, device=device), torch.stack(blocks, dim=-1))
    return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply a rotary position embedding to (..., length, head size)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Plain attention: on a CPU its backward pass is faster than the fused kernel's."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


def tower_forward(tower: Any, images: torch.Tensor) -> torch.Tensor:
    """Image tokens (N, IMAGE_TOKENS, hidden) of pictures (N, MODEL_HEIGHT, MODEL_WIDTH, 3)."""
    count = len(images)
    # A still picture fills both frames of a temporal patch, so the kernel's frames add up.
    kernel = tower.patch_embed.proj.weight.sum(dim=2).flatten(1)
    hidden = functional.linear(patches(images), kernel)
    cos, sin = (part.to(hidden.dtype) for part in tower_positions(tower))
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden))
        q, k, v = qkv.view(count, -1, 3, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, None)
        hidden = hidden + attention.proj(out.transpose(1, 2).reshape(count, hidden.shape[1], -1))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden).view(count, ROWS * COLUMNS, -1)


@torch.inference_mode()
def image_tokens(tower: Any, images: np.ndarray, batch: int = 256) -> torch.Tensor:
    """The frozen tower's tokens of uint8 pictures: float16 (N, IMAGE_TOKENS, hidden), on the tower's device."""
    device = tower.patch_embed.proj.weight.device
    size = (len(images), IMAGE_TOKENS, tower.config.hidden_size)
    out = torch.empty(size, dtype=torch.float16, device=device)
    for first in range(0, len(images), batch):
        some = torch.from_numpy(images[first : first + batch]).to(device)
        with autocast(device):
            out[first : first + batch] = tower_forward(tower, some).half()
    return out


def positions(ids: torch.Tensor) -> torch.Tensor:
    """M-RoPE positions (3, N, length) of prompts with whole pictures of IMAGE_TOKENS image tokens in them."""
    is_image = ids == IMAGE
    before = is_image.cumsum(1) - is_image.long()  # earlier image tokens
    inside = torch.where(is_image, before % IMAGE_TOKENS, 0)
    place = torch.arange(ids.shape[1], device=ids.device)[None] - inside
    place = place - (before // IMAGE_TOKENS) * (IMAGE_TOKENS - max(ROWS, COLUMNS))
    return torch.stack([place, place + inside // COLUMNS, place + inside % COLUMNS])


def embed(language: Any, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Embeddings of ids (N, length) with image tokens (N, IMAGE_TOKENS, hidden) put in; rotary cosines and sines."""
    hidden = language.embed_tokens(ids)
    hidden = hidden.masked_scatter((ids == IMAGE)[..., None], features.to(hidden.dtype))
    cos, sin = language.rotary_emb(hidden, positions(ids))
    return hidden, cos[:, None], sin[:, None]


def language_forward(
    language: Any,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    past: KeysValues | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states (N, length, hidden) under a causal mask, and those half-way up.

    `cos` and `sin` are (N, 1, length, head size). `past`: keys and values of earlier tokens, after which one token may
    follow; it is extended. `bias`: (N, 1, length, length), added to the scores instead of a causal mask.
    """
    count, length, _ = hidden.shape
    causal = bias
    if length > 1 and bias is None:
        causal = torch.full((length, length), -1e4, dtype=hidden.dtype, device=hidden.device).triu(1)
    middle = hidden
    cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
    for index, layer in enumerate(language.layers):
        if index == len(language.layers) // 2:
            middle = hidden
        attention = layer.self_attn
        normed = _norm(layer.input_layernorm, hidden)
        q, k, v = (
            linear(normed).view(count, length, -1, attention.head_dim).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            if index < len(past):
                k, v = torch.cat((past[index][0], k), 2), torch.cat((past[index][1], v), 2)
            past[index : index + 1] = [(k, v)]
        groups = attention.num_key_value_groups
        out = attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), causal)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).reshape(count, length, -1))
        hidden = hidden + layer.mlp(_norm(layer.post_attention_layernorm, hidden))
    return _norm(language.norm, hidden), middle


def _norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalization by a Qwen2-VL norm module."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), module.weight.to(hidden.dtype), module.variance_epsilon)
