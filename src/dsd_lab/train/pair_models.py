"""What is done to whole models in the pair's training: averaged, folded together, written."""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dsd_lab.train.stages import MEAN
from dsd_ros.vlm.loading import quiet_transformers

KEPT = ("README.md", "training.png")  # of a model directory, when its weights are written anew


def digest(path: Path) -> str:
    """Name of a checkpoint's content, for what is built upon it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_start(model: Any, folder: Path) -> str:
    """Give a model the weights of a model directory, and return their digest.

    A tower with more layers gets each of the old ones with copies behind it that change nothing yet. Raises ValueError
    where there are no weights, or those of a model of another size.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"There is no {path} to go on from; name the folder of a trained pair.")
    with quiet_transformers():
        other = type(model).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    _deepen(other.model.visual, len(model.model.visual.blocks))
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise ValueError(f"The model in {folder} is of another size; say which.") from error
    return digest(path)


def _deepen(tower: Any, layers: int) -> None:
    """Bring a tower to as many layers, if it has fewer, so that it says the same as before.

    After T. Chen et al., "Net2Net", 2016, and J. Wu et al., "LLaMA Pro", 2024: copies whose last matrices are zero.
    """
    old = list(tower.blocks)
    if len(old) >= layers:
        return
    blocks: list[nn.Module] = []
    for index in range(layers):
        source = old[index * len(old) // layers]
        if source not in blocks:
            blocks.append(source)
            continue
        block = copy.deepcopy(source)
        for linear in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        blocks.append(block)
    tower.blocks = nn.ModuleList(blocks)


def average(model: Any, paths: Sequence[Path]) -> None:
    """Give a model the mean of checkpoints' running means, later ones weighing more (1, 1.5, 2.25, ...).

    After M. Wortsman et al., "Model soups", 2022: the mean of fine-tuned weights of one lineage
    is steadier than each; here it ended going back and forth between two mistaken views.
    """
    states = [load_file(path) for path in paths]
    weights = torch.tensor([1.5**k for k in range(len(states))], dtype=torch.float64, device="cpu")
    weights /= weights.sum()
    parts = {"language": model.model.language_model, "tower": model.model.visual}
    for name, module in parts.items():
        prefix = f"{MEAN}{name}/"
        mean = {
            key[len(prefix) :]: sum(float(w) * state[key] for w, state in zip(weights, states, strict=True))
            for key in states[0]
            if key.startswith(prefix)
        }
        module.load_state_dict(mean)


def keep_start(model: Any, folder: Path, share: float) -> None:
    """Give a model the mean of its weights and those it went on from, in a model directory, which weigh ``share``.

    After M. Wortsman et al., "Robust fine-tuning of zero-shot models", 2022.
    """
    start = copy.deepcopy(model)
    load_start(start, folder)
    first = start.state_dict()
    model.load_state_dict({key: torch.lerp(last, first[key], share) for key, last in model.state_dict().items()})


def fold(small: Any, tower: Any, project: nn.Linear) -> None:
    """Give a draft its own tower: the target's, whose last layer then projects to the draft's width."""
    state = tower.state_dict()
    last = tower.merger.mlp[2]
    with torch.no_grad():
        state["merger.mlp.2.weight"] = project.weight @ last.weight
        state["merger.mlp.2.bias"] = project.weight @ last.bias + project.bias
    small.model.visual.load_state_dict(state)


def unfold(small: Any, tower: Any) -> nn.Linear:
    """The projection that `fold` gave a draft, found again by its tower and the target's of that time."""
    last, own = tower.merger.mlp[2], small.model.visual.merger.mlp[2]
    project = nn.Linear(last.out_features, own.out_features)
    with torch.no_grad():
        project.weight.copy_(own.weight @ torch.linalg.pinv(last.weight))
        project.bias.copy_(own.bias - project.weight @ last.bias)
    return project


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model directory (float16 weights) next to the old one, then swap them."""
    from dsd_lab.train.text import write_processor_files

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    write_processor_files(part, tokenizer)
    with quiet_transformers():
        copy.deepcopy(model).half().cpu().save_pretrained(part)
    write_processor_files(part, tokenizer)  # save_pretrained writes its own generation settings
    for name in KEPT:
        if (folder / name).exists():
            shutil.copy(folder / name, part / name)
    shutil.rmtree(folder, ignore_errors=True)
    (part / "model.safetensors").chmod(0o644)
    part.rename(folder)
