"""Training states on disk: tensors as safetensors, the rest as JSON, swapped in whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def save_state(path: Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write modules, optimizer and progress (JSON) to one file; a kill leaves the old file whole."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        for key, value in module.state_dict().items():
            tensors[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
    state = optimizer.state_dict()["state"]
    for index, values in state.items():
        for key, value in values.items():
            tensors[f"optimizer/{index}/{key}"] = torch.as_tensor(value, device="cpu").clone().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"progress": json.dumps(progress)})
    os.replace(part, path)


def read_progress(path: Path) -> dict[str, Any]:
    """The progress that `save_state` wrote, without the tensors."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
    return progress


def load_state(path: Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Read what `save_state` wrote back into modules and optimizer; returns the progress."""
    progress = read_progress(path)
    tensors = load_file(path)
    for name, module in modules.items():
        prefix = f"{name}/"
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        module.load_state_dict(state, strict=True)
    if optimizer is not None:
        saved = optimizer.state_dict()
        entries: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer/"):
                _, index, field = key.split("/", 2)
                entries.setdefault(int(index), {})[field] = value
        saved["state"] = entries
        optimizer.load_state_dict(saved)
    return progress
