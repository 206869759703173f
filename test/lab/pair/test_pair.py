from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import make_tiny_model

from dsd_lab.cli import main
from dsd_lab.pair.cards import card
from dsd_lab.pair.figures import acceptance_figures, accepted, bars, training_of
from dsd_lab.pair.page import write_page
from dsd_lab.pair.pair import action_of, evaluate_pair, measure
from dsd_lab.pair.runs import Run, drive, expert_length
from dsd_lab.pair.scenes import DEMO, rooms_of, scenes_of
from dsd_lab.pair.speakers import Speaker
from dsd_lab.train.architecture import DRAFT, build_model
from dsd_lab.train.pair import write_model
from dsd_lab.train.rollouts import roll_out
from dsd_lab.train.text import all_instructions, train_tokenizer
from dsd_ros.paths import models_directory
from dsd_ros.vlm.loading import ModelSettings


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shipped() -> tuple[Speaker, Speaker]:
    """The shipped target, asked many at once and one by one."""
    settings = ModelSettings(str(models_directory() / "target"))
    return Speaker.load(settings), Speaker.load(settings, one_by_one=True)


def test_a_pair_is_measured_and_its_cards_are_written(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(all_instructions())
    for name, seed in (("target", 1), ("draft", 2)):
        write_model(build_model(DRAFT, seed), tokenizer, tmp_path / name)
    exits = "<!-- dsd-lab train exits: begin -->\nfive\n<!-- dsd-lab train exits: end -->\n"
    (tmp_path / "target" / "README.md").write_text(f"# old\n\n{exits}")
    (tmp_path / "training.png").write_bytes(b"")
    training = {"vision": {"steps": 7, "minutes": 0.5}, "dagger": [{"steps": 3, "minutes": 0.2}]}
    figures = evaluate_pair(
        tmp_path / "target", tmp_path / "draft", scenes=2, seeds=1, write_cards=True, training=training,
        situations=("plain", DEMO), repeats=1,
    )  # fmt: skip
    # Untrained models say nothing that parses: no action, no success, and no crash.
    for name in ("target", "draft"):
        assert figures[name]["all"]["actions_right"]["value"] == 0.0
        assert figures[name]["all"]["actions_right"]["of"] == 2  # the demo's rooms do not count
        assert figures[name]["situations"]["plain"]["closed_loop"]["value"] == 0.0
        assert figures[name]["situations"][DEMO]["missed_seeds"] == [100]
        text = (tmp_path / name / "README.md").read_text()
        assert "| actions right (exactly the expert's) | 0.0 % [0.0, 65.8] |" in text
        assert "| dagger, round 0 | 3 | 0.2 |" in text and "(../training.png)" in text
    assert exits in (tmp_path / "target" / "README.md").read_text()
    assert figures["acceptance"]["value"] is None  # no reply came to its end
    assert figures["exits"] is None
    (time,) = [row for row in figures["bars"] if row["name"] == "training on a CPU"]
    assert time["met"] and time["value"] == pytest.approx(0.7)
    assert training_of(tmp_path / "target") == training and training_of(tmp_path) is None
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept == {"evaluation": figures, "training": training}
    # Of a run that went on from another pair, its own minutes are not the training's.
    started = {**training, "start": {"target": "0123abcd"}}
    assert all(row["name"] != "training on a CPU" for row in bars(figures, started))
    assert "(target 0123abcd)" in card("target", figures, started)


def test_any_qwen2_vl_is_measured_one_by_one_and_a_page_tells_of_it(tmp_path: Path) -> None:
    target = ModelSettings(str(make_tiny_model(tmp_path / "big", seed=3, vocab_rows=272)))
    draft = ModelSettings(str(make_tiny_model(tmp_path / "small", seed=3, layers=1)))
    words = str(Path(__file__).parents[1] / "worlds" / "others_words.json")
    evidence = measure(
        target, draft, scenes=1, seeds=1, situations=("two", "absent"), max_steps=2, words=words,
        repeats=1,
    )  # fmt: skip
    figures = json.loads(json.dumps(evidence.figures, allow_nan=False))
    assert figures["target"]["one_by_one"] and figures["target"]["name"] == "big"
    assert list(figures["target"]["situations"]) == ["two", "absent"]
    row = figures["target"]["situations"]["two"]
    assert set(row["truth"]) == {"object", "colour", "side", "distance", "other", "all"}
    assert {"closed_loop", "collided", "path_ratio", "steps", "confusion", "ended"} <= row.keys()
    assert row["ended"] == {"unparsable": 1} and row["path_ratio"]["value"] is None
    assert sum(sum(said.values()) for said in row["confusion"].values()) == 1
    assert {w["name"]: w["met"] for w in figures["bars"]}["target: actions right"] is False
    for model in ("target", "draft"):
        assert figures[model]["ms"]["verify"]["cpu_ms"] > 0.0
    (tmp_path / "docs").mkdir()
    training = {"vision": {"steps": 2, "curve": [[0.1, 2.0, 0.1], [0.2, 1.0, 0.5]]}}
    page = write_page(tmp_path / "docs", evidence, "dsd-lab evaluate pair", training).read_text()
    pictures = sorted(path.name for path in (tmp_path / "docs" / "images").iterdir())
    assert pictures == [
        f"pair-{n}.png" for n in ("actions", "decisions", "paths", "runs", "situations", "training", "truth")
    ]
    for name in pictures:
        assert f"(images/{name})" in page
        with Image.open(tmp_path / "docs" / "images" / name) as picture:
            assert min(picture.size) > 200
    assert sum(p.stat().st_size for p in (tmp_path / "docs" / "images").iterdir()) < 500e3
    assert "| target: actions right | ≥ 98.0 % | 0.0 % [0.0 %, 65.8 %] | missed |" in page
    assert "others_words.json" in page and "| all | 0.0 % [0.0, 65.8] | 0.0 % [0.0, 65.8] |" in page


@pytest.mark.slow
def test_a_model_alone_and_a_pair_of_two_tokenizers_are_measured_without_acceptance(tmp_path: Path) -> None:
    target = ModelSettings(str(make_tiny_model(tmp_path / "big", seed=3)))
    alone = measure(target, None, scenes=1, seeds=1, situations=("plain",), max_steps=1, repeats=1).figures
    assert alone["draft"] is None and alone["acceptance"] is None
    unknown = {row["name"] for row in alone["bars"] if row["met"] is None}
    assert {"draft: step", "exit at half depth agrees with the last layer"} <= unknown
    assert "draft: acceptance, greedy" not in {row["name"] for row in alone["bars"]}
    assert "# dsd_ros target" in card("target", alone, None)
    other = ModelSettings(str(make_tiny_model(tmp_path / "other", other_tokenizer=True)))
    both = measure(target, other, scenes=1, seeds=1, situations=("plain",), max_steps=1, repeats=1).figures
    assert both["draft"] is not None and both["acceptance"] is None


def test_both_ways_of_asking_the_shipped_pair_give_the_same_replies(shipped: tuple[Speaker, Speaker]) -> None:
    many, one = shipped
    assert many.batched and not one.batched
    scenes = list(scenes_of(DEMO, 6))
    pictures, asked = [s.picture for s in scenes], [s.instruction for s in scenes]
    replies = many.replies(pictures, asked)
    same = [a == b for a, b in zip(replies, one.replies(pictures, asked), strict=True)]
    assert sum(same) >= 5  # rounding may tip one near-tie
    assert all(many.ended(reply) and action_of(many.text(reply)) for reply in replies)
    for speaker in shipped:  # greedy replies foretell themselves, but for another near-tie
        followed = speaker.followed(pictures[:3], asked[:3], replies[:3])
        pairs = [zip(a, b, strict=True) for a, b in zip(followed, replies[:3], strict=True)]
        assert sum(a != b for pair in pairs for a, b in pair) <= 1


def test_driving_is_what_roll_outs_do(shipped: tuple[Speaker, Speaker]) -> None:
    worlds = rooms_of(DEMO, 2)
    runs = drive(shipped[0], worlds)
    hf, tokenizer = shipped[0].model.hf, shipped[0].model.tokenizer
    other = roll_out(hf, tokenizer, worlds, max_steps=25, noisy=False)
    assert [run.path for run in runs] == other.paths
    assert [run.reached for run in runs] == other.reached == [True, True]
    assert [run.steps for run in runs] == other.steps
    assert all(run.ended == "stopped" and len(run.expert) == run.steps for run in runs)
    lengths = [expert_length(world) for world in worlds]
    assert all(0.8 < run.length / length < 1.5 for run, length in zip(runs, lengths, strict=True))
    alone = drive(shipped[1], worlds[:1])[0]
    assert alone.path == pytest.approx(runs[0].path, abs=1e-9)


class Reciter:
    """Answers the same to every picture, and notes how many earlier ones it was shown."""

    def __init__(self, text: str) -> None:
        self.said, self.shown = text, []

    def replies(self, pictures, instructions, pasts):
        self.shown += [len(past) for past in pasts]
        return [[0]] * len(pictures)

    def text(self, tokens) -> str:
        return self.said


def test_what_is_not_there_is_found_out_by_a_full_round_or_by_saying_so() -> None:
    worlds = rooms_of("absent", 1)
    around = Reciter("No such ball in view, so I look around. Action: turn left 45 degrees")
    run = drive(around, worlds, history=3)[0]
    assert (run.ended, run.steps, run.reached) == ("searched", 8, True)
    assert around.shown == [0, 1, 2, 3, 3, 3, 3, 3]
    assert run.expert[0].startswith("No ") and run.expert[-1].endswith("so I stop. Action: stop")
    assert drive(Reciter("No such ball anywhere, so I stop. Action: stop"), worlds)[0].reached
    claimed = drive(Reciter("The red ball is straight ahead. Action: stop"), worlds)[0]
    assert (claimed.ended, claimed.reached) == ("stopped", False)
    assert expert_length(worlds[0]) is None
    plain = drive(Reciter("No such ball anywhere, so I stop. Action: stop"), rooms_of("plain", 1))
    assert (plain[0].ended, plain[0].reached) == ("stopped", False)


@pytest.mark.parametrize("situation", ["plain", "two"])
def test_scenes_are_of_their_situation_and_the_same_again(situation: str) -> None:
    scenes = list(scenes_of(situation, 6))
    assert len(scenes) == 6 and {scene.situation for scene in scenes} == {situation}
    assert all(scene.picture.shape == (224, 336, 3) for scene in scenes)
    assert scenes[0].view.world.situation == situation
    again = next(scenes_of(situation, 1))
    assert np.array_equal(again.picture, scenes[0].picture)
    assert (again.instruction, again.reply) == (scenes[0].instruction, scenes[0].reply)
    (room,) = rooms_of(situation, 1)
    assert room.seed != scenes[0].view.world.seed


def test_acceptance_counts_rounds_of_greedy_speculation() -> None:
    # Two agreed and one not, the target's own token, then two agreed to the end.
    assert accepted([[1, 2, 9, 4, 5]], [[1, 2, 3, 4, 5]], gamma=3) == [(4, 5, 5, 2)]
    assert accepted([[9, 9]], [[1, 2]], gamma=4) == [(0, 3, 2, 2)]
    figures = acceptance_figures([(4, 5, 5, 2), (0, 3, 2, 2)])
    assert figures["acceptance"]["value"] == 0.5 and figures["tokens_per_round"]["value"] == 7 / 4
    assert acceptance_figures([])["acceptance"]["value"] is None


def test_bars_are_met_and_missed_by_what_was_measured() -> None:
    def model(share: float) -> dict:
        ms = {name: {"cpu_ms": 3.0} for name in ("step", "verify", "prefill")}
        value = {"value": share, "low": 0.0, "high": 1.0}
        names = ("actions_right", "closed_loop", "collided", "path_ratio")
        return {"all": dict.fromkeys(names, value), "ms": ms, "weights_mb": 40.0}

    figures = {"target": model(0.99), "draft": model(0.86), "acceptance": {"value": 0.95}}
    met = {row["name"]: row["met"] for row in bars(figures)}
    assert met["target: actions right"] and met["draft: step"]
    assert met["target: runs with a collision"] is False
    assert met["draft: runs that reach the goal"] is False  # a draft this good leaves no work
    assert met["draft: acceptance, greedy"] is False and met["weights together"] is False
    assert met["exit at half depth agrees with the last layer"] is None


def test_the_length_of_a_run_is_its_paths() -> None:
    assert Run(rooms_of("plain", 1)[0], [(0.0, 0.0), (3.0, 4.0), (3.0, 5.0)]).length == 6.0
    assert math.isclose(expert_length(rooms_of("plain", 1)[0]) or 0.0, 1.0, rel_tol=0.9)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere holds no model: train one"):
        evaluate_pair(tmp_path / "nowhere", tmp_path / "draft")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--situations plain,moon", "there is no situation 'moon'; name plain, search"),
        ("--split all", "there is no split 'all'; name training, validation, test"),
        ("--scenes 0", "scenes must be at least 1, but it is 0."),
        ("--words /nowhere.json", "The words cannot be read"),
        ("--history 9", "history must be 0 to 8, but it is 9."),
        ("--target /nowhere", "there is no model directory /nowhere"),
        ("--draft /nowhere --no-draft", "--draft names a model and --no-draft wants none"),
        ("--page /nowhere", "there is no folder /nowhere for the page"),
        ("--device tpu", "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["evaluate", "pair", *words.split()]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


@pytest.mark.parametrize(("more", "code"), [("--json --strict", 1), pytest.param("", 0, marks=pytest.mark.slow)])
def test_the_command_fails_on_what_is_missed_only_when_strict(
    more: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny_model(tmp_path / "tiny", seed=3))
    words = f"evaluate pair --no-draft --target {model} --situations plain --scenes 1 --seeds 1 --max-steps 1"
    assert main.main([*words.split(), *more.split()]) == code
    out = capsys.readouterr().out
    if more:
        assert json.loads(out)["target"]["name"] == "tiny"
    else:
        assert "missed" in out and "runs that reach the goal" in out


def test_the_action_is_what_the_controller_would_do() -> None:
    assert action_of("Free way. Action: forward 75 cm") == "forward 75 cm"
    assert action_of("Free way. forward 75 cm") == ""
