"""A training that goes on from a trained pair has its weights, and keeps what it can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.killed_run import tiny

from dsd_ros.paths import models_directory
from dsd_ros.training.architecture import DRAFT, SIZES, TARGET, build_model
from dsd_ros.training.data import MODEL_HEIGHT, MODEL_WIDTH
from dsd_ros.training.forward import tower_forward
from dsd_ros.training.pair import TrainSettings, train_pair
from dsd_ros.training.pair_models import fold, load_start, unfold
from dsd_ros.vlm.loading import quiet_transformers

SHIPPED = models_directory()


def test_the_pairs_weights_are_taken_and_the_drafts_projection_is_found_again() -> None:
    target, draft = build_model(TARGET), build_model(DRAFT)
    assert load_start(target, SHIPPED / "target") != load_start(draft, SHIPPED / "draft")
    before = {key: value.clone() for key, value in draft.model.visual.state_dict().items()}
    fold(draft, target.model.visual, unfold(draft, target.model.visual))
    after = draft.model.visual.state_dict()
    assert all(torch.allclose(before[key], after[key], atol=1e-3) for key in before)


def test_a_deeper_tower_begins_where_the_shallower_one_is(tmp_path: Path) -> None:
    small = SIZES["small"][0]
    shallow, deep = build_model(small, 1), build_model(replace(small, tower_layers=5), 2)
    with quiet_transformers():
        shallow.save_pretrained(tmp_path)
    load_start(deep, tmp_path)
    pictures = torch.randint(256, (2, MODEL_HEIGHT, MODEL_WIDTH, 3), dtype=torch.uint8)
    before, after = (tower_forward(m.model.visual, pictures) for m in (shallow, deep))
    assert torch.allclose(before, after, atol=1e-5)
    after.sum().backward()
    for block in deep.model.visual.blocks:  # the new ones can be learned
        assert block.attn.proj.weight.grad.abs().max() > 0
        assert block.mlp.fc2.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match="of another size"):
        deep.save_pretrained(tmp_path)
        load_start(shallow, tmp_path)


def test_what_cannot_be_gone_on_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no .*model.safetensors to go on from"):
        load_start(build_model(DRAFT), tmp_path)
    with pytest.raises(ValueError, match="of another size"):
        load_start(build_model(SIZES["small"][0]), SHIPPED / "target")
    with pytest.raises(ValueError, match="leave out start, or smoke"):
        train_pair(TrainSettings(smoke=True, start=SHIPPED, cache=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_run_begins_where_the_pair_is(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    steps = {"vision_steps": 1, "language_steps": 1, "joint_steps": 1, "draft_steps": 1}
    steps |= {"dagger_rounds": 0, "draft_worlds": 0, "size": "base", "batch": 16}
    figures = train_pair(tiny(tmp_path, start=SHIPPED, **steps))
    # A step from nothing has none right of the expert's tokens, and a draft no more than a quarter.
    assert min(figures[stage]["right"] for stage in ("target", "joint", "draft")) > 0.6
    assert set(figures["start"]) == {"target", "draft"}
    shipped = (SHIPPED / "target" / "tokenizer.json").read_text()
    assert (tmp_path / "out" / "target" / "tokenizer.json").read_text() == shipped


def test_a_folder_without_a_draft_leaves_the_draft_to_begin_from_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "target").symlink_to(SHIPPED / "target", target_is_directory=True)
    steps = {"vision_steps": 1, "language_steps": 1, "joint_steps": 1, "draft_steps": 1}
    steps |= {"dagger_rounds": 0, "draft_worlds": 0, "size": "base", "batch": 16}
    figures = train_pair(tiny(tmp_path / "run", start=tmp_path / "start", **steps))
    assert set(figures["start"]) == {"target"}
    assert figures["joint"]["right"] > 0.6 and figures["draft"]["right"] < 0.3
