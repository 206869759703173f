# SPDX-License-Identifier: Apache-2.0
"""Runs of a model in the simulator, for DAgger's pictures and for the evaluation's figures.

DAgger (S. Ross, G. Gordon and D. Bagnell, 2011): the learner acts, the expert labels what it meets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model

from dsd_lab.train.data import apply_action, label, shared_offscreen, situation_of, view_of
from dsd_lab.train.forward import image_tokens
from dsd_lab.train.frames import Frame, in_processes, save_shard, shrink, write_json
from dsd_lab.train.model import Size, build_model
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.stages import Report
from dsd_lab.train.tokenizer import prompt_ids
from dsd_lab.worlds.expert import reply
from dsd_lab.worlds.guide import View, full_round
from dsd_lab.worlds.phrases import instructed
from dsd_lab.worlds.situations import Split, world_of
from dsd_lab.worlds.truth import claims_of
from dsd_ros.navigation.run.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import NoLayoutError, World

MAX_STEPS = 25
DAGGER_STEPS = 16
BLOCK = 48  # worlds rolled out side by side, and kept as one shard
_SIDE_BY_SIDE = 100  # rooms at once: replies to prompts of equal length are computed together

Answer = Callable[[list[np.ndarray], list[str]], list[str]]  # pictures and instructions -> replies


@dataclass
class Run:
    """One run: where the robot was, what was said at each step, and how it ended.

    ended: "stopped" by itself; "searched", a full turn in which no reply saw the goal; "unparsable"; or the step
    "budget". reached: it stopped within 0.6 m of the goal and touched nothing; without a goal, it said so or searched.
    """

    world: World
    path: list[tuple[float, float]]
    replies: list[str] = field(default_factory=list)
    expert: list[str] = field(default_factory=list)
    reached: bool = False
    collided: bool = False
    ended: str = "budget"
    images: list[np.ndarray] = field(default_factory=list)  # with labels: as the models see them
    frames: list[Frame] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Length of the path in metres."""
        return sum(math.dist(a, b) for a, b in zip(self.path, self.path[1:], strict=False))

    @property
    def steps(self) -> int:
        return len(self.replies)

    @property
    def agreed(self) -> list[bool]:
        """Whether each action was the expert's."""
        return [action_of(said) == action_of(wanted) for said, wanted in zip(self.replies, self.expert, strict=True)]


def action_of(text: str) -> str:
    """The action of a reply, "" where it does not parse."""
    try:
        return format_action(parse_reply(text).action)
    except UnparsableReply:
        return ""


class _Driver:
    """A robot on its way through one room."""

    def __init__(self, world: World, offscreen: Offscreen | None = None, noisy: bool = False) -> None:
        self.run = Run(world, [world.start[:2]])
        self.simulator = Simulator(world, offscreen=offscreen)
        self.rng = np.random.default_rng([world.seed, 40])
        self.noise = self.rng if noisy else None
        self.actions: list[str] = []
        self.said: list[bool] = []  # whether each reply saw the goal
        self.seen: list[bool] = []  # whether the goal was in view
        self.going = True

    def look(self, labelled: bool) -> np.ndarray:
        """The camera's picture; the expert's reply to it is noted."""
        world, view, picture = self.run.world, view_of(self.simulator), self.simulator.render()
        if labelled:
            self.run.frames.append(label(view, self.rng, world.goal))
            self.run.images.append(shrink(picture))
            self.run.expert.append(self.run.frames[-1].replies[0][1])
        else:
            self.run.expert.append(self.expert(view))
        return picture

    def expert(self, view: View) -> str:
        """The expert's reply, which ends a search after a full turn."""
        goal = self.run.world.goal
        self.seen.append(view.index_of(goal) is not None)
        return reply(view, goal, full_round(self.actions, self.seen))

    def act(self, text: str) -> None:
        """Carry out a reply."""
        action = action_of(text)
        self.run.replies.append(text)
        self.said.append(claims_of(text).seen)
        if not action:
            self.end("unparsable")
        elif full_round(self.actions, self.said):
            self.end("searched")
        elif apply_action(self.simulator, f"Action: {action}", self.noise):
            self.actions.append(action)
            self.run.path.append(self.simulator.pose[:2])
        else:
            self.end("stopped")

    def end(self, how: str) -> None:
        self.run.ended, self.going = how, False

    def finish(self) -> Run:
        """The run with its verdicts."""
        run = self.run
        run.collided = self.simulator.collisions > 0
        if run.world.target_index is None:
            denied = bool(self.said) and not self.said[-1]
            run.reached = run.ended in ("stopped", "searched") and denied and not run.collided
        else:
            run.reached = run.ended == "stopped" and self.simulator.reached()
        return run


def drive(
    answer: Answer,
    worlds: Sequence[World],
    max_steps: int = MAX_STEPS,
    noisy: bool = False,
    labelled: bool = False,
    report: Callable[[float], None] | None = None,
) -> list[Run]:
    """Run a model in some rooms; equal arguments give equal runs unless noisy. `labelled`: keep pictures and labels."""
    runs: list[Run] = []
    with closing(shared_offscreen()) as offscreen:
        for first in range(0, len(worlds), _SIDE_BY_SIDE):
            drivers = [_Driver(world, offscreen, noisy) for world in worlds[first : first + _SIDE_BY_SIDE]]
            for step in range(max_steps):
                active = [driver for driver in drivers if driver.going]
                if not active:
                    break
                if report is not None:
                    report((first + len(drivers) * step / max_steps) / len(worlds))
                pictures = [driver.look(labelled) for driver in active]
                texts = answer(pictures, [driver.run.world.instruction for driver in active])
                for driver, text in zip(active, texts, strict=True):
                    driver.act(text)
            runs += [driver.finish() for driver in drivers]
    return runs


def expert_run(world: World, max_steps: int = 40) -> Run:
    """The expert's own run in a room, by geometry, without pictures."""
    driver = _Driver(world)
    while driver.going and driver.run.steps < max_steps:
        said = driver.expert(View.at(world, driver.simulator.pose))
        driver.run.expert.append(said)
        driver.act(said)
    return driver.finish()


def answers_of(model: Any, tokenizer: Any, pictures: list[np.ndarray], instructions: list[str]) -> list[str]:
    """The answers of a model of the pair's shape, asked about many pictures at once."""
    features = image_tokens(model.model.visual, np.stack([shrink(picture) for picture in pictures]))
    replies = greedy_replies(model, features, prompt_ids(tokenizer, instructions))
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in replies]


def training_world(seed: int) -> World:
    """The training split's world of a seed for a roll-out, situations mixed, asked for in many wordings."""
    return instructed(world_of(seed, situation_of(seed), Split.TRAINING))


def meet(
    folder: Path,
    model: Any,
    size: Size,
    tokenizer: Any,
    seeds: Sequence[int],
    workers: int = 1,
    report: Report | None = None,
    world: Callable[[int], World] = training_world,
) -> dict[str, Any]:
    """Roll a model out in the worlds of some seeds, in processes; existing shards are kept. Shares reached etc."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    weights = notes / "model.safetensors"
    jobs = []
    for k in range(0, len(seeds), BLOCK):
        path = folder / f"shard{k // BLOCK:05d}"
        if not (notes / f"{path.name}.json").exists():  # written after its shard
            jobs.append((path, weights, size, tokenizer.to_str(), list(seeds[k : k + BLOCK]), world))
    if jobs:
        save_model(model, str(weights))
    count = 0

    def done(note: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if report is not None:
            report(f"rolled out: {np.mean(note['reached']):.0%} reached", count / len(jobs))

    threads = torch.get_num_threads()  # _roll_out uses one
    in_processes(_roll_out, jobs, workers, done)
    torch.set_num_threads(threads)
    found = [json.loads(path.read_text()) for path in sorted(notes.glob("*.json"))]
    every = {name: [v for note in found for v in note[name]] for name in found[0]}
    by_situation = {
        name: float(np.mean([r for r, s in zip(every["reached"], every["situations"], strict=True) if s == name]))
        for name in sorted(set(every["situations"]))
    }
    return {name: float(np.mean(every[name])) for name in ("reached", "collided", "agreed")} | {
        "by_situation": by_situation
    }


def _roll_out(
    path: Path, weights: Path, size: Size, tokenizer: str, seeds: list[int], world: Callable[[int], World]
) -> dict[str, Any]:
    """The runs of one shard, as a process of its own makes them."""
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    model = build_model(size)
    load_model(model, str(weights), device="cpu")
    worlds = []
    for seed in seeds:
        try:
            worlds.append(world(seed))
        except NoLayoutError:
            continue
    answer = partial(answers_of, model, Tokenizer.from_str(tokenizer))
    runs = drive(answer, worlds, DAGGER_STEPS, noisy=True, labelled=True)
    save_shard(path, [image for run in runs for image in run.images], [frame for run in runs for frame in run.frames])
    note = {
        "reached": [run.reached for run in runs], "collided": [run.collided for run in runs],
        "agreed": [agreed for run in runs for agreed in run.agreed],
        "situations": [run.world.situation for run in runs],
    }  # fmt: skip
    write_json(path.parent / "notes" / f"{path.name}.json", note)
    return note
