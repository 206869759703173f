# SPDX-License-Identifier: Apache-2.0
"""The pair's stages: they learn, resume exactly, and write models that load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_run import tiny
from safetensors.torch import load_file, save_file

from dsd_lab.train.data import world_frames
from dsd_lab.train.forward import image_tokens
from dsd_lab.train.frames import Frames
from dsd_lab.train.language import GoalHeads, cached_look, language_stage, reply_loss
from dsd_lab.train.model import DRAFT, SIZES, TARGET, average, build_model, fold, load_start, unfold
from dsd_lab.train.pair import train_pair
from dsd_lab.train.questions import Questions
from dsd_lab.train.settings import TrainSettings
from dsd_lab.train.stages import Losses, Stage, load_state, run_stage
from dsd_lab.train.tokenizer import train_tokenizer
from dsd_lab.train.vision import NOTHING, Heads, exactly, goal_classes, make_labels, mirrored, vision_stage
from dsd_lab.worlds.phrases import all_instructions
from dsd_ros.paths import models_directory

SMALL = SIZES["small"][1]
SHIPPED = models_directory()


class Killed(Exception):
    pass


def killer(line: str, share: float) -> None:
    raise Killed


@pytest.fixture(scope="module")
def frames() -> Frames:
    images, labels = [], []
    for seed in (1_000_001, 1_000_002):
        some, their = world_frames(seed, 8)
        images += some
        labels += their
    return Frames(np.stack(images), labels)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def resumes(train: Callable[..., dict], folder: Path) -> None:
    """A stage killed at its tenth step ends with the weights of an undisturbed one."""
    train(folder / "whole")
    with pytest.raises(Killed):
        train(folder / "broken", report=killer, save_seconds=0.0)
    train(folder / "broken")
    whole, broken = load_file(folder / "whole"), load_file(folder / "broken")
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)


def test_a_vision_stage_resumes_exactly_and_starts_over_where_its_ground_has_changed(
    frames: Frames, tmp_path: Path
) -> None:
    def train(path: Path, steps: int = 12, after: str = "", **rest) -> dict:
        model = build_model(SMALL, 4)
        torch.manual_seed(5)
        stage = vision_stage(model.model.visual, Heads(SMALL.width), frames, 4)
        return run_stage(stage, path, None, steps, after=after, **rest)

    resumes(train, tmp_path)
    assert train(tmp_path / "whole", 2, "other pictures")["steps"] == 2
    assert train(tmp_path / "whole", 3, "other pictures")["steps"] == 3


def test_a_language_stage_resumes_exactly_and_learns(frames: Frames, tmp_path: Path) -> None:
    replies = [text for frame in frames.labels for _, text in frame.replies]
    questions = Questions(train_tokenizer(replies + all_instructions()[::20]), frames.labels, 6, 3)
    project = torch.nn.Linear(SMALL.width, SMALL.width)
    features = image_tokens(build_model(SMALL, 4).model.visual, frames.images)

    def train(path: Path, **rest) -> dict:
        torch.manual_seed(6)
        look = cached_look(features, torch.nn.Linear(SMALL.width, SMALL.width))
        stage = language_stage("language", build_model(SMALL, 4), GoalHeads(SMALL.width), look, questions, captions=0.3)
        return run_stage(stage, path, None, 24, **rest)

    resumes(train, tmp_path)
    # On a batch that no step drew it predicts replies better than untrained.
    model, goals, batch = build_model(SMALL, 4), GoalHeads(SMALL.width), questions.draw(999)
    with torch.no_grad():
        untrained, *_ = reply_loss(model, goals, batch, project(features[batch.pictures].float()))
        modules = {"language": model.model.language_model, "goals": goals, "project": project}
        load_state(tmp_path / "whole", modules, None)
        trained, *_ = reply_loss(model, goals, batch, project(features[batch.pictures].float()))
    assert untrained > 6.1 and trained < untrained - 0.25


def test_an_averaged_stage_keeps_the_mean_of_its_weights_and_resumes_from_the_last(tmp_path: Path) -> None:
    met: list[torch.Tensor] = []  # the weights before each step

    def train(path: Path, **rest) -> torch.nn.Linear:
        torch.manual_seed(4)
        module = torch.nn.Linear(3, 2)

        def losses(step: int, share: float) -> Iterator[Losses]:
            met.append(module.weight.detach().clone())
            loss = (module(torch.ones(3)) - step).square().sum()
            yield Losses(loss, loss, loss)

        run_stage(Stage("short", {"tower": (module, 1.0)}, losses, 0.1, 1, averaged=True), path, None, 24, **rest)
        return module

    kept = train(tmp_path / "whole")
    state = load_file(tmp_path / "whole")
    mean = torch.zeros(2, 3)
    for step, weights in enumerate([*met[1:], state["tower/weight"]]):
        mean += 4 / (step + 4) * (weights - mean)
    assert torch.allclose(kept.weight, mean, atol=1e-6)
    assert torch.equal(kept.weight, state["mean/tower/weight"])
    assert torch.equal(train(tmp_path / "whole").weight, kept.weight)  # the stage is over
    with pytest.raises(Killed):
        train(tmp_path / "broken", report=killer, save_seconds=0.0)
    assert torch.equal(train(tmp_path / "broken").weight, kept.weight)


def test_the_target_is_the_mean_of_its_stages_means(tmp_path: Path) -> None:
    models = [build_model(SMALL, seed) for seed in (1, 2)]
    for number, model in enumerate(models):
        halves = {"language": model.model.language_model, "tower": model.model.visual}
        tensors = {f"mean/{name}/{key}": v.clone() for name, m in halves.items() for key, v in m.state_dict().items()}
        save_file(tensors, tmp_path / str(number))
    found = build_model(SMALL, 5)
    average(found, [tmp_path / "0", tmp_path / "1"])
    first, second = (model.state_dict() for model in models)
    for key, value in found.state_dict().items():
        assert torch.allclose(value, 0.4 * first[key] + 0.6 * second[key], atol=1e-6), key


def test_labels_say_where_things_stand_and_how_far_the_way_is_free(frames: Frames) -> None:
    labels = make_labels(frames.labels)
    told = 0
    for n, frame in enumerate(frames.labels):
        for (kind, colour, _, gap, _), bearing in zip(frame.things, frame.bearings, strict=True):
            here = exactly(torch.tensor([round(math.degrees(bearing) * 100), round(gap * 1000)]))
            off = (labels.exact[n, :, :2] - here).abs().sum(-1)
            told += bool(((off < 1e-5) & (labels.turn[n] >= 0)).any())
            if len({t[:2] for t in frame.things}) == len(frame.things):
                *_, centidegrees, distance, ahead = goal_classes(frame, f"{colour} {kind}")
                assert centidegrees == pytest.approx(100 * math.degrees(bearing), abs=0.5)
                assert (distance, ahead) == (round(1000 * gap), round(1000 * min(frame.free[17:19])))
        ways = torch.tensor([[0, round(1000 * metres)] for metres in frame.free])
        assert torch.equal(labels.exact[n, :, 2], exactly(ways)[:, 1])
        assert goal_classes(frame, "left purple box")[1:] == NOTHING[1:]
    # Of two things in one column the larger one counts.
    assert told == int((labels.turn >= 0).sum()) > 20
    # Four degrees to the left, a metre, and an eighth farther from the robot's centre, 0.3 m within its edge.
    one = exactly(torch.tensor([400, 1000, round(1.125 * 1300 - 300)]))
    assert one.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=5e-3)
    twice = mirrored(mirrored(labels))
    assert all(torch.equal(value, getattr(twice, name)) for name, value in vars(labels).items())


def test_a_pairs_weights_are_loaded_and_its_drafts_projection_is_recovered(tmp_path: Path) -> None:
    target, draft = build_model(TARGET), build_model(DRAFT)
    assert load_start(target, SHIPPED / "target") != load_start(draft, SHIPPED / "draft")
    before = {key: value.clone() for key, value in draft.model.visual.state_dict().items()}
    fold(draft, target.model.visual, unfold(draft, target.model.visual))
    assert all(torch.allclose(before[key], value, atol=1e-3) for key, value in draft.model.visual.state_dict().items())
    with pytest.raises(ValueError, match=r"no .*model.safetensors to continue from"):
        load_start(draft, tmp_path)
    with pytest.raises(ValueError, match="another size"):
        load_start(build_model(SMALL), SHIPPED / "target")


def test_a_run_continues_from_a_trained_pair(tmp_path: Path) -> None:
    steps = {"joint_steps": 1, "draft_steps": 1, "dagger_rounds": 0, "draft_worlds": 0}
    figures = train_pair(tiny(tmp_path, start=SHIPPED, size="base", batch=16, **steps))
    # A first step from nothing would have none of the expert's tokens right.
    assert min(figures[stage]["right"] for stage in ("joint", "draft")) > 0.6
    assert figures["vision"] == figures["target"] == {} and set(figures["start"]) == {"target", "draft"}
    shipped = (SHIPPED / "target" / "tokenizer.json").read_text()
    assert (tmp_path / "out" / "target" / "tokenizer.json").read_text() == shipped


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    for wrong, sentence in (
        ({"batch": 0}, "batch must be at least 1"), ({"draft_minutes": 0}, "draft_minutes must be above 0"),
        ({"size": "huge"}, "size must be one of small, base"), ({"device": "tpu"}, "device must be cpu, cuda"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            TrainSettings(**wrong)
    with pytest.raises(ValueError, match="no cuda:99"):
        train_pair(TrainSettings(smoke=True, device="cuda:99", cache=tmp_path))


def pair_loads(folder: Path) -> None:
    from dsd_ros.vlm.loading import ModelSettings, load_model

    image = np.zeros((224, 336, 3), np.uint8)
    for name in ("target", "draft"):
        assert json.loads((folder / name / "dsd.json").read_text())["format"] == 1
        model = load_model(ModelSettings(path=folder / name))
        assert model.prefill(image, "find the red ball").next_logits().shape[-1] == model.vocab_size
        assert (model.exits is not None) == (name == "target")


def test_a_run_of_few_steps_writes_a_pair_that_loads(tmp_path: Path) -> None:
    settings = tiny(tmp_path, exits=True)
    figures = train_pair(settings)
    pair_loads(tmp_path / "out")
    assert figures["exits"]["exits"]
    # What is drawn at first is predicted no worse than by chance: 512 tokens equally likely.
    assert all(figures[stage]["loss"] < 6.5 for stage in ("target", "draft", "draft_own"))
    again = train_pair(settings)  # everything is there already
    assert again["target"]["steps"] == figures["target"]["steps"]


@pytest.mark.slow
def test_the_smoke_run_learns_and_writes_a_pair_that_loads(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = TrainSettings(smoke=True, out=tmp_path / "out", cache=tmp_path)
    figures = train_pair(settings, lambda line, share: lines.append(line))
    # Untrained: 6.24 (512 tokens equally likely), one token in 500 right.
    assert figures["target"]["loss"] < 4.0 and figures["target"]["right"] > 0.25
    assert figures["vision"]["right"] > 0.1  # of the visible names, within a column of 36
    assert figures["draft_own"]["loss"] < figures["draft"]["loss"] < 6.0
    assert figures["draft_own"]["right"] > 0.25
    assert any(line.startswith("vision step") for line in lines)
    pair_loads(tmp_path / "out")
    assert figures["exits"]["exits"]
    again = train_pair(settings)  # everything is there already
    assert again["target"]["steps"] == figures["target"]["steps"]
