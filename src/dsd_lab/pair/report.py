# SPDX-License-Identifier: Apache-2.0
"""The figures of a pair as text: Markdown for its page and its model cards, aligned tables for the terminal."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dsd_lab.pair.figures import LEAST, VIEWS, Figures, stages_of
from dsd_lab.report import render_template, table as aligned
from dsd_lab.train.frames import MODEL_HEIGHT, MODEL_WIDTH
from dsd_lab.train.tokenizer import IMAGE_TOKENS
from dsd_lab.worlds.expert import ASIDE, FAR, SIZE
from dsd_lab.worlds.truth import FIGURES

ROLES = ("target", "draft")
_EXITS = re.compile(r"<!-- dsd-lab train exits: begin -->.*?<!-- dsd-lab train exits: end -->\n?", re.DOTALL)
_ABOUT = {
    "plain": "the goal is in view among things of its colour and of its kind",
    "search": "the goal is out of view at the start, so that the robot has to turn",
    "hidden": "the goal is partly behind another thing",
    "two": "two things have the goal's colour and kind; the instruction asks for the left, right, nearer or farther",
    "absent": "no such thing is in the room; the robot has to say so and stop",
    "demo": 'rooms like the demo\'s, which belong to no split and are not part of "all"',
}
_KEPT = re.compile(r"<!-- written by hand -->.*", re.DOTALL)  # the end of the page
_COSTS = ("", "parameters", "weights", "a token's step, ms", "five-token verification, ms", "image prefill, ms")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, with a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in lines)


def render(figures: Figures) -> str:
    """All figures for a terminal: the page's tables, aligned."""
    lines = []
    text = render_template("pair/sections.md", **_values(figures)).removesuffix("\n")
    for is_table, group in groupby(text.split("\n"), lambda line: line.startswith("|")):
        some = list(group)
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in some]
        lines += aligned([row for row in rows if set("".join(row)) != {"-"}]) if is_table else some
    return "\n".join([*lines, "In brackets: 95 % confidence intervals; ms: CPU time (wall time)."])


def pair_page(figures: Figures, command: str = "") -> str:
    """The page ``pair.md`` of a pair's figures; ``command``: what measured them, unless the figures say so."""
    missed = [
        (name, ", ".join(f"{n} {how}" for how, n in row["ended"].items()), ", ".join(map(str, row["missed_seeds"])))
        for name, row in figures["target"]["situations"].items()
        if row["missed_seeds"]
    ]
    values = {"command": command or figures["command"], "missed": missed} | _values(figures)
    return render_template("pair/page.md", **values).strip("\n")


def write_page(folder: Path, figures: Figures, command: str) -> Path:
    """Write ``pair.md`` into a folder; returns its path. ``command`` is what measured the figures."""
    path = folder / "pair.md"
    kept = _KEPT.search(path.read_text(encoding="utf-8")) if path.exists() else None
    path.write_text(pair_page(figures, command) + "\n" + (kept[0] if kept else ""), encoding="utf-8")
    return path


def _values(figures: Figures) -> dict[str, Any]:
    """What the templates of a page fill in."""
    roles = [role for role in ROLES if figures[role] is not None]
    met = {None: "not measured", True: "met", False: "missed"}
    values: dict[str, Any] = {
        "f": figures, "roles": roles, "about": _ABOUT, "least": LEAST, "views": VIEWS, "aside": math.degrees(ASIDE),
        "far": 100 * FAR, "size": 100 * SIZE, "table": table, "percent": percent, "times": times,
        "situations": situation_table, "truth": _truth_table,
        "bars": [(bar["name"], _wanted(bar), _found(bar), met[bar["met"]]) for bar in figures["bars"]],
        "costs": table(_COSTS, [_costs(role, figures[role]) for role in roles]),
    }  # fmt: skip
    if "words" in figures:
        found = [figures[role]["words"] for role in roles]
        rows = [(name, *(percent(mine["named"][name]) for mine in found)) for name in found[0]["named"]]
        rows.append(("actions right", *(percent(mine["actions_right"]) for mine in found)))
        values["words"] = table(("the goal named", *roles), rows)
    if figures["acceptance"] is not None:
        accepted = figures["acceptance_by_situation"].items()
        rows = [(name, times(row["acceptance"]), times(row["tokens_per_round"])) for name, row in accepted]
        values["together"] = table(("situation", "acceptance", "tokens a round"), rows)
    if (exits := figures["exits"]) is not None:
        rows = [(f"{row['layer']} of {exits['layers']}", percent(row["agreement"])) for row in exits["exits"]]
        values["exits"] = table(("exit after layer", "tokens that equal the last layer's"), rows)
    return values


def _truth_table(model: Figures) -> str:
    figures = (*FIGURES, "all")
    rows = [
        (name, percent(row["named"]), *(percent(row["truth"][one]) for one in figures))
        for name, row in _with_all(model)
    ]
    return table(("situation", "goal named", *FIGURES, "everything"), rows)


def _costs(role: str, mine: Figures) -> tuple[str, ...]:
    cells = []
    for what in ("step", "verify", "prefill"):
        cpu, wall = mine["ms"][what]["cpu_ms"], mine["ms"][what]["wall_ms"]
        cells.append(f"{wall:.1f}" if cpu is None else f"{cpu:.1f} ({wall:.1f})")
    return (role, f"{mine['parameters'] / 1e6:.2f} M", f"{mine['weights_mb']:.1f} MB", *cells)


def write_card(folder: Path, role: str, figures: Figures, training: Figures) -> None:
    """Write ``README.md`` of the model that is the figures' ``role``; the section on its exits stays."""
    path = folder / "README.md"
    exits = _EXITS.search(path.read_text(encoding="utf-8")) if path.exists() else None
    mine, settings = figures[role], training.get("settings", {})
    both, device = mine["all"], settings.get("device", "cpu")
    stages = [
        (name, f"{stage['steps']:.0f}", f"{stage['minutes']:.1f}")
        for name, stage in stages_of(training)
        if {"steps", "minutes"} <= stage.keys()
    ]
    facts = [
        ("actions right (exactly the expert's)", percent(both["actions_right"])),
        ("... in pictures on the way to a target", percent(both["actions_right_on_the_way"])),
        ("replies that parse", percent(both["parsed"])),
        ("replies word for word the expert's", percent(both["word_for_word"])),
        ("runs that reach the target without a collision", percent(both["closed_loop"])),
        ("runs with a collision", percent(both["collided"])),
        ("weights", f"{mine['weights_mb']:.1f} MB"),
    ]
    if figures["acceptance"] is not None:
        facts.append((f"draft's acceptance, greedy, {figures['gamma']} a round", times(figures["acceptance"], 3)))
        facts.append(("tokens per round of the target", times(figures["tokens_per_round"])))
    actions = [
        (action, str(sum(said.values())), f"{100 * said.get(action, 0) / sum(said.values()):.1f} %")
        for action, said in both["confusion"].items()
    ]
    cpu = f"a {platform.machine()} CPU with {settings.get('threads', 1)} threads"
    values = {
        "f": figures, "role": role, "width": MODEL_WIDTH, "height": MODEL_HEIGHT, "image_tokens": IMAGE_TOKENS,
        "where": cpu if device == "cpu" else device, "start": training.get("start", {}).get("target"),
        "stages": table(("stage", "steps", "minutes"), stages), "facts": table(("", ""), facts),
        "situations": situation_table, "actions": table(("expert's action", "scenes", "right"), actions),
        "exits": exits[0] if exits else "",
    }  # fmt: skip
    path.write_text(render_template("pair/card.md", **values), encoding="utf-8")


def situation_table(model: Figures) -> str:
    """A model's actions and runs by situation."""
    head = ("situation", "actions right", "... or a near miss", "runs that reach the goal", "runs with a collision",
            "path, times the expert's", "steps")  # fmt: skip
    shares = ("actions_right", "actions_right_or_near", "closed_loop", "collided")
    rows = [
        (name, *(percent(row[one]) for one in shares), times(row["path_ratio"]), times(row["steps"], 1))
        for name, row in _with_all(model)
    ]
    return table(head, rows)


def _with_all(model: Figures) -> Iterable[tuple[str, Figures]]:
    yield from model["situations"].items()
    if len(model["situations"]) > 1:
        yield "all", model["all"]


def percent(figure: Figures) -> str:
    """A share with its interval: ``97.0 % [91.5, 99.0]``."""
    if figure["value"] is None:
        return "-"
    return f"{100 * figure['value']:.1f} % [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]"


def times(figure: Figures, digits: int = 2) -> str:
    """A ratio with its interval: ``1.08 [1.02, 1.15]``."""
    if figure["value"] is None:
        return "-"
    value, low, high = (f"{figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _wanted(bar: Figures) -> str:
    signs = {"below": "<", "at_least": "≥", "at_most": "≤"}
    return ", ".join(f"{sign} {_amount(bar, bar[key])}" for key, sign in signs.items() if bar[key] is not None)


def _found(bar: Figures) -> str:
    if bar["value"] is None:
        return "-"
    text = _amount(bar, bar["value"])
    return text if bar["low"] is None else f"{text} [{_amount(bar, bar['low'])}, {_amount(bar, bar['high'])}]"


def _amount(bar: dict[str, Any], value: float) -> str:
    """A share in percent, anything else with its unit."""
    if not bar["unit"]:
        return f"{100 * value:.1f} %"
    return f"{value:.2f}x" if bar["unit"] == "x" else f"{value:.1f}{bar['unit']}"
