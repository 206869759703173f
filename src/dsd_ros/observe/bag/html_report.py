# SPDX-License-Identifier: Apache-2.0
"""Write a recorded run as one HTML file that needs nothing else: report.html, filled in."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from string import Template

from dsd_ros.decoding.modes import unit_of
from dsd_ros.observe.bag.report import aligned, gained, summary, summary_lines, table_of
from dsd_ros.observe.bag.run import RecordedStep, Run, picture_sent, pictures_of
from dsd_ros.observe.view.events import tokens_of
from dsd_ros.shown import counted

_SHOWN = 60  # steps shown with their pictures, which keeps the page small
_LEGEND = (
    ("accepted", "drafted, accepted"), ("rejected", "drafted, rejected"),
    ("counted", "[n]: n rejected of a tree"), ("own", "the target's own"),
)  # fmt: skip
_PAGE = Path(__file__).with_name("report.html")


def page(run: Run) -> str:
    """The summary, and every reply with its picture and its passes or rounds, which are folded."""
    pictures = pictures_of(run.bag, {step.stamp for step in run.steps[:_SHOWN]})
    for step in run.steps[:_SHOWN]:
        if step.stamp not in pictures and (sent := picture_sent(step)) is not None:
            pictures[step.stamp] = sent
    replies = "\n".join(_reply(run, step, pictures.get(step.stamp, b"")) for step in run.steps)
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape("; ".join(summary(run)["instructions"]) or f"Run of {run.bag.path.name}"),
        summary=html.escape("\n".join(summary_lines(run))),
        legend=" ".join(f'<span class="{kind}">{text}</span>' for kind, text in _LEGEND if f'class="{kind}' in replies),
        replies=replies,
    )


def _reply(run: Run, step: RecordedStep, picture: bytes) -> str:
    unit = unit_of(step.stats["mode"])
    title = f"{step.number}. {step.action or 'no action'}{'' if step.verified else ', not verified'}"
    cost = f"at {(step.at - run.began) * 1e-9:.2f} s: {gained(step.stats, unit)}, {step.stats['seconds']:.3f} s"
    shown = ""
    if picture:
        form = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
        source = f"data:image/{form};base64,{base64.b64encode(picture).decode()}"
        shown = f'<img alt="picture of step {step.number}" src="{source}">'
    tokens = "".join(
        f'<span class="{kind}{" ahead" * ahead}">{html.escape(text)}</span>'
        for text, kind, ahead in tokens_of(step.shown)
    )
    rounds = "\n".join(aligned(table_of(step.rounds, unit)))
    return (
        f"<article><h2>{html.escape(title)}</h2>{shown}"
        f'<p class="tokens">{tokens or html.escape(step.text)}</p><p class="cost">{html.escape(cost)}</p>'
        f"<details><summary>{counted(len(step.rounds), unit)}</summary><pre>{html.escape(rounds)}</pre></details>"
        "</article>"
    )
