# SPDX-License-Identifier: Apache-2.0
"""Which pictures are kept, and how a history is assembled from sent and kept ones."""

from __future__ import annotations

import numpy as np
import pytest

from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import Observation, Past
from dsd_ros.wire.pictures import (
    MAX_HISTORY_PIXELS,
    UnknownPicture,
    check_history,
    encode_picture,
    kept_pictures,
    picture_digest,
    read_pictures,
)


def picture(value: int, height: int = 2, width: int = 3) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def past(shown: np.ndarray, action: str = "stop", sent: bool = True, **changes) -> Past:
    height, width = shown.shape[:2]
    data = encode_picture(shown) if sent else b""
    values = dict(
        action=action, encoding="png", height=height, width=width, image=data,
        digest=picture_digest(shown),
    )  # fmt: skip
    return Past(**(values | changes))


def observation(image: np.ndarray, *history: Past) -> Observation:
    height, width = image.shape[:2]
    data = encode_picture(image)
    return Observation(1, 1, "go", height, width, "png", data, history=list(history))


def test_what_was_sent_once_is_known_by_its_name():
    kept = kept_pictures()
    image, history = read_pictures(observation(picture(1)), kept)
    assert history == [] and np.array_equal(image, picture(1))
    sent = past(picture(2, 5, 4), "turn left 15 degrees")
    _, history = read_pictures(observation(picture(3), past(picture(1), sent=False), sent), kept)
    assert [action for _, action in history] == ["stop", "turn left 15 degrees"]
    assert np.array_equal(history[0][0], picture(1))
    assert np.array_equal(history[1][0], picture(2, 5, 4))
    named = [past(picture(value), sent=False) for value in (3, 1, 3)]
    _, history = read_pictures(observation(picture(4), *named), kept)
    assert [int(image[0, 0, 0]) for image, _ in history] == [3, 1, 3]


def test_nine_pictures_are_kept_and_a_history_of_eight_always_slides_on():
    kept = kept_pictures()
    read_pictures(observation(picture(0)), kept)
    for step in range(1, 30):
        named = [past(picture(n), sent=False) for n in range(max(0, step - 8), step)]
        image, history = read_pictures(observation(picture(step), *named), kept)
        assert int(image[0, 0, 0]) == step and len(history) == min(8, step)
        assert len(kept) == min(9, step + 1)
    before = observation(picture(99), past(picture(20), sent=False))
    with pytest.raises(UnknownPicture):
        read_pictures(before, kept)
    assert len(kept) == 9 and picture_digest(picture(99)) not in kept


def test_pictures_that_are_not_as_stated_are_refused():
    kept = kept_pictures()
    other = picture_digest(picture(7))
    for wrong in (
        past(picture(1), digest=other),
        past(picture(1), encoding="none"),
        past(picture(1), encoding="jpeg"),
        past(picture(1), height=3, width=2),
        past(picture(1), image=b"nothing"),
    ):
        with pytest.raises(WireError):
            read_pictures(observation(picture(2), wrong), kept)
    assert len(kept) == 0


def test_a_history_is_bounded_before_any_picture_of_it_is_unpacked():
    large = past(picture(1), height=4096, width=4096)
    check_history([(4096, 4096)])
    with pytest.raises(WireError, match="use fewer or smaller ones"):
        read_pictures(observation(picture(2), large, large), kept_pictures())
    with pytest.raises(WireError, match="8 pictures with"):
        check_history([(1, 1)] * 9)
    with pytest.raises(WireError):
        check_history([(1, MAX_HISTORY_PIXELS + 1)])
