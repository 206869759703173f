# SPDX-License-Identifier: Apache-2.0
"""Show a recorded run in the live page: the same events, at their recorded times. Needs no ROS."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from dsd_ros.observe.bag.reader import BagError
from dsd_ros.observe.bag.run import Run
from dsd_ros.observe.view.events import log_event, pose_event, reply_event, world_event
from dsd_ros.observe.view.run_state import RunState
from dsd_ros.observe.view.web import PageFeed
from dsd_ros.pictures import raw_rgb, read_picture

MEMORY_MB = 256
_PICTURES = 1500  # most that are shown of a run
_PICTURE_S = 0.2  # least time between two of them
_CAMERA, _LOG, _HEALTH = "camera/image_raw", "/rosout", ("/diagnostics", "diagnostics")


def feed_of(run: Run) -> PageFeed:
    """What the page shows of a run."""
    bag, feed, state = run.bag, PageFeed(MEMORY_MB, live=False, title=run.bag.path.name), RunState(run.bag.namespace)
    feed.add("world", world_event(run.markers), fixed=True)
    handlers = {
        bag.topic(f"dsd/{name}"): on_message
        for name, on_message in (
            ("memory_answer", state.on_memory), ("reply_progress", state.on_progress),
            ("decode_stats", state.on_stats), ("nav_action", state.on_action), ("safety_state", state.on_safety),
        )
    }  # fmt: skip
    cameras = {bag.topic(_CAMERA), f"{bag.topic(_CAMERA)}/compressed"}
    for came, *pose in run.path:
        feed.add("pose", pose_event(pose), max(0.0, (came - run.began) * 1e-9))
    poses, seen = deque(run.path), -(2**63)
    apart = max(_PICTURE_S, run.seconds / _PICTURES) * 1e9
    for record in bag.messages({*handlers, *cameras, _LOG, *map(bag.topic, _HEALTH)}):
        at = max(0.0, (record.at - run.began) * 1e-9)
        while poses and poses[0][0] <= record.at:
            state.pose = poses.popleft()[1:]
        if record.topic in cameras and record.at - seen < apart:
            continue
        try:
            message = bag.decode(record)
            if record.topic in cameras:
                feed.picture(_bgr(message), at)
                seen = record.at
            elif record.topic == _LOG:
                feed.add("log", log_event(message), at)
            elif record.topic in handlers:
                handlers[record.topic](message)
                if handlers[record.topic] == state.on_progress and not message.done:
                    feed.add("reply", reply_event(state.overlay.reply, state.begun), at)
            else:
                state.on_health(message, at)
                state.show_link(at)
        except (BagError, AttributeError, LookupError, OSError, TypeError, ValueError):
            continue  # damaged; `read_run` has counted it, or it is a picture less
        while state.news:
            kind, value = state.news.popleft()
            feed.add(kind, reply_event(value[1], value[0]) if kind == "reply" else value, at)
    return feed


def _bgr(message: Any) -> np.ndarray:
    rgb = raw_rgb(message) if hasattr(message, "encoding") else read_picture(message.data.tobytes())
    return np.ascontiguousarray(rgb[..., ::-1])
