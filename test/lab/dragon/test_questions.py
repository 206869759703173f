# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab evaluate questions --methods`: each method answers the same questions from the same documents."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from in_process import dsd_lab
from tiny_text import make_tiny_text

from dsd_lab.dragon.questions import MEASURED, drawn
from dsd_lab.pair.held_out import SIDES, aggregated, load_questions, relevant
from dsd_lab.report import BenchError
from dsd_ros.dragon.documents.embedding import SentenceEncoder
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings


def test_a_draw_is_even_over_the_kinds_and_repeated_by_its_seed() -> None:
    items = load_questions()
    some = drawn(items, 100, 3)
    assert some == drawn(items, 100, 3) != drawn(items, 100, 4) and len({item.id for item in some}) == 100
    whole = Counter(item.kind for item in items)
    for kind, count in Counter(item.kind for item in some).items():
        assert abs(count - 100 * whole[kind] / len(items)) <= 1
    assert sorted(item.id for item in drawn(items, 0, 3)) == sorted(item.id for item in items)
    with pytest.raises(BenchError, match="count is -1; use 1 to"):
        drawn(items, -1, 0)


def test_every_method_answers_and_says_what_travelled(capsys, tmp_path) -> None:
    reader, report = make_tiny_text(tmp_path / "reader", seed=3), tmp_path / "report.json"
    code, out, err = dsd_lab(
        capsys, "evaluate", "questions", "--methods", "--count", "1", "--trip-ms", "20", "--model", reader,
        "--json", report,
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(report.read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == [variant.label for variant in MEASURED] and all(label in out for label in rows)
    assert all(row["right"]["of"] == row["seconds"]["of"] == 1 and row["tokens"] > 1 for row in rows.values())
    assert rows["device"]["bytes_down"] == 0 and rows["device"]["over_device"]["value"] == 1.0
    sent = [rows[label]["bytes_down"] for label in ("device", "drcg-text", "drcg-kv")]
    assert sent == sorted(set(sent)) and rows["dragon"]["bytes_up"] > 0
    assert [label for label, row in rows.items() if row["travels"]] == ["drcg-text", "drcg-kv"]
    (bar,) = found["bars"]
    assert bar["value"] == rows["dragon"]["over_device"]["value"] and bar["at_most"] == 1.25
    # What is said does not depend on the link: it is the mixture's answer, in step or ahead.
    model, encoder = load_model(ModelSettings(str(reader))), SentenceEncoder()
    for item, said in zip(drawn(load_questions(), 1, 0), found["answers"], strict=True):
        both = [relevant(encoder, item.question, getattr(item, side), 2) for side in SIDES]
        assert said["id"] == item.id and said["dragon"] == said["drdg-tw"] == aggregated(model, item.question, both)
    code, _, err = dsd_lab(capsys, "evaluate", "questions", "--methods", "--variants", "smoke")
    assert code == 2 and "there is no variant 'smoke'; name some of dragon; dragon, full" in err


def test_each_side_is_asked_in_turn(capsys, tmp_path) -> None:
    reader, report = make_tiny_text(tmp_path / "reader", seed=3), tmp_path / "report.json"
    options = ("evaluate", "questions", "--which", "shipped", "--count", "3", "--model", reader)
    code, out, err = dsd_lab(capsys, *options, "--side", "each", "--json", report)
    found = json.loads(report.read_text())
    assert code == 0 and list(found["figures"]) == ["both", *SIDES] and len(found["answers"]) == 3, err
    assert out.count("all ") == 3 and found["models"]["both"]["name"] == "reader"
    code, _, err = dsd_lab(capsys, *options, "--side", "left")
    assert code == 2 and "--side is both, device, cloud or each, not 'left'" in err
