# SPDX-License-Identifier: Apache-2.0
"""Draw a reply as swim lanes: who was busy when, and in rounds what was drafted ahead.

All times are on the robot's clock, because clocks of two machines are never compared. In rounds, uplink and downlink
each get half of the wait that is not spent in the target. A pass of the target ends when the robot got its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dsd_ros.decoding.modes import PRESETS, streams
from dsd_ros.observe.view.overlay import (
    ACCEPTED,
    AHEAD,
    BAR,
    FAINT,
    INK,
    OWN,
    PAPER,
    REJECTED,
    WIDTH,
    Colour,
    blank,
    text_width,
    write,
)
from dsd_ros.observe.view.state import Round, ShownReply

LANES = ("draft", "ahead", "uplink", "target", "downlink")
READ, DRAFT, HIT, PARTLY = "reads the picture", "draft", "ready ahead", "begun ahead"
UP, VERIFY, DOWN = "up", "verify", "down"
_COLOURS: dict[str, Colour] = {
    READ: (92, 98, 110),
    DRAFT: ACCEPTED,
    HIT: AHEAD,
    PARTLY: (150, 118, 60),
    UP: (120, 134, 220),
    VERIFY: OWN,
    DOWN: (88, 180, 190),
}
_SIZE = 11
_LEFT = 62
_LANE = 21
_AXIS = 18
_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Span:
    """An activity from ``start`` to ``end`` (s since the reply began)."""

    lane: str
    start: float
    end: float
    what: str
    round: int  # counted from 1
    label: str = ""


@dataclass(frozen=True)
class Exit:
    """An early exit, shown in the target's lane."""

    at: float
    layer: int
    round: int
    held: bool  # the first exit that agreed with the last layer


def lanes_of(mode: str) -> tuple[str, ...]:
    """The lanes of a mode's replies."""
    if not streams(mode):
        return LANES
    return ("draft", "target") if PRESETS[mode].drafts else ("target",)


def _pass_spans(reply: ShownReply) -> list[Span]:
    """The target's passes, which do not overlap, and what the robot drafted meanwhile."""
    spans: list[Span] = []
    following = float("inf")
    for number, now in reversed([*enumerate(reply.rounds, 1)]):
        came = now.began + now.wait
        end = min(came, following)
        following = max(0.0, end - now.verify)
        spans.append(Span("target", following, end, VERIFY, number, _gain(now)))
        if now.depth:
            spans.append(Span("draft", max(now.began, came - now.model), came, DRAFT, number, str(now.depth)))
    return spans[::-1]


def _gain(now: Round) -> str:
    return f"{now.accepted}+{len(now.gained) - now.accepted}" if now.gained else ""


def spans_of(reply: ShownReply) -> list[Span]:
    """All spans of a reply, ordered by round or pass."""
    if streams(reply.mode):
        return _pass_spans(reply)
    spans: list[Span] = []
    before = None
    for number, now in enumerate(reply.rounds, 1):
        if number == 1 and now.began > 0.0:
            spans.append(Span("draft", 0.0, now.began, READ, number))
        sent = now.began + now.draft
        if now.draft > 0.0 and now.source != "flight":
            spans.append(Span("draft", now.began, sent, DRAFT, number, str(now.drafted)))
        if now.source and before is not None:
            begun = before.began + before.draft
            end = min(begun + max(now.model, 0.0), begun + before.wait)
            kind = HIT if now.ready else PARTLY
            spans.append(Span("ahead", begun, end, kind, number, str(now.drafted)))
        way = _one_way(now.wait, now.verify)
        arrived = sent + way
        left = sent + now.wait - way
        spans.append(Span("uplink", sent, arrived, UP, number))
        spans.append(Span("target", arrived, left, VERIFY, number, _gain(now)))
        spans.append(Span("downlink", left, sent + now.wait, DOWN, number))
        before = now
    return spans


def exits_of(reply: ShownReply) -> list[Exit]:
    """All early exits of a reply, at the time they left the target (estimated on the robot's clock)."""
    found = []
    for number, now in enumerate(reply.rounds, 1):
        way = _one_way(now.wait, now.verify)
        sent = now.began + now.draft
        held = False
        for layer, seconds in now.exits:
            first = layer == now.first_exit and not held
            held = held or first
            at = max(sent + way, sent + seconds - way)
            found.append(Exit(at, layer, number, first))
    return found


def _one_way(wait: float, verify: float) -> float:
    return max(0.0, wait - verify) / 2


def draw_timeline(reply: ShownReply, width: int = WIDTH) -> np.ndarray:
    """The swim lanes: uint8 (height, width, 3), RGB."""
    lanes = lanes_of(reply.mode)
    canvas = blank(len(lanes) * _LANE + _AXIS, width)
    for number, lane in enumerate(lanes):
        paper = PAPER if number % 2 else BAR
        canvas.paste(paper, (0, number * _LANE, width, (number + 1) * _LANE))
        write(canvas, 4, number * _LANE + 3, lane, _SIZE, FAINT)
    spans = spans_of(reply)
    whole = max((span.end for span in spans), default=0.0)
    if whole <= 0.0:
        write(canvas, _LEFT, canvas.height - _AXIS + 1, "nothing verified yet", _SIZE, FAINT)
        return np.asarray(canvas)

    def place(seconds: float) -> int:
        return _LEFT + round(seconds * (width - _LEFT - 8) / whole)

    for span in spans:
        top = lanes.index(span.lane) * _LANE + 3
        left, right = place(span.start), max(place(span.start) + 1, place(span.end))
        # Leave a gap between neighbours if it fits.
        canvas.paste(_COLOURS[span.what], (left, top, right - (right - left > 3), top + _LANE - 6))
        if span.label and text_width(span.label, _SIZE) + 4 < right - left:
            write(canvas, left + 2, top, span.label, _SIZE, PAPER)
    top = lanes.index("target") * _LANE
    for early in exits_of(reply):
        left = place(early.at)
        canvas.paste(AHEAD if early.held else REJECTED, (left, top + 1, left + 2, top + _LANE - 1))
    _draw_axis(canvas, whole, place)
    return np.asarray(canvas)


def _draw_axis(canvas: Image.Image, whole: float, place: Callable[[float], int]) -> None:
    step = next((s for s in _STEPS if whole / s <= 7), _STEPS[-1])
    y = canvas.height - _AXIS
    for number in range(int(whole / step) + 1):
        seconds = number * step
        left = place(seconds)
        canvas.paste(INK, (left, y, left + 1, y + 4))
        label = f"{1e3 * seconds:.0f} ms" if step < 0.5 else f"{seconds:.1f} s"
        write(canvas, left + 2, y + 3, label, _SIZE - 1, FAINT)
