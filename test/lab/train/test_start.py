"""A training that goes on from a trained pair has its weights, and keeps what it can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed_run import tiny
from safetensors.torch import load_file

from dsd_lab.train.architecture import DRAFT, SIZES, TARGET, build_model
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH
from dsd_lab.train.forward import tower_forward
from dsd_lab.train.pair import TrainSettings, train_pair
from dsd_lab.train.pair_models import fold, keep_start, load_start, unfold
from dsd_ros.paths import models_directory
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


def test_the_pair_gone_on_from_weighs_its_share(tmp_path: Path) -> None:
    small = SIZES["small"][0]
    first, last = build_model(small, 1), build_model(small, 2)
    with quiet_transformers():
        first.save_pretrained(tmp_path)
    ends = {key: value.clone() for key, value in last.state_dict().items()}
    keep_start(last, tmp_path, 0.25)
    begun = first.state_dict()
    for key, value in last.state_dict().items():
        assert torch.allclose(value, 0.25 * begun[key] + 0.75 * ends[key], atol=1e-6)
    assert any(not torch.equal(begun[key], ends[key]) for key in ends)


@pytest.mark.parametrize("share, start", [(1.0, SHIPPED), (-0.1, SHIPPED), (0.5, None)])
def test_a_share_that_cannot_be_kept_is_said(share: float, start: Path | None) -> None:
    with pytest.raises(ValueError, match="start_share"):
        TrainSettings(start_share=share, start=start)


def test_only_a_trained_pair_can_do_without_the_first_stages() -> None:
    behind = TrainSettings(start=SHIPPED).resolved()
    assert behind.vision_minutes == behind.language_minutes == 0 and behind.joint_minutes == 120
    assert TrainSettings(start=SHIPPED, vision_minutes=3).resolved().vision_minutes == 3
    assert TrainSettings().resolved().vision_minutes == 120
    with pytest.raises(ValueError, match="vision_minutes must be above 0"):
        TrainSettings(vision_minutes=0)
    with pytest.raises(ValueError, match="joint_minutes must be above 0"):
        TrainSettings(start=SHIPPED, joint_minutes=0)


def test_what_cannot_be_gone_on_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no .*model.safetensors to go on from"):
        load_start(build_model(DRAFT), tmp_path)
    with pytest.raises(ValueError, match="of another size"):
        load_start(build_model(SIZES["small"][0]), SHIPPED / "target")
    with pytest.raises(ValueError, match="leave out start, or smoke"):
        train_pair(TrainSettings(smoke=True, start=SHIPPED, cache=tmp_path))


def test_a_smoke_run_is_on_the_device_and_compiled_as_asked(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="cuda:99 is not there"):
        train_pair(TrainSettings(smoke=True, device="cuda:99", cache=tmp_path))
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(ValueError, match="There is no no-compiler to compile the passes with"):
        train_pair(TrainSettings(smoke=True, compile=True, cache=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_run_begins_where_the_pair_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Path, float]] = []
    monkeypatch.setattr("dsd_lab.train.pair.keep_start", lambda model, folder, share: kept.append((folder, share)))
    torch.set_num_threads(1)
    steps = {"vision_steps": None, "language_steps": None, "joint_steps": 1, "draft_steps": 1}
    steps |= {"dagger_rounds": 0, "draft_worlds": 0, "size": "base", "batch": 16, "smoke": False}
    figures = train_pair(tiny(tmp_path, start=SHIPPED, start_share=0.25, **steps))
    # A step from nothing has none right of the expert's tokens, and a draft no more than a quarter.
    assert min(figures[stage]["right"] for stage in ("joint", "draft")) > 0.6
    # What teaches an untrained pair to look is left out.
    assert figures["vision"] == figures["target"] == {}
    learned = {key.split("/")[0] for key in load_file(tmp_path / "cache/target-joint.safetensors")}
    assert learned == {"language", "tower", "mean", "optimizer"}
    assert set(figures["start"]) == {"target", "draft"}
    shipped = (SHIPPED / "target" / "tokenizer.json").read_text()
    assert (tmp_path / "out" / "target" / "tokenizer.json").read_text() == shipped
    assert kept == [(SHIPPED / "target", 0.25)]


def test_a_folder_without_a_draft_leaves_the_draft_to_begin_from_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "target").symlink_to(SHIPPED / "target", target_is_directory=True)
    steps = {"vision_steps": 1, "language_steps": 1, "joint_steps": 1, "draft_steps": 1}
    steps |= {"dagger_rounds": 0, "draft_worlds": 0, "size": "base", "batch": 16}
    figures = train_pair(tiny(tmp_path / "run", start=tmp_path / "start", **steps))
    assert set(figures["start"]) == {"target"}
    assert min(figures[stage]["right"] for stage in ("target", "joint")) > 0.6
    assert figures["vision"]["steps"] == 1 and figures["draft"]["right"] < 0.3
