"""The training's stages: they learn, they resume exactly, and they write loadable models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dsd_lab.train.architecture import DRAFT, build_model
from dsd_lab.train.batches import NOTHING
from dsd_lab.train.checkpoint import load_state
from dsd_lab.train.curves import draw_training, stages_of
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH, Frames, generate, load_frames, world_frames
from dsd_lab.train.devices import CPU
from dsd_lab.train.goal_heads import GoalHeads, goal_classes
from dsd_lab.train.language_stage import cached_look, image_tokens, reply_loss, train_language
from dsd_lab.train.pair import TrainSettings, smoke_settings, train_pair
from dsd_lab.train.pair_models import average
from dsd_lab.train.questions import Mixer, Questions
from dsd_lab.train.stages import CURVE_POINTS, Curve, Descent, Losses, Stage, run_stage
from dsd_lab.train.text import all_instructions, train_tokenizer
from dsd_lab.train.vision_stage import Heads, exactly, make_labels, measure, mirrored, train_vision, vision_stage
from dsd_lab.worlds.situations import Split


class Killed(Exception):
    pass


def killer(at: int) -> Callable[[str, float], None]:
    def report(line: str, share: float) -> None:
        if f"step {at} " in line:
            raise Killed

    return report


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


@pytest.mark.parametrize("trained", [False, True])
def test_an_interrupted_vision_stage_ends_with_the_same_weights(
    frames: Frames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    monkeypatch.setattr("dsd_lab.train.vision_stage._HEADS_FIRST", 22)  # killed before

    def train(name: str, report=None) -> None:
        model = build_model(DRAFT, 4)
        torch.manual_seed(5)
        train_vision(
            model.model.visual, Heads(DRAFT.width), frames, frames, tmp_path / name,
            1.0, steps=24, batch=4, trained=trained, report=report,
            save_seconds=0.0 if report else 60.0,
        )  # fmt: skip

    train("whole")
    with pytest.raises(Killed):
        train("broken", killer(20))
    train("broken")
    whole, broken = load_file(tmp_path / "whole"), load_file(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)


def test_a_trained_tower_stays_as_it_is_until_its_heads_have_caught_up(frames: Frames) -> None:
    model = build_model(DRAFT, 4)
    heads = Heads(DRAFT.width)
    stage = vision_stage(model.model.visual, heads, frames, 4, trained=True)
    descent, held = Descent(stage, CPU), stage.held["tower"]

    def weights(module: torch.nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()

    first, learned = weights(model.model.visual), weights(heads)
    for step in (0, 1, held - 1):
        descent.step(stage.draw(step, 0.0), step, 0.0)
        assert torch.equal(weights(model.model.visual), first)
        assert not torch.equal(weights(heads), learned)
        learned = weights(heads)
    descent.step(stage.draw(held, 0.0), held, 0.0)
    assert not torch.equal(weights(model.model.visual), first)


def test_a_stage_begins_anew_where_what_it_builds_upon_has_changed(frames: Frames, tmp_path: Path) -> None:
    def train(name: str, after: str, steps: int) -> dict[str, float]:
        model = build_model(DRAFT, 4)
        torch.manual_seed(5)
        return train_vision(
            model.model.visual, Heads(DRAFT.width), frames, frames, tmp_path / name, 1.0, steps=steps, batch=2,
            after=after,
        )  # fmt: skip

    train("one", "these pictures", 3)
    figures = train("one", "other pictures", 2)
    assert figures["steps"] == 2 and len(figures["curve"]) == 1
    train("other", "other pictures", 2)
    one, other = load_file(tmp_path / "one"), load_file(tmp_path / "other")
    assert all(torch.equal(one[key], other[key]) for key in other)
    assert train("one", "other pictures", 3)["steps"] == 3  # the same goes on


def test_an_interrupted_language_stage_ends_with_the_same_weights(frames: Frames, tmp_path: Path) -> None:
    replies = [text for frame in frames.labels for _, text in frame.replies]
    tokenizer = train_tokenizer(replies + all_instructions())
    questions = Questions(tokenizer, frames.labels)
    mixer = Mixer(questions, 6, 3, variants=8, captions=True)

    def train(name: str, report=None) -> dict[str, float]:
        model = build_model(DRAFT, 4)
        features = image_tokens(model.model.visual, frames.images)
        look = cached_look(features)
        torch.manual_seed(6)
        return train_language(
            model, GoalHeads(DRAFT.width), look, mixer, tmp_path / name, 1.0, steps=20, captions=0.3, report=report,
            save_seconds=0.0 if report else 60.0,
        )  # fmt: skip

    figures = train("whole")
    with pytest.raises(Killed):
        train("broken", killer(10))
    assert train("broken")["loss"] == pytest.approx(figures["loss"])
    whole, broken = load_file(tmp_path / "whole"), load_file(tmp_path / "broken")
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    # It has learned: on a batch that no step drew it foretells replies better than it did untrained.
    model, goals = build_model(DRAFT, 4), GoalHeads(DRAFT.width)
    features = image_tokens(model.model.visual, frames.images).float()
    batch = mixer.draw(999, 0.0)
    tokens = features[batch.pictures][batch.back]
    with torch.no_grad():
        untrained, *_ = reply_loss(model, goals, batch, tokens)
        load_state(tmp_path / "whole", {"language": model.model.language_model, "goals": goals}, None)
        trained, *_ = reply_loss(model, goals, batch, tokens)
    assert untrained > 6.1 and trained < untrained - 0.25
    assert 5.5 < figures["loss"] < untrained


class _Nothing:
    def to(self, device: torch.device) -> _Nothing:
        return self


def test_an_averaged_stage_keeps_the_mean_of_its_weights_and_goes_on_behind_its_last(tmp_path: Path) -> None:
    met: list[torch.Tensor] = []  # the weights before each step

    def train(path: Path, report=None) -> torch.nn.Linear:
        torch.manual_seed(4)
        module = torch.nn.Linear(3, 2)

        def losses(batch: _Nothing, step: int) -> Losses:
            met.append(module.weight.detach().clone())
            loss = (module(torch.ones(3)) - step).square().sum()
            return Losses(loss, loss.detach(), loss.detach())

        modules = {"tower": (module, 1.0)}
        stage = Stage("short", modules, lambda step, share: _Nothing(), losses, 0.1, 1, averaged=True)
        run_stage(stage, path, 1.0, 24, report=report, save_seconds=0.0 if report else 60.0)
        return module

    kept = train(tmp_path / "whole")
    state = load_file(tmp_path / "whole")
    behind = [*met[1:], state["tower/weight"]]
    mean = torch.zeros(2, 3)
    for step, weights in enumerate(behind):
        mean += 4 / (step + 4) * (weights - mean)
    assert torch.allclose(kept.weight, mean, atol=1e-6)
    assert torch.equal(kept.weight, state["mean/tower/weight"])
    assert (kept.weight - behind[-1]).abs().max() > 0.01
    assert torch.equal(train(tmp_path / "whole").weight, kept.weight)  # a stage that is over
    with pytest.raises(Killed):
        train(tmp_path / "broken", killer(20))
    assert torch.equal(train(tmp_path / "broken").weight, kept.weight)


def test_the_target_is_the_mean_of_its_stages_means(tmp_path: Path) -> None:
    models = [build_model(DRAFT, seed) for seed in (1, 2, 3, 4)]
    for number, (last, mean) in enumerate([models[:2], models[2:]]):
        halves = {"language": "language_model", "tower": "visual"}
        save_file(
            {
                f"{prefix}{name}/{key}": value.clone()
                for prefix, model in (("", last), ("mean/", mean))
                for name, half in halves.items()
                for key, value in getattr(model.model, half).state_dict().items()
            },
            tmp_path / str(number),
        )
    found = build_model(DRAFT, 5)
    average(found, [tmp_path / "0", tmp_path / "1"])
    first, second = models[1].state_dict(), models[3].state_dict()
    for key, value in found.state_dict().items():
        assert torch.allclose(value, 0.4 * first[key] + 0.6 * second[key], atol=1e-6), key


def test_labels_tell_exactly_where_things_stand_and_how_far_ways_are_free(frames: Frames) -> None:
    labels = make_labels(frames.labels)
    told = 0
    for n, frame in enumerate(frames.labels):
        for (_, _, _, gap, _), bearing in zip(frame.things, frame.bearings, strict=True):
            here = exactly(torch.tensor([round(math.degrees(bearing) * 100), round(gap * 1000)]))
            off = (labels.exact[n, :, :2] - here).abs().sum(-1)
            told += bool(((off < 1e-5) & (labels.turn[n] >= 0)).any())
        ways = torch.tensor([[0, round(1000 * metres)] for metres in frame.free])
        assert torch.equal(labels.exact[n, :, 2], exactly(ways)[:, 1])
    # Two things in one column: the larger one in the picture is told of.
    assert told == int((labels.turn >= 0).sum()) > 20
    # Four degrees to the left, a metre, and what is an eighth farther from the robot's centre, 0.3 m within its edge.
    one = exactly(torch.tensor([400, 1000, round(1.125 * 1300 - 300)]))
    assert one.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=5e-3)


def test_a_goal_is_known_by_its_bearing_its_distance_and_the_way_ahead(frames: Frames) -> None:
    frame = next(f for f in frames.labels if len({t[:2] for t in f.things}) == len(f.things) > 1)
    for index, (kind, colour, _, gap, _) in enumerate(frame.things):
        *_, bearing, distance, ahead = goal_classes(frame, f"{colour} {kind}")
        assert bearing == pytest.approx(100 * math.degrees(frame.bearings[index]), abs=0.5)
        assert (distance, ahead) == (round(1000 * gap), round(1000 * min(frame.free[17:19])))
    assert goal_classes(frame, None) == NOTHING


def test_errors_of_what_is_told_exactly_are_in_degrees_and_shares(
    frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, labels = build_model(DRAFT, 4), make_labels(frames.labels)
    heads = Heads(DRAFT.width)

    def told(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**Heads.forward(heads, tokens), "exact": labels.exact + torch.tensor([0.5, -1.0, 2.0])}

    monkeypatch.setattr(heads, "forward", told)
    found = measure(model.model.visual, heads, frames.images, labels)
    assert found["bearing"] == pytest.approx(2.0)
    assert found["gap"] == pytest.approx(math.log(1.125))
    assert found["way"] == pytest.approx(2 * math.log(1.125))


def test_mirrored_labels_mirror_back(frames: Frames) -> None:
    labels = make_labels(frames.labels)
    twice = mirrored(mirrored(labels))
    for name, value in vars(labels).items():
        assert torch.equal(value, getattr(twice, name)), name
    sides = torch.tensor([-1.0, 1.0, 1.0])
    assert torch.equal(mirrored(labels).exact, labels.exact.flip(1) * sides)


def test_whole_shards_are_kept_and_missing_ones_made(tmp_path: Path) -> None:
    generate(tmp_path, Split.TRAINING, 1, workers=1, frames_per_world=3)
    first = (tmp_path / "shard00000.npy").stat().st_mtime_ns
    (tmp_path / "shard00001.part.npy").write_bytes(b"cut off")
    generate(tmp_path, Split.TRAINING, 1, workers=1, frames_per_world=3)
    assert (tmp_path / "shard00000.npy").stat().st_mtime_ns == first
    assert load_frames(tmp_path).images.shape == (3, MODEL_HEIGHT, MODEL_WIDTH, 3)
    with pytest.raises(ValueError, match="generate them first"):
        load_frames(tmp_path / "nowhere")


@pytest.mark.parametrize("room, moves", [(0, True), (2, True), (3, False), (9, False)])
def test_added_pictures_use_the_room_that_was_left(tmp_path: Path, room: int, moves: bool) -> None:
    generate(tmp_path, Split.TRAINING, 1, workers=1, frames_per_world=3)
    plain, roomy = load_frames(tmp_path), load_frames(tmp_path, room=room)
    place = roomy.images.ctypes.data
    roomy.add(plain)
    assert np.array_equal(roomy.images, np.concatenate([plain.images, plain.images]))
    assert roomy.labels == [*plain.labels, *plain.labels]
    assert (roomy.images.ctypes.data != place) is moves


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="batch must be at least 1"):
        TrainSettings(batch=0)
    with pytest.raises(ValueError, match="draft_minutes must be above 0"):
        TrainSettings(draft_minutes=0)


def test_curves_keep_few_points_evenly(tmp_path: Path) -> None:
    curve = Curve()
    for step in range(1, 5001):
        if curve.due(step):
            curve.add(step / 100, 1 / step, step / 5000)
    minutes = [point[0] for point in curve.points]
    assert 100 <= len(minutes) <= CURVE_POINTS and minutes[-1] >= 49
    assert len({round(b - a, 3) for a, b in zip(minutes, minutes[1:], strict=False)}) == 1
    stage = {"steps": 5000, "minutes": 50.0, "curve": curve.points}
    figures = {name: stage for name in ("vision", "target", "joint", "draft")}
    figures |= {"dagger": [stage, {**stage, "curve": []}], "draft_own": {}}
    for model, count in (("target", 5), ("draft", 1), (None, 6)):
        assert len(list(stages_of(figures, model))) == count
    draw_training(figures, tmp_path / "training.png", "target")
    with Image.open(tmp_path / "training.png") as image:
        assert image.width > 800


def test_the_smoke_run_learns_and_writes_a_pair_that_loads(tmp_path: Path) -> None:
    from dsd_ros.vlm.loading import ModelSettings, load_model

    lines: list[str] = []
    settings = smoke_settings(tmp_path / "out", tmp_path / "cache")
    figures = train_pair(settings, lambda line, share: lines.append(line))
    # Untrained: 6.24 (512 tokens alike likely), a seventh of the turns, one of 500 tokens.
    assert figures["target"]["loss"] < 4.0
    assert figures["target"]["right"] > 0.25
    assert figures["vision"]["turn"] > 0.2
    # Behind both of its stages: how much the first one's 40 steps foretell hangs on how uniformly the target babbles.
    assert figures["draft_own"]["loss"] < figures["draft"]["loss"] < 6.0
    assert figures["draft_own"]["right"] > 0.25
    assert any(line.startswith("vision step") for line in lines)
    image = np.zeros((224, 336, 3), np.uint8)
    for name in ("target", "draft"):
        folder = tmp_path / "out" / name
        assert json.loads((folder / "dsd.json").read_text())["format"] == 1
        assert (folder / "training.png").stat().st_size > 5000
        model = load_model(ModelSettings(path=folder))
        sequence = model.prefill(image, "find the red ball")
        assert sequence.next_logits().shape[-1] == model.vocab_size
        if name == "target":
            assert model.exits is not None
    assert figures["exits"]["exits"]
    again = train_pair(settings, lambda line, share: None)  # everything is there already
    assert again["target"]["steps"] == figures["target"]["steps"]
