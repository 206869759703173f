"""A model, or the expert, in the simulator's loop: figures, and DAgger's pictures.

DAgger: S. Ross, G. Gordon and D. Bagnell, "A Reduction of Imitation Learning and Structured
Prediction to No-Regret Online Learning", 2011: let the learner act, let the expert label what the
learner meets, and train on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsd_lab.train.data import Frame, apply_action, label, shared_offscreen, shrink
from dsd_lab.train.language_stage import image_tokens
from dsd_lab.train.questions import prompt_with_past
from dsd_lab.train.replies import greedy_replies
from dsd_lab.worlds.expert import View, reply
from dsd_lab.worlds.guide import SEARCH_TURNS, full_round
from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World

MAX_STEPS = 16  # of a run
NOT_HERE = "No "  # how a reply begins that does not see its goal


@dataclass
class Rollouts:
    """What happened in each run, and what was seen on the way with the expert's labels.

    A run is ended by the reply "stop" ("stopped"), by one without an action ("unparsable"), by a full round in
    which no reply saw the goal ("searched"), as navigation ends it, or by the number of steps ("budget").
    """

    images: list[np.ndarray] = field(default_factory=list)
    labels: list[Frame] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # the run that each picture is of
    agreed: list[bool] = field(default_factory=list)  # of each picture: the expert's action was taken
    reached: list[bool] = field(default_factory=list)
    collided: list[bool] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    paths: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def lengths(self) -> list[float]:
        """Metres of each run's path."""
        return [sum(math.dist(a, b) for a, b in zip(path, path[1:], strict=False)) for path in self.paths]

    def by_run(self) -> Rollouts:
        """The same with each run's pictures one behind the other."""
        order = sorted(range(len(self.images)), key=lambda n: (self.runs[n], n))
        return Rollouts(
            [self.images[n] for n in order], [self.labels[n] for n in order],
            [self.runs[n] for n in order], [self.agreed[n] for n in order],
            self.reached, self.collided, self.steps, self.ended, self.paths,
        )  # fmt: skip


def view_of(simulator: Simulator) -> View:
    """What the camera shows: by geometry, which is faster, where a world has a look of its own."""
    if simulator.world.look is None:
        return View.of(simulator)
    return View.at(simulator.world, simulator.pose)


class _Run:
    """One run that goes on until something ends it."""

    def __init__(self, world: World, offscreen: Offscreen, noisy: bool) -> None:
        self.world = world
        self.simulator = Simulator(world, offscreen=offscreen)
        self.rng = np.random.default_rng([world.seed, 40])
        self.noise = self.rng if noisy else None
        self.path = [world.start[:2]]
        self.actions: list[str] = []
        self.seen: list[bool] = []  # by the replies
        self.truly_seen: list[bool] = []
        self.pictures: list[int] = []
        self.steps, self.ended, self.gone = 0, "budget", False

    def look(self, history: int) -> Frame:
        """The expert's labels of what is in view; of a full round only where a prompt can show one."""
        view = view_of(self.simulator)
        self.truly_seen.append(view.index_of(self.world.goal) is not None)
        round_ = history >= SEARCH_TURNS and full_round(self.actions, self.truly_seen)
        frame = label(self.simulator, view, self.rng, self.world.goal, round_)
        frame.before = self.actions[-1] if self.actions else ""
        return frame

    def act(self, text: str) -> str:
        """Carry out a reply; returns its action, "" when it has none."""
        self.steps += 1
        try:
            action = format_action(parse_reply(text).action)
        except UnparsableReply:
            self.ended = "unparsable"
            return ""
        self.seen.append(not text.startswith(NOT_HERE))
        self.gone = not self.seen[-1]
        if full_round(self.actions, self.seen):
            self.ended = "searched"
        elif apply_action(self.simulator, f"Action: {action}", self.noise):
            self.actions.append(action)
            self.path.append(self.simulator.pose[:2])
        else:
            self.ended = "stopped"
        return action

    @property
    def reached(self) -> bool:
        """Whether the run ended at its goal, or in finding that there is none where there is none."""
        if self.world.target_index is None:
            return self.ended in ("searched", "stopped") and self.gone
        return self.ended == "stopped" and self.simulator.reached()

    @property
    def collided(self) -> bool:
        return self.simulator.collisions > 0


def roll_out(
    model: Any,
    tokenizer: Any,
    worlds: Sequence[World],
    max_steps: int = MAX_STEPS,
    noisy: bool = True,
    history: int = 0,
) -> Rollouts:
    """Run a model in some worlds, each until something ends it; where the model is, there it computes.

    `history`: how many earlier pictures its prompts show at most.
    """
    result = Rollouts()
    offscreen = shared_offscreen()
    runs = [_Run(world, offscreen, noisy) for world in worlds]
    tokens: torch.Tensor | None = None
    for _ in range(max_steps):
        active = [run for run in runs if run.ended == "budget"]
        if not active:
            break
        images, prompts, shown = [], [], []
        for run in active:
            result.labels.append(run.look(history))
            result.runs.append(runs.index(run))
            run.pictures.append(len(result.images) + len(images))
            images.append(shrink(run.simulator.render()))
            past = run.actions[-history:] if history else []
            prompts.append(prompt_with_past(tokenizer, run.world.instruction, past))
            shown.append(run.pictures[-1 - len(past) :])
        found = image_tokens(model.model.visual, np.stack(images))
        tokens = found if tokens is None else torch.cat([tokens, found])
        replies = greedy_replies(model, tokens, prompts, pictures=shown)
        result.images += images
        for run, ids in zip(active, replies, strict=True):
            action = run.act(tokenizer.decode(ids, skip_special_tokens=True))
            wanted = result.labels[run.pictures[-1]].replies[0][1]
            result.agreed.append(wanted.endswith(f"Action: {action}"))
    result.paths = [run.path for run in runs]
    result.reached = [run.reached for run in runs]
    result.collided = [run.collided for run in runs]
    result.steps = [run.steps for run in runs]
    result.ended = [run.ended for run in runs]
    offscreen.close()
    return result


def expert_run(world: World, offscreen: Offscreen | None = None, max_steps: int = 40) -> Rollouts:
    """The expert's own run in a world, carried out exactly, without pictures: a `Rollouts` of one run."""
    shared = shared_offscreen() if offscreen is None else offscreen
    run = _Run(world, shared, noisy=False)
    while run.ended == "budget" and run.steps < max_steps:
        view = view_of(run.simulator)
        seen = [*run.seen, view.index_of(world.goal) is not None]
        run.act(reply(view, world.goal, full_round(run.actions, seen)))
    if offscreen is None:
        shared.close()
    return Rollouts(
        reached=[run.reached], collided=[run.collided], steps=[run.steps], ended=[run.ended],
        paths=[run.path],
    )  # fmt: skip
