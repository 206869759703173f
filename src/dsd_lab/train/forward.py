"""Qwen2-VL's forward passes for batches of equal pictures and texts.

The same arithmetic on the same modules as transformers' own forward (a test compares them), without
its loop over pictures and with fused kernels: several times faster in training on a CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from dsd_lab.train.architecture import COLUMNS, GRID_HEIGHT, GRID_WIDTH, MERGE, PATCH, ROWS

Layers = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Qwen2-VL's image normalization (that of CLIP).
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def patches(images: torch.Tensor) -> torch.Tensor:
    """Normalized patches of uint8 or float 0..255 pictures (N, MODEL_HEIGHT, MODEL_WIDTH, 3): (N, patches, 3*14*14).

    In Qwen2-VL's order: the four patches of one image token stand together.
    """
    mean, std = (_constant(values, images.device) for values in (MEAN, STD))
    pixels = (images.float() / 255.0 - mean) / std
    pixels = pixels.permute(0, 3, 1, 2).reshape(len(images), 3, ROWS, MERGE, PATCH, COLUMNS, MERGE, PATCH)
    pixels = pixels.permute(0, 2, 5, 3, 6, 1, 4, 7)
    return pixels.reshape(len(images), GRID_HEIGHT * GRID_WIDTH, 3 * PATCH * PATCH)


def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """A few numbers on a device, written there: a copy from the host would wait for a GPU."""
    return torch.cat([torch.full((1,), value, device=device) for value in values])


def tower_positions(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the tower's two-dimensional rotary positions, (patches, head size)."""
    device = tower.patch_embed.proj.weight.device
    rows = torch.arange(GRID_HEIGHT, device=device)[:, None].expand(-1, GRID_WIDTH)
    columns = torch.arange(GRID_WIDTH, device=device)[None].expand(GRID_HEIGHT, -1)

    def blocks(grid: torch.Tensor) -> torch.Tensor:
        return grid.reshape(ROWS, MERGE, COLUMNS, MERGE).permute(0, 2, 1, 3).flatten()

    positions = torch.stack([blocks(rows), blocks(columns)], dim=-1)
    cos, sin = tower.rotary_pos_emb(torch.zeros(1, device=device), positions)
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
    """Image tokens of pictures (N, MODEL_HEIGHT, MODEL_WIDTH, 3): (N, IMAGE_TOKENS, hidden)."""
    count = len(images)
    # A still picture fills both frames of a temporal patch, so the kernel's frames add up.
    kernel = tower.patch_embed.proj.weight.sum(dim=2).flatten(1)
    hidden = functional.linear(patches(images), kernel)
    cos, sin = tower_positions(tower)
    cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden))
        q, k, v = qkv.view(count, -1, 3, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, None)
        hidden = hidden + attention.proj(out.transpose(1, 2).reshape(count, hidden.shape[1], -1))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden).view(count, ROWS * COLUMNS, -1)


def language_layers(
    language: Any, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, causal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`language_forward` with its mask given: made inside, a compiler works it out for every score anew."""
    middle = embeddings
    hidden = embeddings
    count, length, _ = hidden.shape
    cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
    for index, layer in enumerate(language.layers):
        if index == len(language.layers) // 2:
            middle = hidden
        attention = layer.self_attn
        normed = norm(layer.input_layernorm, hidden)
        heads = attention.head_dim
        q = attention.q_proj(normed).view(count, length, -1, heads).transpose(1, 2)
        k = attention.k_proj(normed).view(count, length, -1, heads).transpose(1, 2)
        v = attention.v_proj(normed).view(count, length, -1, heads).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = attention.num_key_value_groups
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = attend(q, k, v, causal)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).reshape(count, length, -1))
        hidden = hidden + layer.mlp(norm(layer.post_attention_layernorm, hidden))
    return norm(language.norm, hidden), middle


def language_forward(
    language: Any, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layers: Layers = language_layers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states (N, length, hidden) under a causal mask, and those half-way up.

    `cos` and `sin` are (N, 1, length, head size); `layers` is `language_layers`, compiled or not.
    """
    length = embeddings.shape[1]
    causal = torch.full((length, length), -1e4, dtype=embeddings.dtype, device=embeddings.device)
    return layers(language, embeddings, cos, sin, causal.triu(1))


def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalization by a Qwen2-VL norm module."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), module.weight.to(hidden.dtype), module.variance_epsilon)


class Passes:
    """The forward passes of a training: as they are written, or compiled for this machine.

    Compiling (torch.compile) takes a minute or two, and fuses what is done number by number, which is most of a small
    model's step on a CPU. Raises ValueError where that is asked for and there is no C++ compiler.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.tower: Callable[..., torch.Tensor] = tower_forward
        self.language: Layers = language_forward
        if compiled:
            compiler = os.environ.get("CXX", "g++")
            if shutil.which(compiler) is None:
                raise ValueError(
                    f"There is no {compiler} to compile the passes with: install it, name another C++ compiler in "
                    "CXX, or train without --compile."
                )
            # Batches differ in length and in pictures.
            self.tower = torch.compile(tower_forward, dynamic=True)
            layers = torch.compile(language_layers, dynamic=True)
            self.language = partial(language_forward, layers=layers)


PLAIN = Passes()
