"""From answers and runs to figures with their intervals, and what they have to reach."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsd_lab.pair.intervals import ratio, share
from dsd_lab.pair.near import near_miss
from dsd_lab.pair.runs import Run, action_of
from dsd_lab.pair.scenes import Scene
from dsd_lab.pair.truth import FIGURES, names_goal, truthful, truths
from dsd_lab.train.curves import stages_of

Figures = dict[str, Any]
_SHORTEST = 0.05  # metres of the expert's path; what is shorter is no way to compare with


def near_misses(scenes: Sequence[Scene], texts: Sequence[str]) -> list[bool]:
    """Which replies end in a wrong action that is a near miss, as ``pair_near`` has it."""
    said = [action_of(text) for text in texts]
    return [
        bool(a) and a != action_of(s.reply) and near_miss(s.view, s.goal, a) for a, s in zip(said, scenes, strict=True)
    ]


def answer_figures(scenes: Sequence[Scene], texts: Sequence[str], near: Sequence[bool]) -> Figures:
    """Shares of replies: right, right or a near miss (``near``: which are one), parsed, naming the goal, word for word
    the expert's, truthful by figure; and which action for which.
    """
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
    """Success, collisions, steps, and path against the expert's (of runs in which both got there)."""
    pairs = [
        (run.length, length)
        for run, length in zip(runs, lengths, strict=True)
        if run.reached and length is not None and length >= _SHORTEST
    ]
    return {
        "closed_loop": share([run.reached for run in runs]),
        "collided": share([run.collided for run in runs]),
        "path_ratio": ratio([a for a, _ in pairs], [b for _, b in pairs]),
        "path_ratios": [round(a / b, 3) for a, b in pairs],
        "steps": ratio([float(run.steps) for run in runs]),
        "agreed": share(
            [
                action_of(said) == action_of(wanted)
                for run in runs
                for said, wanted in zip(run.replies, run.expert, strict=True)
            ]
        ),
        "ended": dict(sorted(Counter(run.ended for run in runs).items())),
        "missed_seeds": [run.world.seed for run in runs if not run.reached],
    }


def accepted(
    guesses: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], gamma: int
) -> list[tuple[int, int, int, int]]:
    """Greedy speculative decoding of replies by what a draft would have said, a row per reply.

    (tokens accepted, drafted, tokens, rounds): rounds of ``gamma`` guesses each, the target's own token behind
    those that it confirms.
    """
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
    """Share of drafted tokens accepted, and tokens per round of the target, over replies."""
    agreed, drafted, tokens, rounds = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {"acceptance": ratio(agreed, drafted), "tokens_per_round": ratio(tokens, rounds)}


def exit_figures(found: Figures | None) -> Figures | None:
    """Each exit's agreement with the last layer over all tokens, from ``pair_costs.exit_agreement``."""
    if found is None:
        return None
    rows = [
        {
            "layer": layer,
            "agreement": ratio([a for a, _ in counts], [b for _, b in counts]),
            "tokens": sum(b for _, b in counts),
        }
        for layer, counts in found["counts"].items()
    ]
    return {"layers": found["layers"], "exits": rows}


def training_of(model: Path) -> Figures | None:
    """The figures of the training that wrote a model directory, which it keeps beside it; None without any."""
    try:
        found = json.loads((model.parent / "figures.json").read_text(encoding="utf-8"))
        training = found.get("training")
    except (OSError, ValueError, AttributeError):
        return None
    return training if isinstance(training, dict) else None


def bars(figures: Figures, training: Figures | None = None) -> list[Figures]:
    """What the pair is to reach, a row each: name, bar, figure with its interval, and met (None: not measured)."""
    target, draft = figures["target"], figures.get("draft")
    everywhere = target["all"]
    rows = [
        _bar("target: actions right", everywhere["actions_right"], at_least=0.98),
        _bar("target: runs that reach the goal", everywhere["closed_loop"], at_least=0.95),
        _bar("target: runs with a collision", everywhere["collided"], below=0.01),
        _bar("target: path, times the expert's", everywhere["path_ratio"], at_most=1.3, unit="x"),
    ]
    half = _half_depth(figures.get("exits"))
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
    minutes = [stage["minutes"] for _, stage in stages_of(training or {}) if "minutes" in stage]
    if training is not None and minutes and "start" not in training:  # or they are not all
        cpu = training.get("settings", {}).get("device", "cpu") == "cpu"
        name, limit = ("CPU", 720.0) if cpu else ("GPU", 30.0)
        rows.append(_bar(f"training on a {name}", {"value": sum(minutes)}, at_most=limit, unit=" min"))
    return rows


def _half_depth(exits: Figures | None) -> Figures | None:
    if exits is None:
        return None
    for row in exits["exits"]:
        if row["layer"] == exits["layers"] // 2:
            found: Figures = row["agreement"]
            return found
    return None


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
        met = (
            (at_least is None or value >= at_least)
            and (at_most is None or value <= at_most)
            and (below is None or value < below)
        )
    return {
        "name": name,
        "at_least": at_least,
        "at_most": at_most,
        "below": below,
        "unit": unit,
        "value": value,
        "low": figure.get("low"),
        "high": figure.get("high"),
        "met": met,
    }
