# SPDX-License-Identifier: Apache-2.0
"""Callbacks in threads: parallel across groups, sequential within one, each delivered once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import rclpy
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.context import Context

from dsd_ros.ros.running import ThreadedExecutor

LONG_S = 60.0  # never waited for where all is well


@pytest.fixture
def node(ros_domain):
    context = Context()
    rclpy.init(args=[], context=context)
    made = rclpy.create_node("threads", context=context)
    yield made
    made.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture
def executor(node):
    made = ThreadedExecutor(3, context=node.context)
    made.add_node(node)
    yield made
    assert made.shutdown(1.0)


def once(node, group, act):
    """Have ``act`` called back one time, from a timer of that group."""

    def callback():
        timer.cancel()
        act()

    timer = node.create_timer(0.001, callback, callback_group=group)


def spin_until(executor, done, turns=2000):
    for _ in range(turns):
        if done():
            return
        executor.spin_once(timeout_sec=0.05)
    raise AssertionError(f"not in {turns} turns")


def test_different_groups_run_side_by_side(node, executor):
    meet = threading.Barrier(3)  # which none passes alone
    met = []
    for _ in range(3):
        once(node, MutuallyExclusiveCallbackGroup(), lambda: (meet.wait(LONG_S), met.append(threading.get_ident())))
    spin_until(executor, lambda: len(met) == 3)
    assert len(set(met)) == 3 and threading.get_ident() not in met


def test_one_group_runs_one_after_the_other(node, executor):
    group = MutuallyExclusiveCallbackGroup()
    inside, most, calls = [], [], []

    def act():
        inside.append(1)
        threading.Event().wait(0.02)
        most.append(len(inside))
        inside.pop()
        calls.append(1)

    for _ in range(5):
        once(node, group, act)
    spin_until(executor, lambda: len(calls) == 5)
    assert max(most) == 1


def test_a_callback_that_waits_for_a_thread_is_handed_over_once(node, monkeypatch):
    submitted, submit = [], ThreadPoolExecutor.submit
    monkeypatch.setattr(
        ThreadPoolExecutor, "submit",
        lambda pool, *work: submitted.append(work) or submit(pool, *work),
    )  # fmt: skip
    executor = ThreadedExecutor(1, context=node.context)
    executor.add_node(node)
    go, ran = threading.Event(), []
    try:
        once(node, MutuallyExclusiveCallbackGroup(), lambda: go.wait(LONG_S))
        spin_until(executor, lambda: submitted)
        once(node, MutuallyExclusiveCallbackGroup(), lambda: ran.append(1))
        for _ in range(20):
            executor.spin_once(timeout_sec=0.02)
        assert len(submitted) == 2 and not ran
        go.set()
        spin_until(executor, lambda: ran)
    finally:
        go.set()
        assert executor.shutdown(1.0)


def test_what_a_callback_raises_is_raised_to_who_spins(node, executor):
    once(node, MutuallyExclusiveCallbackGroup(), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        spin_until(executor, lambda: False)
