from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsd_ros.evaluation.pair import action_of, evaluate_pair
from dsd_ros.training.architecture import DRAFT, build_model
from dsd_ros.training.pair import write_model
from dsd_ros.training.text import all_instructions, train_tokenizer


def test_a_pair_is_measured_and_its_cards_are_written(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(all_instructions())
    for name, seed in (("target", 1), ("draft", 2)):
        write_model(build_model(DRAFT, seed), tokenizer, tmp_path / name)
    figures = evaluate_pair(
        tmp_path / "target", tmp_path / "draft", scenes=4, seeds=1, write_cards=True
    )
    # Untrained models say nothing that parses: no action, no success, and no crash.
    for name in ("target", "draft"):
        assert figures[name]["actions_right"] == 0.0
        assert figures[name]["closed_loop"] == 0.0
        assert figures[name]["missed_seeds"] == [100]
        card = (tmp_path / name / "README.md").read_text()
        assert "| actions right (exactly the expert's) | 0.0 % |" in card
    assert 0.0 <= figures["acceptance"] <= 1.0


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere holds no model: train one"):
        evaluate_pair(tmp_path / "nowhere", tmp_path / "draft")


def test_the_action_is_what_the_controller_would_do() -> None:
    assert action_of("Free way. Action: forward 75 cm") == "forward 75 cm"
    assert action_of("Free way. forward 75 cm") == ""
