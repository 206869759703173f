"""Pictures that a model meets when it acts itself, rolled out by parallel processes into resumable shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model

from dsd_lab.train.architecture import Size, build_model
from dsd_lab.train.data import save_shard, situation_of
from dsd_lab.train.rollouts import roll_out
from dsd_lab.train.stages import Report
from dsd_lab.workers import begin_worker
from dsd_lab.worlds.phrases import instructed
from dsd_lab.worlds.situations import Split, world_of
from dsd_ros.robot.sim.world import NoLayoutError, World

BLOCK = 48  # worlds rolled out side by side, and kept as one shard


def training_world(seed: int) -> World:
    """The world of a seed for a roll-out, situations mixed as in the pictures, asked for in many words."""
    return instructed(world_of(seed, situation_of(seed), Split.TRAINING))


def meet(
    folder: Path,
    model: Any,
    size: Size,
    tokenizer: Any,
    seeds: range,
    workers: int = 1,
    history: int = 0,
    report: Report | None = None,
    world: Callable[[int], World] = training_world,
) -> dict[str, Any]:
    """Roll a model out in the worlds of some seeds; shards already there are kept.

    The shards lie in `folder` as `data.load_frames` reads them, each run's pictures one behind the other.
    Processes of their own compute on the CPU. Returns shares: reached, collided, agreed (with the
    expert's actions), and of reached by situation.
    """
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    jobs = []
    for k in range(0, len(seeds), BLOCK):
        path = folder / f"shard{k // BLOCK:05d}"
        # The shard is written first, so that a note tells of a whole one.
        if not (notes / f"{path.name}.json").exists():
            jobs.append((path, list(seeds[k : k + BLOCK])))
    done = 0

    def tell(note: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(f"rolled out: {np.mean(note['reached']):.0%} reached", done / len(jobs))

    if min(len(jobs), workers) <= 1:
        for path, some in jobs:
            tell(_block(path, model, tokenizer, some, history, world))
    else:
        state = notes / "model.safetensors"
        save_model(model, str(state))
        text = tokenizer.to_str()
        with ProcessPoolExecutor(
            min(workers, len(jobs)), get_context("spawn"), begin_worker
        ) as pool:  # fmt: skip
            futures = [pool.submit(_in_process, path, state, size, text, some, history, world) for path, some in jobs]
            try:
                for future in as_completed(futures):
                    tell(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return _figures([json.loads(path.read_text()) for path in sorted(notes.glob("*.json"))])


def _in_process(
    path: Path, state: Path, size: Size, tokenizer: str, seeds: list[int], history: int,
    world: Callable[[int], World],
) -> dict[str, Any]:  # fmt: skip
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    model = build_model(size)
    load_model(model, str(state), device="cpu")
    return _block(path, model, Tokenizer.from_str(tokenizer), seeds, history, world)


def _block(
    path: Path, model: Any, tokenizer: Any, seeds: Sequence[int], history: int,
    world: Callable[[int], World],
) -> dict[str, Any]:  # fmt: skip
    worlds = [found for seed in seeds if (found := _world(world, seed)) is not None]
    result = roll_out(model, tokenizer, worlds, history=history).by_run()
    save_shard(path, result.images, result.labels)
    note = {
        "reached": result.reached, "collided": result.collided, "agreed": result.agreed,
        "situations": [one.situation for one in worlds],
    }  # fmt: skip
    target = path.parent / "notes" / f"{path.name}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(note))
    os.replace(part, target)
    return note


def _world(world: Callable[[int], World], seed: int) -> World | None:
    try:
        return world(seed)
    except NoLayoutError:
        return None


def _figures(notes: list[dict[str, Any]]) -> dict[str, Any]:
    every = {name: [v for note in notes for v in note[name]] for name in notes[0]}
    shares: dict[str, Any] = {name: float(np.mean(every[name])) for name in ("reached", "collided", "agreed")}
    shares["by_situation"] = {
        name: float(np.mean([r for r, s in zip(every["reached"], every["situations"], strict=True) if s == name]))
        for name in sorted(set(every["situations"]))
    }  # fmt: skip
    return shares
