# SPDX-License-Identifier: Apache-2.0
"""Distances from depth images of made-up scenes, whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsd_ros.navigation.safety.causes import DepthView
from dsd_ros.navigation.safety.depth import DepthCorridor, DepthError, Intrinsics, read_depth

VIEW = DepthView()
CAMERA = Intrinsics(97.0, 97.0, 84.0, 56.0, 168, 112)


def scene(view: DepthView = VIEW, camera: Intrinsics = CAMERA, boxes: tuple = (), floor: bool = True) -> np.ndarray:
    """Depths of a floor and of upright plates: (ahead, left from, left to, low, high) in metres."""
    v, u = np.mgrid[: camera.height, : camera.width]
    x, y = (u - camera.cx) / camera.fx, (v - camera.cy) / camera.fy
    p = view.camera_pitch
    ahead, up, left = math.cos(p) - math.sin(p) * y, -math.sin(p) - math.cos(p) * y, -x
    depth = np.full(x.shape, np.inf)
    if floor:
        with np.errstate(divide="ignore"):
            depth = np.where(up < 0, view.camera_height / np.maximum(-up, 1e-9), np.inf)
    for distance, right, to_left, low, high in boxes:
        z = distance / ahead
        height = view.camera_height + z * up
        hit = (left * z > right) & (left * z < to_left) & (height > low) & (height < high)
        depth = np.where(hit & (z > 0) & (z < depth), z, depth)
    return depth.astype(np.float32)


def corridor(view: DepthView = VIEW, camera: Intrinsics = CAMERA) -> DepthCorridor:
    return DepthCorridor(view, camera, 0.5)


WALL = (1.0, -3.0, 3.0, 0.0, 2.0)


@pytest.mark.parametrize("distance", [0.1, 0.35, 1.0, 1.5])
@pytest.mark.parametrize("pitch", [0.0, 17.0, 35.0])
def test_a_wall_is_as_far_as_it_is(distance, pitch):
    view = DepthView(camera_pitch=math.radians(pitch))
    found = corridor(view).nearest(scene(view, boxes=((distance, *WALL[1:]),)))
    assert found == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize("height", [0.2, 0.36, 1.0])
def test_the_floor_is_nothing(height):
    view = DepthView(camera_height=height)
    assert corridor(view).nearest(scene(view)) == math.inf


@pytest.mark.parametrize("degrees", [-2.0, 2.0])
def test_a_pitching_body_does_not_make_the_floor_rise(degrees):
    seen = DepthView(camera_pitch=VIEW.camera_pitch + math.radians(degrees))
    assert corridor().nearest(scene(seen)) == math.inf


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((0.6, -0.07, 0.07, 0.0, 0.42), 0.6),  # a bottle
        ((0.6, -0.09, 0.09, 0.0, 0.22), 0.6),  # a can
        ((0.6, 0.2, 0.5, 0.0, 1.0), 0.6),  # half in the way
        ((0.6, 0.27, 0.5, 0.0, 1.0), math.inf),  # beside it
        ((0.6, -0.6, -0.27, 0.0, 1.0), math.inf),
        ((0.6, -1.0, 1.0, 0.55, 1.0), math.inf),  # above it
        ((0.6, -1.0, 1.0, 0.0, 0.05), math.inf),  # a door's sill
    ],
)
def test_what_is_in_the_way_and_what_is_not(box, expected):
    assert corridor().nearest(scene(boxes=(box,))) == pytest.approx(expected, rel=1e-3)


def test_a_few_wild_pixels_are_noise_and_an_object_is_not():
    depths = scene(boxes=(WALL,))
    rng = np.random.default_rng(1)
    rows, columns = rng.integers(30, 80, 8), rng.integers(60, 110, 8)
    depths[rows, columns] = 0.05
    assert corridor().nearest(depths) == pytest.approx(1.0, rel=1e-3)
    depths[50:54, 80:84] = 0.3  # sixteen in one place
    assert corridor().nearest(depths) < 0.35


def test_unknown_pixels():
    depths = scene(boxes=(WALL,))
    for nothing in (math.nan, 0.0, -1.0):
        holes = depths.copy()
        holes[::3] = nothing
        assert corridor().nearest(holes) == pytest.approx(1.0, rel=1e-3)
        holes[:] = nothing
        assert corridor().nearest(holes) is None  # a covered lens is no free way
        holes = depths.copy()
        holes[20:, 40:130] = nothing  # nor is one that is covered where it matters
        assert corridor().nearest(holes) is None
    assert corridor().nearest(np.full_like(depths, math.inf)) == math.inf
    near = depths.copy()
    near[40:70, 60:110] = -math.inf
    assert corridor().nearest(near) == 0.0


def test_a_camera_that_looks_elsewhere_is_blind():
    view = DepthView(camera_height=2.0, camera_pitch=math.radians(-45.0))
    looking_up = corridor(view)
    assert looking_up.blind and looking_up.nearest(scene(view)) is None
    assert not corridor().blind


def test_any_noise_gives_a_distance_or_nothing():
    rng = np.random.default_rng(3)
    for _ in range(50):
        depths = rng.choice(
            np.array([np.nan, 0, -1, np.inf, -np.inf, 1e-30, 1e30, 0.4, 5], np.float32), (CAMERA.height, CAMERA.width)
        )
        found = corridor().nearest(depths)
        assert found is None or found >= 0.0


def test_big_pictures_are_looked_at_coarsely():
    camera = Intrinsics(600.0, 600.0, 640.0, 360.0, 1280, 720)
    depths = scene(camera=camera, boxes=((0.4, -0.07, 0.07, 0.0, 0.42),))
    assert corridor(camera=camera).nearest(depths) == pytest.approx(0.4, rel=1e-3)


@pytest.mark.parametrize("big_endian", [False, True])
def test_reading_messages(big_endian):
    order = ">" if big_endian else "<"
    wanted = np.array([[0.5, 1.25, 0.0], [2.0, 65.535, 3.0]], np.float32)
    padded = np.zeros((2, 5), f"{order}f4")
    padded[:, :3] = wanted
    read = read_depth(padded.tobytes(), "32FC1", 2, 3, 20, big_endian)
    assert read.dtype == np.float32 and np.array_equal(read, wanted)
    millimetres = (wanted * 1000).round().astype(f"{order}u2")
    read = read_depth(millimetres.tobytes(), "16UC1", 2, 3, 6, big_endian)
    assert np.allclose(read, wanted)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((b"", "32FC1", 0, 0, 0, False), "has 0 bytes"),
        ((bytes(23), "32FC1", 2, 3, 12, False), "has 23 bytes"),
        ((bytes(24), "32FC1", 2, 3, 8, False), "rows of 8 bytes"),
        ((bytes(24), "mono8", 2, 3, 3, False), "known are 32FC1, 16UC1"),
    ],
)
def test_damaged_messages_are_refused(arguments, sentence):
    with pytest.raises(DepthError, match=sentence):
        read_depth(*arguments)


def test_what_does_not_fit_the_cameras_info_is_refused():
    with pytest.raises(DepthError, match="84 x 56 pixels"):
        corridor().nearest(np.ones((56, 84), np.float32))
    for fx in (0.0, math.nan):
        with pytest.raises(DepthError, match="focal length"):
            corridor(camera=Intrinsics(fx, 97.0, 84.0, 56.0, 168, 112))
