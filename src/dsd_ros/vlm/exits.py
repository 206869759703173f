# SPDX-License-Identifier: Apache-2.0
"""Early exits: an adapter after a decoder layer that feeds the model's own frozen LM head.

Source: "Fast and Cost-effective Speculative Edge-Cloud Decoding with Early Exits" (FSD), figure 3. Exit i, from 1,
reads the hidden states after i decoder layers. Adapters are in the model's folder, in ``exits/exits.safetensors``,
with the fingerprint of the model they were trained for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from dsd_ros.vlm.errors import ModelError

# In a folder of its own: engines take every *.safetensors beside config.json for weights of the model.
EXITS_FILE = "exits/exits.safetensors"
_FORMAT = "1"
_MINIMUM_RANK = 32


class ExitBackbone(Protocol):
    """What an exit needs from its model."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: (n, hidden size) to logits (n, vocabulary) float32."""
        ...


def default_rank(hidden_size: int) -> int:
    """Width of an adapter's bottleneck: an eighth of the model's, at least 32."""
    return min(max(hidden_size // 8, _MINIMUM_RANK), hidden_size)


class ExitAdapter(nn.Module):
    """A residual bottleneck, hidden + up(gelu(down(norm(hidden)))); untrained, it is the identity."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.down = nn.Parameter(torch.empty(rank, hidden_size))
        self.up = nn.Parameter(torch.zeros(hidden_size, rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., hidden size) of an early layer to what the LM head expects."""
        normed = functional.rms_norm(hidden, self.scale.shape, self.scale, 1e-6)
        inner = functional.gelu(functional.linear(normed, self.down))
        return hidden + functional.linear(inner, self.up)


class ExitAdapters(nn.Module):
    """The exits of one model, after ``layers`` (1-based, below the last); ModelError if they do not fit the model."""

    def __init__(self, layers: Iterable[int], hidden_size: int, num_layers: int, rank: int | None = None) -> None:
        super().__init__()
        self.layers = tuple(sorted(set(layers)))
        self.rank = default_rank(hidden_size) if rank is None else rank
        if not self.layers or not 1 <= self.layers[0] <= self.layers[-1] < num_layers:
            raise ModelError(
                f"exits after layers {list(self.layers)} do not fit a model of {num_layers} layers; "
                f"name layers from 1 to {num_layers - 1}"
            )
        if not 1 <= self.rank <= hidden_size:
            raise ModelError(f"an exit's rank must be 1 to {hidden_size}, not {self.rank}")
        self.adapters = nn.ModuleDict({str(layer): ExitAdapter(hidden_size, self.rank) for layer in self.layers})

    @classmethod
    def untrained(
        cls, model: ExitBackbone, layers: Iterable[int] | None = None, rank: int | None = None, seed: int = 0
    ) -> ExitAdapters:
        """New float32 adapters on the CPU after ``layers``, by default after every layer but the last."""
        chosen = range(1, model.num_layers) if layers is None else layers
        exits = cls(chosen, model.hidden_size, model.num_layers, rank)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in exits.layers:
                down = exits.adapter(layer).down
                down.copy_(torch.randn(down.shape, generator=generator))
                down.mul_(1 / math.sqrt(model.hidden_size))
        return exits

    @property
    def parameters_count(self) -> int:
        """Trainable parameters of all exits together."""
        return sum(parameter.numel() for parameter in self.parameters())

    def adapter(self, layer: int) -> ExitAdapter:
        """The adapter after a 1-based layer; ModelError if there is no exit."""
        try:
            found = self.adapters[str(layer)]
        except KeyError:
            raise ModelError(f"there is no exit after layer {layer}; use one of {list(self.layers)}") from None
        assert isinstance(found, ExitAdapter)
        return found

    @torch.inference_mode()
    def logits(self, model: ExitBackbone, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of exit ``layer``: hidden (n, hidden size) to (n, vocabulary) float32."""
        return model.head(self.adapter(layer)(hidden))

    def save(self, directory: Path, model_fingerprint: str) -> Path:
        """Write the exits (float16) into a model's directory, atomically; the path of the file."""
        path = directory / EXITS_FILE
        part = path.with_suffix(".part")
        tensors = {k: v.detach().cpu().half().contiguous() for k, v in self.state_dict().items()}
        metadata = {
            "format": _FORMAT,
            "model": model_fingerprint,
            "layers": ",".join(map(str, self.layers)),
            "rank": str(self.rank),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata=metadata)
        part.chmod(0o644)
        part.replace(path)
        return path


def load_exits(
    directory: Path, model_fingerprint: str, hidden_size: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> ExitAdapters | None:
    """The frozen exits stored with a model; None if there are none, ModelError if they do not fit."""
    path = directory / EXITS_FILE
    if not path.exists():
        return None
    remedy = "train them again with `dsd-lab train exits`, or delete the file"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}); {remedy}") from error
    if metadata.get("format") != _FORMAT:
        raise ModelError(f"{path} has format {metadata.get('format')!r} and this version reads {_FORMAT!r}; {remedy}")
    if metadata.get("model") != model_fingerprint:
        raise ModelError(f"{path} was trained for other weights than those beside it; {remedy}")
    try:
        layers = [int(layer) for layer in metadata["layers"].split(",")]
        exits = ExitAdapters(layers, hidden_size, num_layers, int(metadata["rank"]))
        exits.load_state_dict(tensors)
    except (KeyError, ValueError, RuntimeError) as error:  # ModelError is a ValueError
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path} holds no exits for this model ({reason}); {remedy}") from error
    return exits.to(device=device, dtype=dtype).eval().requires_grad_(False)
