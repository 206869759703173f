# SPDX-License-Identifier: Apache-2.0
"""A reply of five rounds, some of them drafted ahead, and one of four passes, as views show them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsd_ros.observe.view.figures import ReplyFigures
from dsd_ros.observe.view.state import Overlay, Round, ShownReply

_ROUNDS = (
    ("I see a silver bottle", 4, (), ""),
    ("on the left behind the", 4, (), "exit"),
    ("blue chair .", 2, ("box ", "and "), "guess"),
    ("So I", 1, ("go ", "ahead "), ""),
    ("turn left 30 degrees", 3, (), "exit"),
)


def sample_reply() -> ShownReply:
    reply = ShownReply("find the silver bottle", "I see a silver bottle. Action: turn left 30 degrees", mode="fsd")
    began = 0.014
    for words, accepted, rejected, source in _ROUNDS:
        ready = source == "exit"
        draft = 0.0 if ready else 0.008
        reply = reply.with_round(
            Round(
                drafted=accepted + len(rejected), accepted=accepted, rejected=rejected, source=source,
                gained=tuple(word + " " for word in words.split()), ready=ready, began=began, draft=draft,
                wait=0.05, verify=0.03, model=0.012, exits=((2, 0.022), (4, 0.028), (6, 0.034)),
                first_exit=4, predrafts=3, depth=accepted + len(rejected),
            )
        )  # fmt: skip
        began += draft + 0.052
    return replace(reply, done=True)


def sample_stream() -> ShownReply:
    """Passes of 10 ms; the last two came to the robot together."""
    passes = (
        Round(0, 0, ("I ",), began=0.0, wait=0.04, verify=0.02, depth=2, model=0.01),
        Round(3, 3, ("see ", "a ", "silver ", "bottle "), began=0.04, wait=0.01, verify=0.01, depth=2, model=0.008),
        Round(2, 0, (". ",), ("and ", "so "), began=0.05, wait=0.02, verify=0.01, depth=3, model=0.012),
        Round(1, 1, ("turn ", "left "), began=0.07, wait=0.0, verify=0.01),
    )
    return ShownReply("find the silver bottle", "I see a silver bottle . turn left", passes, True, mode="stream")


def sample_overlay(**changes: object) -> Overlay:
    values: dict[str, object] = {
        "reply": sample_reply(), "action": "turn left 30 degrees", "link": "session open, mode fsd",
        "link_ok": True, "newest": ReplyFigures("fsd", tau=4.2, seconds=0.31, observation_age=0.45),
    }  # fmt: skip
    return Overlay(**{**values, **changes})  # type: ignore[arg-type]


def picture() -> np.ndarray:
    """uint8 (224, 336, 3), plain grey."""
    return np.full((224, 336, 3), 128, np.uint8)


def share(image: np.ndarray, colour: tuple[int, int, int], tolerance: int = 12) -> float:
    """Share of the pixels that have a colour."""
    far = np.abs(image.astype(int) - np.array(colour)).max(axis=-1)
    return float((far <= tolerance).mean())
