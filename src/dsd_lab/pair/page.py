"""A page on a pair: what was measured, plots, and what went wrong to look at."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dsd_lab.pair.gallery import draw_decisions, draw_runs, failed_runs, how_it_ended, wrong_decisions
from dsd_lab.pair.near import LEAST, VIEWS
from dsd_lab.pair.pair import Evidence
from dsd_lab.pair.plots import draw_actions, draw_paths, draw_situations, draw_truth, need_matplotlib
from dsd_lab.pair.text import (
    ROLES,
    bar_rows,
    cost_rows,
    exit_rows,
    percent,
    situation_rows,
    table,
    times,
    truth_rows,
    word_rows,
)
from dsd_lab.train.curves import draw_training, stages_of
from dsd_lab.worlds.expert import ASIDE, FAR, SIZE

Figures = dict[str, Any]
_ABOUT = {
    "plain": "the goal is in view among things of its colour and of its kind",
    "search": "the goal is out of view at the start: the robot has to turn",
    "hidden": "the goal is partly behind another thing",
    "two": "two things of the goal's colour and kind: the left, right, nearer or farther one is asked for",
    "absent": "there is no such thing in the room: the robot is to say so and stop",
    "demo": "rooms as the demo's, which are of no split and not counted among all",
}


def check_page(folder: Path) -> None:
    """ValueError where no page can be written to a folder: before hours of work, not after."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} for the page; make it first")
    need_matplotlib()


def write_page(folder: Path, evidence: Evidence, command: str, training: Figures | None = None) -> Path:
    """Write ``pair.md`` into a folder and its pictures, ``pair-*.png``, into images/; returns the page's path.

    ``command``: what made it. ``training``: figures of the training, for its curves.
    """
    check_page(folder)
    images = folder / "images"
    images.mkdir(exist_ok=True)
    for old in images.glob("pair-*.png"):  # a figure that is not drawn any more
        old.unlink()
    figures = evidence.figures
    pictures = {
        "situations": "actions, runs and collisions by situation",
        "truth": "what the replies say truthfully",
        "actions": "actions said for the expert's",
        "paths": "path lengths of runs that reached the goal",
    }
    draw_situations(figures, images / "pair-situations.png")
    draw_truth(figures, images / "pair-truth.png")
    draw_actions(figures, images / "pair-actions.png")
    draw_paths(figures, images / "pair-paths.png")
    curves = training or {}
    drawn = any("curve" in stage for _, stage in stages_of(curves))
    if drawn:
        draw_training(curves, images / "pair-training.png")
    shown = {name: f"![{title}](images/pair-{name}.png)" for name, title in pictures.items()}
    lines = [
        "# The pair, measured",
        "",
        *_beginning(figures, command),
        "",
        *_reached(figures),
        "",
        *table(*bar_rows(figures)),
        "",
        "## By situation",
        "",
        *(f"* {name}: {_ABOUT[name]}" for name in figures["situations"]),
        "",
    ]
    for role in _roles(figures):
        lines += [f"The {role}:", "", *table(*situation_rows(figures[role])), ""]
    lines += [shown["situations"], "", *_explained(figures), "", shown["paths"], ""]
    lines += ["## Truth of what is said", "", *_TRUTH, ""]
    for role in _roles(figures):
        lines += [f"The {role}:", "", *table(*truth_rows(figures[role])), ""]
    lines += [shown["truth"], ""]
    if "words" in figures:
        lines += ["## In others' words", "", *_others(figures), ""]
    lines += ["## Which actions", "", shown["actions"], ""]
    lines += ["## Together", "", *_together(figures), "", "## Costs", "", *_costs(figures), ""]
    if drawn:
        lines += ["## Training", "", "![loss and accuracy](images/pair-training.png)", ""]
    lines += _gallery(evidence, images)
    path = folder / "pair.md"
    path.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    return path


def _roles(figures: Figures) -> list[str]:
    return [role for role in ROLES if figures[role] is not None]


def _beginning(figures: Figures, command: str) -> list[str]:
    sizes = " and ".join(
        f"{role} `{figures[role]['name']}` ({figures[role]['parameters'] / 1e6:.2f} M parameters)"
        for role in _roles(figures)
    )
    first, seeds = figures["first_run_seed"], figures["seeds"]
    how = "one by one, as on the robot" if figures["target"]["one_by_one"] else "many at once"
    return [
        "How well a pair decides, speaks the truth and steers the simulated robot, from",
        "",
        "```bash",
        command,
        "```",
        "",
        f"of {sizes}, on {figures['machine']}.",
        f"{figures['scenes']} scenes and {seeds} runs (seeds {first} and up) of each situation, "
        f"of the {figures['split']} split",
        f"(each has rooms, looks, phrasings and pairs of look-alikes of its own); greedy decoding, {how}; at most "
        f"{figures['max_steps']} actions a run.",
        "In brackets 95 % confidence intervals: Wilson's of shares, the bootstrap's of ratios. The same command",
        "measures any other Qwen2-VL with `--target DIR --draft DIR`, or one alone with `--no-draft`.",
    ]


def _reached(figures: Figures) -> list[str]:
    missed = [bar["name"] for bar in figures["bars"] if bar["met"] is False]
    unknown = [bar["name"] for bar in figures["bars"] if bar["met"] is None]
    text = f"Missed: {', '.join(missed) or 'nothing'}"
    text += f"; not measured: {', '.join(unknown)}" if unknown else ""
    return ["## What it is to reach", "", f"{text}. `--strict` makes the command fail on what is missed."]


def _explained(figures: Figures) -> list[str]:
    return [
        "An action is right when it is exactly the expert's, amount and all. A near miss is wrong, but what the expert",
        f"does, too, in {LEAST} or more of {VIEWS} views of the picture in which it misjudges everything a little:",
        f"bearings by {math.degrees(ASIDE):.1f} degrees, distances by {100 * FAR:.0f} %, how much of a thing shows by "
        f"{100 * SIZE:.0f} % (standard deviations). So",
        f"misjudging, it keeps its own action in {percent(figures['expert_misjudging'])} of the views.",
        "",
        "A run reaches its goal when the robot stopped by itself within 0.6 m of it and touched nothing; where there",
        "is none, when it ended by saying so, or by a full round in which no reply saw one. Paths are compared in runs",
        "that reached the goal: the sum of their lengths over the sum of the expert's.",
    ]


def _others(figures: Figures) -> list[str]:
    return [
        f"The same questions in the words of `{figures['words']}`, each way to ask for a goal in turn: how often",
        "the first thing that a reply names is the goal, and how often the action is right.",
        "",
        *table(*word_rows(figures)),
    ]


_TRUTH = [
    "Each reply's words against what the simulator knows: is the goal the first thing that it names, with the word for",
    "which of two (the goal named); does it speak of the goal's kind and tell truly whether it is in view (object);",
    "name its colour; say left, right or ahead as it is, within 3 degrees of the border (side); its distance within",
    "0.25 m, the smallest step (distance); and does the other thing that it names stand where it says (other). Side",
    "and distance are asked for where the goal is in view. All that is said: the last five, all true of the expert's.",
]


def _together(figures: Figures) -> list[str]:
    lines = []
    if figures["acceptance"] is not None:
        lines = [
            f"The target accepts {times(figures['acceptance'])} of the tokens that the draft proposes greedily,",
            f"{figures['gamma']} a round, which makes {times(figures['tokens_per_round'])} tokens a round.",
            "",
        ]
        rows = [
            (name, times(row["acceptance"]), times(row["tokens_per_round"]))
            for name, row in figures["acceptance_by_situation"].items()
        ]
        lines += [*table(("situation", "acceptance", "tokens a round"), rows), ""]
    elif figures["draft"] is not None:
        lines = ["Target and draft have different tokenizers: acceptance is not measured here.", ""]
    if figures["exits"] is None:
        return [*lines, "The target has no early exits."]
    return [*lines, *table(*exit_rows(figures))]


def _costs(figures: Figures) -> list[str]:
    repeats = figures["target"]["ms"]["repeats"]
    return [
        *table(*cost_rows(figures)),
        "",
        f"Medians of {repeats} on one CPU thread: its own time, and in brackets the clock's, which counts what else",
        "the machine did. A verification reads five drafted tokens and the one that is pending.",
    ]


def _gallery(evidence: Evidence, images: Path) -> list[str]:
    """What went wrong: the target's, each situation in turn."""
    texts, runs = evidence.texts["target"], evidence.runs["target"]
    near = evidence.near["target"]
    wrong, failed = wrong_decisions(evidence.scenes, texts, near), failed_runs(runs)
    lines = ["## What goes wrong", ""]
    if wrong:
        draw_decisions([evidence.scenes[n] for n in wrong], [texts[n] for n in wrong], images / "pair-decisions.png")
        lines += [
            "Wrong decisions of the target, near misses last: the instruction, its reply (red), the expert's (green).",
            "",
            "![pictures with wrong decisions](images/pair-decisions.png)",
            "",
        ]
    if failed:
        draw_runs([runs[n] for n in failed], images / "pair-runs.png")
        lines += [
            "Runs of the target that failed, from above, with the last reply: the path in red from the yellow dot, the",
            "goal in the ring.",
            "",
            "![maps of failed runs](images/pair-runs.png)",
            "",
        ]
    every: dict[tuple[str, str], list[str]] = {}
    for situation, run in runs:
        if not run.reached:
            every.setdefault((situation, how_it_ended(run)), []).append(str(run.world.seed))
    if every:
        rows = [(name, how, ", ".join(seeds)) for (name, how), seeds in sorted(every.items())]
        lines += [*table(("situation", "how it ended", "seeds"), rows), ""]
    if not wrong and not failed:
        lines += ["Nothing, of what was measured.", ""]
    return lines
