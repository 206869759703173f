"""The figures of a pair as text: for the terminal, the model cards and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Figures = dict[str, Any]
Rows = tuple[Sequence[str], list[Sequence[str]]]
ROLES = ("target", "draft")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table's lines."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in lines]


def percent(figure: Figures) -> str:
    """A share with its interval: ``97.0 % [91.5, 99.0]``."""
    if figure["value"] is None:
        return "-"
    low, high = 100 * figure["low"], 100 * figure["high"]
    return f"{100 * figure['value']:.1f} % [{low:.1f}, {high:.1f}]"


def times(figure: Figures, digits: int = 2) -> str:
    """A ratio with its interval: ``1.08 [1.02, 1.15]``."""
    if figure["value"] is None:
        return "-"
    value, low, high = (f"{figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def situation_rows(model: Figures) -> Rows:
    """Actions and runs by situation."""
    head = ("situation", "actions right", "... or a near miss", "runs that reach the goal", "runs with a collision",
            "path, times the expert's", "steps")  # fmt: skip
    rows: list[Sequence[str]] = [
        (
            name,
            percent(row["actions_right"]),
            percent(row["actions_right_or_near"]),
            percent(row["closed_loop"]),
            percent(row["collided"]),
            times(row["path_ratio"]),
            times(row["steps"], 1),
        )
        for name, row in _with_all(model)
    ]
    return head, rows


def truth_rows(model: Figures) -> Rows:
    """Truth of the replies by situation."""
    names = ("object", "colour", "side", "distance", "other", "all")
    head = ("situation", "the goal named", *names[:-1], "all that is said")
    return head, [
        (name, percent(row["named"]), *(percent(row["truth"][figure]) for figure in names))
        for name, row in _with_all(model)
    ]


def word_rows(figures: Figures) -> Rows:
    """Of the questions in a file's words: replies that name the goal, by what is asked for, and actions."""
    roles = [role for role in ROLES if figures[role] is not None]
    found = [figures[role]["words"] for role in roles]
    rows: list[Sequence[str]] = [
        (name, *(percent(mine["named"][name]) for mine in found)) for name in found[0]["named"]
    ]
    rows.append(("actions right", *(percent(mine["actions_right"]) for mine in found)))
    return ("the goal named", *roles), rows


def action_rows(confusion: dict[str, dict[str, int]]) -> Rows:
    """Which of the expert's actions are hit."""
    rows: list[Sequence[str]] = []
    for action, said in confusion.items():
        count = sum(said.values())
        rows.append((action, str(count), f"{100 * said.get(action, 0) / count:.1f} %"))
    return ("expert's action", "scenes", "right"), rows


def bar_rows(figures: Figures) -> Rows:
    """What is to be reached, and whether it is."""
    rows: list[Sequence[str]] = []
    for bar in figures["bars"]:
        met = {None: "not measured", True: "met", False: "missed"}[bar["met"]]
        rows.append((bar["name"], _wanted(bar), _found(bar), met))
    return ("", "bar", "measured", ""), rows


def cost_rows(figures: Figures) -> Rows:
    """Milliseconds and megabytes of each model."""
    rows: list[Sequence[str]] = []
    for role in ROLES:
        if figures[role] is None:
            continue
        mine = figures[role]
        cells = []
        for what in ("step", "verify", "prefill"):
            cpu, wall = mine["ms"][what]["cpu_ms"], mine["ms"][what]["wall_ms"]
            cells.append(f"{wall:.1f}" if cpu is None else f"{cpu:.1f} ({wall:.1f})")
        rows.append((role, f"{mine['parameters'] / 1e6:.2f} M", f"{mine['weights_mb']:.1f} MB", *cells))
    return ("", "parameters", "weights", "a token's step, ms", "five-token verification, ms",
            "image prefill, ms"), rows  # fmt: skip


def exit_rows(figures: Figures) -> Rows:
    """Each exit's agreement with the last layer."""
    exits = figures["exits"]
    rows: list[Sequence[str]] = [
        (f"{row['layer']} of {exits['layers']}", percent(row["agreement"])) for row in exits["exits"]
    ]
    return ("exit behind layer", "tokens as of the last layer"), rows


def render(figures: Figures) -> str:
    """All figures for a terminal."""
    parts = []
    for role in ROLES:
        if figures[role] is None:
            continue
        mine = figures[role]
        parts += [f"{role}: {mine['name']}, {mine['parameters'] / 1e6:.2f} M parameters", ""]
        parts += [*_aligned(*situation_rows(mine)), "", *_aligned(*truth_rows(mine)), ""]
    if "words" in figures:
        parts += [f"in the words of {figures['words']}:", "", *_aligned(*word_rows(figures)), ""]
    if figures["acceptance"] is not None:
        tau = times(figures["tokens_per_round"])
        parts += [
            f"acceptance {times(figures['acceptance'])}, {figures['gamma']} tokens a round; tokens per round {tau}",
            "",
        ]
    if figures["exits"] is not None:
        parts += [*_aligned(*exit_rows(figures)), ""]
    parts += [*_aligned(*cost_rows(figures)), "", *_aligned(*bar_rows(figures))]
    parts += ["", "in brackets: 95 % confidence; ms: the thread's own time (the clock's)"]
    return "\n".join(parts)


def _with_all(model: Figures) -> Iterable[tuple[str, Figures]]:
    yield from model["situations"].items()
    if len(model["situations"]) > 1:
        yield "all", model["all"]


def _wanted(bar: Figures) -> str:
    if bar["below"] is not None:
        return f"< {_amount(bar, bar['below'])}"
    parts = []
    if bar["at_least"] is not None:
        parts.append(f"≥ {_amount(bar, bar['at_least'])}")
    if bar["at_most"] is not None:
        parts.append(f"≤ {_amount(bar, bar['at_most'])}")
    return ", ".join(parts)


def _found(bar: Figures) -> str:
    if bar["value"] is None:
        return "-"
    text = _amount(bar, bar["value"])
    if bar["low"] is not None:
        text += f" [{_amount(bar, bar['low'])}, {_amount(bar, bar['high'])}]"
    return text


def _amount(bar: Figures, value: float) -> str:
    """A share in percent, anything else with its unit."""
    if not bar["unit"]:
        return f"{100 * value:.1f} %"
    return f"{value:.2f}x" if bar["unit"] == "x" else f"{value:.1f}{bar['unit']}"


def _aligned(head: Sequence[str], rows: list[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left."""
    everything = [head, *rows]
    widths = [max(len(row[n]) for row in everything) for n in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    ]
