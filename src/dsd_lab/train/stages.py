"""What all stages of the pair's training share: steps until minutes or steps are over, resumable."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dsd_lab.train.checkpoint import load_state, read_progress, save_state
from dsd_lab.train.devices import CPU, Feeder, Movable, autocast

Report = Callable[[str, float], None]
CURVE_POINTS = 200
_FIRST_STRIDE = 5
_TELL_EVERY = 10  # steps; a GPU is waited for no more often
_KEEP = 0.98  # of the running loss and share, at most
MEAN = "mean/"  # of the names, in a checkpoint, of modules' running means
_DECAY = 3.0  # of the steps' weights in those: the last quarter of a stage weighs two thirds


class Losses(NamedTuple):
    """Of a step: what is descended, the loss that is shown, and the share right; scalars on the device."""

    total: torch.Tensor
    shown: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Stage:
    """What is trained and on what.

    `modules`: name -> module and learning-rate factor. `draw(step, share)` gives a step's batch on the
    host, equal ones for equal arguments; `losses(batch, step)` its losses from the batch on the device.
    `averaged`: what is kept of the modules is the running mean of their weights.
    """

    name: str
    modules: dict[str, tuple[nn.Module, float]]
    draw: Callable[[int, float], Movable]
    losses: Callable[[Any, int], Losses]
    rate: float
    warm_up: int = 100
    held: dict[str, int] = field(default_factory=dict)  # steps for which a module stays as it is
    averaged: bool = False


class Curve:
    """At most CURVE_POINTS points (minutes, loss, share right), evenly over the steps done."""

    def __init__(self, points: list[list[float]] | None = None, stride: int = _FIRST_STRIDE) -> None:
        self.points, self.stride = points or [], stride

    def due(self, step: int) -> bool:
        return step % self.stride == 0

    def add(self, minutes: float, loss: float, right: float) -> None:
        """Append a point; when there are too many, every second one goes."""
        self.points.append([round(minutes, 3), round(loss, 5), round(right, 5)])
        if len(self.points) > CURVE_POINTS:
            self.points = self.points[1::2]
            self.stride *= 2


def schedule(share: float) -> float:
    """Learning-rate factor over the share of training done: flat, then down to nearly nothing."""
    return 1.0 if share < 0.3 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - 0.3) / 0.7))


class Descent:
    """The optimizer of a stage, and one step of it: what a device is kept busy with."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.stage, self.device = stage, device
        groups = [{"params": list(module.parameters()), "factor": factor} for module, factor in stage.modules.values()]
        self.held = [stage.held.get(name, 0) for name in stage.modules]
        self.trained = [p for group in groups for p in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.02)

    def step(self, batch: Any, step: int, share: float) -> Losses:
        """Descend on a batch; nothing here waits for a GPU."""
        for group, held in zip(self.optimizer.param_groups, self.held, strict=True):
            warm = min(1.0, max(0, step + 1 - held) / self.stage.warm_up)
            group["lr"] = group["factor"] * self.stage.rate * warm * schedule(share)
        with autocast(self.device):
            losses = self.stage.losses(batch, step)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return losses


@torch.no_grad()
def follow(mean: nn.Module, module: nn.Module, step: int) -> None:
    """Take the weights behind a step (from 0) into their running mean, later ones weighing more.

    Polynomial-decay averaging: O. Shamir and T. Zhang, "Stochastic gradient descent for non-smooth optimization", 2013.
    torch's own AveragedModel would keep the count of steps as one more state, and bring it to the device each time.
    """
    weight = (_DECAY + 1) / (step + 1 + _DECAY)
    for kept, now in zip(mean.parameters(), module.parameters(), strict=True):
        kept.lerp_(now, weight)


def run_stage(
    stage: Stage,
    path: Path,
    minutes: float,
    steps: int | None = None,
    device: torch.device = CPU,
    after: str = "",
    report: Report | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Run a stage for some minutes, or exactly `steps`; resumes from the checkpoint at `path`.

    `after` names what the stage builds upon: a checkpoint that was begun upon something else is of no
    use and is begun anew. Returns steps, minutes, the running loss and share right, and their curve
    [[minutes, loss, right], ...].
    """
    modules = {name: module for name, (module, _) in stage.modules.items()}
    for module in modules.values():
        module.to(device)
    means_of = {name: copy.deepcopy(module) for name, module in modules.items() if stage.averaged}
    kept = {**modules, **{MEAN + name: mean for name, mean in means_of.items()}}
    descent = Descent(stage, device)
    step, first, spent = 0, 0, 0.0
    means = torch.zeros(2, device=device)
    curve = Curve()
    if path.exists() and read_progress(path).get("after", "") == after:
        progress = load_state(path, kept, descent.optimizer)
        step, spent = progress["step"], progress["minutes"]
        first = step
        means = torch.tensor([progress["loss"], progress["right"]], device=device)
        curve = Curve(progress["curve"], progress["stride"])
    saved = time.monotonic()

    def save() -> None:
        loss, right = means.tolist()
        progress = {"step": step, "minutes": spent, "loss": loss, "right": right, "after": after,
                    "curve": curve.points, "stride": curve.stride}  # fmt: skip
        save_state(path, kept, descent.optimizer, progress)

    def share_of(later: int) -> float:
        """Share done at a step: known where steps are given, else as if its time were now."""
        return later / steps if steps is not None else spent / minutes

    with Feeder(stage.draw, share_of, device) as feeder:
        while (share := share_of(step)) < 1.0:
            began = time.monotonic()
            losses = descent.step(feeder.batch(step), step, share)
            for name, mean in means_of.items():
                follow(mean, modules[name], step)
            step += 1
            keep = min(_KEEP, 1 - 1 / step)
            means = keep * means + (1 - keep) * torch.stack([losses.shown, losses.right]).float()
            if curve.due(step):
                loss, right = means.tolist()
                curve.add(spent + (time.monotonic() - began) / 60, loss, right)
            if report is not None and step % _TELL_EVERY == 0:
                loss, right = means.tolist()
                report(f"{stage.name} step {step} loss {loss:.3f} right {right:.3f}", share)
            spent += (time.monotonic() - began) / 60
            if time.monotonic() - saved > save_seconds:
                save()
                saved = time.monotonic()
    loss, right = means.tolist()
    if step > first or not curve.points:
        if not curve.due(step):
            curve.add(spent, loss, right)
        save()
    for name, mean in means_of.items():
        modules[name].load_state_dict(mean.state_dict())
    figures = {"loss": loss, "right": right, "minutes": spent, "steps": step}
    return {**figures, "curve": curve.points}
