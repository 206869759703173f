"""Questions in the words of a file in place of a split's, and how a model takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from dsd_lab.pair.intervals import share
from dsd_lab.pair.scenes import Scene
from dsd_lab.train.runs import action_of
from dsd_lab.worlds.guide import split_goal
from dsd_lab.worlds.phrases import FIND, INTENTS, fill
from dsd_lab.worlds.truth import names_goal

Words = dict[str, tuple[str, ...]]
_EXAMPLES = 40
_PLACES = {"", "s"}  # fields of a template: "red chair" and "red chairs"


def read_words(path: str | Path) -> Words:
    """Instructions from a JSON file, a list for each of INTENTS; "{}" is "red chair", "{s}" its plural. ValueError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The words cannot be read: {error}.") from None
    except ValueError:
        raise ValueError(f"The words in {path} are no JSON; give a list for each intent.") from None
    if not isinstance(found, dict) or set(found) != set(INTENTS):
        raise ValueError(f"The words in {path} must have a list for each of {', '.join(INTENTS)}, and no other.")
    for intent, texts in found.items():
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"The words for '{intent}' in {path} must be a list with instructions.")
        for text in texts:
            if not isinstance(text, str) or not _is_template(text):
                raise ValueError(
                    f'The instruction {text!r} in {path} must say where the goal\'s name goes: "{{}}", or "{{s}}" for '
                    "more of it."
                )
    return {intent: tuple(texts) for intent, texts in found.items()}


def _is_template(text: str) -> bool:
    try:
        parts = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    return bool(parts) and all(name in _PLACES and not form and not converted for name, form, converted in parts)


def asked_in(words: Words, scenes: Sequence[Scene]) -> list[str]:
    """An instruction for each scene's goal: each intent's in turn, then again in another order; equal in each run."""
    rng = np.random.default_rng(62)
    left: dict[str, list[int]] = {intent: [] for intent in words}
    texts = []
    for scene in scenes:
        which, name = split_goal(scene.goal)
        intent = which or FIND
        if not left[intent]:
            left[intent] = rng.permutation(len(words[intent])).tolist()
        texts.append(fill(words[intent][left[intent].pop()], name))
    return texts


def words_figures(scenes: Sequence[Scene], instructions: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """Shares of replies that name the goal, by intent and in all, and of actions right; 40 misnaming replies."""
    named = [names_goal(text, scene.goal) for text, scene in zip(texts, scenes, strict=True)]
    intents = [split_goal(scene.goal)[0] or FIND for scene in scenes]
    right = [action_of(text) == action_of(scene.reply) for text, scene in zip(texts, scenes, strict=True)]
    by_intent = {
        intent: share([one for one, of in zip(named, intents, strict=True) if of == intent])
        for intent in INTENTS
        if intent in intents
    }
    return {
        "named": {**by_intent, "all": share(named)},
        "actions_right": share(right),
        "misnamed": [[asked, text] for asked, text, one in zip(instructions, texts, named, strict=True) if not one][
            :_EXAMPLES
        ],
    }
