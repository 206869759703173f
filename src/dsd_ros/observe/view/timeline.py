# SPDX-License-Identifier: Apache-2.0
"""A reply as swim lanes: who was busy when, and in rounds what was drafted ahead.

All times are on the robot's clock, because clocks of two machines are never compared. In rounds, uplink and downlink
each get half of the wait that is not spent in the target. A pass of the target ends when the robot got its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.decoding.modes import PRESETS, streams
from dsd_ros.observe.view.state import Round, ShownReply

LANES = ("draft", "ahead", "uplink", "target", "downlink")
READ, DRAFT, HIT, PARTLY = "reads the picture", "draft", "ready ahead", "begun ahead"
UP, VERIFY, DOWN = "up", "verify", "down"


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
