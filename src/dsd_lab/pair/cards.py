"""The model cards of a pair, written from what was measured."""

from __future__ import annotations

import math
import platform
import re
from pathlib import Path
from typing import Any

from dsd_lab.pair.text import action_rows, percent, situation_rows, table, times
from dsd_lab.train.architecture import IMAGE_TOKENS
from dsd_lab.train.curves import stages_of
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH
from dsd_lab.worlds.expert import ASIDE, FAR

PLOT = "training.png"
_EXITS = re.compile(r"<!-- dsd-lab train exits: begin -->.*?<!-- dsd-lab train exits: end -->\n?", re.DOTALL)
_ROLES = {
    "target": "the target: the large model whose word counts",
    "draft": "the draft: the small model that proposes tokens on the robot",
}


def write_card(folder: Path, role: str, figures: dict[str, Any], training: dict[str, Any] | None) -> None:
    """Write ``README.md`` of the model that is the figures' ``role``; what it said of its exits stays."""
    path = folder / "README.md"
    exits = _EXITS.search(path.read_text(encoding="utf-8")) if path.exists() else None
    text = card(role, figures, training, plot=_plot(folder))
    path.write_text(text + (f"\n{exits[0]}" if exits else ""), encoding="utf-8")


def card(role: str, figures: dict[str, Any], training: dict[str, Any] | None, plot: str | None = None) -> str:
    """The card's text; ``plot``: a picture of the training's curves, relative to the card."""
    mine = figures[role]
    both = mine["all"]
    missed = {
        name: ", ".join(map(str, row["missed_seeds"]))
        for name, row in mine["situations"].items()
        if row["missed_seeds"]
    }
    facts = [
        ("actions right (exactly the expert's)", percent(both["actions_right"])),
        ("... in pictures on the way to a target", percent(both["actions_right_on_the_way"])),
        ("replies that parse", percent(both["parsed"])),
        ("replies word for word the expert's", percent(both["word_for_word"])),
        ("runs that reach the target without a collision", percent(both["closed_loop"])),
        ("runs with a collision", percent(both["collided"])),
    ]
    if figures["acceptance"] is not None:
        facts += [
            (f"draft's acceptance, greedy, {figures['gamma']} tokens a round", times(figures["acceptance"], 3)),
            ("tokens per round of the target", times(figures["tokens_per_round"])),
        ]
    facts.append(("weights", f"{mine['weights_mb']:.1f} MB"))
    lines = [
        "---",
        "license: apache-2.0",
        "pipeline_tag: image-text-to-text",
        "---",
        "",
        f"# dsd_ros {role}",
        "",
        f"A small vision-language model of Qwen2-VL architecture, {_ROLES[role]}. It sees one picture of the",
        f"simulated robot's front camera (336 x 224, shrunk to {MODEL_WIDTH} x {MODEL_HEIGHT}: {IMAGE_TOKENS} image",
        "tokens) and an instruction that names a colour and a kind, and answers with a line of reasoning and one",
        "action: `<reasoning> Action: forward 25|50|75 cm`, `turn left|right 15|30|45 degrees` or `stop`.",
        f"{mine['parameters'] / 1e6:.2f} million parameters, float16, vocabulary of 512.",
        "",
        "It knows the project's simulated rooms and nothing else: it is no model for real pictures.",
        "",
        "## How it was made",
        "",
        "`dsd-lab train pair`, on pictures rendered by the project's own simulator and labelled by its expert. Stages:",
        "the vision tower through throw-away heads, the language model on the frozen tower's tokens, both",
        f"together{_dagger_clause(training)}, and for the draft: a copy of the target's tower and a small language",
        "model trained on the target's own replies. Training, validation and test have seeds of their own.",
        "",
        *_training_lines(training),
        *([f"![loss and accuracy over the training]({plot})", ""] if plot else []),
        "## How well it does",
        "",
        f"Measured by `dsd-lab evaluate pair` in the run that wrote this card: {figures['scenes']} scenes and",
        f"{figures['seeds']} runs (seeds {figures['first_run_seed']} and up) of each situation, which neither training",
        "nor the choice of weights saw; greedy decoding; in brackets the 95 % confidence interval.",
        "",
        *table(("", ""), facts),
        "",
        *table(*situation_rows(mine)),
        "",
        "A near miss is an action that the expert, too, takes where it misjudges the picture a little: bearings by",
        f"{math.degrees(ASIDE):.1f} degrees, distances by {100 * FAR:.0f} % (`dsd_lab.pair.near`).",
        "",
        f"Missed seeds: {'; '.join(f'{name} {seeds}' for name, seeds in missed.items()) or 'none'}.",
        "",
        *table(*action_rows(both["confusion"])),
    ]
    return "\n".join(lines) + "\n"


def _plot(folder: Path) -> str | None:
    """The training's plot beside the card or one folder up, as the card would link to it."""
    if (folder / PLOT).exists():
        return PLOT
    return f"../{PLOT}" if (folder.parent / PLOT).exists() else None


def _dagger_clause(training: dict[str, Any] | None) -> str:
    """What the stages of DAgger add to the prose, when there were any."""
    if not training or not training.get("dagger"):
        return ""
    return (
        ", the same with pictures met while running\nthe model in the loop and labelling what it meets (DAgger), "
        "then the mean of the weights at the ends of these\nlast stages"
    )


def _training_lines(training: dict[str, Any] | None) -> list[str]:
    """A row per stage, whatever stages the training names."""
    if not training:
        return []
    rows = [
        (name, f"{stage['steps']:.0f}", f"{stage['minutes']:.1f}")
        for name, stage in stages_of(training)
        if {"steps", "minutes"} <= stage.keys()
    ]
    if not rows:
        return []
    settings = training.get("settings", {})
    device = settings.get("device", "cpu")
    start = training.get("start", {}).get("target")
    before = f" It went on from an earlier pair (target {start}), whose training comes on top." if start else ""
    where = f"a {platform.machine()} CPU with {settings.get('threads', 1)} threads"
    return [
        *table(("stage", "steps", "minutes"), rows),
        "",
        f"Measured on {where if device == 'cpu' else device}.{before} {training.get('note', '')}".rstrip(),
        "",
    ]
