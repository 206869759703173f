"""The queue of turns: order, fairness, bounds, and dropped turns."""

from __future__ import annotations

import threading
import time

import pytest

from dsd_ros.wire.turns import TurnQueue


def put(queue: TurnQueue[str], *turns: str) -> None:
    """ "a1" is a turn of owner "a"."""
    for turn in turns:
        assert queue.put(turn[0], turn)


def taken(queue: TurnQueue[str], limit: int = 1) -> list[str]:
    found = []
    while more := queue.ready(limit, 0.0):
        found += more
    return found


def test_owners_alternate_and_each_ones_turns_keep_their_order():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "a3", "b1", "c1", "b2")
    assert taken(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_owner_that_comes_back_waits_for_one_turn_of_each_other():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "b1", "b2")
    assert queue.ready() == ["a1"]
    put(queue, "c1")
    assert taken(queue) == ["b1", "a2", "c1", "b2"]


@pytest.mark.parametrize(("limit", "first"), [(1, ["a1"]), (2, ["a1", "b1"]), (9, ["a1", "b1", "c1"])])
def test_a_batch_holds_one_turn_of_each_owner(limit, first):
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "b1", "c1", "b2")
    assert queue.ready(limit, 0.0) == first
    assert len(queue) == 5 - len(first)


def test_urgent_turns_overtake():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "b1")
    queue.put("a", "A1", urgent=True)
    queue.put("d", "D1", urgent=True)
    assert queue.ready(3) == ["A1", "D1", "a1"]
    assert taken(queue) == ["b1"]


def test_turns_are_bounded_by_owner_and_bytes():
    queue: TurnQueue[str] = TurnQueue(2, max_bytes=100)
    assert queue.put("a", "1", size=60) and queue.put("a", "2")
    assert not queue.put("a", "3")
    assert not queue.put("b", "4", size=41) and queue.put("b", "4", size=40)
    assert (queue.bytes, len(queue)) == (100, 3)
    assert queue.put("a", "5", bounded=False)
    assert queue.ready() == ["1"] and queue.bytes == 40
    assert taken(queue) == ["4", "2", "5"] and queue.bytes == 0
    assert queue.put("a", "6", size=100)


def test_a_key_waits_once():
    queue: TurnQueue[str] = TurnQueue(10)
    assert queue.put("a", "1", key="k", size=5) and queue.put("a", "2", key="k", size=5)
    assert (queue.ready(), queue.bytes, len(queue)) == (["1"], 0, 0)
    assert queue.put("a", "3", key="k")
    assert taken(queue) == ["3"]


def test_held_owners_wait_and_discarded_ones_are_forgotten():
    queue: TurnQueue[str] = TurnQueue(2)
    queue.hold("a")
    put(queue, "a1", "b1", "a2")
    assert not queue.put("a", "a3")
    assert taken(queue) == ["b1"]
    queue.release("a")
    assert queue.ready() == ["a1"]
    queue.hold("a")
    assert queue.put("a", "a3", key="k", size=7)
    queue.discard("a")
    assert (len(queue), queue.bytes, taken(queue)) == (0, 0, [])
    assert queue.put("a", "a4", key="k") and queue.ready() == ["a4"]


@pytest.mark.parametrize("how", ["put", "release", "close"])
def test_the_worker_is_woken(how):
    queue: TurnQueue[str] = TurnQueue(2)
    queue.hold("a")
    put(queue, "a1")
    found: list[list[str]] = []
    worker = threading.Thread(target=lambda: found.append(queue.ready()))
    worker.start()
    time.sleep(0.05)
    assert not found
    {"put": lambda: put(queue, "b1"), "release": lambda: queue.release("a"), "close": queue.close}[how]()
    worker.join(10)
    assert found == [{"put": ["b1"], "release": ["a1"], "close": []}[how]]


def test_a_closed_queue_takes_and_gives_nothing():
    queue: TurnQueue[str] = TurnQueue(1)
    put(queue, "a1")
    queue.close()
    queue.close()
    assert queue.closed and queue.put("a", "a2") and queue.ready() == []
