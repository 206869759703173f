"""The memory of earlier decoded pictures, without ROS."""

from __future__ import annotations

import numpy as np

from dsd_ros.ros.camera import KEPT_FRAMES, RecentFrames


def picture(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


def values(history) -> list[tuple[int, str]]:
    return [(int(image[0, 0, 0]), action) for image, action in history]


def test_the_last_steps_whose_pictures_are_there():
    frames = RecentFrames()
    for step in range(6):
        frames.remember((step, 5), picture(step))
    stamps, actions = [(step, 5) for step in range(6)], list("abcdef")
    assert frames.history(stamps, actions, 0) == []
    assert values(frames.history(stamps, actions, 2)) == [(4, "e"), (5, "f")]
    assert len(frames.history(stamps, actions, 8)) == 6
    # Steps of another run of this node, or of one before its restart, are left out.
    stamps[4] = (4, 6)
    assert values(frames.history(stamps, actions, 3)) == [(2, "c"), (3, "d"), (5, "f")]
    frames.clear()
    assert frames.history(stamps, actions, 8) == []


def test_what_is_remembered_is_bounded_and_used_ones_stay():
    frames = RecentFrames(size=10 * 12)  # ten of these
    for step in range(10 * KEPT_FRAMES):
        frames.remember((step, 0), picture(step % 256))
        stamps = [(n, 0) for n in range(max(0, step - 7), step + 1)]
        assert len(frames.history(stamps, ["go"] * len(stamps), 8)) == len(stamps)
        assert len(frames._kept) <= 10
    many = RecentFrames()
    for step in range(10 * KEPT_FRAMES):
        many.remember((step, 0), picture(0))
    assert len(many._kept) == KEPT_FRAMES
