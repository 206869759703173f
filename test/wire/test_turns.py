# SPDX-License-Identifier: Apache-2.0
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


def test_weights_are_bounded():
    queue: TurnQueue[str] = TurnQueue(10)
    for owner, weight in (("a", 3), ("b", 9), ("c", 2), ("d", 1)):
        queue.put(owner, owner, weight=weight)
    assert queue.ready(10, 0.0, 5) == ["a", "c"]
    assert queue.ready(10, 0.0, 5) == ["b"]  # heavier than all may be together
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


def test_with_several_workers_the_one_that_used_the_least_time_is_next():
    now = [0.0]
    queue: TurnQueue[str] = TurnQueue(10, clock=lambda: now[0])
    put(queue, "a1", "a2", "b1", "b2")
    assert queue.ready(2, hold=True) == ["a1", "b1"]
    now[0] = 0.1
    queue.release("b")
    now[0] = 0.5
    queue.release("a")
    put(queue, "a3", "b3")
    assert queue.ready(1, hold=True) == ["b2"]


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


def test_one_turn_of_a_link_is_prepared_at_a_time_and_the_least_used_first():
    now = [0.0]
    queue: TurnQueue[str] = TurnQueue(10, clock=lambda: now[0])

    def put_raw(link: str, owner: str) -> None:
        assert queue.put(owner, owner, of=(link,), raw=True)

    for owner in ("a1", "a2", "b1"):
        put_raw(owner[0], owner)
    with queue.preparing(0.0) as first, queue.preparing(0.0) as second, queue.preparing(0.0) as third:
        assert (first, second, third) == ("a1", "b1", None)
        now[0] = 0.5
    now[0] = 0.6
    put_raw("c", "c1")
    with queue.preparing(0.0) as first:
        assert first == "c1"  # a2 is a's, which has used half a second
    assert taken(queue) == ["c1", "a1", "b1"]


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


class Worker:
    """Works on a queue by a clock of its own: each turn takes what its text says, in ms."""

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self.now = 0.0
        self.queue: TurnQueue[str] = TurnQueue(10_000, max_bytes, clock=lambda: self.now)
        self.used: dict[str, float] = {}
        self.order: list[str] = []

    def put(self, path: str, *milliseconds: int, kind: str = "", urgent: bool = False) -> None:
        *of, owner = path.split("/")
        for ms in milliseconds:
            assert self.queue.put(owner, f"{path} {ms}", of=tuple(of), kind=kind, urgent=urgent)

    def work(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            turns = self.queue.ready(1, 0.0)
            if not turns:
                self.now += 0.001
                continue
            path, ms = turns[0].split()
            self.now += int(ms) / 1000
            self.used[path] = self.used.get(path, 0.0) + int(ms) / 1000
            self.order.append(path)


def test_long_turns_give_no_larger_share():
    worker = Worker()
    worker.put("greedy", *[500] * 100)
    worker.put("honest", *[10] * 2000)
    worker.work(10)
    assert worker.used["honest"] > 4.0


def test_many_sessions_and_many_links_give_no_larger_share():
    worker = Worker()
    for link in range(8):
        for session in range(8):
            worker.put(f"1.1.1.1/l{link}/s{link}.{session}", *[10] * 500)
    worker.put("2.2.2.2/l/s", *[10] * 2000)
    worker.put("3.3.3.3/l/s1", *[10] * 2000)
    worker.put("3.3.3.3/l/s2", *[10] * 2000)
    worker.work(9)
    assert worker.used["2.2.2.2/l/s"] == pytest.approx(3, abs=0.1)
    assert worker.used["3.3.3.3/l/s1"] == pytest.approx(1.5, abs=0.1)
    greedy = [used for path, used in worker.used.items() if path.startswith("1.1.1.1")]
    assert sum(greedy) == pytest.approx(3, abs=0.1) and max(greedy) - min(greedy) < 0.02


def test_time_without_turns_gives_no_credit():
    worker = Worker()
    worker.put("a", *[10] * 2000)
    worker.work(10)
    worker.put("b", *[10] * 2000)
    before = worker.used["a"]
    worker.work(4)
    assert worker.used["a"] - before == pytest.approx(2, abs=0.1)


def test_a_long_turn_lets_a_robot_in_mid_reply_go_first():
    """A robot that sends its next round a moment after each outcome finds the worker busy with a long turn rarely."""
    worker = Worker()
    worker.put("greedy", *[500] * 1000, kind="observation")
    rounds, waited = 0, 0.0
    while worker.now < 15:
        came = worker.now
        worker.put("honest", 10, kind="draft")
        while worker.order.count("honest") == rounds:
            worker.work(0.001)
        rounds += 1
        waited += worker.now - came
        worker.work(0.02)  # it drafts
    assert rounds > 150 and worker.used["greedy"] > 4


def test_many_small_pictures_hardly_delay_a_robot_in_mid_reply():
    worker = Worker()
    worker.put("greedy", *[30] * 2000, kind="observation")
    rounds = 0
    while worker.now < 10:
        worker.put("honest", 6, kind="draft")
        while worker.order.count("honest") == rounds:
            worker.work(0.001)
        rounds += 1
        worker.work(0.001)  # it drafts
    assert rounds > 500 and worker.used["greedy"] > 4  # a long turn after each round would leave 277


@pytest.mark.parametrize("milliseconds", [0, 1, 2])
def test_a_flood_of_short_turns_does_not_starve_a_long_one(milliseconds):
    """Turns of no length would be behind in time used for ever; the idle time that they cost is charged to them."""
    worker, sent = Worker(), 0
    while worker.now < 20:
        worker.put("flood", milliseconds, kind="draft")
        if worker.order.count("honest") == sent:
            worker.put("honest", 30, kind="draft")
            sent += 1
        worker.work(0.004)
    assert worker.used["honest"] > 9.0


def test_a_turn_that_waits_out_of_courtesy_holds_no_third_one_up():
    worker = Worker()
    worker.put("greedy", *[200] * 100, kind="observation")
    for _ in range(100):
        worker.put("honest", 10, kind="draft")
        worker.put("third", 5, kind="draft")
        began, done = worker.now, worker.order.count("third")
        while worker.order.count("third") == done:
            worker.work(0.001)
        assert worker.now - began < 0.23
        worker.work(0.02)


def test_a_robot_that_used_little_cannot_take_the_worker_for_long():
    worker = Worker()
    worker.put("a", *[10] * 2000)
    while worker.now < 5:
        worker.put("b", 1)
        worker.work(0.02)
    before = worker.used["a"]
    worker.put("b", *[10] * 2000)
    worker.work(2)
    assert worker.used["a"] - before > 0.8


def test_a_robot_alone_never_waits_and_equals_do_not_wait_for_each_other():
    worker = Worker()
    worker.put("a", *[500] * 4, kind="observation")
    worker.work(2)
    assert worker.order == ["a"] * 4
    for _ in range(20):
        worker.put("a", 50, kind="draft")
        worker.put("b", 50, kind="draft")
        began = worker.now
        worker.work(0.1)
        assert worker.now - began == pytest.approx(0.1, abs=0.005)
    assert worker.order.count("b") == 20


@pytest.mark.parametrize(("kind", "together"), [("round", ["a3", "h3"]), ("picture", ["a3"])])
def test_courtesy_keeps_no_round_out_of_a_pass_that_runs_anyway(kind, together):
    """One that has used more waits for another's next turn, but not while that runs; a long turn waits all the same."""
    now = [0.0]
    queue: TurnQueue[str] = TurnQueue(10, clock=lambda: now[0])
    turns = ("a1", "round", 0.003), ("h1", "picture", 0.1), ("h2", "round", 0.003), ("a2", "round", 0.003)
    for turn, of_kind, seconds in turns:
        queue.put(turn[0], turn, kind=of_kind)
        assert queue.ready() == [turn]
        now[0] += seconds
    assert queue.ready(8, 0.0) == []
    now[0] += 0.0005
    queue.put("a", "a3", kind="round")
    queue.put("h", "h3", kind=kind)
    assert queue.ready(8, 0.0) == together


def test_urgent_turns_do_not_starve_the_others():
    worker = Worker()
    worker.put("flood", *[1] * 5000, urgent=True)
    worker.put("honest", *[1] * 100)
    worker.work(1.5)
    assert worker.order.count("honest") == 100


def test_one_link_does_not_take_all_bytes():
    queue: TurnQueue[str] = TurnQueue(100, max_bytes=100)
    assert queue.put("s1", "1", of=("x", "l"), size=20)
    assert not queue.put("s2", "2", of=("x", "l"), size=6) and queue.put("s2", "2", of=("x", "l"))
    assert queue.put("s3", "3", of=("x", "m"), size=25)
    assert queue.bytes == 45 and taken(queue) and queue.bytes == 0


def test_a_batch_is_charged_to_its_owners_alike():
    now = [0.0]
    queue: TurnQueue[str] = TurnQueue(10, clock=lambda: now[0])
    put(queue, "a1", "b1", "b2", "c1")
    assert queue.ready(2, 0.0) == ["a1", "b1"]
    now[0] = 1.0
    assert queue.ready(1, 0.0) == ["c1"]
    now[0] = 1.2
    put(queue, "a2")
    assert taken(queue) == ["b2", "a2"]


def test_a_batch_is_charged_by_weight():
    worker = Worker()
    for _ in range(10):
        worker.queue.put("tree", "tree 0", weight=63)
        worker.queue.put("token", "token 0", weight=1)
        assert len(worker.queue.ready(2, 0.0)) == 2
        worker.now += 0.016
    worker.queue.put("tree", "tree 0")
    worker.queue.put("token", "token 0")
    assert worker.queue.ready(1, 0.0) == ["token 0"]


def test_accounts_of_robots_that_left_are_forgotten():
    queue: TurnQueue[str] = TurnQueue(10)
    for number in range(10_000):
        queue.put(number, "turn", of=("address", f"link {number}"))
        assert queue.ready(1, 0.0) == ["turn"]
    assert len(queue._accounts) < 5000
