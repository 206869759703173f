"""What earlier pictures in the prompt cost and change, with the shipped pair or another.

``python -m dsd_lab.bench.history report.json`` walks through rooms that no training saw:
eight actions at random, then the expert's way. Each picture of that way is decoded with its last K steps in front.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_lab.bench.overhead import machine
from dsd_lab.pair.pair import action_of
from dsd_lab.train.data import TEST_SEEDS, apply_action, reply, shared_offscreen
from dsd_lab.worlds.expert import View
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.paths import models_directory
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.local import LocalChannel
from dsd_ros.wire.messages import MAX_HISTORY, Message, Observation
from dsd_ros.wire.pictures import encode_picture

FRAMES = (0, 1, 2, 4, 8)
_AROUND = ("turn left 30 degrees", "turn right 15 degrees", "forward 25 cm", "turn left 45 degrees")
_LONGEST = 25


class Step(NamedTuple):
    """A picture (height, width, 3) uint8 RGB, what is asked, what was done behind it, and if it is measured."""

    image: np.ndarray
    instruction: str
    action: str
    measured: bool


def walks(pictures: int) -> list[list[Step]]:
    """As many walks as give that many pictures on the expert's way, each behind eight steps or more."""
    found: list[list[Step]] = []
    offscreen = shared_offscreen()
    try:
        for seed in TEST_SEEDS:
            world, rng = World.from_seed(seed), np.random.default_rng([seed, 70])
            steps: list[Step] = []
            with Simulator(world, offscreen=offscreen) as simulator:
                for number in range(_LONGEST):
                    image, on_way = simulator.render(), number >= MAX_HISTORY
                    action = str(rng.choice(_AROUND))
                    if on_way:
                        action = action_of(reply(View.of(simulator), world.target.name))
                    steps.append(Step(image, world.instruction, action, on_way))
                    if not apply_action(simulator, f"Action: {action}", None):
                        break
            found.append(steps)
            if sum(step.measured for walk in found for step in walk) >= pictures:
                return found
    finally:
        offscreen.close()
    raise ValueError(f"there are no {pictures} pictures on held-out ways; ask for fewer")


class _Counting(LocalChannel):
    """Keeps the size of the observation sent last, bytes."""

    observation = 0

    def send(self, message: Message) -> None:
        before = self.bytes_up
        super().send(message)
        if isinstance(message, Observation):
            self.observation = self.bytes_up - before


def _measured(walk: list[Step], frames: int) -> Iterator[tuple[Step, list[tuple[np.ndarray, str]]]]:
    """The steps that count, each with the last ``frames`` in front of it."""
    for number, step in enumerate(walk):
        if step.measured:
            past = walk[max(0, number - frames) : number]
            yield step, [(one.image, one.action) for one in past]


def _first(walk: list[Step]) -> Step:
    return next(step for step in walk if step.measured)


def measure(
    draft: VisionLanguageModel, target: VisionLanguageModel, found: list[list[Step]], frames: int
) -> dict[str, Any]:
    """Walk once with the last ``frames`` steps in every prompt, in process, greedily."""
    prefill: dict[str, list[float]] = {"draft": [], "target": []}
    sent, anew, tau, prompt, right, parsed = [], [], [], [], [], []
    with VerifierEngine(target) as engine, _Counting(engine) as channel:
        for walk in found:
            with EdgeSession(channel, draft, DecodeSettings(mode="dsd", max_tokens=64)) as session:
                for step, past in _measured(walk, frames):
                    said = session.decode(step.image, step.instruction, history=past)
                    pictures = sum(len(encode_picture(one)) for one, _ in past)
                    action = action_of(said.text)
                    sent.append(channel.observation)
                    # The first of a walk brings them all.
                    anew.append(sent[-1] + (pictures if step is not _first(walk) else 0))
                    tau.append(said.tau)
                    right.append(action == step.action)
                    parsed.append(bool(action))
    for name, model in (("draft", draft), ("target", target)):
        for walk in found:
            for step, past in _measured(walk, frames):
                began = time.perf_counter()
                sequence = model.prefill(step.image, step.instruction, past)
                if step is not _first(walk):  # of the others all but the newest has been looked at
                    prefill[name].append(time.perf_counter() - began)
                    prompt.append(sequence.prompt_length)
    return {
        "frames": frames,
        "pictures": len(right),
        "prompt_tokens": statistics.median(prompt),
        "draft_prefill_ms": _quartiles(prefill["draft"]),
        "target_prefill_ms": _quartiles(prefill["target"]),
        "actions_right": statistics.mean(right),
        "actions_parsed": statistics.mean(parsed),
        "tokens_per_round": statistics.mean(tau),
        "observation_bytes": statistics.median(sent),
        "observation_bytes_if_all_were_sent": statistics.median(anew),
    }


def _quartiles(seconds: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile, ms."""
    return [round(1e3 * value, 2) for value in statistics.quantiles(seconds, n=4)]


def main() -> None:
    """Command line: where the report goes, and perhaps how many pictures."""
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m dsd_lab.bench.history history.json [pictures]")
    torch.set_num_threads(1)
    found = walks(int(sys.argv[2]) if len(sys.argv) == 3 else 50)
    models = [load_model(ModelSettings(str(models_directory() / role))) for role in ("draft", "target")]
    rows = [measure(models[0], models[1], found, frames) for frames in FRAMES]
    report = {"machine": machine(), "threads": 1, "frames": rows}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
