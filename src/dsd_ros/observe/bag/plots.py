"""Plot a recorded run, and write it as a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from dsd_ros.observe.bag.report import rounds_of, summary, summary_lines
from dsd_ros.observe.bag.run import Run, picture_sent, pictures_of

_SHOWN = 60  # steps shown with their pictures, which keeps the page small
_COLOURS = {"draft": "#4477aa", "verify": "#ee6677", "link": "#ccbb44"}
_STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;text-align:right}"
    "td.l,th.l{text-align:left}img{max-width:100%}pre{overflow-x:auto;background:#f6f6f6;padding:1em}"
    "td img{width:168px;image-rendering:pixelated}"
)


def draw(run: Run) -> bytes:
    """A PNG of the path, seconds and tokens of every reply, and the times the robot was held.

    :raises ValueError: when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("Plots need the package matplotlib: pip install -r requirements/train.txt.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    try:
        _draw_way(axes[0][0], run)
        _draw_seconds(axes[0][1], run)
        _draw_rounds(axes[1][0], run)
        _draw_timeline(axes[1][1], run)
        figure.suptitle(summary_lines(run)[0])
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110)
    finally:
        pyplot.close(figure)
    return out.getvalue()


def page(run: Run) -> str:
    """A self-contained HTML page. Raises ValueError like :func:`draw`."""
    plot = base64.b64encode(draw(run)).decode()
    pictures = pictures_of(run.bag, {step.stamp for step in run.steps[:_SHOWN]})
    rows = []
    for step in run.steps:
        picture = ""
        found = pictures.get(step.stamp) or (picture_sent(step) if step.number <= _SHOWN else None)
        if found is not None:
            data = base64.b64encode(found[0]).decode()
            picture = f'<img alt="picture of step {step.number}" src="data:image/png;base64,{data}">'
        s = step.stats
        accepted = " ".join(str(count) for count in s["accepted"])
        rows.append(
            f"<tr><td>{step.number}</td><td>{picture}</td><td class=l>{html.escape(step.text)}</td>"
            f"<td>{s['tokens']}</td><td>{s['rounds']}</td><td>{s['tau']:.2f}</td>"
            f"<td>{s['seconds']:.3f}</td><td>{s['bytes_up']}</td><td>{s['bytes_down']}</td>"
            f"<td class=l>{accepted}</td></tr>"
        )
    title = html.escape(f"Run of {run.bag.path.name}")
    overview = html.escape("\n".join(summary_lines(run)))
    names = (
        "step", "picture", "reply", "tokens", "rounds", "tau", "s", "bytes up", "bytes down",
        "accepted, round by round",
    )  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><pre>{overview}</pre>"
        f'<img alt="plots of the run" src="data:image/png;base64,{plot}">'
        f"<h2>Replies</h2>{_table(names, rows)}"
        f"<h2>Rounds</h2>{_round_table(run)}</html>\n"
    )


def _round_table(run: Run) -> str:
    names = (
        "step", "round", "drafted", "accepted", "draft_seconds", "wait_seconds", "verify_seconds",
        "bytes_up", "bytes_down", "source", "ready",
    )  # fmt: skip
    rows = []
    for row in rounds_of(run):
        cells = (f"{row[name]:.4f}" if isinstance(row[name], float) else html.escape(str(row[name])) for name in names)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return _table([name.replace("_", " ") for name in names], rows)


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _draw_way(axis: Any, run: Run) -> None:
    axis.set_title("way walked")
    axis.set_xlabel("x, m")
    axis.set_ylabel("y, m")
    axis.set_aspect("equal", adjustable="datalim")
    if not run.path:
        axis.text(0.5, 0.5, "no odometry", ha="center", transform=axis.transAxes)
        return
    axis.plot([p[1] for p in run.path], [p[2] for p in run.path], color="#888888")
    for step in run.steps:
        place = min(run.path, key=lambda p: abs(p[0] - step.at))
        axis.plot(place[1], place[2], "o", color=_COLOURS["draft"])
        axis.annotate(str(step.number), place[1:3], textcoords="offset points", xytext=(4, 4))


def _draw_seconds(axis: Any, run: Run) -> None:
    axis.set_title("seconds a reply")
    axis.set_xlabel("step")
    axis.set_ylabel("s")
    bottom = [0.0] * len(run.steps)
    numbers = [step.number for step in run.steps]
    for name, colour in _COLOURS.items():
        heights = [float(step.stats[f"{name}_seconds"]) for step in run.steps]
        axis.bar(numbers, heights, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    if numbers:
        axis.legend()


def _draw_rounds(axis: Any, run: Run) -> None:
    s = summary(run)
    axis.set_title(f"tokens gained a round, tau {s['tau']:.2f}")
    axis.set_xlabel("round of the run")
    axis.set_ylabel("tokens")
    rows = rounds_of(run)
    axis.bar(range(1, len(rows) + 1), [row["accepted"] + 1 for row in rows], color=_COLOURS["draft"])
    firsts = [index for index, row in enumerate(rows) if row["round"] == 1]
    for index in firsts:
        axis.axvline(index + 0.5, color="#bbbbbb", linewidth=0.8)


def _draw_timeline(axis: Any, run: Run) -> None:
    axis.set_title("replies, and when the robot was held")
    axis.set_xlabel("s")
    axis.set_yticks([0, 1], ["held", "replies"])
    axis.set_ylim(-0.6, 1.6)
    axis.set_xlim(0.0, max(run.seconds, 0.1))
    for step in run.steps:
        seconds = float(step.stats["seconds"])
        end = (step.at - run.began) * 1e-9
        axis.barh(1, seconds, left=end - seconds, height=0.5, color=_COLOURS["draft"])
    for stop in run.stops:
        left = (stop.began - run.began) * 1e-9
        width = max((stop.ended - stop.began) * 1e-9, 0.05)
        axis.barh(0, width, left=left, height=0.5, color=_COLOURS["verify"])
        axis.text(left, 0.3, ", ".join(stop.causes), fontsize=7)
