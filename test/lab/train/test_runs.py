# SPDX-License-Identifier: Apache-2.0
"""How runs of a model and of the expert end, and what DAgger keeps of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dsd_lab.train.frames import load_frames
from dsd_lab.train.model import SIZES, build_model
from dsd_lab.train.runs import drive, expert_run, meet
from dsd_lab.train.tokenizer import train_tokenizer
from dsd_lab.worlds.phrases import all_instructions, instructed
from dsd_lab.worlds.situations import Situation, Split, world_of

SEED = 1_000_001
LOOK = "No red chair in view. Action: turn left 45 degrees"
NOWHERE = "No red chair anywhere here, so I stop. Action: stop"


@cache
def world(situation: Situation = Situation.PLAIN, seed: int = SEED):
    return instructed(world_of(seed, situation, Split.TRAINING))


def said(text: str, situation: Situation = Situation.PLAIN, **rest):
    """A run of a model that says the same to every picture."""
    return drive(lambda pictures, instructions: [text] * len(pictures), [world(situation)], **rest)[0]


def test_the_expert_reaches_what_is_there_and_looks_all_round_for_what_is_not() -> None:
    there = expert_run(world())
    assert (there.reached, there.collided, there.ended) == (True, False, "stopped")
    assert there.length > 0.3 and len(there.path) == there.steps
    absent = expert_run(world(Situation.ABSENT))
    assert (absent.ended, absent.reached, absent.steps) == ("searched", True, 8) and absent.length < 0.05


@pytest.mark.parametrize(
    ("text", "situation", "end"),
    [
        ("The red chair is left. Action: stop", Situation.PLAIN, ("stopped", False, 1)),
        ("chair chair", Situation.PLAIN, ("unparsable", False, 1)),
        (LOOK, Situation.ABSENT, ("searched", True, 8)),
        (LOOK, Situation.PLAIN, ("searched", False, 8)),
        (NOWHERE, Situation.ABSENT, ("stopped", True, 1)),  # right only where the goal is not there
        (NOWHERE, Situation.PLAIN, ("stopped", False, 1)),
    ],
)
def test_runs_end_by_stopping_by_what_does_not_parse_and_by_a_full_turn(text, situation, end) -> None:
    run = said(text, situation)
    assert (run.ended, run.reached, run.steps) == end
    if (text, situation) == (LOOK, Situation.ABSENT):
        assert run.expert[0].startswith("No ") and run.expert[-1].endswith("so I stop. Action: stop")


def test_a_labelled_run_keeps_its_pictures_and_ends_at_its_budget() -> None:
    run = said("The red chair is left. Action: turn left 15 degrees", max_steps=3, labelled=True, noisy=True)
    assert (run.ended, run.reached, run.steps) == ("budget", False, 3)
    assert len(run.images) == len(run.frames) == 3 and run.images[0].shape == (168, 252, 3)
    assert run.expert == [frame.replies[0][1] for frame in run.frames]


def test_met_pictures_are_kept_and_rolled_out_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    size = SIZES["small"][1]
    tokenizer = train_tokenizer(["The red chair is left. Action: stop", *all_instructions()[::50]])
    lines: list[str] = []

    def roll():
        seeds = [SEED, SEED + 1]
        return meet(
            tmp_path, build_model(size, 3), size, tokenizer, seeds, report=lambda line, share: lines.append(line)
        )

    figures = roll()
    assert figures["reached"] == 0.0 and len(lines) == 1 and len(load_frames(tmp_path).labels) >= 2
    assert roll() == figures and len(lines) == 1
    note = json.loads((tmp_path / "notes" / "shard00000.json").read_text())
    assert len(note["reached"]) == 2 and np.mean(note["agreed"]) <= 1.0
