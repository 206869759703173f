"""The training on any device: no tensor is made without saying where, no step waits for a value.

No GPU is needed to see that. A mode watches every call of torch's from the training's own files: whatever makes
a tensor must be told a device, and whatever brings a value back to the host (or needs one, as a choice by
a mask does) must not be called in a step.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from dsd_lab import train as training
from dsd_lab.train.architecture import IMAGE_TOKENS, SIZES, build_model
from dsd_lab.train.data import FREE_WAYS, MODEL_HEIGHT, MODEL_WIDTH, Frame, Frames
from dsd_lab.train.devices import CPU, Feeder, autocast, torch_device
from dsd_lab.train.distil import teacher
from dsd_lab.train.goal_heads import GoalHeads
from dsd_lab.train.language_stage import cached_look, frozen_look, image_tokens, language_stage, live_look
from dsd_lab.train.questions import Mixer, Questions
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.stages import Descent, Stage, follow
from dsd_lab.train.text import all_instructions, prompt_ids, train_tokenizer
from dsd_lab.train.vision_stage import Heads, vision_stage

BIG, SMALL = SIZES["small"]
FOLDER = Path(training.__file__).parent
MAKERS = _device_constructors()
WAITERS = {
    getattr(torch.Tensor, name) for name in ("item", "tolist", "nonzero", "cpu", "__bool__", "__float__", "__int__")
} | {torch.nonzero, torch.unique, torch.masked_select, torch.Tensor.unique}


class Watched(TorchFunctionMode):
    """Collects what the training's own files should not have called."""

    def __init__(self, waiting: bool = False) -> None:
        super().__init__()
        self.waiting = waiting  # allowed
        self.found: list[str] = []
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        if Path(frame.f_code.co_filename).parent == FOLDER:
            self.calls += 1
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {func.__name__}"
            if func in MAKERS and kwargs.get("device") is None and "generator" not in kwargs:
                self.found.append(where)
            by_mask = func is torch.Tensor.__getitem__ and any(
                isinstance(part, torch.Tensor) and part.dtype == torch.bool
                for part in (args[1] if isinstance(args[1], tuple) else (args[1],))
            )
            if not self.waiting and (func in WAITERS or by_mask):
                self.found.append(where)
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def frames() -> Frames:
    things = [("chair", "red", 0.3, 1.0, 400), ("box", "blue", 0.7, 2.0, 300)]
    said = "The red chair is left; fine, the way is open. Action: forward 75 cm"
    labels = [Frame(n, (0.0, 0.0, 0.0), things, [("red chair", said)], free=[1.0] * FREE_WAYS) for n in range(6)]
    return Frames(np.zeros((6, MODEL_HEIGHT, MODEL_WIDTH, 3), np.uint8), labels)


@pytest.fixture(scope="module")
def mixer(frames: Frames) -> Mixer:
    said = [text for frame in frames.labels for _, text in frame.replies]
    tokenizer = train_tokenizer([*said, *all_instructions()[::20]])
    return Mixer(Questions(tokenizer, frames.labels), 6, seed=2, variants=4)


def stages(frames: Frames, mixer: Mixer) -> Iterator[Stage]:
    """Every kind of stage of the pair's training."""
    model, small = build_model(BIG), build_model(SMALL)
    goals, own = GoalHeads(BIG.width), GoalHeads(SMALL.width)
    tower, heads = model.model.visual, Heads(BIG.width)
    features = torch.zeros(6, IMAGE_TOKENS, BIG.width, dtype=torch.float16)
    yield vision_stage(tower, heads, frames, 4)
    yield language_stage("target", model, goals, frozen_look(tower, frames), mixer)
    yield language_stage("joint", model, goals, live_look(tower, heads, frames, 3), mixer)
    yield language_stage("alone", model, None, live_look(tower, None, frames, 3), mixer)
    seen = cached_look(features, torch.nn.Linear(BIG.width, SMALL.width))
    yield language_stage("draft", small, own, seen, mixer, teacher=teacher(model, features))


def test_every_stage_says_where_its_tensors_are_and_never_waits(frames, mixer) -> None:
    names = []
    for stage in stages(frames, mixer):
        descent = Descent(stage, CPU)
        batch = stage.draw(0, 0.5).to(CPU)
        with Watched() as watched:
            losses = descent.step(batch, 0, 0.5)
            for module, _ in stage.modules.values():
                follow(module, module, 0)
        assert watched.found == [] and watched.calls > 20
        assert all(bool(loss.isfinite()) for loss in losses)
        names.append(stage.name)
    assert names == ["vision", "target", "joint", "alone", "draft"]


def test_image_tokens_and_replies_say_where_their_tensors_are(frames, mixer) -> None:
    model = build_model(SMALL)
    prompt = prompt_ids(mixer.questions.tokenizer, "find the red chair")
    with Watched(waiting=True) as watched:  # one token after the other has to wait
        tokens = image_tokens(model.model.visual, frames.images[:2])
        greedy_replies(model, tokens, [prompt, prompt], max_tokens=3)
    assert watched.found == [] and watched.calls > 50


def test_the_watch_finds_what_it_looks_for(frames) -> None:
    # A function that the watch takes for one of the training's files.
    source = "def made(torch, x):\n    y = torch.zeros(2)\n    return y[x > 0], float(x[0])\n"
    space: dict[str, Any] = {}
    exec(compile(source, str(FOLDER / "made.py"), "exec"), space)
    with Watched() as watched:
        space["made"](torch, torch.ones(2))
    assert [line.split()[0] for line in watched.found] == ["made.py:2", "made.py:3", "made.py:3"]


def test_arrays_and_tensors_change_sides_in_one_place_only() -> None:
    """`from_numpy` gives tensors of the host's, `.numpy()` wants such: devices.py and batches.py do that."""
    pair = ("pair", "pair_models", "vision_stage", "language_stage", "goal_heads", "forward",
            "replies", "rollouts", "dagger", "distil", "stages", "questions", "exit_data")  # fmt: skip
    for name in pair:
        for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("numpy", "as_tensor"):
                raise AssertionError(f"{name}.py line {node.lineno} calls {node.attr}")
            if isinstance(node, ast.Attribute) and node.attr == "from_numpy":
                # Labels are made on the host and moved as a whole.
                assert name == "vision_stage", f"{name}.py line {node.lineno}"


def test_batches_drawn_ahead_are_those_drawn_in_turn(mixer: Mixer) -> None:
    shares = []

    def draw(step: int, share: float) -> Any:
        shares.append((step, share))
        return mixer.draw(step, 0.0)

    with Feeder(draw, lambda step: step / 20, CPU, ahead=4) as feeder:
        ahead = [feeder.batch(step) for step in range(3, 9)]
    assert sorted(shares)[:6] == [(step, step / 20) for step in range(3, 9)]
    for step, batch in enumerate(ahead, 3):
        now = mixer.draw(step, 0.0)
        assert all(torch.equal(value, getattr(now, name)) for name, value in vars(batch).items())


def test_a_device_that_is_not_there_is_refused() -> None:
    assert torch_device("cpu").type == "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ValueError, match=f"{count} GPUs are"):
        torch_device(f"cuda:{count}")


@pytest.mark.parametrize(
    "capabilities, dtype",
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx2": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_can(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    some = torch.ones(2, 2)
    with autocast(CPU):
        assert (some @ some).dtype == dtype
