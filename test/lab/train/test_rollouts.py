"""How runs of a model and of the expert end, and what their pictures are followed by."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dsd_lab.train import rollouts
from dsd_lab.train.architecture import SIZES, build_model
from dsd_lab.train.dagger import meet
from dsd_lab.train.data import load_frames
from dsd_lab.train.questions import Questions
from dsd_lab.train.rollouts import expert_run, roll_out
from dsd_lab.train.text import all_instructions, train_tokenizer
from dsd_lab.worlds.phrases import instructed
from dsd_lab.worlds.situations import Situation, Split, world_of

SEED = 1_000_001


@cache
def world(situation: Situation = Situation.PLAIN, seed: int = SEED):
    return instructed(world_of(seed, situation, Split.TRAINING))


@pytest.fixture(scope="module")
def tokenizer():
    torch.set_num_threads(1)
    return train_tokenizer(["The red chair is left. Action: stop", *all_instructions()[::50]])


class Script:
    """Says given replies in turn, whatever it is shown."""

    def __init__(self, tokenizer, texts: list[str]) -> None:
        self.texts, self.tokenizer = list(texts), tokenizer
        self.pictures: list[list[int]] = []

    def __call__(self, model, features, prompts, pictures=None, **rest) -> list[list[int]]:
        self.pictures += [list(some) for some in pictures]
        text = self.texts.pop(0)
        return [self.tokenizer.encode(text, add_special_tokens=False).ids for _ in prompts]


def said(monkeypatch, tokenizer, situation: Situation, texts: list[str], **rest):
    script = Script(tokenizer, texts)
    monkeypatch.setattr(rollouts, "greedy_replies", script)
    model = build_model(SIZES["small"][1])
    return roll_out(model, tokenizer, [world(situation)], noisy=False, **rest), script


def test_the_expert_reaches_what_is_there_and_looks_all_round_for_what_is_not() -> None:
    there = expert_run(world())
    assert there.reached == [True] and there.collided == [False] and there.ended == ["stopped"]
    assert there.lengths[0] > 0.3 and len(there.paths[0]) == there.steps[0]
    absent = expert_run(world(Situation.ABSENT))
    assert absent.ended == ["searched"] and absent.reached == [True]
    assert absent.steps == [8] and absent.lengths[0] < 0.05


def test_runs_end_by_stop_by_what_does_not_parse_and_by_a_full_round(monkeypatch, tokenizer) -> None:
    stop = ["The red chair is left. Action: stop"]
    early, _ = said(monkeypatch, tokenizer, Situation.PLAIN, stop)
    assert early.ended == ["stopped"] and early.reached == [False] and early.steps == [1]
    lost, _ = said(monkeypatch, tokenizer, Situation.PLAIN, ["chair chair"])
    assert lost.ended == ["unparsable"] and lost.reached == [False]
    look = ["No red chair in view. Action: turn left 45 degrees"] * 20
    gone, _ = said(monkeypatch, tokenizer, Situation.ABSENT, look)
    assert gone.ended == ["searched"] and gone.reached == [True] and gone.steps == [8]
    missed, _ = said(monkeypatch, tokenizer, Situation.PLAIN, look)
    assert missed.ended == ["searched"] and missed.reached == [False]
    # To stop without having seen it is right only where it is not there.
    nowhere = ["No red chair anywhere here, so I stop. Action: stop"]
    assert said(monkeypatch, tokenizer, Situation.ABSENT, nowhere)[0].reached == [True]


def test_a_history_shows_a_run_its_own_last_pictures(monkeypatch, tokenizer) -> None:
    look = ["No red chair in view. Action: turn left 45 degrees"] * 20
    run, script = said(monkeypatch, tokenizer, Situation.ABSENT, look, history=2, max_steps=4)
    assert script.pictures == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert run.ended == ["budget"] and run.reached == [False]
    assert [frame.before for frame in run.labels] == ["", *["turn left 45 degrees"] * 3]
    questions = Questions(tokenizer, run.by_run().labels, history=2)
    assert questions.before.tolist() == [-1, 0, 1, 2]


def test_met_pictures_are_kept_and_rolled_out_once(tokenizer, tmp_path: Path) -> None:
    size = SIZES["small"][1]
    model = build_model(size, 3)
    lines: list[str] = []
    seeds = range(SEED, SEED + 2)

    def roll(report=None):
        return meet(tmp_path, model, size, tokenizer, seeds, world=plain, report=report)

    figures = roll(lambda line, share: lines.append(line))
    assert figures["reached"] == 0.0 and figures["by_situation"] == {"plain": 0.0}
    assert len(lines) == 1 and len(load_frames(tmp_path).labels) >= 2
    again: list[str] = []
    assert roll(lambda line, share: again.append(line)) == figures and again == []
    note = json.loads((tmp_path / "notes" / "shard00000.json").read_text())
    assert len(note["reached"]) == 2 and np.mean(note["agreed"]) <= 1.0


def plain(seed: int):
    return world(Situation.PLAIN, seed)
