# SPDX-License-Identifier: Apache-2.0
"""The queue of turns: order, fairness, bounds, and dropped turns."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings as profile, strategies as st

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


@pytest.mark.parametrize(("limit", "first"), [(1, ["a1"]), (2, ["a1", "b1"]), (9, ["a1", "b1", "c1"])])
def test_a_batch_holds_one_turn_of_each_owner(limit, first):
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "b1", "c1", "b2")
    assert queue.ready(limit, 0.0) == first
    assert len(queue) == 5 - len(first)


def test_weights_are_bounded():
    queue: TurnQueue[str] = TurnQueue(10)
    for owner, weight in (("a", 3), ("b", 2), ("c", 9), ("d", 1)):
        queue.put(owner, owner, weight=weight)
    assert queue.ready(10, 0.0, 5) == ["a", "b"]
    assert queue.ready(10, 0.0, 5) == ["c"]  # heavier than all may be together
    assert queue.ready(10, 0.0, 5) == ["d"]


def test_a_turn_is_taken_along_with_the_one_that_joins_it():
    queue: TurnQueue[str] = TurnQueue(10)
    for owner in ("a", "b"):
        queue.put(owner, f"{owner} prompt", joins="draft")
        queue.put(owner, f"{owner} draft", kind="draft", weight=4)
        queue.put(owner, f"{owner} next", kind="draft")
    queue.put("c", "c prompt", joins="draft")
    queue.put("c", "c other", kind="other")
    assert queue.ready(3, 0.0, 8) == ["a prompt", "a draft", "b prompt", "c prompt"]
    assert sorted(taken(queue)) == ["a next", "b draft", "b next", "c other"]


def test_a_turn_may_go_before_its_owners_others():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2")
    queue.put("a", "a0", first=True)
    assert taken(queue) == ["a0", "a1", "a2"]


def test_several_workers_take_one_turn_of_an_owner_at_a_time():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "b1")
    assert queue.ready(hold=True) == ["a1"]
    assert queue.ready(hold=True) == ["b1"]
    assert queue.ready(timeout=0.0, hold=True) == [] and queue.taken == 2
    queue.release("a")
    assert queue.ready(hold=True) == ["a2"] and queue.taken == 2
    for owner in "ab":
        queue.release(owner)
    assert queue.taken == 0


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


def test_held_owners_wait_for_each_release_and_discarded_ones_are_forgotten():
    queue: TurnQueue[str] = TurnQueue(2)
    queue.hold("a")
    put(queue, "a1", "b1", "a2")
    assert not queue.put("a", "a3")
    assert taken(queue) == ["b1"]
    queue.hold("a")
    queue.release("a")
    assert taken(queue) == []
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


class Rotation:
    """A queue whose owners always have a turn waiting. "account/session" is an owner and whose share it takes."""

    def __init__(self, *paths: str, eager: Sequence[str] = ()) -> None:
        self.queue: TurnQueue[str] = TurnQueue(10)
        self.paths, self.eager = list(paths), eager
        self.counts: Counter[str] = Counter()

    def steps(self, count: int, limit: int = 1) -> list[list[str]]:
        found = []
        for _ in range(count):
            for path in self.paths:
                self.queue.put(path, path, of=path.partition("/")[0], key=path)
            turns = self.queue.ready(limit, 0.0, eager=lambda path: path in self.eager)
            self.counts.update(turns)
            found.append(turns)
        return found


def test_many_sessions_give_no_larger_share_and_a_step_takes_one_of_each_account_first():
    greedy = [f"a/{session}" for session in range(64)]
    rotation = Rotation(*greedy, "b/1", "c/1", "c/2")
    rotation.steps(960)
    assert rotation.counts["b/1"] == 320
    assert rotation.counts["c/1"] == rotation.counts["c/2"] == 160
    assert {rotation.counts[path] for path in greedy} == {5}
    (first,) = Rotation("x/1", "x/2", "y/1", "z/1").steps(1, limit=3)
    assert first == ["x/1", "y/1", "z/1"]


def test_a_robot_that_redials_does_not_go_before_one_that_waits():
    queue: TurnQueue[str] = TurnQueue(10)
    order = []
    for step in range(12):
        for owner in ("works", "waits", f"redials {step}"):
            queue.put(owner, owner, of=owner, key=owner)
        order += queue.ready(1, 0.0)
    assert order.count("works") == order.count("waits") >= 3


def test_eager_turns_go_first_and_the_others_a_step_later():
    rotation = Rotation("a", "b", "c", "d", eager=["c", "d"])
    assert rotation.steps(3, limit=2) == [["c", "d"], ["a", "b"], ["c", "d"]]


@given(seed=st.integers(0, 1 << 20), owners=st.integers(2, 7), limit=st.integers(1, 7), most=st.integers(1, 40))
@profile(max_examples=60)
def test_nobody_starves(seed, owners, limit, most):
    """Whoever is eager, and whatever turns weigh: everyone has a turn once in a round of all owners, or one later."""
    chance = random.Random(seed)
    queue: TurnQueue[int] = TurnQueue(1)
    waited = dict.fromkeys(range(owners), 0)
    for _ in range(80):
        for owner in waited:
            queue.put(owner, owner, weight=chance.choice([1, 17, 65]))
        eager = {owner for owner in waited if chance.random() < 0.7}
        turns = queue.ready(limit, 0.0, most, eager=eager.__contains__)
        assert turns and len(set(turns)) == len(turns) <= limit
        for owner in waited:
            waited[owner] = 0 if owner in turns else waited[owner] + 1
        assert max(waited.values()) <= owners


def test_one_account_does_not_take_all_bytes():
    queue: TurnQueue[str] = TurnQueue(100, max_bytes=100)
    assert queue.put("s1", "1", of="x", size=80)
    assert not queue.put("s2", "2", of="x", size=21) and queue.put("s2", "2", of="x")
    assert queue.put("s3", "3", of="y", size=100)
    assert queue.bytes == 180 and taken(queue) and queue.bytes == 0


def test_those_that_left_are_forgotten():
    queue: TurnQueue[str] = TurnQueue(10)
    for number in range(10_000):
        queue.put(number, "turn", of=f"account {number}")
        assert queue.ready(1, 0.0) == ["turn"]
    assert len(queue._served) < 5000
