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


def test_an_owner_that_comes_back_waits_for_one_turn_of_each_other_and_a_new_one_for_none():
    queue: TurnQueue[str] = TurnQueue(10)
    put(queue, "a1", "a2", "b1", "b2")
    assert queue.ready() == ["a1"]
    put(queue, "c1")
    assert taken(queue) == ["b1", "c1", "a2", "b2"]


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


def test_a_raw_turn_waits_until_it_is_prepared_and_its_owners_next_with_it():
    queue: TurnQueue[str] = TurnQueue(10)
    queue.put("a", "a picture", raw=True, joins="draft")
    queue.put("a", "a draft", kind="draft")
    put(queue, "b1")
    assert taken(queue) == ["b1"]
    with queue.preparing(0.0) as turn:
        assert turn == "a picture"
        assert taken(queue) == []
        with queue.preparing(0.0) as other:  # that of no other owner waits
            assert other is None
    assert queue.ready(2, 0.0) == ["a picture", "a draft"]


def test_one_turn_of_a_link_is_prepared_at_a_time_and_by_rotation():
    queue: TurnQueue[str] = TurnQueue(10)
    for owner in ("a1", "a2", "b1"):
        assert queue.put(owner, owner, of=(owner[0],), raw=True)
    with queue.preparing(0.0) as first, queue.preparing(0.0) as second, queue.preparing(0.0) as third:
        assert (first, second, third) == ("a1", "b1", None)
    assert queue.ready(2, 0.0) == ["a1", "b1"]
    assert queue.put("c1", "c1", of=("c",), raw=True)
    with queue.preparing(0.0) as first, queue.preparing(0.0) as second:
        assert (first, second) == ("c1", "a2")  # a2 is a's, which has had a turn
    assert taken(queue) == ["c1", "a2"]


def test_a_raw_turn_that_is_dropped_while_it_is_prepared_stays_away():
    queue: TurnQueue[str] = TurnQueue(10)
    queue.put("a", "a1", raw=True)
    with queue.preparing(0.0) as turn:
        assert turn == "a1"
        queue.discard("a")
    queue.put("a", "a2", raw=True)
    assert taken(queue) == []
    with queue.preparing(0.0) as turn:
        assert turn == "a2"
    assert taken(queue) == ["a2"]


@pytest.mark.parametrize("how", ["put", "take", "prepared", "close"])
def test_the_preparing_worker_is_woken(how):
    queue: TurnQueue[str] = TurnQueue(10)
    found = []

    def work() -> None:
        with queue.preparing(10) as turn:
            found.append(turn)

    worker = threading.Thread(target=work)
    if how == "take":
        put(queue, "a0")
    if how in ("take", "prepared"):
        queue.put("a", "a1", raw=True)
    if how == "prepared":
        queue.put("b", "b1", of=("link",), raw=True)
        queue.put("c", "a1", of=("link",), raw=True)
        with queue.preparing(0.0), queue.preparing(0.0):
            worker.start()
            time.sleep(0.02)
    else:
        worker.start()
        time.sleep(0.02)
    if how == "put":
        queue.put("a", "a1", raw=True)
    elif how == "take":
        assert taken(queue) == ["a0"]
    elif how == "close":
        queue.close()
    worker.join(5)
    assert found == [None if how == "close" else "a1"]


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


class Rotation:
    """A queue whose owners always have a turn waiting. "address/link/session" is an owner's path."""

    def __init__(self, *paths: str, eager: Sequence[str] = ()) -> None:
        self.queue: TurnQueue[str] = TurnQueue(10)
        self.paths, self.eager = list(paths), eager
        self.counts: Counter[str] = Counter()

    def steps(self, count: int, limit: int = 1) -> list[list[str]]:
        found = []
        for _ in range(count):
            for path in self.paths:
                *of, owner = path.split("/")
                self.queue.put(owner, path, of=tuple(of), key=path)
            turns = self.queue.ready(limit, 0.0, eager=lambda path: path in self.eager)
            self.counts.update(turns)
            found.append(turns)
        return found


def test_many_sessions_and_many_links_give_no_larger_share():
    greedy = [f"1.1.1.1/l{link}/s{link}.{session}" for link in range(8) for session in range(8)]
    rotation = Rotation(*greedy, "2.2.2.2/l/s", "3.3.3.3/m/s1", "3.3.3.3/m/s2")
    rotation.steps(960)
    assert rotation.counts["2.2.2.2/l/s"] == 320
    assert rotation.counts["3.3.3.3/m/s1"] == rotation.counts["3.3.3.3/m/s2"] == 160
    assert {rotation.counts[path] for path in greedy} == {5}


def test_a_step_with_room_for_some_takes_one_of_each_address_first():
    rotation = Rotation("x/l/1", "x/l/2", "x/m/3", "y/n/4", "z/o/5")
    first, second = rotation.steps(2, limit=4)
    assert set(first) == {"x/l/1", "y/n/4", "z/o/5", "x/m/3"}  # of x, the other link's before the same link's next
    assert second[0] == "x/l/2" or second[:3] == ["x/l/2", "y/n/4", "z/o/5"]


def test_waiting_gives_no_credit():
    rotation = Rotation("a")
    rotation.steps(100)
    rotation.paths.append("b")
    rotation.steps(100)
    assert rotation.counts["b"] == 50


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


def test_a_heavy_turn_is_not_kept_waiting_by_light_ones_of_its_address():
    queue: TurnQueue[str] = TurnQueue(1)
    waited = 0
    for _ in range(20):
        queue.put("heavy", "heavy", of=("x",), weight=5)
        queue.put("light", "light", of=("x",))
        for owner in "yz":
            queue.put(owner, owner, of=(owner,), weight=2)
        turns = queue.ready(9, 0.0, 6, eager=lambda turn: turn in "yz")
        waited = 0 if "heavy" in turns else waited + 1
        assert waited < 4


def test_one_link_does_not_take_all_bytes():
    queue: TurnQueue[str] = TurnQueue(100, max_bytes=100)
    assert queue.put("s1", "1", of=("x", "l"), size=80)
    assert not queue.put("s2", "2", of=("x", "l"), size=21) and queue.put("s2", "2", of=("x", "l"))
    assert queue.put("s3", "3", of=("x", "m"), size=100)
    assert queue.bytes == 180 and taken(queue) and queue.bytes == 0


def test_those_that_left_are_forgotten():
    queue: TurnQueue[str] = TurnQueue(10)
    for number in range(10_000):
        queue.put(number, "turn", of=("address", f"link {number}"))
        assert queue.ready(1, 0.0) == ["turn"]
    assert len(queue._served) < 5000
