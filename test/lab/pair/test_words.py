# SPDX-License-Identifier: Apache-2.0
"""Whether replies name the right goal, and files of instructions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsd_lab.pair.figures import asked_in, read_words, words_figures
from dsd_lab.pair.scenes import scenes_of
from dsd_lab.worlds.phrases import INTENTS
from dsd_lab.worlds.truth import names_goal

WORDS = {
    "find": ["off to the {}", "one of the {s} here"],
    **{which: [f"the {which} of the {{s}}"] for which in INTENTS[1:]},
}


def test_the_first_thing_named_is_the_goal_or_is_not() -> None:
    for text, goal, named in [
        ("The left red chair is on the right, 1.2 m away; nothing else.", "left red chair", True),
        ("No red chair in view, only a red ball on the left.", "red chair", True),
        ("I see the rightmost red chair.", "right red chair", True),
        ("The red chair is on the left.", "left red chair", False),
        ("The right red chair is on the left.", "left red chair", False),
        ("The left red chair is on the right.", "red chair", False),
        ("The red ball is ahead; with the red chair left of it.", "red chair", False),
        ("Onwards.", "red chair", False),
    ]:
        assert names_goal(text, goal) is named


def test_scenes_are_asked_about_in_a_files_words_and_counted_by_intent(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text(json.dumps(WORDS))
    scenes = [*scenes_of("plain", 3), *scenes_of("two", 1)]
    words = read_words(path)
    texts = asked_in(words, scenes)
    assert texts == asked_in(words, scenes)
    name = scenes[0].goal
    ways = [f"off to the {name}", f"one of the {name}{'es' if name[-1] == 'x' else 's'} here"]
    assert sorted(texts[:2]) == ways and texts[2] in ways
    which = scenes[3].goal.split()[0]
    assert texts[3].startswith(f"the {which} of the ")
    replies = [scene.reply for scene in scenes]
    replies[1] = "The purple whale is ahead. Action: stop"
    found = words_figures(scenes, texts, replies)
    assert found["misnamed"] == [[texts[1], replies[1]]]
    assert set(found["named"]) == {"find", which, "all"}
    assert found["named"]["find"]["value"] == pytest.approx(2 / 3)
    assert found["named"][which]["value"] == 1.0
    assert found["named"]["all"]["value"] == found["actions_right"]["value"] == 0.75


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "are no JSON"),
        (json.dumps(WORDS | {"above": ["{}"]}), "must have a list for each of find, left, right, nearer, farther"),
        (json.dumps(WORDS | {"left": []}), "The words for 'left' in"),
        (json.dumps(WORDS | {"left": ["the left one"]}), "must say where the goal's name goes"),
        (json.dumps(WORDS | {"left": ["{0.__class__}"]}), "must say where the goal's name goes"),
    ],
)
def test_what_is_no_file_of_words_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"words\.json") as refused:
        read_words(path)
    assert sentence in str(refused.value) and str(refused.value).count(". ") == 0
    with pytest.raises(ValueError, match="cannot be read"):
        read_words(tmp_path / "none.json")
