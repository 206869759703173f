# SPDX-License-Identifier: Apache-2.0
"""The watchdog: zero half a second after the last fresh command or odometry, and never before the
first.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dsd_ros.navigation.run.controller import AT_REST, Velocity
from dsd_ros.navigation.safety.watchdog import Watchdog

GO = Velocity(0.5, 0.1)


def test_zero_before_anything_arrived():
    watchdog = Watchdog()
    assert watchdog.output(0.0) == AT_REST
    watchdog.command(GO, 0.0)
    assert watchdog.output(0.0) == AT_REST  # a command, but no word from the robot
    watchdog.odometry(0.0)
    assert watchdog.output(0.0) == GO


def test_stop_forgets_the_command():
    watchdog = Watchdog()
    watchdog.odometry(0.0)
    watchdog.command(GO, 0.0)
    watchdog.stop()
    assert watchdog.output(0.0) == AT_REST
    watchdog.command(GO, 0.1)
    assert watchdog.output(0.1) == GO


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_command_that_is_no_number_does_not_count(bad):
    watchdog = Watchdog()
    watchdog.odometry(0.0)
    watchdog.command(Velocity(bad, 0.0), 0.0)
    watchdog.command(Velocity(0.0, bad), 0.0)
    assert watchdog.output(0.0) == AT_REST


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="positive number"):
        Watchdog(timeout)


_EVENTS = st.lists(st.tuples(st.sampled_from(["command", "odometry"]), st.floats(0.0, 0.4)), max_size=30)


@given(_EVENTS, st.floats(0.0, 2.0))
def test_motion_only_with_both_fresh(events, wait):
    watchdog, now = Watchdog(0.5), 100.0
    last = {"command": -math.inf, "odometry": -math.inf}
    for kind, gap in events:
        now += gap
        if kind == "command":
            watchdog.command(GO, now)
        else:
            watchdog.odometry(now)
        last[kind] = now
    now += wait
    fresh = all(now - at < 0.5 for at in last.values())
    assert watchdog.output(now) == (GO if fresh else AT_REST)
