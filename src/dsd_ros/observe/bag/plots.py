# SPDX-License-Identifier: Apache-2.0
"""Plot a recorded run, and write it as a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from dsd_ros.decoding.modes import unit_of
from dsd_ros.observe.bag.report import gained, summary, summary_lines, table_of, unit_of_run
from dsd_ros.observe.bag.run import RecordedStep, Run, picture_sent, pictures_of
from dsd_ros.observe.bag.shown_run import shown_reply
from dsd_ros.observe.view.events import reply_event, world_event
from dsd_ros.observe.view.figures import size
from dsd_ros.shown import counted

_SHOWN = 60  # steps shown with their pictures, which keeps the page small
_COLOURS = {"draft": "#4477aa", "verify": "#ee6677", "link": "#ccbb44"}
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:72em;margin:0 auto;padding:1em;color:#1b1f24;background:#fff}
h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.15em;margin:1.6em 0 .6em}h3{font-size:1em;margin:0 0 .3em}
h1,h3,p,li,td,dd{overflow-wrap:anywhere}img{max-width:100%;height:auto}
.outcome{padding:.6em .8em;border-radius:6px;font-weight:600;background:#fff1c2;color:#4d3800}
.good{background:#dafbe1;color:#0b3d1b}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15em 1em;margin:1em 0}dt{color:#4f5963}dd{margin:0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26em),1fr));gap:.6em}
article{display:grid;grid-template-columns:168px minmax(0,1fr);gap:.8em;padding:.8em 0;border-top:1px solid #d0d7de}
article p{margin:.2em 0}small,summary{color:#4f5963;font-size:.9em}summary{cursor:pointer}
.accepted{color:#116329}.rejected{color:#b42318;text-decoration:line-through}.own{color:#0550ae;font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:12px}
th,td{text-align:right;padding:2px 8px;border-bottom:1px solid #d0d7de;font-variant-numeric:tabular-nums}
@media (max-width:640px){article{grid-template-columns:minmax(0,1fr)}th,td{padding:2px 4px;font-size:11px}}
@media print{body{max-width:none;padding:0;font-size:11px}article,.plots img,tr{break-inside:avoid}h2{break-after:avoid}
.outcome{border:1px solid #1b1f24}details:not([open]){display:none}.wide{overflow:visible}}
"""


def draw(run: Run) -> bytes:
    """A PNG of the path, seconds and tokens of every reply, and the times the robot was held.

    :raises ValueError: when matplotlib is not installed.
    """
    return _drawn(run, (2, 2), (12, 8), _PLOTS, summary_lines(run)[0])


def page(run: Run) -> str:
    """A self-contained HTML page, for screen and paper: the outcome, figures, plots, every reply with its picture.

    The passes or rounds of a reply are folded. Raises ValueError like `draw`.
    """
    pictures = pictures_of(run.bag, {step.stamp for step in run.steps[:_SHOWN]})
    title = "; ".join(summary(run)["instructions"]) or f"Run of {run.bag.path.name}"
    plots = "".join(_image(_drawn(run, (1, 1), (6, 4), [plot]), name) for name, plot in _NAMED_PLOTS.items())
    replies = "".join(_reply(run, step, pictures.get(step.stamp)) for step in run.steps)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f'{_outcomes(run)}{_facts(run)}<div class="plots">{plots}</div><h2>Replies</h2>'
        '<p><small><span class="accepted">drafted, accepted</span>, <span class="rejected">drafted, rejected</span>, '
        '<span class="own">the target\'s own</span></small></p>'
        f"{replies}</html>\n"
    )


def _outcomes(run: Run) -> str:
    """How the run's goals ended, newest last."""
    ends = [text for _, text in run.ends] or ["No outcome: the bag ends before the run does, or no goal was given."]
    return "".join(
        f'<p class="outcome{" good" if text.startswith("ARRIVED") else ""}">{html.escape(text)}</p>' for text in ends
    )


def _facts(run: Run) -> str:
    """The summary as a list of names and values; what the bag has nothing of is left out."""
    s = summary(run)
    sooner = s["sooner_estimate"]
    facts = [
        ("recorded", f"{s['bag']}, {s['seconds']:.1f} s, {s['messages']} messages on {len(s['topics'])} topics"),
        ("decoding", " over ".join(filter(None, (", ".join(s["modes"]), ", ".join(s["transports"]))))),
        ("target", ", ".join(s["targets"])),
        ("replies", f"{s['steps']}, {gained(s, unit_of_run(run))}"),
        ("actions", f"{s['parsed']} of {s['steps']} replies end in one"),
        ("miss rate", "" if s["miss_rate"] is None else f"{100 * s['miss_rate']:.1f} %"),
        ("estimate", f"about {sooner:.1f} times as fast as the target alone" if sooner else ""),
        ("times", f"{s['reply_seconds']:.3f} s a reply, {s['seconds_per_action']:.2f} s an action"),
        ("link", f"{size(s['bytes_up'])} up, {size(s['bytes_down'])} down"),
        ("way", f"{s['distance_m']:.2f} m" if run.path else ""),
        *(("note", note) for note in s["notes"]),
        *((f"at {e['at']:.2f} s", f"refused: {e['code']}: {e['sentence']}") for e in s["refusals"]),
        *((f"at {e['at']:.2f} s", f"held for {e['seconds']:.2f} s: {' '.join(e['sentences'])}") for e in s["stops"]),
    ]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in facts if text) + "</dl>"


def _reply(run: Run, step: RecordedStep, picture: tuple[bytes, str] | None) -> str:
    found = picture or (picture_sent(step) if step.number <= _SHOWN else None)
    shown = "<span></span>" if found is None else _image(found[0], f"picture of step {step.number}")
    s = step.stats
    unit = unit_of(s["mode"])
    cost = f"{gained(s, unit)}, {s['seconds']:.3f} s, {size(s['bytes_up'])} up, {size(s['bytes_down'])} down"
    title = f"{step.number}. {step.action or 'no action'}{'' if step.verified else ', not verified'}"
    at = (step.at - run.began) * 1e-9
    return (
        f"<article>{shown}<div><h3>{html.escape(title)} <small>at {at:.2f} s</small></h3>"
        f"<p>{_tokens(step)}</p><p><small>{cost}</small></p>{_rounds(step, unit)}</div></article>"
    )


def _tokens(step: RecordedStep) -> str:
    """A reply's text, with its tokens in their colours where the bag has all of them."""
    tokens = reply_event(shown_reply(step), step.number)["tokens"]
    if "".join(text for text, kind, _ in tokens if kind != "rejected").strip() != step.text.strip():
        return html.escape(step.text)
    return "".join(f'<span class="{kind}">{html.escape(text)}</span>' for text, kind, _ in tokens)


def _rounds(step: RecordedStep, unit: str) -> str:
    """A folded table of a reply's passes or rounds."""
    if not step.rounds:
        return ""
    head, *rows = table_of(step.rounds, unit)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<details><summary>{counted(len(rows), unit)}</summary><div class="wide"><table>'
        f"<thead><tr>{''.join(f'<th>{title}</th>' for title in head)}</tr></thead><tbody>{body}</tbody></table></div>"
        "</details>"
    )


def _drawn(run: Run, grid: tuple[int, int], inches: tuple[int, int], plots: Sequence[_Plot], title: str = "") -> bytes:
    """A PNG of some plots in a grid of (rows, columns)."""
    try:
        from matplotlib.figure import Figure  # which draws without a window
    except ModuleNotFoundError:
        raise ValueError("Plots need the package matplotlib: pip install -r requirements/train.txt.") from None
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots(*grid, squeeze=False)
    for axis, plot in zip(axes.flat, plots, strict=True):
        plot(axis, run)
    figure.suptitle(title)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _image(picture: bytes, alt: str) -> str:
    form = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f'<img alt="{alt}" src="data:image/{form};base64,{base64.b64encode(picture).decode()}">'


def _draw_path(axis: Any, run: Run) -> None:
    axis.set(title="path walked", xlabel="x, m", ylabel="y, m")
    axis.set_aspect("equal", adjustable="datalim")
    _draw_world(axis, run)
    if not run.path:
        axis.text(0.5, 0.5, "no odometry", ha="center", transform=axis.transAxes)
        return
    axis.plot([p[1] for p in run.path], [p[2] for p in run.path], color="#b42318")
    for step in run.steps:
        place = min(run.path, key=lambda p: abs(p[0] - step.at))
        axis.plot(place[1], place[2], "o", color=_COLOURS["draft"])
        axis.annotate(str(step.number), place[1:3], textcoords="offset points", xytext=(4, 4))


def _draw_world(axis: Any, run: Run) -> None:
    """The room, its things by name, and the goal, where the bag has them."""
    from matplotlib.patches import Circle, Rectangle

    for thing in world_event(run.markers):
        (x, y, _), (wide, deep, _) = thing["at"], thing["size"]
        goal, colour = thing["kind"] == "goal", [part / 255 for part in thing["rgb"]]
        if thing["box"]:
            axis.add_patch(Rectangle((x - wide / 2, y - deep / 2), wide, deep, color=colour))
        else:
            axis.add_patch(Circle((x, y), wide / 2, color="#2ea043" if goal else colour, alpha=0.35 if goal else 1.0))
        if thing["label"]:
            text = f"goal: {thing['label']}" if goal else thing["label"]
            weight = "bold" if goal else "normal"
            axis.annotate(
                text, (x, y - wide / 2), textcoords="offset points", xytext=(0, -2), ha="center", va="top",
                fontsize=7, weight=weight, color="#116329" if goal else "#4f5963",
            )  # fmt: skip
    axis.autoscale_view()


def _draw_seconds(axis: Any, run: Run) -> None:
    axis.set(title="seconds a reply", xlabel="step", ylabel="s")
    parts = {name: [float(step.stats[f"{name}_seconds"]) for step in run.steps] for name in _COLOURS}
    if unit_of_run(run) == "pass":  # the robot drafts meanwhile, and the target does not wait for the link
        rest = [step.stats["seconds"] - step.stats["verify_seconds"] for step in run.steps]
        parts = {"verify": parts["verify"], "link": [max(0.0, seconds) for seconds in rest]}
    _stack(axis, [step.number for step in run.steps], parts, {"verify": "target", "link": "link and the rest"})


def _draw_rounds(axis: Any, run: Run) -> None:
    unit = unit_of_run(run)
    axis.set(title=f"tokens gained a {unit}", xlabel=f"{unit} of the run", ylabel="tokens")
    rows = [found for step in run.steps for found in step.rounds]
    accepted = [found["accepted"] for found in rows]
    own = [len(found["gained"]) - found["accepted"] for found in rows]
    names = {"draft": "from drafts", "verify": "the target's own"}
    _stack(axis, range(1, len(rows) + 1), {"verify": own, "draft": accepted}, names)
    for index in (index for index, row in enumerate(rows) if row["round"] == 1):
        axis.axvline(index + 0.5, color="#bbbbbb", linewidth=0.8)


def _stack(axis: Any, places: Sequence[int], parts: dict[str, list[Any]], names: dict[str, str]) -> None:
    """Bars on top of each other in their colours, with a legend."""
    bottom = [0.0] * len(places)
    for name, heights in parts.items():
        axis.bar(places, heights, bottom=bottom, color=_COLOURS[name], label=names.get(name, name))
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axis.legend()


def _draw_timeline(axis: Any, run: Run) -> None:
    axis.set(title="replies, and when the robot was held", xlabel="s")
    axis.set(xlim=(0.0, max(run.seconds, 0.1)), ylim=(-0.6, 1.6))
    axis.set_yticks([0, 1], ["held", "replies"])
    for step in run.steps:
        seconds = float(step.stats["seconds"])
        axis.barh(1, seconds, left=(step.at - run.began) * 1e-9 - seconds, height=0.5, color=_COLOURS["draft"])
    free = 0.0  # up to where there is no label yet
    for stop in run.stops:
        left = (stop.began - run.began) * 1e-9
        width = max((stop.ended - stop.began) * 1e-9, 0.05)
        axis.barh(0, width, left=left, height=0.5, color=_COLOURS["verify"])
        if left >= free:
            axis.text(left, 0.3, ", ".join(stop.causes), fontsize=7)
            free = left + 0.012 * len(", ".join(stop.causes)) * max(run.seconds, 0.1)


_Plot = Callable[[Any, Run], None]
_NAMED_PLOTS: dict[str, _Plot] = {
    "path walked, with the room and the goal": _draw_path,
    "seconds of every reply": _draw_seconds,
    "tokens gained a pass or round": _draw_rounds,
    "replies, and when the robot was held": _draw_timeline,
}
_PLOTS = list(_NAMED_PLOTS.values())
