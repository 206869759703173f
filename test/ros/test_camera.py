# SPDX-License-Identifier: Apache-2.0
"""Fresh pictures whatever the camera's stamps and the node's clock do; and the memory of earlier decoded pictures."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import rclpy
from rclpy.context import Context
from rclpy.duration import Duration
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image

from dsd_ros.ros.camera import KEPT_FRAMES, Camera, RecentFrames
from dsd_ros.ros.stamps import seconds, to_stamp


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


class OneCamera:
    """A draft node's camera in a node of its own, which is handed pictures and is told the time."""

    def __init__(self, context) -> None:
        self.node = rclpy.create_node("camera_test", context=context)
        self.shift = 0.0  # of the node's clock against the wall clock, s
        clock, now = self.node.get_clock(), self.node.get_clock().now
        clock.now = lambda: now() + Duration(nanoseconds=round(self.shift * 1e9))
        self.camera = Camera(self.node)
        self.stamps: Callable[[], float] = self.now

    def now(self) -> float:
        return self.node.get_clock().now().nanoseconds * 1e-9

    def fresh(self, not_before: float | None = None, wait: float = 0.4, during: Callable[[], None] = lambda: None):
        """What is answered while a picture comes every 20 ms; and the complaint if there is none."""
        stop, shown = threading.Event(), threading.Event()
        not_before = self.now() if not_before is None else not_before

        def show() -> None:
            while not stop.wait(0.02):
                message = Image()
                message.header.stamp = to_stamp(self.stamps())
                self.camera._on_image(message)
                if self.camera.received > 1:  # one alone repeats none
                    shown.set()

        shows = threading.Thread(target=show, daemon=True)
        shows.start()
        assert shown.wait(60.0)
        timer = threading.Timer(0.1, during)
        timer.start()
        try:
            found = self.camera.fresh(not_before, wait, lambda: False)
            return found, "" if found else self.camera.complaint(not_before, wait)
        finally:
            stop.set()
            shows.join()
            timer.cancel()


@pytest.fixture
def one(ros_domain):
    context = Context()
    rclpy.init(args=[], context=context, signal_handler_options=SignalHandlerOptions.NO)
    made = OneCamera(context)
    yield made
    made.node.destroy_node()
    rclpy.shutdown(context=context)


def test_a_camera_on_this_clock_is_heard(one):
    found, _ = one.fresh(wait=60.0)
    assert found is not None and one.now() - seconds(found.header.stamp) < 0.2


@pytest.mark.parametrize(
    ("stamps", "sentence"),
    [
        (lambda now: 0.0, r"have no time \(stamp 0, \d+\.\d s behind this node's clock\)"),
        (lambda now: now - 10800.0, r"stamped 10800\.\d s behind this node's clock: let"),
        (lambda now: now + 10800.0, r"stamped 10(800\.0|799\.\d) s ahead of this node's clock: let"),
        (lambda now: 1e9, r"repeats a picture stamped \d+\.\d s ago"),
    ],
)
def test_a_camera_on_another_clock_is_named_with_its_offset(one, stamps, sentence):
    one.stamps = lambda: stamps(one.now())
    found, complaint = one.fresh()
    assert found is None and re.search(sentence, complaint), complaint
    found, _ = one.fresh(0.0, wait=60.0)  # any recent picture
    assert found is not None


def test_a_request_from_another_clock_is_named_with_its_offset(one):
    found, complaint = one.fresh(one.now() + 500.0)
    assert found is None and re.search(r"a picture of (500\.0|499\.\d) s ahead of this node's clock", complaint)


@pytest.mark.parametrize("jump", [-900.0, 5.0])
def test_what_was_demanded_moves_with_a_clock_that_is_set(one, jump):
    one.stamps = lambda: one.now() - 0.3  # so the first picture that would do comes after the clock was set

    def set_clock() -> None:
        one.shift += jump

    began = time.monotonic()
    found, complaint = one.fresh(wait=1.0, during=set_clock)
    assert found is not None, complaint
    assert time.monotonic() - began < 0.9


def test_a_picture_of_before_the_clock_was_set_back_is_not_taken_for_a_new_one(one):
    message = Image()
    message.header.stamp = to_stamp(one.now())
    one.camera._on_image(message)
    one.shift -= 900.0
    assert one.camera.fresh(one.now(), 0.1, lambda: False) is None
    assert "No fresh picture came" in one.camera.complaint(one.now(), 0.1)
    one.shift += 899.9  # by and by the clock reaches that stamp again, and no picture has come
    assert one.camera.fresh(one.now() - 1.0, 0.1, lambda: False) is None


def test_simulated_time_that_never_comes_is_named(one):
    one.node.set_parameters([Parameter("use_sim_time", value=True)])
    found, complaint = one.fresh(5.0, 0.1)
    assert found is None and complaint.startswith("use_sim_time is set, and no time has come on /clock")
