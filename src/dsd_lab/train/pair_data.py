"""The pictures and the tokenizer of the pair's training, made once and kept in its cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dsd_lab.train.data import Frames, generate, load_frames
from dsd_lab.train.rollouts import MAX_STEPS
from dsd_lab.train.settings import TrainSettings
from dsd_lab.train.stages import Report
from dsd_lab.train.text import all_instructions, train_tokenizer
from dsd_lab.worlds.situations import Split

_PER_WORLD = 16


def render(settings: TrainSettings, report: Report) -> tuple[Frames, Frames]:
    """Training and validation pictures; those already in the cache are kept."""
    cache, made = settings.cache, [0]

    def count(n: int) -> None:
        made[0] += n
        report(f"rendered {made[0]} pictures", made[0] / (settings.worlds * _PER_WORLD))

    # Shards that are there are kept, so other rooms need a folder of their own.
    skip = settings.skip_worlds
    train = cache / (f"train-behind{skip}" if skip else "train")
    generate(train, Split.TRAINING, settings.worlds, settings.workers, _PER_WORLD, count, skip)
    generate(cache / "val", Split.VALIDATION, settings.validation_worlds, settings.workers, _PER_WORLD)
    # Adding them by copying would take twice the memory for a moment.
    met = settings.dagger_rounds * settings.dagger_worlds * MAX_STEPS
    return load_frames(train, room=met), load_frames(cache / "val")


def trained_tokenizer(cache: Path, frames: Frames, start: Path | None = None) -> Any:
    """The tokenizer of both models: the pair's in ``start``, or trained on replies and all instructions."""
    from tokenizers import Tokenizer

    if start is not None:
        return Tokenizer.from_file(str(start / "target" / "tokenizer.json"))
    path = cache / "tokenizer.json"
    if not path.exists():
        replies = [text for f in frames.labels[:20_000] for _, text in f.replies]
        part = path.with_suffix(".part")
        train_tokenizer(replies[::3] + all_instructions()).save(str(part))
        os.replace(part, path)
    return Tokenizer.from_file(str(path))
