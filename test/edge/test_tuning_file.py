# SPDX-License-Identifier: Apache-2.0
"""What mode auto measured outlives a restart: a second session begins with it, and no file can make one fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from simulated_rounds import Replies, World, best_constant, run

from dsd_ros.cli.main import main
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.strategies import strategies_of
from dsd_ros.edge.tuner import Tuner
from dsd_ros.edge.tuning_file import TuningFile
from dsd_ros.paths import cache_directory

FAR = World(draft=0.07, target=0.6, delay=0.12, eight=1.15, prefills=(1, 1), noise=0.02)
AUTO = DecodeSettings(mode="auto")
FILE_LOG = "dsd_ros.edge.tuning_file"


def learned(seed: int = 0) -> Tuner:
    tuner = Tuner(strategies_of(AUTO))
    run(tuner, [FAR] * 20, seed)
    return tuner


def kept(path: Path, link: str = "ws://cloud:8765") -> str:
    """A file with what was measured over ``link``; its text."""
    file, tuner = TuningFile(str(path), link), learned()
    file.recall(tuner, AUTO, "draft", "target")
    file.keep(tuner, now=True)
    return path.read_text()


def recalled(
    path: Path, target: str = "target", settings: DecodeSettings = AUTO, link: str = "ws://cloud:8765"
) -> Tuner:
    tuner = Tuner(strategies_of(settings))
    TuningFile(str(path), link).recall(tuner, settings, "draft", target)
    return tuner


def exploring(tuner: Tuner, replies: Replies, count: int) -> int:
    """How many rounds of so many replies have not the strategy that is chosen after them."""
    names: list[str] = []
    for _ in range(count):
        run(tuner, [FAR], replies=replies)
        names += [record.strategy for record in replies.records]
    return sum(name != tuner.choice.strategy.name for name in names)


def test_a_second_start_decodes_well_from_its_first_reply(tmp_path: Path) -> None:
    kept(tmp_path / "tuning.json")
    cold, warm = Tuner(strategies_of(AUTO)), recalled(tmp_path / "tuning.json")
    assert warm.choice.strategy.name == learned().choice.strategy.name
    assert exploring(warm, Replies(7), 3) <= 1
    assert exploring(cold, Replies(7), 3) >= 3
    slow = fast = best = 0.0
    for seed in range(8):
        slow += sum(run(Tuner(strategies_of(AUTO)), [FAR], seed))
        fast += sum(run(recalled(tmp_path / "tuning.json"), [FAR], seed))
        best += best_constant(FAR, 1, seed)[0]
    assert fast < 0.9 * slow and fast < 1.25 * best  # the best choice for each reply is known only afterwards


def test_what_is_kept_is_small_and_read_again_as_it_was(tmp_path: Path) -> None:
    text = kept(tmp_path / "tuning.json")
    assert len(text) < 40_000
    again = recalled(tmp_path / "tuning.json")
    assert json.loads(text)["entries"].popitem()[1]["tuner"]["ways"] == json.loads(json.dumps(again.state()))["ways"]


def test_links_and_settings_are_kept_apart_and_old_entries_go(tmp_path: Path) -> None:
    path, fresh = tmp_path / "tuning.json", Tuner(strategies_of(AUTO)).state()
    for number in range(12):
        kept(path, f"ws://cloud:{number}")
    assert len(json.loads(path.read_text())["entries"]) == 8
    assert recalled(path, link="ws://cloud:3").state() == fresh
    assert recalled(path, link="ws://cloud:11").state() != fresh
    for other in ({"temperature": 1.0}, {"draft_image_tokens": 9}):
        assert recalled(path, link="ws://cloud:11", settings=DecodeSettings(mode="auto", **other)).state() == fresh


def test_other_models_begin_anew_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path / "tuning.json")
    caplog.set_level(logging.INFO, FILE_LOG)  # the chooser tells of its changes, too
    assert recalled(tmp_path / "tuning.json", target="another").state() == Tuner(strategies_of(AUTO)).state()
    assert [record.getMessage() for record in caplog.records if record.name == FILE_LOG] == [
        "mode auto measures anew: ws://cloud:8765 was measured with other models"
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_damaged_file_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    path = tmp_path / "tuning.json"
    good = kept(path)
    deep = json.loads(good)
    (entry,) = deep["entries"].values()
    entry["tuner"]["ways"]["in turn"]["times"]["verify"]["_y"] = [float("nan")]
    path.write_text([
        good[: len(good) // 2], "", "[]", "[" * 100_000, good.replace('"version":1', '"version":2'),
        good.replace('"_held":[', '"_held":["x",'), good.replace('"models"', '"model"'), json.dumps(deep),
        " " * (1 << 21),
    ][number])  # fmt: skip
    caplog.set_level(logging.INFO, FILE_LOG)  # the chooser tells of its changes, too
    tuner = recalled(path)
    assert tuner.state() == Tuner(strategies_of(AUTO)).state()
    (said,) = (record.getMessage() for record in caplog.records if record.name == FILE_LOG)
    assert str(path) in said and "measures anew" in said
    file = TuningFile(str(path), "ws://cloud:8765")
    file.recall(tuner, AUTO, "draft", "target")
    file.keep(tuner, now=True)
    assert json.loads(path.read_text())["version"] == 1


def test_a_file_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    file, tuner = TuningFile(str(tmp_path / "file" / "tuning.json"), "here"), Tuner()
    file.recall(tuner, AUTO, "draft", "target")
    file.keep(tuner, now=True)
    file.keep(tuner, now=True)
    assert caplog.text.count("is not kept") == 1


def test_writes_are_some_seconds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    file, tuner, writes = TuningFile(str(tmp_path / "t.json"), "here"), Tuner(), 0
    file.recall(tuner, AUTO, "draft", "target")
    for _ in range(1000):
        now += 0.1
        file.keep(tuner)
        writes += (tmp_path / "t.json").exists()
        (tmp_path / "t.json").unlink(missing_ok=True)
    assert 5 <= writes <= 10


def test_decode_keeps_it_unless_told_otherwise(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, draft = map(str, tiny_pair)
    picture_file = tmp_path / "view.png"
    Image.fromarray(np.zeros((112, 168, 3), dtype=np.uint8)).save(picture_file)
    command = ["decode", "--instruction", "find it", "--image", str(picture_file), "--draft", draft, "--target", target]
    assert main([*command, "--tuning-file", ""]) == 0
    assert not (tmp_path / "cache").exists()
    assert main([*command, "--mode", "dsd"]) == 0
    assert not (tmp_path / "cache").exists()
    assert main(command) == 0
    (name,) = json.loads((cache_directory() / "tuning.json").read_text())["entries"]
    assert name.startswith("this process coupled preset")
