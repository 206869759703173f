# SPDX-License-Identifier: Apache-2.0
"""A reply of five rounds, some of them drafted ahead, as views show it."""

from __future__ import annotations

import numpy as np

from dsd_ros.observe.view.state import Overlay, Round, ShownReply

_ROUNDS = (
    ("I see a silver bottle", 4, (), ""),
    ("on the left behind the", 4, (), "exit"),
    ("blue chair .", 2, ("box ", "and "), "guess"),
    ("So I", 1, ("go ", "ahead "), ""),
    ("turn left 30 degrees", 3, (), "exit"),
)


def sample_reply() -> ShownReply:
    reply = ShownReply("find the silver bottle", "I see a silver bottle. Action: turn left 30 degrees")
    began = 0.014
    for words, accepted, rejected, source in _ROUNDS:
        ready = source == "exit"
        draft = 0.0 if ready else 0.008
        reply = reply.with_round(
            Round(
                drafted=accepted + len(rejected), accepted=accepted, rejected=rejected, source=source,
                gained=tuple(word + " " for word in words.split()), ready=ready, began=began, draft=draft,
                wait=0.05, verify=0.03, model=0.012, exits=((2, 0.022), (4, 0.028), (6, 0.034)),
                first_exit=4, predrafts=3,
            )
        )  # fmt: skip
        began += draft + 0.052
    return reply


def sample_overlay(**changes: object) -> Overlay:
    values: dict[str, object] = {
        "reply": sample_reply(), "action": "turn left 30 degrees", "link": "session open, mode fsd",
        "link_ok": True, "mode": "fsd", "tau": 4.2, "seconds": 0.31, "age": 0.45,
    }  # fmt: skip
    return Overlay(**{**values, **changes})  # type: ignore[arg-type]


def picture() -> np.ndarray:
    """uint8 (224, 336, 3), plain grey."""
    return np.full((224, 336, 3), 128, np.uint8)


def share(image: np.ndarray, colour: tuple[int, int, int], tolerance: int = 12) -> float:
    """Share of the pixels that have a colour."""
    far = np.abs(image.astype(int) - np.array(colour)).max(axis=-1)
    return float((far <= tolerance).mean())
