# SPDX-License-Identifier: Apache-2.0
"""Smaller matrices for draft models: 8 or 4 bits on a CPU, 4 bits on a GPU.

The decoder's layers and the LM head become smaller. The vision tower keeps its precision: it runs once per image, and
vision is the weak point of small models.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import warnings
from pathlib import Path
from typing import Any

import torch

from dsd_ros.vlm.backbones import TextBackbone
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.settings import ModelSettings

_GROUPS = (64, 32)  # weights in a row that share a scale and a zero in 4 bits: the first number that fits
_ROWS = 16  # the 4-bit kernel takes a multiple of this many
_MADV_DONTNEED = 4


def quantize_on_cpu(backbone: TextBackbone, quantization: str) -> None:
    """Replace the matrices by "int8" or "4bit" ones, one after another; activations stay as they are.

    For drafts only. With int8 the activations share a scale per pass, so logits depend on how tokens are split into
    passes.
    """
    smaller = _int8 if quantization == "int8" else _four_bits
    # The LM head first: its float copy is the largest, while there is least beside it.
    for parent in (backbone.hf, *list(backbone.language.modules())):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, smaller(child))
                _let_go(child.weight)


class _Int8(torch.nn.Module):
    """An int8 matrix of float32 activations, for those of another precision."""

    def __init__(self, matrix: torch.nn.Module) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.matrix(x.float())
        return found.to(x.dtype)


def _int8(linear: torch.nn.Linear) -> torch.nn.Module:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    whole = torch.nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    whole.weight = torch.nn.Parameter(linear.weight.float(), requires_grad=False)
    if linear.bias is not None:
        whole.bias = torch.nn.Parameter(linear.bias.float(), requires_grad=False)
    box = torch.nn.Sequential(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_dynamic(box, {torch.nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    return box[0] if linear.weight.dtype == torch.float32 else _Int8(box[0])


class _FourBits(torch.nn.Module):
    """A matrix of 4-bit weights with a scale and a zero per group, in PyTorch's layout for CPUs."""

    def __init__(self, linear: torch.nn.Linear, group: int) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        self.group, self.rows, self.bias = group, rows, linear.bias
        self.scales = torch.empty((columns // group, rows, 2), dtype=linear.weight.dtype)
        levels = torch.empty((rows, columns), dtype=torch.int32)
        for some in torch.arange(rows).split(8192):
            weights = linear.weight[some].float().unflatten(1, (-1, group))
            low, high = weights.aminmax(dim=2, keepdim=True)
            scale = ((high - low) / 15).clamp(min=1e-9)
            levels[some] = ((weights - low) / scale).round().clamp(0, 15).int().flatten(1)
            self.scales[:, some] = torch.cat([scale, low + 8 * scale], 2).transpose(0, 1).to(self.scales.dtype)
        self.levels = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        found: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.levels, self.group, self.scales)
        found = found if self.bias is None else found + self.bias
        return found.view(*x.shape[:-1], self.rows)


def _four_bits(linear: torch.nn.Linear) -> torch.nn.Module:
    """The 4-bit matrix; the one given where its shape does not fit the kernel."""
    for group in _GROUPS:
        if linear.in_features % group == 0 == linear.out_features % _ROWS:
            return _FourBits(linear, group)
    return linear


def _let_go(weight: torch.Tensor) -> None:
    """Give back the memory of a weight that is mapped from its file. It is read again if something still needs it."""
    first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and _is_mapped(first):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED)


def _is_mapped(address: int) -> bool:
    """Whether the memory at an address is a file of weights."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else ():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(".safetensors")
    return False


def four_bit_options(settings: ModelSettings) -> dict[str, Any]:
    """Options of ``from_pretrained`` for matrices in 4 bits (NF4) on a GPU; ModelError without bitsandbytes."""
    for package in ("accelerate", "bitsandbytes"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"4bit quantization on CUDA needs the package {package}; install it, or use none")
    from transformers import BitsAndBytesConfig

    config: Any = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, settings.dtype),
        llm_int8_skip_modules=["lm_head", "model.visual", "visual"],
    )
    return {"quantization_config": config, "device_map": {"": settings.device}}
