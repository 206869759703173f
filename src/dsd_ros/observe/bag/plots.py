# SPDX-License-Identifier: Apache-2.0
"""Plot a recorded run, and write it as a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from dsd_ros.observe.bag.report import round_lines, rounds_of, step_lines, summary, summary_lines
from dsd_ros.observe.bag.run import Run, picture_sent, pictures_of

_SHOWN = 60  # steps shown with their pictures, which keeps the page small
_COLOURS = {"draft": "#4477aa", "verify": "#ee6677", "link": "#ccbb44"}
_STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:70em;margin:2em auto;color:#222}img{max-width:100%}"
    "pre{overflow-x:auto;background:#f6f6f6;padding:1em}p img{width:168px;vertical-align:middle;margin-right:1em}"
)


def draw(run: Run) -> bytes:
    """A PNG of the path, seconds and tokens of every reply, and the times the robot was held.

    :raises ValueError: when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # which draws without a window
    except ModuleNotFoundError:
        raise ValueError("Plots need the package matplotlib: pip install -r requirements/train.txt.") from None
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_path(axes[0][0], run)
    _draw_seconds(axes[0][1], run)
    _draw_rounds(axes[1][0], run)
    _draw_timeline(axes[1][1], run)
    figure.suptitle(summary_lines(run)[0])
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def page(run: Run) -> str:
    """A self-contained HTML page: plots, every reply with its picture, every round. Raises ValueError like `draw`."""
    pictures = pictures_of(run.bag, {step.stamp for step in run.steps[:_SHOWN]})
    replies = []
    for step in run.steps:
        found = pictures.get(step.stamp) or (picture_sent(step) if step.number <= _SHOWN else None)
        shown = "" if found is None else _image(found[0], f"picture of step {step.number}")
        accepted = " ".join(map(str, step.stats["accepted"]))
        text = html.escape(f"{step.number}. {step.text} ({step.stats['tokens']} tokens; accepted by round: {accepted})")
        replies.append(f"<p>{shown}{text}</p>")
    title = html.escape(f"Run of {run.bag.path.name}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{_text(summary_lines(run))}{_image(draw(run), 'plots of the run')}"
        f"<h2>Replies</h2>{_text(step_lines(run))}{''.join(replies)}<h2>Rounds</h2>{_text(round_lines(run))}</html>\n"
    )


def _image(picture: bytes, alt: str) -> str:
    form = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f'<img alt="{alt}" src="data:image/{form};base64,{base64.b64encode(picture).decode()}">'


def _text(lines: Sequence[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _draw_path(axis: Any, run: Run) -> None:
    axis.set(title="path walked", xlabel="x, m", ylabel="y, m")
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
    axis.set(title="seconds a reply", xlabel="step", ylabel="s")
    bottom = [0.0] * len(run.steps)
    for name, colour in _COLOURS.items():
        heights = [float(step.stats[f"{name}_seconds"]) for step in run.steps]
        axis.bar([step.number for step in run.steps], heights, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axis.legend()


def _draw_rounds(axis: Any, run: Run) -> None:
    title = f"tokens gained a round, tau {summary(run)['tau']:.2f}"
    axis.set(title=title, xlabel="round of the run", ylabel="tokens")
    rows = rounds_of(run)
    axis.bar(range(1, len(rows) + 1), [row["accepted"] + 1 for row in rows], color=_COLOURS["draft"])
    for index in (index for index, row in enumerate(rows) if row["round"] == 1):
        axis.axvline(index + 0.5, color="#bbbbbb", linewidth=0.8)


def _draw_timeline(axis: Any, run: Run) -> None:
    axis.set(title="replies, and when the robot was held", xlabel="s")
    axis.set(xlim=(0.0, max(run.seconds, 0.1)), ylim=(-0.6, 1.6))
    axis.set_yticks([0, 1], ["held", "replies"])
    for step in run.steps:
        seconds = float(step.stats["seconds"])
        axis.barh(1, seconds, left=(step.at - run.began) * 1e-9 - seconds, height=0.5, color=_COLOURS["draft"])
    for stop in run.stops:
        left = (stop.began - run.began) * 1e-9
        width = max((stop.ended - stop.began) * 1e-9, 0.05)
        axis.barh(0, width, left=left, height=0.5, color=_COLOURS["verify"])
        axis.text(left, 0.3, ", ".join(stop.causes), fontsize=7)
