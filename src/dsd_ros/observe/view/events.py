# SPDX-License-Identifier: Apache-2.0
"""Turn what views show into the live page's events: plain values that JSON can hold. `page.html` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dsd_ros.decoding.modes import streams, unit_of
from dsd_ros.observe.view.figures import Figures
from dsd_ros.observe.view.overlay import ACCEPTED, OWN, fates_of, token_run
from dsd_ros.observe.view.state import ShownMemory, ShownReply, ShownStep, motion_of
from dsd_ros.observe.view.timeline import exits_of, lanes_of, spans_of
from dsd_ros.shown import LINES, shown

CUBE, CYLINDER = 1, 3  # of visualization_msgs/Marker
_WARN, _ERROR = 30, 40  # of rcl_interfaces/Log


def world_event(markers: Iterable[Any]) -> list[dict[str, Any]]:
    """The boxes and cylinders of a world's markers, in metres; the goal apart, and what stands on it without a name."""
    things = []
    for marker in markers:
        place, size, colour = marker.pose.position, marker.scale, marker.color
        numbers = (place.x, place.y, place.z, size.x, size.y, size.z, colour.r, colour.g, colour.b)
        if marker.type not in (CUBE, CYLINDER) or not all(map(math.isfinite, numbers)):
            continue
        things.append({
            "kind": marker.ns, "box": marker.type == CUBE, "at": _round(numbers[:3]), "size": _round(numbers[3:6]),
            "rgb": [round(255 * part) for part in numbers[6:]], "label": marker.text,
        })  # fmt: skip
    goals = [thing["at"][:2] for thing in things if thing["kind"] == "goal"]
    for thing in things:
        if thing["kind"] != "goal" and thing["at"][:2] in goals:
            thing["label"] = ""
    return things


def tokens_of(reply: ShownReply) -> list[tuple[str, str, bool]]:
    """Each token, its fate (accepted, rejected, own; counted: rejected of a tree), whether it was drafted ahead."""
    kinds = {ACCEPTED: "accepted", OWN: "own"}
    return [
        (text, kinds.get(colour, "rejected" if struck else "counted"), ahead)
        for text, colour, struck, ahead in token_run(reply)
    ]


def reply_event(reply: ShownReply, number: int) -> dict[str, Any]:
    """A reply with its tokens and swim lanes, so far as it is verified."""
    return {
        "n": number, "instruction": reply.instruction, "text": reply.text, "done": reply.done,
        "tokens": tokens_of(reply),
        "unit": unit_of(reply.mode), "legend": fates_of(reply.mode), "lanes": lanes_of(reply.mode),
        "spans": [(s.lane, round(s.start, 4), round(s.end, 4), s.what, s.round, s.label) for s in spans_of(reply)],
        "exits": [(round(e.at, 4), e.layer, e.held) for e in exits_of(reply)],
    }  # fmt: skip


def stats_event(figures: Figures) -> dict[str, Any]:
    """The newest reply's cost, 0 where a figure means nothing in its mode; the run's figures, and what was gained."""
    new = figures.newest
    return {
        "mode": new.mode, "transport": new.transport, "replies": figures.replies, "rows": figures.rows(),
        "gained": figures.gained(),
        "seconds": round(new.seconds, 4), "tau": 0 if streams(new.mode) else round(new.tau, 3),
        "share": round(new.draft_share, 3), "sooner": round(new.sooner, 3),
        "tq": round(new.verify_round_seconds, 5), "tc": round(new.link_delay_seconds, 5),
        "up": new.bytes_up, "down": new.bytes_down,
    }  # fmt: skip


def step_event(step: ShownStep) -> dict[str, Any]:
    """An announced action, and where it leads."""
    reach = 0.5 if step.turn and not step.ahead else 0.0  # a turn on the spot leads nowhere: draw where the robot looks
    poses = motion_of(step.pose, step.ahead, step.turn)
    return {
        "n": step.number, "phrase": step.phrase, "verified": step.verified, "retracing": step.retracing,
        "reasoning": step.reasoning, "took": round(step.took, 3),
        "path": [_round((x + reach * math.cos(yaw), y + reach * math.sin(yaw))) for x, y, yaw in poses],
    }  # fmt: skip


def memory_event(memory: ShownMemory) -> dict[str, Any]:
    """What a goal means by memory, sentence by sentence, and what the robot asks where that is not known."""
    told = [(shown(sentence), shown(document)) for sentence, document in memory.told]
    return {"goal": memory.goal, "told": told, "instruction": memory.instruction, "question": memory.question}


def pose_event(pose: Sequence[float]) -> list[float]:
    """x, y (m) and yaw (rad)."""
    return _round(pose)


def log_event(line: Any) -> dict[str, str]:
    """A line of the log (rcl_interfaces/Log)."""
    level = "bad" if line.level >= _ERROR else "warn" if line.level >= _WARN else ""
    return {"level": level, "name": shown(line.name), "text": shown(line.msg, keep=LINES)}


def _round(values: Sequence[float]) -> list[float]:
    return [round(float(value), 3) for value in values]
