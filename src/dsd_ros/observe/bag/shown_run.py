# SPDX-License-Identifier: Apache-2.0
"""Show a recorded run in the live page: the same events, at their recorded times. Needs no ROS."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from PIL import Image

from dsd_ros.navigation.run.actions import ANY, action_of
from dsd_ros.observe.bag.reader import BagError
from dsd_ros.observe.bag.run import RecordedStep, Run, executed_phrase, stamp_of
from dsd_ros.observe.view.events import (
    log_event,
    memory_event,
    pose_event,
    reply_event,
    robot_event,
    stats_event,
    step_event,
    world_event,
)
from dsd_ros.observe.view.figures import Figures, ReplyFigures
from dsd_ros.observe.view.state import Pose, Round, ShownMemory, ShownReply, ShownStep
from dsd_ros.observe.view.web import PageFeed
from dsd_ros.pictures import raw_rgb

MEMORY_MB = 256
_PICTURES = 1500  # most that are shown of a run
_PICTURE_S = 0.2  # least time between two of them
_CAMERA, _LOG, _HEALTH, _MEMORY = "camera/image_raw", "/rosout", "/diagnostics", "dsd/memory_answer"
_LINK_NODES = ("draft_node", "bridge_node")
_STALE = 3  # of diagnostic_msgs/DiagnosticStatus: a node that is starting
_Event = tuple[int, str, Any]


def feed_of(run: Run) -> PageFeed:
    """What the page shows of a run."""
    feed = PageFeed(MEMORY_MB, live=False, title=run.bag.path.name)
    feed.add("robot", robot_event(), fixed=True)
    feed.add("world", world_event(run.markers), fixed=True)
    events = [*_replies(run), *_safety(run), *_recorded(run)]
    events += [(at, "pose", pose_event(pose)) for at, *pose in run.path]
    for at, kind, value in sorted(events, key=lambda event: event[0]):
        since = max(0.0, (at - run.began) * 1e-9)
        if kind == "picture":
            feed.picture(value, since)
        else:
            feed.add(kind, value, since)
    return feed


def _replies(run: Run) -> Iterator[_Event]:
    """Replies as they grew, their figures, and the actions they led to."""
    figures = Figures()
    announced = {stamp_of(action.observation_stamp): action for action in run.actions}
    before = 0
    for step in run.steps:
        reply = shown_reply(step)
        began = step.at - round(step.stats["seconds"] * 1e9)
        for number, last in enumerate(reply.rounds[:-1], 1):
            rounds = reply.rounds[:number]
            part = replace(reply, rounds=rounds, done=False, text="".join(p for r in rounds for p in r.gained))
            at = began + round((last.began + last.draft + last.wait) * 1e9)
            yield min(at, step.at), "reply", reply_event(part, step.number)
        yield step.at, "reply", reply_event(reply, step.number)
        names = {field.name for field in fields(ReplyFigures)}
        figures.add_reply(ReplyFigures(**{name: value for name, value in step.stats.items() if name in names}))
        figures.add_step((step.at - before) * 1e-9 if before else 0.0)
        before = step.at
        yield step.at, "stats", stats_event(figures)
        if step.stamp in announced:
            yield step.at, "step", step_event(_shown_step(run, step, announced[step.stamp]))


def shown_reply(step: RecordedStep) -> ShownReply:
    """A recorded reply as views show it."""
    rounds = tuple(map(_round, step.rounds))
    return ShownReply(step.instruction, step.text, rounds, True, step.stamp * 1e-9, step.stats["mode"])


def _shown_step(run: Run, step: RecordedStep, message: Any) -> ShownStep:
    ahead = turn = 0.0
    with contextlib.suppress(ValueError):
        action = action_of(message, ANY)
        ahead, turn = action.metres, action.radians
    place = min(run.path, key=lambda pose: abs(pose[0] - step.at), default=(0, 0.0, 0.0, 0.0))
    pose: Pose = (place[1], place[2], place[3])
    return ShownStep(
        int(message.step), executed_phrase(message, run.grammar), ahead, turn, step.verified, pose,
        str(message.reasoning), bool(message.retracing),
    )  # fmt: skip


def _round(found: dict[str, Any]) -> Round:
    """A Round of its recorded fields."""
    values = {field.name: found[field.name] for field in fields(Round) if field.name in found}
    times = {name: found.get(f"{name}_seconds", 0.0) for name in ("began", "draft", "wait", "verify", "model")}
    exits = tuple(zip(found.get("exit_layers", ()), found.get("exit_seconds", ()), strict=False))
    words = {name: tuple(found.get(name, ())) for name in ("gained", "rejected")}
    accepted = min(int(found.get("accepted", 0)), len(words["gained"]))
    return Round(**values | times | words | {"exits": exits, "accepted": accepted})


def _safety(run: Run) -> Iterator[_Event]:
    """When the robot was held, and how its goals ended."""
    for stop in run.stops:
        yield stop.began, "hold", {"on": True, "causes": stop.causes, "sentences": stop.sentences}
        yield stop.ended, "hold", {"on": False, "causes": [], "sentences": []}
    for at, text in run.ends:
        outcome, _, sentence = text.partition(": ")
        yield at, "end", {"outcome": outcome, "sentence": sentence, "good": outcome == "ARRIVED"}


def _recorded(run: Run) -> Iterator[_Event]:
    """The log, memory's answers, the link's state and the pictures, in one pass over the bag."""
    bag = run.bag
    camera, memory = bag.topic(_CAMERA), bag.topic(_MEMORY)
    links: dict[str, tuple[int, str]] = {}
    apart = max(_PICTURE_S, run.seconds / _PICTURES) * 1e9
    seen, link = -(2**63), None
    for record in bag.messages([camera, f"{camera}/compressed", memory, _LOG, _HEALTH, _HEALTH[1:]]):
        picture = record.topic.startswith(camera)
        if picture and record.at - seen < apart:
            continue
        try:
            message = bag.decode(record)
            if picture:
                seen = record.at
                yield record.at, "picture", _bgr(message)
            elif record.topic == _LOG:
                yield record.at, "log", log_event(message)
            elif record.topic == memory:
                yield record.at, "memory", memory_event(ShownMemory.of(message))
            else:
                for status in message.status:
                    space, _, name = str(status.name).rpartition("/")
                    if name in _LINK_NODES and space.strip("/") == bag.namespace.strip("/"):
                        links[name] = (int(status.level), str(status.message))
                bad = [text for level, text in links.values() if level]
                ok = None if {level for level, _ in links.values()} - {0} == {_STALE} else not bad
                now = {"ok": ok, "text": (bad or [text for _, text in links.values()] or [""])[0], "gone": False}
                if links and now != link:
                    link = now
                    yield record.at, "link", now
        except (BagError, AttributeError, LookupError, OSError, TypeError, ValueError):
            continue  # damaged; `read_run` has counted it, or it is a picture less


def _bgr(message: Any) -> np.ndarray:
    if hasattr(message, "encoding"):
        return np.ascontiguousarray(raw_rgb(message)[..., ::-1])
    with Image.open(io.BytesIO(message.data.tobytes())) as picture:
        return np.ascontiguousarray(np.asarray(picture.convert("RGB"))[..., ::-1])
