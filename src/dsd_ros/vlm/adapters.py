# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: what a training changed in a published model, a few MB beside a base that is installed apart.

A folder with ``adapter.safetensors`` is a model: its base is another model folder of ``models/``, which
tools/convert_gguf.py makes of the GGUF file in the Python package of that name, and each named matrix W becomes
W + scale * B A (LoRA, arXiv 2106.09685) when the model is loaded. ``dsd.json`` and ``chat_template.jinja`` stand
beside it as in any model folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsd_ros.paths import READER_INSTALL, models_directory
from dsd_ros.vlm.errors import ModelError

ADAPTER_FILE = "adapter.safetensors"


class Adapter(NamedTuple):
    """The pairs (A, B) of matrices by the name of the layer that they change, and the base they are made for."""

    base: str  # a folder of models/
    base_fingerprint: str  # of the GGUF file that it is made of
    scale: float
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]


def base_directory(name: str) -> Path:
    """The folder of a base model; ModelError, with the commands that make it, if there is none."""
    folder = models_directory() / name
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"the base model {folder} is not there; {READER_INSTALL}")
    return folder


def save_adapter(directory: Path, adapter: Adapter) -> None:
    """Write an adapter as float16."""
    tensors = {}
    for name, (a, b) in adapter.matrices.items():
        tensors[f"{name}.a"], tensors[f"{name}.b"] = (m.detach().cpu().half().contiguous() for m in (a, b))
    about = {"base": adapter.base, "base_fingerprint": adapter.base_fingerprint, "scale": adapter.scale}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / ADAPTER_FILE, metadata={"adapter": json.dumps(about)})  # one key: equal files
    (directory / ADAPTER_FILE).chmod(0o644)  # safetensors lets only its owner read it


def read_adapter(directory: Path) -> Adapter:
    """The adapter in a folder; ModelError if it cannot be read."""
    path = directory / ADAPTER_FILE
    try:
        with safe_open(path, "pt") as file:
            about: Mapping[str, Any] = json.loads(file.metadata()["adapter"])
            names = sorted(key.removesuffix(".a") for key in file.keys() if key.endswith(".a"))  # noqa: SIM118
            matrices = {name: (file.get_tensor(f"{name}.a"), file.get_tensor(f"{name}.b")) for name in names}
        return Adapter(about["base"], about["base_fingerprint"], float(about["scale"]), matrices)
    except Exception as error:  # safetensors has errors of its own
        raise ModelError(f"{path} cannot be read as an adapter ({error}); fetch or train it again") from error


@torch.no_grad()
def merge_adapter(base: Any, adapter: Adapter) -> None:
    """Add an adapter to the matrices of a transformers model; ModelError if it was made for another base."""
    if adapter.base_fingerprint != getattr(base.config, "gguf_fingerprint", None):
        raise ModelError(
            f"the adapter was trained on another version of {adapter.base}; convert the version in "
            "requirements/reader-model.txt, or train the adapter again"
        )
    for name, (a, b) in adapter.matrices.items():
        try:
            weight = base.model.get_submodule(name).weight
            weight += (adapter.scale * (b.float() @ a.float())).to(weight)
        except (AttributeError, RuntimeError) as error:
            raise ModelError(f"the adapter does not fit {adapter.base} at {name}; train it again") from error
