# SPDX-License-Identifier: Apache-2.0
"""The pair under models/: there, documented, loadable, and able to find the silver bottle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsd_lab.pair.figures import acceptance_figures, accepted
from dsd_lab.pair.scenes import DEMO_INSTRUCTION, DEMO_SEED, held_out_scenes
from dsd_lab.train.replies import Speaker
from dsd_lab.train.runs import action_of, drive
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, load_model

MODELS = Path(__file__).parents[3] / "models"
PAIR = ("target", "draft")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_directories_are_whole_small_and_share_a_tokenizer() -> None:
    for name in PAIR:
        card = (MODELS / name / "README.md").read_text()
        assert "actions right" in card and "runs that reach the target" in card
        assert (MODELS / name / "model.safetensors").stat().st_size < 20e6
    tokenizers = [(MODELS / name / "tokenizer.json").read_bytes() for name in PAIR]
    assert tokenizers[0] == tokenizers[1]


def test_the_targets_exits_fit_it_and_predict_its_replies() -> None:
    model = load_model(ModelSettings(path=MODELS / "target"))
    assert model.exits is not None and model.exits.layers == tuple(range(1, model.num_layers))
    assert "## Early exits" in (MODELS / "target" / "README.md").read_text()
    images, labels = held_out_scenes(6)
    right = dict.fromkeys(model.exits.layers, 0)
    tokens = 0
    for image, frame in zip(images, labels, strict=True):
        sequence = model.prefill(image, f"find the {frame.replies[0][0]}")
        while len(sequence.tokens) < 24:
            foretold: dict[int, int] = {}

            def note(index: int, hidden: torch.Tensor, said: dict[int, int] = foretold) -> None:
                if index + 1 in right:
                    said[index + 1] = int(model.exits.logits(model, index + 1, hidden)[-1].argmax())

            token = int(sequence.verify([], note)[-1].argmax())
            sequence.append([token])
            tokens += 1
            for layer, guess in foretold.items():
                right[layer] += guess == token
            if token in model.eos_token_ids:
                break
    shares = [right[layer] / tokens for layer in model.exits.layers]
    assert min(shares) > 0.8 and shares[-1] > 0.92, shares


def test_most_actions_are_right_and_the_draft_helps() -> None:
    images, labels = held_out_scenes(40)
    target, draft = (Speaker.load(ModelSettings(path=MODELS / name)) for name in PAIR)
    asked = [f"find the {frame.replies[0][0]}" for frame in labels]
    replies = target.replies(images, asked)
    right = [
        action_of(target.model.decode_text(r)) == action_of(f.replies[0][1])
        for r, f in zip(replies, labels, strict=True)
    ]
    assert np.mean(right) > 0.9
    figures = acceptance_figures(accepted(draft.followed(images, asked, replies), replies, 4))
    assert 0.7 < figures["acceptance"]["value"] < 0.95 and figures["tokens_per_round"]["value"] > 3.5


def test_the_demo_finds_the_silver_bottle() -> None:
    target = Speaker.load(ModelSettings(path=MODELS / "target"))
    (run,) = drive(target.answer, [World.from_seed(DEMO_SEED, DEMO_INSTRUCTION)])
    assert run.reached and not run.collided
