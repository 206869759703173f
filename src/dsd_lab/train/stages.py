# SPDX-License-Identifier: Apache-2.0
"""What all trainings share: a stage runs until its minutes or steps are over, and resumes after a kill.

Checkpoints are safetensors files with the progress as JSON in the header, replaced as a whole.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dsd_lab.train.forward import CPU, autocast

Report = Callable[[str, float], None]  # line, share done
MEAN = "mean/"  # prefix of the averaged modules in a checkpoint
_REPORT_EVERY = 10  # steps; a GPU is waited for no more often
_KEEP = 0.98  # largest decay of the running loss and share
_DECAY = 3.0  # of the weights in the average: the last quarter of a stage counts for two thirds


class Losses(NamedTuple):
    """Parts of a step: the loss to descend, the loss to show, and the share right; scalars on the device."""

    total: torch.Tensor
    shown: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Stage:
    """What is trained, and on what.

    `losses(step, share)` draws the batch of a step, equal ones for equal steps, and yields its loss in parts; a part's
    graph is freed before the next part is made.
    """

    name: str
    modules: dict[str, tuple[nn.Module, float]]  # name -> module and factor of its learning rate
    losses: Callable[[int, float], Iterator[Losses]]
    rate: float
    warm_up: int = 100  # steps
    weight_decay: float = 0.02
    averaged: bool = False  # the modules end with the running mean of their weights
    clip_each: bool = False  # clip each module's gradient by itself
    mixed: bool = True  # in bfloat16 where the device is fast at it


def schedule(share: float) -> float:
    """Factor of the learning rate over the share of training done: flat, then a cosine down to nearly nothing."""
    return 1.0 if share < 0.3 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - 0.3) / 0.7))


def descend(stage: Stage, optimizer: torch.optim.Optimizer, device: torch.device, step: int, share: float) -> Losses:
    """One step of a stage; nothing here waits for a GPU."""
    for group in optimizer.param_groups:
        group["lr"] = group["factor"] * stage.rate * min(1.0, (step + 1) / stage.warm_up) * schedule(share)
    optimizer.zero_grad(set_to_none=True)
    shown, right = (torch.zeros((), device=device) for _ in range(2))
    parts = stage.losses(step, share)
    while True:
        with autocast(device, stage.mixed):
            part = next(parts, None)
        if part is None:
            break
        part.total.backward()
        shown, right = shown + part.shown.detach().float(), right + part.right.float()
    groups = [group["params"] for group in optimizer.param_groups]
    for parameters in groups if stage.clip_each else [[p for group in groups for p in group]]:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return Losses(shown, shown, right)


def optimizer_of(stage: Stage) -> torch.optim.AdamW:
    """The optimizer of a stage's modules."""
    groups = [{"params": list(module.parameters()), "factor": factor} for module, factor in stage.modules.values()]
    return torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), weight_decay=stage.weight_decay)


@torch.no_grad()
def follow(mean: nn.Module, module: nn.Module, step: int) -> None:
    """Take the weights after a step into their running mean (polynomial-decay averaging, Shamir and Zhang, 2013)."""
    weight = (_DECAY + 1) / (step + 1 + _DECAY)
    for kept, now in zip(mean.parameters(), module.parameters(), strict=True):
        kept.lerp_(now, weight)


def run_stage(
    stage: Stage,
    path: Path,
    minutes: float | None,
    steps: int | None = None,
    device: torch.device = CPU,
    after: str = "",
    report: Report | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Run a stage for some minutes, or for exactly `steps`; resumes from the checkpoint at `path`.

    A checkpoint of another `after` starts over. Returns steps, minutes, and the running loss and share right.
    """
    modules = {name: module.to(device) for name, (module, _) in stage.modules.items()}
    means = {name: copy.deepcopy(module) for name, module in modules.items() if stage.averaged}
    kept = {**modules, **{MEAN + name: mean for name, mean in means.items()}}
    optimizer = optimizer_of(stage)
    done = {"step": 0, "minutes": 0.0, "loss": 0.0, "right": 0.0, "after": after}
    running = torch.zeros(2, device=device)
    if path.exists() and read_progress(path).get("after") == after:
        done = load_state(path, kept, optimizer)
        running = torch.tensor([done["loss"], done["right"]], device=device)

    def share_done() -> float:
        return float(done["step"] / steps if steps is not None else done["minutes"] / (minutes or 1e-9))

    def save() -> None:
        done["loss"], done["right"] = running.tolist()
        save_state(path, kept, optimizer, done)

    first, last = done["step"], time.monotonic()
    while (share := share_done()) < 1.0:
        began, step = time.monotonic(), done["step"]
        losses = descend(stage, optimizer, device, step, share)
        for name, mean in means.items():
            follow(mean, modules[name], step)
        done["step"] = step + 1
        keep = min(_KEEP, 1 - 1 / (step + 1))
        running = keep * running + (1 - keep) * torch.stack([losses.shown, losses.right])
        if report is not None and (step + 1) % _REPORT_EVERY == 0:
            loss, right = running.tolist()
            report(f"{stage.name} step {step + 1} loss {loss:.3f} right {right:.3f}", share)
        done["minutes"] += (time.monotonic() - began) / 60
        if time.monotonic() - last > save_seconds:
            save()
            last = time.monotonic()
    if done["step"] > first or not path.exists():
        save()
    for name, mean in means.items():
        modules[name].load_state_dict(mean.state_dict())
    return {"loss": done["loss"], "right": done["right"], "minutes": done["minutes"], "steps": done["step"]}


def save_state(path: Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write modules, optimizer and progress to one file; a kill leaves the old file whole."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        for key, value in module.state_dict().items():
            tensors[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            tensors[f"optimizer/{index}/{key}"] = torch.as_tensor(value, device="cpu").clone().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"progress": json.dumps(progress)})
    part.replace(path)


def read_progress(path: Path) -> dict[str, Any]:
    """The progress in a checkpoint, without the tensors."""
    with safe_open(path, "pt") as file:
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
    return progress


def load_state(path: Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Read a checkpoint back into modules and optimizer; returns the progress."""
    tensors = load_file(path)
    for name, module in modules.items():
        prefix = f"{name}/"
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    if optimizer is not None:
        entries: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer/"):
                _, index, name = key.split("/", 2)
                entries.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
    return read_progress(path)
