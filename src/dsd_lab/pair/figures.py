# SPDX-License-Identifier: Apache-2.0
"""From answers and runs to figures with their intervals, and the bars that they should reach."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from dsd_lab.pair.scenes import Scene
from dsd_lab.report import ratio, share
from dsd_lab.train.runs import Run, action_of
from dsd_lab.worlds.expert import misjudged
from dsd_lab.worlds.guide import View, decide, split_goal
from dsd_lab.worlds.phrases import FIND, INTENTS, fill
from dsd_lab.worlds.truth import FIGURES, names_goal, truthful, truths

Figures = dict[str, Any]
VIEWS = 100  # misjudged views per picture
LEAST = 5  # of them in which the expert takes a near miss
_SHORTEST = 0.05  # metres; shorter paths are not compared


def near_miss(view: View, goal: str, action: str) -> bool:
    """Whether the expert takes an action such as "turn left 15 degrees" in LEAST of VIEWS misjudged views."""
    found = 0
    for taken in _taken(view, goal):
        found += taken == action
        if found == LEAST:
            return True
    return False


def kept(view: View, goal: str) -> float:
    """The share of misjudged views in which the expert keeps its action."""
    own = decide(view, goal).action
    return sum(taken == own for taken in _taken(view, goal)) / VIEWS


def _taken(view: View, goal: str) -> Iterator[str]:
    rng = np.random.default_rng([view.world.seed, 62])
    for _ in range(VIEWS):
        yield decide(misjudged(view, rng), goal).action


def near_misses(scenes: Sequence[Scene], texts: Sequence[str]) -> list[bool]:
    """Which replies end in a wrong action that is a near miss."""
    said = [action_of(text) for text in texts]
    return [
        bool(a) and a != action_of(s.reply) and near_miss(s.view, s.goal, a) for a, s in zip(said, scenes, strict=True)
    ]


def answer_figures(scenes: Sequence[Scene], texts: Sequence[str], near: Sequence[bool]) -> Figures:
    """Shares of replies that are right, parse, name the goal and so on, and which action was said for which."""
    wanted = [action_of(scene.reply) for scene in scenes]
    said = [action_of(text) for text in texts]
    right = [a == b for a, b in zip(said, wanted, strict=True)]
    found = [truths(t, s.view, s.goal) for t, s in zip(texts, scenes, strict=True)]
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for a, b in zip(wanted, said, strict=True):
        confusion[a][b or "unparsable"] += 1
    truth = {name: share([one[name] is True for one in found if one[name] is not None]) for name in FIGURES}
    return {
        "actions_right": share(right),
        "actions_right_or_near": share([r or n for r, n in zip(right, near, strict=True)]),
        "actions_right_on_the_way": share([r for r, s in zip(right, scenes, strict=True) if s.on_way]),
        "parsed": share([bool(a) for a in said]),
        "named": share([names_goal(t, s.goal) for t, s in zip(texts, scenes, strict=True)]),
        "word_for_word": share([t == s.reply for t, s in zip(texts, scenes, strict=True)]),
        "truth": truth | {"all": share([truthful(one) for one in found])},
        "confusion": {a: dict(sorted(row.items())) for a, row in sorted(confusion.items())},
    }


def run_figures(runs: Sequence[Run], lengths: Sequence[float | None]) -> Figures:
    """Success, collisions, steps, and path against the expert's (in runs that both finished)."""
    pairs = [
        (run.length, length)
        for run, length in zip(runs, lengths, strict=True)
        if run.reached and length is not None and length >= _SHORTEST
    ]
    return {
        "closed_loop": share([run.reached for run in runs]),
        "collided": share([run.collided for run in runs]),
        "path_ratio": ratio([a for a, _ in pairs], [b for _, b in pairs]),
        "steps": ratio([float(run.steps) for run in runs]),
        "agreed": share([agreed for run in runs for agreed in run.agreed]),
        "ended": dict(sorted(Counter(run.ended for run in runs).items())),
        "missed_seeds": [run.world.seed for run in runs if not run.reached],
    }


def accepted(
    guesses: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], gamma: int
) -> list[tuple[int, int, int, int]]:
    """(accepted, drafted, tokens, rounds) of each reply, by greedy speculative decoding with a draft's guesses."""
    rows = []
    for guess, reply in zip(guesses, replies, strict=True):
        place = drafted = agreed = rounds = 0
        while place < len(reply):
            width = min(gamma, len(reply) - place)
            run = 0
            while run < width and guess[place + run] == reply[place + run]:
                run += 1
            drafted, agreed, rounds, place = (drafted + width, agreed + run, rounds + 1, place + run + 1)
        rows.append((agreed, drafted, len(reply), rounds))
    return rows


def acceptance_figures(rows: Sequence[tuple[int, int, int, int]]) -> Figures:
    """The share of drafted tokens that are accepted, and the tokens per round of the target."""
    agreed, drafted, tokens, rounds = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {"acceptance": ratio(agreed, drafted), "tokens_per_round": ratio(tokens, rounds)}


def stages_of(training: Figures) -> Iterator[tuple[str, Figures]]:
    """(name, figures) of the stages of a training, in order."""
    for name in ("vision", "target", "joint", "dagger", "draft", "draft_own", "exits"):
        found = training.get(name) or []
        for number, stage in enumerate(found if isinstance(found, list) else [found]):
            yield f"dagger, round {number}" if name == "dagger" else name.replace("_", ", "), stage


def bars(figures: Figures) -> list[Figures]:
    """What the pair should reach: name, bar, figure with its interval, and met (None: not measured)."""
    target, draft = figures["target"], figures.get("draft")
    everywhere = target["all"]
    rows = [
        _bar("target: actions right", everywhere["actions_right"], at_least=0.98),
        _bar("target: runs that reach the goal", everywhere["closed_loop"], at_least=0.95),
        _bar("target: runs with a collision", everywhere["collided"], below=0.01),
        _bar("target: path, times the expert's", everywhere["path_ratio"], at_most=1.3, unit="x"),
    ]
    exits = figures.get("exits") or {"exits": [], "layers": 0}
    half = next((row["agreement"] for row in exits["exits"] if row["layer"] == exits["layers"] // 2), None)
    rows.append(_bar("exit at half depth agrees with the last layer", half, at_least=0.80))
    if draft is not None:
        found = figures.get("acceptance")
        rows += [
            _bar("draft: runs that reach the goal", draft["all"]["closed_loop"], at_most=0.85),
            _bar("draft: acceptance, greedy", found, at_least=0.70, at_most=0.90),
        ]
    weights = target["weights_mb"] + (draft["weights_mb"] if draft is not None else 0.0)
    rows += [
        _bar("weights together", {"value": weights}, at_most=60.0, unit=" MB"),
        _bar("draft: step", _ms(draft, "step"), at_most=4.0, unit=" ms"),
        _bar("target: five-token verification", _ms(target, "verify"), at_most=25.0, unit=" ms"),
        _bar("target: image prefill", _ms(target, "prefill"), at_most=60.0, unit=" ms"),
    ]
    return rows


def _ms(model: Figures | None, what: str) -> Figures | None:
    return None if model is None else {"value": model["ms"][what]["cpu_ms"]}


def _bar(
    name: str,
    figure: Figures | None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    unit: str = "",
) -> Figures:
    figure = figure or {}
    value = figure.get("value")
    met = None
    if value is not None:
        inside = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        met = inside and (below is None or value < below)
    bar = {"name": name, "at_least": at_least, "at_most": at_most, "below": below, "unit": unit, "met": met}
    return bar | {"value": value, "low": figure.get("low"), "high": figure.get("high")}


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
