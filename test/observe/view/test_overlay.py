# SPDX-License-Identifier: Apache-2.0
"""The overlay: colours as in the legend, and nothing drawn twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from views_sample import picture, sample_overlay, sample_reply, sample_stream, share

from dsd_ros.observe.view.figures import ReplyFigures
from dsd_ros.observe.view.overlay import (
    ACCEPTED,
    AHEAD,
    ALARM,
    CALM,
    OWN,
    PANEL_HEIGHT,
    REJECTED,
    OverlayPainter,
    fates_of,
    panel,
    shortened,
    text_width,
    token_run,
    wrapped,
)
from dsd_ros.observe.view.state import Overlay, Round, ShownReply


def test_a_canvas_drawn_on_again_shows_what_is_new():
    painter, image = OverlayPainter(336), picture()
    canvas = np.empty(painter.shape(image), np.uint8)
    first, later = sample_overlay(), replace(sample_overlay(), newest=ReplyFigures(tau=9.75), action="stop")
    for shown, lit in ((first, image), (first, image // 2), (later, image // 2), (first, image)):
        painter.frame(lit, shown, canvas)
        assert np.array_equal(canvas, OverlayPainter(336).frame(lit, shown))
    other = painter.frame(image, first, np.empty_like(canvas))
    assert np.array_equal(other, canvas)


@pytest.mark.parametrize("size", [(2000, 1), (8192, 1), (600, 4), (1, 8192), (300, 100)])
def test_no_shape_of_picture_takes_a_frame_larger_than_two_squares(size):
    painter = OverlayPainter(480)
    image = np.full((*size, 3), 128, np.uint8)
    frame = painter.frame(image, sample_overlay())
    assert frame.shape == painter.shape(image) and frame.shape[0] <= 2 * 480 + PANEL_HEIGHT
    canvas = np.full(frame.shape, 77, np.uint8)
    assert np.array_equal(OverlayPainter(480).frame(image, sample_overlay(), canvas), frame)
    if size == (300, 100):  # three times as high as wide: 320 x 960, in the middle
        row = frame[400]
        assert (row[80:400] == 128).all() and not row[:80].any() and not row[400:].any()


def test_every_token_is_shown_with_its_fate():
    run = token_run(sample_reply())
    fates = {colour: [text.strip() for text, c, _, _ in run if c == colour] for colour in (ACCEPTED, REJECTED, OWN)}
    assert fates[REJECTED] == ["box", "and", "go", "ahead"]
    assert fates[OWN] == ["bottle", "the", ".", "I", "degrees"]
    assert len(fates[ACCEPTED]) == 4 + 4 + 2 + 1 + 3
    assert all(struck == (colour == REJECTED) for _, colour, struck, _ in run)
    ahead = [text.strip() for text, _, _, ahead in run if ahead]
    assert ahead == ["on", "the", "left", "behind", "blue", "chair", "box", "and", "turn", "left", "30"]


def test_a_pass_shows_its_accepted_tokens_and_the_targets_own():
    kinds = {ACCEPTED: "accepted", REJECTED: "rejected", OWN: "own"}
    run = [(text.strip(), kinds[colour]) for text, colour, _, _ in token_run(sample_stream())]
    assert run == [
        ("I", "own"), ("see", "accepted"), ("a", "accepted"), ("silver", "accepted"), ("bottle", "own"),
        ("and", "rejected"), ("so", "rejected"), (".", "own"), ("turn", "accepted"), ("left", "own"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "fates"),
    [
        ("stream", ["accepted", "rejected", "own"]), ("ar", ["own"]), ("dsd", ["accepted", "rejected", "own"]),
        ("fsd", ["accepted", "rejected", "own", "ahead"]), ("", ["accepted", "rejected", "own", "ahead"]),
    ],
)  # fmt: skip
def test_the_legend_has_what_a_mode_has(mode, fates):
    assert fates_of(mode) == fates
    drawn = np.asarray(panel(Overlay(ShownReply(mode=mode), newest=ReplyFigures(mode, sooner=1.25))))
    assert (share(drawn, REJECTED) > 0) == ("rejected" in fates) and (share(drawn, AHEAD) > 0) == ("ahead" in fates)


def test_a_frame_keeps_the_picture_between_the_bars():
    frame = OverlayPainter(480).frame(picture(), sample_overlay())
    assert frame.shape == (320 + PANEL_HEIGHT, 480, 3) and frame.dtype == np.uint8
    assert (frame[120:200] == 128).all()
    assert share(frame[:27], CALM) > 0.1 and share(frame[:27], ALARM) == 0.0
    for colour in (ACCEPTED, REJECTED, OWN, AHEAD):
        assert share(frame[320:], colour) > 0.0005


def test_a_frame_is_drawn_where_it_is_wanted():
    painter = OverlayPainter(400, bgr=True)
    canvas = np.empty(painter.shape(picture()), np.uint8)
    drawn = painter.frame(picture(), sample_overlay(), canvas=canvas)
    assert np.shares_memory(drawn, canvas) and drawn.shape == canvas.shape
    plain = OverlayPainter(400).frame(picture(), sample_overlay())
    assert np.array_equal(plain[..., ::-1], drawn)


def test_trouble_is_seen_from_afar():
    trouble = sample_overlay(
        link="no session", link_ok=False, causes=("the link is lost",), stopped=True, verified=False
    )
    frame = OverlayPainter(480).frame(picture(), trouble)[:-PANEL_HEIGHT]
    assert share(frame[:27], ALARM) > 0.05
    assert share(frame[250:], ALARM) > 0.1  # the cause, over the reasoning
    calm = OverlayPainter(480).frame(picture(), replace(trouble, stopped=False))[:-PANEL_HEIGHT]
    assert share(calm[250:], ALARM) == 0.0


def test_what_did_not_change_is_not_drawn_again():
    painter, overlay = OverlayPainter(), sample_overlay()
    first = painter.frame(picture(), overlay)
    assert np.array_equal(painter.frame(picture(), sample_overlay()), first) and painter.drawn == 1
    other = painter.frame(picture(), replace(overlay, newest=ReplyFigures(tau=9.87)))
    assert painter.drawn == 2 and not np.array_equal(other, first)


@pytest.mark.parametrize("shape", [(1, 1), (1080, 1920), (600, 80)])
def test_pictures_of_any_size_fit(shape):
    frame = OverlayPainter(320).frame(np.zeros((*shape, 3), np.uint8), sample_overlay())
    assert frame.shape[1] == 320 and frame.shape[0] >= PANEL_HEIGHT


@pytest.mark.parametrize(
    "overlay",
    [
        Overlay(),
        Overlay(ShownReply("x" * 8000, "y " * 4000, (Round(gained=("z" * 64,) * 128),) * 50)),
        Overlay(ShownReply("寻找银色瓶子", "\n\tAction: \x00 stop", (Round(gained=("", "\ufffd", "\n")),))),
        Overlay(causes=("a very long cause " * 30,) * 32, link="word " * 400),
    ],
)
def test_any_text_can_be_shown(overlay):
    painter = OverlayPainter()
    assert painter.frame(picture(), overlay).shape == (320 + PANEL_HEIGHT, 480, 3)


def test_the_newest_tokens_stay_visible():
    long = ShownReply("go", rounds=(Round(accepted=0, gained=("old ",) * 100),) * 3)
    new = long.with_round(Round(drafted=1, accepted=0, gained=(), rejected=("news ",)))
    assert share(np.asarray(panel(Overlay(new)))[:80], REJECTED) > 0
    assert share(np.asarray(panel(Overlay(long)))[:80], REJECTED) == 0


def test_lines_are_cut_to_their_room():
    assert shortened("short", 12, 200) == "short"
    cut = shortened("a long sentence that goes on and on", 12, 80)
    assert cut.endswith("...") and text_width(cut, 12) <= 80
    lines = wrapped("one two three four five six seven eight nine ten", 12, 70, 2)
    assert len(lines) == 2 and lines[1].endswith("...")


def test_a_pause_bounds_how_often_text_is_drawn():
    painter = OverlayPainter(pause=3600.0)
    first = painter.frame(picture(), sample_overlay())
    assert np.array_equal(painter.frame(picture(), sample_overlay(action="stop")), first)
    assert painter.drawn == 1
