"""The model in the simulator's loop, many worlds at once: figures, and DAgger's pictures.

DAgger: S. Ross, G. Gordon and D. Bagnell, "A Reduction of Imitation Learning and Structured
Prediction to No-Regret Online Learning", 2011: let the learner act, let the expert label what the
learner meets, and train on both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.robot.simulator import Simulator
from dsd_ros.robot.world import World

from .data import Frame, apply_action, label, shared_offscreen, shrink
from .expert import View
from .language_stage import image_tokens
from .replies import greedy_replies
from .text import prompt_ids


@dataclass
class Rollouts:
    """What happened, and what was seen on the way with the expert's labels."""

    images: list[np.ndarray] = field(default_factory=list)
    labels: list[Frame] = field(default_factory=list)
    reached: list[bool] = field(default_factory=list)
    collided: list[bool] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)  # the model's action was the expert's
    paths: list[list[tuple[float, float]]] = field(default_factory=list)


def roll_out(
    model: Any, tokenizer: Any, worlds: list[World], max_steps: int = 16, noisy: bool = True
) -> Rollouts:
    """Run a model in some worlds until it stops; a reply that does not parse ends a run, too."""
    result = Rollouts()
    offscreen = shared_offscreen()
    simulators = [Simulator(world, offscreen=offscreen) for world in worlds]
    generators = [np.random.default_rng([world.seed, 40]) for world in worlds]
    active = list(range(len(worlds)))
    result.paths = [[world.start[:2]] for world in worlds]
    taken = [0] * len(worlds)
    for _ in range(max_steps):
        if not active:
            break
        images, frames, prompts = [], [], []
        for n in active:
            own = worlds[n].target.name
            frames.append(label(simulators[n], View.of(simulators[n]), generators[n], own))
            images.append(shrink(simulators[n].render()))
            prompts.append(prompt_ids(tokenizer, worlds[n].instruction))
        tokens = image_tokens(model.model.visual, np.stack(images))
        replies = greedy_replies(model, tokens, prompts)
        result.images += images
        result.labels += frames
        still = []
        for n, ids, frame in zip(active, replies, frames, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            taken[n] += 1
            try:
                action = format_action(parse_reply(text).action)
            except UnparsableReply:
                action = ""
            result.agreed.append(frame.replies[0][1].endswith(f"Action: {action}"))
            noise = generators[n] if noisy else None
            if action and apply_action(simulators[n], f"Action: {action}", noise):
                still.append(n)
                result.paths[n].append(simulators[n].pose[:2])
        active = still
    # Who has not said stop by then has not arrived.
    result.reached = [s.reached() and n not in active for n, s in enumerate(simulators)]
    result.collided = [s.collisions > 0 for s in simulators]
    result.steps = taken
    offscreen.close()
    return result
