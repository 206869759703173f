# SPDX-License-Identifier: Apache-2.0
"""Settings of `dsd-lab train`, without torch, so that the command line answers at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsd_ros.vlm.settings import DTYPES

PAIR_SIZES = ("small", "base")  # of model.SIZES


def _set(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def _check(settings: Any, above_zero: tuple[str, ...] = (), **least: tuple[str, ...]) -> None:
    """ValueError for numbers out of range: `least` maps "from0" and "from1" to names."""
    for bound, names in least.items():
        for name in names:
            value = getattr(settings, name)
            if value is not None and not value >= int(bound[-1]):
                raise ValueError(f"{name} must be at least {bound[-1]}, but it is {value}.")
    for name in above_zero:
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0, but it is {value}.")
    if re.fullmatch(r"cpu|cuda(:\d+)?", settings.device) is None:
        raise ValueError(f"device must be cpu, cuda or cuda:N, not {settings.device!r}.")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a pair's training; a stage ends after its minutes, or after its steps where these are given."""

    out: Path = _set(Path("models"), "folder for target/ and draft/")
    cache: Path = _set(Path(".cache/pair"), "folder for pictures and checkpoints")
    start: Path | None = _set(None, "folder of a trained pair to continue from (default: from nothing)")
    seed: int = _set(0, "seed of everything random")
    size: str = _set("base", "size of both models", choices=PAIR_SIZES)
    device: str = _set("cpu", "cpu, cuda or cuda:N")
    worlds: int = _set(5000, "worlds to render for training")
    workers: int = _set(2, "processes that render and roll out")
    threads: int = _set(2, "CPU threads of the training itself")
    batch: int = _set(64, "questions or pictures per step")
    live_batch: int = _set(40, "questions per step while the tower trains, too")
    vision_minutes: float = _set(120.0, "time for the vision tower")
    language_minutes: float = _set(40.0, "time for the target's language half")
    joint_minutes: float = _set(120.0, "time for both halves together")
    dagger_rounds: int = _set(3, "rounds of training on the target's own roll-outs")
    dagger_worlds: int = _set(960, "worlds rolled out per round")
    dagger_minutes: float = _set(40.0, "time per round")
    draft_minutes: float = _set(15.0, "time for both stages of the draft")
    draft_worlds: int = _set(480, "worlds rolled out with the draft between its stages")
    distilled: int = _set(12000, "pictures about which the target answers for the draft")
    exit_minutes: float = _set(10.0, "time for the target's early exits")
    exit_worlds: int = _set(200, "worlds that the exits learn from")
    exits: bool = _set(True, "train the target's early exits last")
    vision_steps: int | None = _set(None, "steps instead of minutes: vision")
    language_steps: int | None = _set(None, "steps instead of minutes: language")
    joint_steps: int | None = _set(None, "steps instead of minutes: joint, and each round")
    draft_steps: int | None = _set(None, "steps instead of minutes: each stage of the draft")
    exit_steps: int | None = _set(None, "steps instead of minutes: exits")
    save_seconds: float = _set(60.0, "time between checkpoints")
    evaluate: bool = _set(True, "measure the pair and write the model cards")
    smoke: bool = _set(False, "a tiny run of a minute or two, into the cache")

    def __post_init__(self) -> None:
        steps = ("vision_steps", "language_steps", "joint_steps", "draft_steps", "exit_steps")
        counts = ("worlds", "workers", "threads", "batch", "live_batch", "dagger_worlds", "distilled", "exit_worlds")
        stages = ("vision", "language", "joint", "dagger", "draft", "exit")
        minutes = tuple(f"{stage}_minutes" for stage in stages)
        _check(self, minutes, from0=("seed", "dagger_rounds", "draft_worlds", "save_seconds"), from1=(*counts, *steps))
        if self.size not in PAIR_SIZES:
            raise ValueError(f"size must be one of {', '.join(PAIR_SIZES)}, not {self.size!r}.")

    def resolved(self) -> TrainSettings:
        """The settings; a smoke run gets its own sizes and folders."""
        if not self.smoke or self.vision_steps is not None:
            return self
        # A tiny run must neither replace the shipped pair nor mix with the pictures of a whole run.
        cache = self.cache / "smoke"
        return replace(
            self, out=cache / "models" if self.out == Path("models") else self.out, cache=cache, start=None,
            size="small", worlds=24, workers=1, threads=1, batch=32, live_batch=16, vision_steps=120,
            language_steps=80, joint_steps=10, draft_steps=40, exit_steps=20, dagger_rounds=1, dagger_worlds=4,
            draft_worlds=4, distilled=64, exit_worlds=2, evaluate=False,
        )  # fmt: skip


@dataclass(frozen=True)
class ReaderSettings:
    """Settings of the reader's training, which ends after its minutes, or after its steps where these are given."""

    out: Path = _set(Path("models"), "folder for reader-smollm2/")
    cache: Path = _set(Path(".cache/reader"), "folder for the checkpoint")
    seed: int = _set(0, "seed of everything random")
    minutes: float = _set(480.0, "time for the training")
    steps: int | None = _set(None, "steps instead of minutes")
    batch: int = _set(4, "pages of five questions per step")
    rate: float = _set(6e-4, "learning rate")
    rank: int = _set(8, "rank of the adapters")
    device: str = _set("cpu", "cpu, cuda or cuda:N")
    threads: int = _set(1, "CPU threads")
    save_seconds: float = _set(300.0, "time between checkpoints")
    smoke: bool = _set(False, "a tiny run of under a minute, into the cache")

    def __post_init__(self) -> None:
        _check(self, ("minutes", "rate"), from0=("save_seconds",), from1=("steps", "batch", "threads", "rank"))

    def resolved(self) -> ReaderSettings:
        """The settings; a smoke run replaces neither the shipped reader nor a whole run."""
        if not self.smoke:
            return self
        cache = self.cache / "smoke"
        out = cache / "models" if self.out == Path("models") else self.out
        return replace(self, out=out, cache=cache, steps=self.steps or 3)


@dataclass(frozen=True)
class ExitSettings:
    """Settings of `dsd-lab train exits`, on what the model says itself; it ends after its minutes or steps."""

    model: str = _set("", "model directory or hub id; text: SmolLM2-135M (default: the shipped target)")
    layers: str = _set("all", "layers with an exit: all, or 2,4")
    rank: int | None = _set(None, "width of the adapters (default: hidden size / 8, at least 32)")
    minutes: float | None = _set(None, "time for the training itself")
    steps: int | None = _set(None, "steps instead of minutes (default: ten times through the replies)")
    rate: float | None = _set(None, "learning rate (default: 3e-3; text models 5e-3)")
    batch: int | None = _set(None, "replies per step (default: 64; text models 2)")
    seed: int = _set(0, "seed of everything random")
    out: Path | None = _set(None, "output folder (default: beside the model)")
    cache: Path = _set(Path(".cache/exits"), "folder for scenes and checkpoints")
    worlds: int = _set(200, "worlds to render, 16 pictures each")
    written: int = _set(320, "conversations that a text model writes")
    held_out: int = _set(400, "replies kept for the report")
    threads: int = _set(2, "CPU threads")
    workers: int = _set(2, "processes that render")
    device: str = _set("cpu", "cpu, cuda or cuda:N")
    dtype: str = _set("float32", "precision of the model", choices=DTYPES)

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "rank", "worlds", "written", "held_out", "threads", "workers")
        _check(self, ("minutes", "rate"), from1=counts)
        if self.minutes is not None and self.steps is not None:
            raise ValueError("Give minutes or steps, only one of them.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")


@dataclass(frozen=True)
class TextDraftSettings:
    """Settings of the training of SmolLM2-135M's draft, which ends after its minutes or steps."""

    layers: int = _set(4, "layers of the target before the trained one")
    out: Path = _set(Path("models/draft-smollm2"), "folder for the trained layer")
    cache: Path = _set(Path(".cache/exits"), "folder for conversations and the checkpoint")
    minutes: float | None = _set(120.0, "time for the training itself")
    steps: int | None = _set(None, "steps instead of minutes")
    rate: float = _set(1e-3, "learning rate")
    batch: int = _set(2, "conversations per step")
    written: int = _set(3200, "conversations that the target writes")
    held_out: int = _set(64, "conversations kept for the report")
    seed: int = _set(0, "seed of everything random")
    device: str = _set("cpu", "cpu, cuda or cuda:N")
    threads: int = _set(2, "CPU threads")

    def __post_init__(self) -> None:
        _check(self, ("minutes", "rate"), from1=("layers", "steps", "batch", "written", "held_out", "threads"))
