"""What `dsd-lab train` is asked for, without torch, so that the command line tells of it at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsd_ros.vlm.settings import DTYPES

READER_SIZES = ("tiny", "base", "large")  # of training.reader
PAIR_SIZES = ("small", "base", "large")  # of architecture.SIZES
MAX_HISTORY = 8  # of wire.messages


# What a setting left open is by the kind of device: a GPU is idle at batches that fill a core.
PAIR_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "batch": 64, "live_batch": 40, "vision_minutes": 120.0, "language_minutes": 40.0,
        "joint_minutes": 120.0, "dagger_minutes": 40.0, "draft_minutes": 15.0, "exit_minutes": 10.0,
    },
    "cuda": {
        "batch": 512, "live_batch": 320, "vision_minutes": 5.0, "language_minutes": 3.0,
        "joint_minutes": 5.0, "dagger_minutes": 2.0, "draft_minutes": 1.0, "exit_minutes": 1.0,
    },
}  # fmt: skip

_LEFT_OUT = ("vision_minutes", "language_minutes")  # by one that goes on from a trained pair


def _open(name: str, text: str) -> Any:
    """A setting whose default hangs on the device."""
    cpu, cuda = (PAIR_DEFAULTS[kind][name] for kind in ("cpu", "cuda"))
    return field(default=None, metadata={"help": f"{text} (none: {cpu:g}; on a GPU {cuda:g})"})


def _steps(stage: str) -> Any:
    return field(default=None, metadata={"help": f"{stage}: steps instead of minutes"})


def _check_device(name: str) -> None:
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"device must be cpu, cuda or cuda:N, not {name!r}.")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run; stages end after their minutes, or after their steps if given."""

    out: Path = field(default=Path("models"), metadata={"help": "folder for target/ and draft/"})
    cache: Path = field(default=Path(".cache/pair"), metadata={"help": "folder for pictures and checkpoints"})
    start: Path | None = field(
        default=None,
        metadata={
            "help": "folder with a target/ to go on from, and a draft/ unless that begins anew (none: from nothing)"
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of everything random"})
    size: str = field(default="base", metadata={"help": "size of both models", "choices": PAIR_SIZES})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N"})
    history: int = field(default=0, metadata={"help": "earlier pictures in a prompt at most, 0 to 8"})
    worlds: int = field(default=5000, metadata={"help": "worlds to render for training"})
    skip_worlds: int = field(
        default=0, metadata={"help": "worlds to leave out before those, as seen by the pair gone on from"}
    )
    start_share: float = field(
        default=0.0, metadata={"help": "weight of the target gone on from in the mean that is kept, 0 to 1"}
    )
    validation_worlds: int = field(
        default=40, metadata={"help": "worlds to render for the figures of the vision tower"}
    )
    workers: int = field(default=2, metadata={"help": "processes that render, and that roll models out"})
    threads: int = field(default=2, metadata={"help": "CPU threads of the training itself"})
    batch: int | None = _open("batch", "questions or pictures per step")
    live_batch: int | None = _open("live_batch", "questions per step, tower unfrozen")
    vision_minutes: float | None = _open("vision_minutes", "time for the vision tower, with start 0 unless given")
    language_minutes: float | None = _open("language_minutes", "time for the target, with start 0 unless given")
    joint_minutes: float | None = _open("joint_minutes", "time for tower and target")
    dagger_rounds: int = field(default=3, metadata={"help": "rounds on the model's own roll-outs"})
    dagger_worlds: int = field(default=960, metadata={"help": "worlds rolled out per round"})
    dagger_minutes: float | None = _open("dagger_minutes", "training time per round")
    draft_minutes: float | None = _open("draft_minutes", "time for the draft, both halves")
    draft_worlds: int = field(default=480, metadata={"help": "worlds the draft is rolled out in between its halves"})
    distilled: int = field(default=12000, metadata={"help": "pictures that the target answers about"})
    soft_targets: bool = field(
        default=False, metadata={"help": "the draft learns the target's probabilities (always with a history)"}
    )
    exit_minutes: float | None = _open("exit_minutes", "time for the target's early exits")
    exit_worlds: int = field(default=200, metadata={"help": "rooms that the exits learn from"})
    exits: bool = field(default=True, metadata={"help": "train the target's early exits last"})
    vision_steps: int | None = _steps("vision tower")
    language_steps: int | None = _steps("target")
    joint_steps: int | None = _steps("tower and target, and each round")
    draft_steps: int | None = _steps("each half of the draft")
    exit_steps: int | None = _steps("early exits")
    save_seconds: float = field(default=60.0, metadata={"help": "time between checkpoints"})
    compile: bool = field(
        default=False, metadata={"help": "compile the models' passes first (minutes; needs a C++ compiler)"}
    )
    evaluate: bool = field(default=True, metadata={"help": "measure the pair, write the cards"})
    smoke: bool = field(default=False, metadata={"help": "a tiny run of a minute or two"})

    def __post_init__(self) -> None:
        for name in ("worlds", "validation_worlds", "workers", "threads", "batch", "live_batch", "dagger_worlds",
                     "distilled", "exit_worlds", "vision_steps", "language_steps", "joint_steps",
                     "draft_steps", "exit_steps"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but it is {value}.")
        for name in PAIR_DEFAULTS["cpu"]:
            value = getattr(self, name)
            if value == 0 and name in _LEFT_OUT and self.start is not None:
                continue
            if name.endswith("_minutes") and value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, but it is {value}.")
        for name in ("seed", "dagger_rounds", "draft_worlds", "skip_worlds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but it is {getattr(self, name)}.")
        if not 0 <= self.start_share < 1:
            raise ValueError(f"start_share must be 0 to below 1, but it is {self.start_share}.")
        if self.start_share and self.start is None:
            raise ValueError("start_share weighs the target gone on from; give start, too.")
        if not self.save_seconds >= 0:
            raise ValueError(f"save_seconds must not be negative, but it is {self.save_seconds}.")
        if not 0 <= self.history <= MAX_HISTORY:
            raise ValueError(f"history must be 0 to {MAX_HISTORY}, but it is {self.history}.")
        if self.size not in PAIR_SIZES:
            raise ValueError(f"size must be one of {', '.join(PAIR_SIZES)}, not {self.size!r}.")
        _check_device(self.device)

    def resolved(self) -> TrainSettings:
        """With what was left open filled in for the device."""
        defaults = dict(PAIR_DEFAULTS["cpu" if self.device == "cpu" else "cuda"])
        if self.start is not None:
            defaults |= dict.fromkeys(_LEFT_OUT, 0.0)
        return replace(self, **{n: v for n, v in defaults.items() if getattr(self, n) is None})


@dataclass(frozen=True)
class ReaderSettings:
    """Settings of the reader's training, which ends after its minutes, or after its steps if given."""

    out: Path = field(default=Path("models"), metadata={"help": "folder for reader/"})
    cache: Path = field(default=Path(".cache/reader"), metadata={"help": "folder for tokenizer and checkpoint"})
    seed: int = field(default=0, metadata={"help": "seed of everything random"})
    minutes: float = field(default=45.0, metadata={"help": "time for the training"})
    steps: int | None = field(default=None, metadata={"help": "steps instead of minutes"})
    batch: int = field(default=48, metadata={"help": "examples per step"})
    rate: float = field(default=3e-3, metadata={"help": "learning rate"})
    size: str = field(default="base", metadata={"help": "how large a model", "choices": READER_SIZES})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N"})
    threads: int = field(default=1, metadata={"help": "CPU threads"})
    workers: int = field(default=0, metadata={"help": "processes that draw questions; 0: the training's own"})
    save_seconds: float = field(default=60.0, metadata={"help": "time between checkpoints"})
    evaluate: bool = field(default=True, metadata={"help": "measure the reader, write its card"})
    smoke: bool = field(default=False, metadata={"help": "a tiny run of under a minute"})

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but it is {value}.")
        for name in ("minutes", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, but it is {getattr(self, name)}.")
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, but it is {self.workers}.")
        if self.size not in READER_SIZES:
            raise ValueError(f"size must be one of {', '.join(READER_SIZES)}, not {self.size!r}.")
        _check_device(self.device)
        if not self.save_seconds >= 0:
            raise ValueError(f"save_seconds must not be negative, but it is {self.save_seconds}.")

    def tiny(self) -> ReaderSettings:
        """A smoke run, which takes neither the shipped reader's place nor a whole run's checkpoint."""
        cache = self.cache / "smoke"
        return replace(
            self,
            out=cache / "models" if self.out == Path("models") else self.out,
            cache=cache,
            size="tiny",
            steps=self.steps or 150,
            batch=min(self.batch, 32),
            evaluate=False,
        )


@dataclass(frozen=True)
class ExitSettings:
    """What `dsd-lab train exits` is asked for; ValueError, one sentence, on a value out of place.

    Without ``data`` it renders scenes and trains on the model's own replies to them, 64 a step at a
    rate of 3e-3; with ``data`` as the paper does, one conversation a step at 1e-4. Both for 10 epochs.
    """

    model: str = field(default="", metadata={"help": "model directory or hub id (default: the shipped target)"})
    data: Path | None = field(
        default=None, metadata={"help": "conversations, .jsonl or .json; none: scenes and the model's own replies"}
    )
    layers: str = field(default="all", metadata={"help": "layers with an exit: all, or 2,4"})
    rank: int | None = field(default=None, metadata={"help": "adapters' width (none: hidden/8, 32 or more)"})
    minutes: float | None = field(default=None, metadata={"help": "time for the training itself"})
    steps: int | None = field(default=None, metadata={"help": "steps instead of minutes"})
    epochs: float | None = field(default=None, metadata={"help": "epochs instead (with none of the three: 10)"})
    rate: float | None = field(default=None, metadata={"help": "learning rate (none: 1e-4 with --data, else 3e-3)"})
    batch: int | None = field(default=None, metadata={"help": "conversations a step (none: 1 with --data, else 64)"})
    seed: int = field(default=0, metadata={"help": "seed of everything random"})
    out: Path | None = field(default=None, metadata={"help": "folder (none: beside the model)"})
    cache: Path = field(default=Path(".cache/exits"), metadata={"help": "folder for scenes and checkpoints"})
    worlds: int = field(default=200, metadata={"help": "rooms to render, 16 pictures each"})
    held_out: int = field(default=400, metadata={"help": "conversations kept for the report"})
    context: int = field(default=1600, metadata={"help": "tokens of a conversation at most"})
    threads: int = field(default=2, metadata={"help": "CPU threads"})
    workers: int = field(default=2, metadata={"help": "processes that render"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N"})
    dtype: str = field(default="float32", metadata={"help": "precision of the backbone", "choices": DTYPES})

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank", "worlds", "held_out", "threads", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but it is {value}.")
        for name in ("minutes", "epochs", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, but it is {value}.")
        if self.context < 16:
            raise ValueError(f"context must be at least 16 tokens, but it is {self.context}.")
        if sum(v is not None for v in (self.minutes, self.steps, self.epochs)) > 1:
            raise ValueError("Give minutes, steps or epochs, only one of them.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")


@dataclass(frozen=True)
class PublishedCount:
    """A model of FSD's table 2: its exits, their parameters, and the share in percent."""

    exits: int
    parameters: float
    percent: float


PUBLISHED = {
    "qwen2-vl-7b": PublishedCount(27, 88e6, 1.02),
    "llama-2-7b": PublishedCount(31, 101e6, 1.48),
    "vicuna-13b": PublishedCount(39, 158e6, 1.20),
}
