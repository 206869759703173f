"""The figures of a pair as text: Markdown for its page and its model cards, aligned tables for the terminal."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dsd_lab.pair.figures import LEAST, VIEWS, Figures, stages_of
from dsd_lab.report import table as aligned
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, and an empty line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in lines), ""]


def render(figures: Figures) -> str:
    """All figures for a terminal: the page's tables, aligned."""
    lines = []
    for is_table, group in groupby(sections(figures), lambda line: line.startswith("|")):
        some = list(group)
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in some]
        lines += aligned([row for row in rows if set("".join(row)) != {"-"}]) if is_table else some
    return "\n".join([*lines, "In brackets: 95 % confidence intervals; ms: CPU time (wall time)."])


def write_page(folder: Path, figures: Figures, command: str) -> Path:
    """Write ``pair.md`` into a folder; returns its path. ``command`` is what measured the figures."""
    sizes = " and ".join(
        f"{role} `{figures[role]['name']}` ({figures[role]['parameters'] / 1e6:.2f} M parameters)"
        for role in ROLES
        if figures[role]
    )
    how = "one by one, as on the robot" if figures["target"]["one_by_one"] else "many at once"
    lines = [
        "# The pair, measured",
        "",
        "How well a pair decides, describes the scene and steers the simulated robot. Measured by",
        "",
        "```bash",
        command,
        "```",
        "",
        f"with {sizes}, on {figures['machine']}.",
        f"{figures['scenes']} scenes and {figures['seeds']} runs (seeds {figures['first_run_seed']} and up) of each "
        f"situation, of the {figures['split']} split.",
        f"Each split has its own rooms, looks, wordings and pairs of look-alikes. Decoding is greedy, {how}; a run "
        f"has at most {figures['max_steps']} actions.",
        "In brackets: 95 % confidence intervals, Wilson's for shares and the bootstrap's for ratios. The same command",
        "measures any other Qwen2-VL with `--target DIR --draft DIR`, or one alone with `--no-draft`.",
        "",
        *sections(figures),
        *_missed(figures),
    ]
    path = folder / "pair.md"
    kept = _KEPT.search(path.read_text(encoding="utf-8")) if path.exists() else None
    path.write_text("\n".join(lines) + (kept[0] if kept else ""), encoding="utf-8")
    return path


_KEPT = re.compile(r"<!-- written by hand -->.*", re.DOTALL)  # the end of the page


def sections(figures: Figures) -> Iterator[str]:
    """The tables of a page, with their headings."""
    roles = [role for role in ROLES if figures[role] is not None]
    met = {None: "not measured", True: "met", False: "missed"}
    yield from ("## Bars", "", "With `--strict` the command fails if a bar is missed.", "")
    bars = [(bar["name"], _wanted(bar), _found(bar), met[bar["met"]]) for bar in figures["bars"]]
    yield from table(("", "bar", "measured", ""), bars)
    yield from ("## By situation", "", *(f"* {name}: {_ABOUT[name]}" for name in figures["situations"]), "")
    for role in roles:
        yield from (f"The {role}:", "", *table(*situation_rows(figures[role])))
    yield from _EXPLAINED
    yield from (
        "With such misjudgements, the expert keeps its own action in "
        f"{percent(figures['expert_misjudging'])} of the views.",
        "",
    )
    yield from ("## Truth of the replies", "", *_TRUTH)
    for role in roles:
        head = ("situation", "goal named", *FIGURES, "everything")
        rows = [
            (name, percent(row["named"]), *(percent(row["truth"][one]) for one in (*FIGURES, "all")))
            for name, row in _with_all(figures[role])
        ]
        yield from (f"The {role}:", "", *table(head, rows))
    if "words" in figures:
        found = [figures[role]["words"] for role in roles]
        rows = [(name, *(percent(mine["named"][name]) for mine in found)) for name in found[0]["named"]]
        rows.append(("actions right", *(percent(mine["actions_right"]) for mine in found)))
        yield from (
            "## In other people's words",
            "",
            f"The same questions in the words of `{figures['words']}`: how often",
        )
        yield from ("the reply names the goal first, and how often the action is right.", "")
        yield from table(("the goal named", *roles), rows)
    yield from ("## Draft and target together", "", *_together(figures))
    yield from ("## Costs", "")
    costs = [_costs(role, figures[role]) for role in roles]
    yield from table(
        ("", "parameters", "weights", "a token's step, ms", "five-token verification, ms", "image prefill, ms"), costs
    )
    yield f"Medians of {figures['target']['ms']['repeats']} runs on one CPU thread: CPU time (wall time)."
    yield from ("A verification reads five drafted tokens and the pending one.", "")


_EXPLAINED = [
    "An action is right if it equals the expert's, amount included. A near miss is wrong, but the expert also takes it",
    f"in {LEAST} or more of {VIEWS} views in which it misjudges everything a little: bearings by "
    f"{math.degrees(ASIDE):.1f} degrees,",
    f"distances by {100 * FAR:.0f} %, the visible part of a thing by {100 * SIZE:.0f} % (standard deviations).",
    "",
    "A run reaches its goal if the robot stops by itself within 0.6 m of it and touches nothing. Without a goal, the",
    "run must end by saying so, or with a full turn in which no reply saw one. Paths are compared in runs that reached",
    "the goal: the sum of their lengths over the sum of the expert's.",
    "",
]
_TRUTH = [
    "Each reply is compared with the simulator's ground truth. Goal named: the reply names the goal first, with the",
    "word for which of two. Object: it names the goal's kind and says correctly whether it is in view. Colour: the",
    "goal's. Side: left, right or ahead, within 3 degrees of the border. Distance: within 0.25 m, the smallest step.",
    "Other: the other thing that it names is where it says.",
    "",
]


def _together(figures: Figures) -> Iterator[str]:
    if figures["acceptance"] is not None:
        yield f"The target accepts {times(figures['acceptance'])} of the tokens that the draft proposes greedily."
        yield f"With {figures['gamma']} per round, tau is {times(figures['tokens_per_round'])}."
        rows = [
            (name, times(row["acceptance"]), times(row["tokens_per_round"]))
            for name, row in figures["acceptance_by_situation"].items()
        ]
        yield from ("", *table(("situation", "acceptance", "tokens a round"), rows))
    elif figures["draft"] is not None:
        yield from ("Target and draft have different tokenizers: acceptance is not measured here.", "")
    exits = figures["exits"]
    if exits is None:
        yield from ("The target has no early exits.", "")
        return
    found = [(f"{row['layer']} of {exits['layers']}", percent(row["agreement"])) for row in exits["exits"]]
    yield from table(("exit after layer", "tokens that equal the last layer's"), found)


def _costs(role: str, mine: Figures) -> tuple[str, ...]:
    cells = []
    for what in ("step", "verify", "prefill"):
        cpu, wall = mine["ms"][what]["cpu_ms"], mine["ms"][what]["wall_ms"]
        cells.append(f"{wall:.1f}" if cpu is None else f"{cpu:.1f} ({wall:.1f})")
    return (role, f"{mine['parameters'] / 1e6:.2f} M", f"{mine['weights_mb']:.1f} MB", *cells)


def _missed(figures: Figures) -> list[str]:
    rows = [
        (
            name,
            ", ".join(f"{count} {how}" for how, count in row["ended"].items()),
            ", ".join(map(str, row["missed_seeds"])),
        )
        for name, row in figures["target"]["situations"].items()
        if row["missed_seeds"]
    ]
    return ["## Runs that fail", "", *table(("situation", "how runs end", "seeds that fail"), rows)] if rows else []


def write_card(folder: Path, role: str, figures: Figures, training: Figures) -> None:
    """Write ``README.md`` of the model that is the figures' ``role``; the section on its exits stays."""
    path = folder / "README.md"
    exits = _EXITS.search(path.read_text(encoding="utf-8")) if path.exists() else None
    text = "\n".join(card(role, figures, training))
    path.write_text(text + (f"\n{exits[0]}" if exits else ""), encoding="utf-8")


def card(role: str, figures: Figures, training: Figures) -> Iterator[str]:
    """The lines of a model card."""
    mine = figures[role]
    both = mine["all"]
    named = {
        "target": "the target: the large model that verifies every token",
        "draft": "the draft: the small model that proposes tokens on the robot",
    }
    yield from ("---", "license: apache-2.0", "pipeline_tag: image-text-to-text", "---", "", f"# dsd_ros {role}", "")
    yield f"A small vision-language model of Qwen2-VL architecture, {named[role]}."
    yield "It sees one picture of the simulated robot's front camera (336 x 224, shrunk to"
    yield f"{MODEL_WIDTH} x {MODEL_HEIGHT}: {IMAGE_TOKENS} image tokens) and an instruction that names a colour and a"
    yield "kind, and answers with a line of reasoning and one action: `<reasoning> Action: forward 25|50|75 cm`,"
    yield "`turn left|right 15|30|45 degrees` or `stop`."
    yield f"{mine['parameters'] / 1e6:.2f} million parameters, float16, vocabulary of 512."
    yield from ("", "It knows the project's simulated rooms and nothing else. Do not use it on real pictures.", "")
    yield from ("## How it was made", "")
    yield "`dsd-lab train pair` trains on pictures that the project's simulator renders and its expert labels. The"
    yield "stages: the vision tower with throw-away heads; the language model on the frozen tower's tokens; both"
    yield "together; the same with pictures that the model met itself (DAgger); and for the draft, a copy of the"
    yield "target's tower and a small language model trained on the target's own replies. Each split has its own"
    yield "seeds."
    yield from ("", *_training(training), "## How well it does", "")
    yield f"Measured by `dsd-lab evaluate pair`: {figures['scenes']} scenes and {figures['seeds']} runs (seeds"
    yield f"{figures['first_run_seed']} and up) per situation, unseen in training; greedy decoding; 95 % confidence"
    yield from ("intervals in brackets.", "")
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
    yield from table(("", ""), facts)
    yield from table(*situation_rows(mine))
    actions = [
        (action, str(sum(said.values())), f"{100 * said.get(action, 0) / sum(said.values()):.1f} %")
        for action, said in both["confusion"].items()
    ]
    yield from table(("expert's action", "scenes", "right"), actions)


def _training(training: Figures) -> list[str]:
    """A row for each stage of a training."""
    rows = [
        (name, f"{stage['steps']:.0f}", f"{stage['minutes']:.1f}")
        for name, stage in stages_of(training)
        if {"steps", "minutes"} <= stage.keys()
    ]
    settings = training.get("settings", {})
    device = settings.get("device", "cpu")
    where = f"a {platform.machine()} CPU with {settings.get('threads', 1)} threads" if device == "cpu" else device
    start = training.get("start", {}).get("target")
    before = (
        f" It continued from an earlier pair (target {start}); that pair's training is not included." if start else ""
    )
    return [*table(("stage", "steps", "minutes"), rows), f"Measured on {where}.{before}", ""]


def situation_rows(model: Figures) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Heading and rows of a model's actions and runs by situation."""
    head = ("situation", "actions right", "... or a near miss", "runs that reach the goal", "runs with a collision",
            "path, times the expert's", "steps")  # fmt: skip
    shares = ("actions_right", "actions_right_or_near", "closed_loop", "collided")
    return head, [
        (name, *(percent(row[one]) for one in shares), times(row["path_ratio"]), times(row["steps"], 1))
        for name, row in _with_all(model)
    ]


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
