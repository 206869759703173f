# SPDX-License-Identifier: Apache-2.0
"""Which pictures of an observation are sent in full, and which by digest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings as profile, strategies as st

from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.vlm.errors import ImageError, PromptError
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.pictures import UnknownPicture, kept_pictures, read_pictures


def picture(value: int) -> np.ndarray:
    return np.full((2, 2 + value % 3, 3), value, np.uint8)


def in_full(message) -> list[bool]:
    return [bool(past.image) for past in message.history]


def test_a_picture_travels_once_in_a_session():
    pictures = SessionPictures(LinkSettings(image_encoding="png"))
    pictures.begin(picture(1))
    assert pictures.observation(5, 1, "go").history == []
    pictures.arrived(5)
    pictures.begin(picture(2), [(picture(1), "stop")])
    message = pictures.observation(5, 2, "go")
    assert in_full(message) == [False] and message.history[0].action == "stop"
    assert in_full(pictures.observation(5, 2, "go", everything=True)) == [True]
    pictures.arrived(5)
    pictures.begin(picture(3), [(picture(1), "stop"), (picture(2), "stop")])
    assert in_full(pictures.observation(5, 3, "go")) == [False, False]
    assert in_full(pictures.observation(6, 3, "go")) == [True, True]  # another session


def test_what_cannot_be_sent_leaves_the_reply_before():
    pictures = SessionPictures(LinkSettings(image_encoding="png"))
    pictures.begin(picture(1), [(picture(2), "stop")])
    good = pictures.observation(5, 1, "go")
    for image, history, error in (
        (None, [(picture(2), "stop")], ImageError),
        (picture(1), [(np.zeros((3, 3), np.uint8), "stop")], ImageError),
        (picture(1), [(picture(2), "x" * 257)], PromptError),
        (picture(1), [(picture(2), "stop")] * 9, WireError),
        (picture(1)[0], [], WireError),
    ):
        with pytest.raises(error):
            pictures.begin(image, history)
    assert pictures.observation(5, 1, "go") == good


def test_rows_of_pixels_that_no_message_holds_are_refused_before_they_are_needed():
    large = np.zeros((2300, 2300, 3), np.uint8)
    other = np.ones((2300, 2300, 3), np.uint8)
    with pytest.raises(WireError, match="use fewer or smaller ones, or jpeg"):
        SessionPictures(LinkSettings(image_encoding="rgb8")).begin(large, [(large, "stop"), (other, "stop")])
    SessionPictures(LinkSettings(image_encoding="png")).begin(large, [(large, "stop"), (other, "stop")])


STEPS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the present picture
        st.lists(st.integers(0, 12), max_size=8),  # those before
        st.sampled_from(["answered", "answered", "answered", "lost", "given up", "restarted"]),
    ),
    max_size=25,
)


@profile(max_examples=150)
@example([(2, [9, 0, 6, 7, 9], "answered"), (3, [1, 4, 5, 8], "answered"), (0, [9], "answered")])
@given(STEPS)
def test_the_verifier_always_gets_all_pictures_and_asks_at_most_once(steps):
    pictures, kept, session = SessionPictures(LinkSettings(image_encoding="png")), kept_pictures(), 1
    asked = 0
    for number, (now, earlier, fate) in enumerate(steps, 1):
        history = [(picture(value), f"step {value}") for value in earlier]
        if fate == "restarted":
            kept, session = kept_pictures(), session + 1
        pictures.begin(picture(now), history)
        message = pictures.observation(session, number, "go")
        if fate == "lost":
            continue
        try:
            read = read_pictures(message, kept)
        except UnknownPicture:
            asked += 1
            message = pictures.observation(session, number, "go", everything=True)
            read = read_pictures(message, kept)
        assert np.array_equal(read[0], picture(now))
        assert [action for _, action in read[1]] == [action for _, action in history]
        for (shown, _), (given_, _) in zip(read[1], history, strict=True):
            assert np.array_equal(shown, given_)
        if fate != "given up":
            pictures.arrived(session)
    if all(fate in ("answered", "restarted") for *_, fate in steps):
        assert asked == 0
