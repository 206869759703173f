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
    token_run,
)
from dsd_ros.observe.view.state import Overlay, Round, ShownReply


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


def test_a_frame_keeps_the_picture_between_the_bars_and_is_drawn_where_it_is_wanted():
    frame = OverlayPainter(480).frame(picture(), sample_overlay())
    assert frame.shape == (320 + PANEL_HEIGHT, 480, 3) and frame.dtype == np.uint8
    assert (frame[120:200] == 128).all()
    assert share(frame[:27], CALM) > 0.1 and share(frame[:27], ALARM) == 0.0
    for colour in (ACCEPTED, REJECTED, OWN, AHEAD):
        assert share(frame[320:], colour) > 0.0005
    painter = OverlayPainter(480, bgr=True)
    canvas = np.empty(painter.shape(picture()), np.uint8)
    drawn = painter.frame(picture(), sample_overlay(), canvas=canvas)
    assert np.shares_memory(drawn, canvas) and np.array_equal(frame[..., ::-1], drawn)


def test_trouble_is_seen_from_afar():
    trouble = sample_overlay(
        link="no session", link_ok=False, causes=("the link is lost",), stopped=True, verified=False
    )
    frame = OverlayPainter(480).frame(picture(), trouble)[:-PANEL_HEIGHT]
    assert share(frame[:27], ALARM) > 0.05
    assert share(frame[250:], ALARM) > 0.1  # the cause, over the reasoning
    calm = OverlayPainter(480).frame(picture(), replace(trouble, stopped=False))[:-PANEL_HEIGHT]
    assert share(calm[250:], ALARM) == 0.0


def test_text_is_drawn_when_it_changes_and_not_within_the_pause():
    painter, overlay = OverlayPainter(), sample_overlay()
    first = painter.frame(picture(), overlay)
    assert np.array_equal(painter.frame(picture(), sample_overlay()), first) and painter.drawn == 1
    other = painter.frame(picture(), replace(overlay, newest=ReplyFigures(tau=9.87)))
    assert painter.drawn == 2 and not np.array_equal(other, first)
    patient = OverlayPainter(pause=3600.0)
    patient.frame(picture(), overlay)
    assert np.array_equal(patient.frame(picture(), sample_overlay(action="stop")), first) and patient.drawn == 1


@pytest.mark.parametrize("size", [(1, 1), (1080, 1920), (8192, 1), (1, 8192)])
def test_pictures_of_any_size_fit(size):
    painter, image = OverlayPainter(320), np.zeros((*size, 3), np.uint8)
    frame = painter.frame(image, sample_overlay())
    assert frame.shape == painter.shape(image) and PANEL_HEIGHT < frame.shape[0] <= 2 * 320 + PANEL_HEIGHT


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
    assert OverlayPainter().frame(picture(), overlay).shape == (320 + PANEL_HEIGHT, 480, 3)


def test_the_newest_tokens_stay_visible():
    long = ShownReply("go", rounds=(Round(accepted=0, gained=("old ",) * 100),) * 3)
    new = long.with_round(Round(drafted=1, accepted=0, gained=(), rejected=("news ",)))
    assert share(np.asarray(panel(Overlay(new)))[:80], REJECTED) > 0
    assert share(np.asarray(panel(Overlay(long)))[:80], REJECTED) == 0
