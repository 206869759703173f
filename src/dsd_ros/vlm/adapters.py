# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: what a training changed in a published model, a few MB beside a base that is installed apart.

A folder with ``adapter.safetensors`` is a model: its base is a GGUF file in a Python package, and each named matrix W
becomes W + scale * B A (LoRA, arXiv 2106.09685) when the model is loaded. ``dsd.json`` and ``chat_template.jinja``
stand beside it as in any model folder.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsd_ros.paths import READER_BASE, READER_INSTALL
from dsd_ros.vlm.errors import ModelError

ADAPTER_FILE = "adapter.safetensors"
_INSTALL = {READER_BASE: READER_INSTALL}


class Adapter(NamedTuple):
    """The pairs (A, B) of matrices by the name of the layer that they change, and the base they are made for."""

    base: str  # a Python package with one GGUF file
    base_fingerprint: str
    scale: float
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]


def packaged_gguf(package: str) -> Path:
    """The GGUF file in a Python package, which is not imported; ModelError if it is not installed."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(f"the base model {package} is not installed; {_INSTALL.get(package, f'pip install {package}')}")


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
def merge_adapter(language: Any, adapter: Adapter, base_fingerprint: str) -> None:
    """Add an adapter to the matrices of a language model; ModelError if it was made for another base."""
    if adapter.base_fingerprint != base_fingerprint:
        raise ModelError(
            f"the adapter was trained on another version of {adapter.base}; install the version in "
            "requirements/reader-model.txt, or train the adapter again"
        )
    for name, (a, b) in adapter.matrices.items():
        try:
            weight = language.get_submodule(name).weight
            weight += (adapter.scale * (b.float() @ a.float())).to(weight)
        except (AttributeError, RuntimeError) as error:
            raise ModelError(f"the adapter does not fit {adapter.base} at {name}; train it again") from error
