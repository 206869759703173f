"""The pair under models/: there, documented, loadable, and able to find the silver bottle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsd_lab.pair.pair import DEMO_INSTRUCTION, DEMO_SEED, action_of, held_out_scenes, load_plain
from dsd_lab.train.language_stage import image_tokens
from dsd_lab.train.replies import acceptance, followed, greedy_replies
from dsd_lab.train.rollouts import roll_out
from dsd_lab.train.text import prompt_ids
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


def test_the_targets_exits_fit_it_and_foretell_its_replies() -> None:
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


@pytest.mark.parametrize("name", PAIR)
def test_the_vlm_room_says_what_training_saw(name: str) -> None:
    images, labels = held_out_scenes(6)
    model = load_model(ModelSettings(path=MODELS / name))
    plain, tokenizer = load_plain(MODELS / name)
    goals = [frame.replies[0][0] for frame in labels]
    prompts = [prompt_ids(tokenizer, f"find the {goal}") for goal in goals]
    expected = greedy_replies(plain, image_tokens(plain.model.visual, images), prompts)
    same = 0
    for image, goal, reply in zip(images, goals, expected, strict=True):
        sequence = model.prefill(image, f"find the {goal}")
        said: list[int] = []
        while len(said) < 64 and not (said and said[-1] in model.eos_token_ids):
            said.append(int(np.argmax(sequence.next_logits())))
            sequence.append(said[-1:])
        same += said == reply
        assert action_of(model.decode_text(said))
    assert same >= 5  # rounding may tip one near-tie


def test_most_actions_are_right_and_the_draft_helps() -> None:
    images, labels = held_out_scenes(60)
    plain, tokenizer = load_plain(MODELS / "target")
    small, _ = load_plain(MODELS / "draft")
    prompts = [prompt_ids(tokenizer, f"find the {f.replies[0][0]}") for f in labels]
    replies = greedy_replies(plain, image_tokens(plain.model.visual, images), prompts)
    said = [action_of(tokenizer.decode(r, skip_special_tokens=True)) for r in replies]
    right = [a == action_of(f.replies[0][1]) for a, f in zip(said, labels, strict=True)]
    assert np.mean(right) > 0.75
    guesses = followed(small, image_tokens(small.model.visual, images), prompts, replies)
    assert 0.45 < acceptance(guesses, replies)[0] < 0.95


def test_the_demo_finds_the_silver_bottle() -> None:
    plain, tokenizer = load_plain(MODELS / "target")
    world = World.from_seed(DEMO_SEED, DEMO_INSTRUCTION)
    run = roll_out(plain, tokenizer, [world], max_steps=25, noisy=False)
    assert run.reached == [True] and run.collided == [False]
