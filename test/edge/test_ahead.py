# SPDX-License-Identifier: Apache-2.0
"""Pre-drafting that does not hurt: the round itself goes first, and what is drafted ahead fits into idle time."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import numpy as np
import pytest
import torch
from dsd_ros.edge.proposer import ReplyRequest
from table_model import TableModel

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge import ahead
from dsd_ros.edge.ahead import Ahead, IdleTime, Rest
from dsd_ros.vlm.sequence import grow_trees_together
from dsd_ros.wire.client import Limits

IMAGE = np.full((2, 2, 3), 1, np.uint8)
LAYERS = 4


class Watched(TableModel):
    """Four layers; knows which thread began which pass, how many drafts it had and how many of its layers ran.

    A worker's pass stops in its second layer while ``gate`` is closed.
    """

    def __init__(self) -> None:
        super().__init__(1, 12, ends=False, noise=0.5)
        self.passes: list[dict] = []
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def forward_tokens(self, tokens, cache, rope_delta, rows, on_layer=None):
        self._run(1, on_layer)
        return super().forward_tokens(tokens, cache, rope_delta, rows)

    def forward_batch(self, feeds, on_layer=None):
        self._run(len(feeds), on_layer)
        return super().forward_batch(feeds)

    def _run(self, drafts, on_layer):
        thread = threading.current_thread().name
        one = {"thread": thread, "drafts": drafts, "layers": 0, "threads": torch.get_num_threads()}
        self.passes.append(one)
        for layer in range(LAYERS):
            if layer == 1 and thread.startswith("predraft"):
                self.reached.set()
                assert self.gate.wait(20)
            one["layers"] += 1
            if on_layer is not None:
                on_layer(layer, torch.zeros(1, 1))

    def by_workers(self) -> list[dict]:
        return [one for one in self.passes if one["thread"].startswith("predraft")]


@pytest.fixture
def model() -> Watched:
    return Watched()


@pytest.fixture
def proposer(model, monkeypatch):
    """proposer(processors, settings): one that has begun a reply; a second is a year on its clock."""
    made = []

    def begin(processors=2, clock=lambda: 0.0, rest=None, **values) -> Ahead:
        monkeypatch.setattr(ahead, "processors", lambda: processors)
        chosen = {"mode": "fsd", "predraft_source": "guesses", "max_tokens": 200, "predraft_when": "always"} | values
        found = Ahead(model, DecodeSettings(**chosen), None, lambda draft: None, clock, rest)
        made.append(found)
        found.begin(ReplyRequest(1, IMAGE, "go", None, str, Limits()), frozenset())
        return found

    yield begin
    model.gate.set()
    for one in made:
        one.reset()
        one.close()


def until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def idle(pool: Ahead) -> bool:
    """Whether all workers wait for work."""
    with pool._lock:
        return len(pool._work._waiters) == len(pool._threads) > 0


def sent(pool: Ahead):
    """The next round, sent and being verified."""
    draft = pool.propose([])
    pool.draft_ahead(draft)
    return draft


def missed(draft) -> Result:
    """An outcome that none has guessed."""
    return Result(0, 11, b"", 12)


@pytest.mark.parametrize(("processors", "workers"), [(2, 1), (4, 1), (5, 4), (64, 4)])
def test_workers_that_find_no_processor_of_their_own_share_one_thread(model, proposer, processors, workers):
    pool = proposer(processors, predraft_workers=4, predraft_budget=8)
    sent(pool)
    until(lambda: idle(pool))
    assert len(pool._threads) == workers
    most = max(one["drafts"] for one in model.by_workers())
    assert most == (4 if workers == 1 else 1)  # in passes in which a further draft costs nothing


def test_no_worker_begins_a_pass_while_the_round_drafts_or_takes_its_verdict_in(model, proposer):
    pool = proposer(predraft_budget=64, predraft_workers=1)
    draft = sent(pool)
    until(lambda: model.by_workers())
    pool.update(draft, missed(draft))
    until(lambda: idle(pool))
    begun = len(model.by_workers())
    pool.propose([])
    with pool._lock:  # there would be work, if it were the time for it
        pool._levels = [pool._level(draft)]
        pool._work.notify_all()
    time.sleep(0.05)
    assert len(model.by_workers()) == begun
    sent(pool)
    until(lambda: len(model.by_workers()) > begun)


def test_a_pass_that_the_verdict_makes_useless_ends_after_its_layer(model, proposer):
    pool = proposer()
    model.gate.clear()
    draft = sent(pool)
    assert model.reached.wait(20)
    began = len(model.passes)
    pool.update(draft, missed(draft))  # it waits for no worker
    assert pool.origin.source == "" and len(model.passes) == began
    model.gate.set()
    until(lambda: idle(pool))
    (useless,) = model.by_workers()
    assert useless["layers"] == 2 < LAYERS and not pool.error
    # The round goes on as if nothing had been drafted ahead.
    assert len(pool.propose([]).tree) == 4


def test_the_pass_that_the_verdict_needs_is_waited_for(model, proposer):
    pool = proposer(predraft_budget=1, predraft_workers=1)
    draft = sent(pool)
    until(lambda: idle(pool))
    (fitting,) = [named for named in pool._levels[0].outcomes._named.values() if named.begun]
    with pool._lock:
        fitting.draft, fitting.begun = None, True
        pool._levels[0].outcomes.put_back(fitting)
        model.reached.clear()
        model.gate.clear()
        pool._work.notify_all()
    assert model.reached.wait(20)
    threading.Timer(0.05, model.gate.set).start()
    pool.update(draft, Result(fitting.accepted, fitting.next_token, b"", 12))
    assert pool.origin.source == "guess" and pool._next is fitting.draft
    assert model.by_workers()[-1]["layers"] == LAYERS and model.gate.is_set()
    assert pool._next.sequence.tokens


def test_after_a_miss_the_draft_goes_on_in_its_own_sequence(model, proposer):
    """A copy of keys and values is made only while a worker may make one, too."""
    pool = proposer()
    draft = sent(pool)
    until(lambda: idle(pool))
    pool.update(draft, missed(draft))
    assert pool._next.sequence is draft.sequence and pool._next.sequence.tokens == [11]
    draft = sent(pool)
    until(lambda: idle(pool))
    with pool._lock:
        pool._forking = 1
    pool.update(draft, missed(draft))
    assert pool._next.sequence is not draft.sequence


def test_workers_share_the_models_processors_and_leave_others_theirs(model, proposer):
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(4)
        pool = proposer(64, predraft_workers=2)
        sent(pool)
        until(lambda: idle(pool))
        assert {one["threads"] for one in model.by_workers()} == {2}
        assert torch.get_num_threads() == 4
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [4]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["unlikely", "likely"])
def test_an_unlikely_draft_is_not_begun_just_before_the_verdict(model, proposer, monkeypatch, kind):
    now = [0.0]
    pool = proposer(clock=lambda: now[0], predraft_workers=1)
    monkeypatch.setattr(ahead, "_LIKELY", 1.1 if kind == "unlikely" else 0.0)
    pool._time.begin(True)
    now[0] = 10.0
    pool._time.end()  # verdicts come after 10 s, and a pass takes 4
    pool._time.learn(1, 4.0)
    monkeypatch.setattr(pool._time, "begin", lambda first: IdleTime.begin(pool._time, first))
    draft = pool.propose([])
    pool._time._sent = None
    now[0] = 0.0
    monkeypatch.setattr(pool, "_choose", gated(pool, now, 7.0))
    pool.draft_ahead(draft)
    until(lambda: now[0] == 7.0)
    time.sleep(0.05)
    assert bool(model.by_workers()) == (kind == "likely")


def gated(pool: Ahead, now: list[float], at: float):
    """A worker that looks for work comes to it when the clock says ``at``."""
    choose = pool._choose

    def later():
        if pool._open:
            now[0] = at
        return choose()

    return later


def test_idle_time_keeps_a_pass_apart_from_the_verdict():
    now = [0.0]
    times = IdleTime(lambda: now[0])
    assert times.pause(1) == 0.0  # nothing is known
    for seconds, first in ((30.0, True), (10.0, False)):
        times.begin(first)
        now[0] += seconds
        times.end()
    times.learn(1, 2.0)
    times.learn(3, 3.0)
    assert [times.seconds(drafts) for drafts in (1, 2, 3)] == pytest.approx([2.0, 2.5, 3.0])
    now[0] = 0.0
    times.begin(False)
    for at, pause in ((0.0, 0.0), (7.9, 0.0), (8.5, 3.5), (11.0, 1.0), (12.1, 0.0)):
        now[0] = at
        assert times.pause(1) == pytest.approx(pause)
    now[0] = 7.5
    assert times.pause(1) == 0.0 and times.pause(3) > 0.0  # three drafts would take longer than there is time
    now[0] = 0.0
    times.begin(True)  # a first round, whose verdict comes after 30 s
    now[0] = 11.0
    assert times.pause(1) == 0.0
    times.end()
    assert times.pause(1) == 0.0


def test_a_draft_joins_a_pass_if_that_makes_it_worth_more_a_second():
    times = IdleTime(lambda: 0.0)
    assert times.joins(0.01, 0.9, 1)  # as long as nobody knows what it takes
    times.learn(1, 1.0)
    times.learn(2, 1.25)
    assert times.joins(0.3, 0.8, 1) and not times.joins(0.1, 0.8, 1)
    for _ in range(400):  # what was measured long ago is tried again
        times.learn(1, 1.0)
    assert times.joins(0.1, 0.8, 1)


class Rounds:
    """Replies of ten rounds that take ``seconds``, by whether they rest; the first of a reply takes ``first``."""

    def __init__(self, with_it: float, without: float, first: dict[bool, float] | None = None) -> None:
        self.now, self.seconds = 0.0, {False: with_it, True: without}
        self.first = first or {False: 50.0, True: 50.0}
        self.rest = Rest(1, lambda: self.now)

    def run(self, replies: int) -> tuple[list[bool], list[bool]]:
        """Which rounds rested: first ones, and the others."""
        kinds: tuple[list[bool], list[bool]] = [], []
        for _ in range(replies):
            for number in range(10):
                rests = self.rest.next(1 + number)
                kinds[number > 0].append(rests)
                self.now += (self.seconds if number else self.first)[rests]
        return kinds


def test_drafting_ahead_rests_almost_at_once_where_it_costs_much():
    rounds = Rounds(with_it=2.1, without=1.0)
    assert rounds.run(1)[1] == [True, False] * 2 + [True] * 5
    assert "0.48 times" in rounds.rest.explain()
    _, kinds = rounds.run(1000)
    tried = [number for number, rests in enumerate(kinds) if not rests]
    assert 4 <= len(tried) <= 20  # again and again, ever more rarely
    gaps = [b - a for a, b in itertools.pairwise(tried) if b - a > 10]
    assert len(gaps) > 2 and gaps == sorted(gaps) and gaps[-1] > 10 * gaps[0]


def test_drafting_ahead_that_pays_hardly_rests():
    rounds = Rounds(with_it=1.0, without=1.5)
    rounds.run(2)
    _, kinds = rounds.run(100)
    assert not rounds.rest.explain() and 4 <= sum(kinds) <= 20


@pytest.mark.parametrize(("with_it", "rests"), [(1.0, True), (0.9, False), (1.1, True)])
def test_a_small_difference_is_told_by_a_longer_trial(with_it, rests):
    rounds = Rounds(with_it, 1.0)
    # A reply's last round does not count: nothing is sent after it.
    assert rounds.run(1)[1] == [True, False] * 4 + [True]
    assert rounds.run(1)[1][:4] == [True, False] * 2
    assert rounds.run(2)[1] == [rests] * 18


def test_first_rounds_rest_by_themselves():
    """Guesses may be for nothing while the target reads the prompt, and pay later."""
    rounds = Rounds(with_it=1.0, without=2.1, first={False: 8.0, True: 7.0})
    rounds.run(13)
    assert rounds.run(5) == ([True] * 5, [False] * 45)


def test_what_changes_is_noticed_and_soon_tried_again():
    rounds = Rounds(with_it=2.1, without=1.0)
    rounds.run(20)
    rounds.seconds = {False: 1.0, True: 2.1}
    _, kinds = rounds.run(60)
    assert not any(kinds[-20:]) and not rounds.rest.explain()


def test_rounds_in_flight_are_compared_in_runs():
    """The first rounds of a run pay for what the run before it has left or lacks."""
    now, kinds = 0.0, []
    rest = Rest(3, lambda: now)
    for number in range(60):
        kinds.append(rest.next(number + 1))
        settled = kinds[-3:] == [kinds[-1]] * 3
        now += 1.0 if kinds[-1] is not settled else 1.5  # drafting ahead pays, but for a run's first two rounds
    assert kinds[1:25] == ([True] * 3 + [False] * 3) * 4
    assert not any(kinds[36:])


class SharedProcessor:
    """A clock on which every pass of the draft model takes a second, whichever thread runs it, and the target none."""

    def __init__(self, model: Watched, session_only: bool) -> None:
        self.model, self.session_only = model, session_only

    def __call__(self) -> float:
        passes = len(self.model.passes)
        return float(passes - (len(self.model.by_workers()) if self.session_only else 0))


@pytest.mark.parametrize("shared", [True, False])
def test_the_real_loop_rests_where_workers_take_the_rounds_processor(model, proposer, shared):
    pool = proposer(
        clock=SharedProcessor(model, session_only=not shared), predraft_when="pays", predraft_workers=1,
        predraft_budget=4,
    )  # fmt: skip
    rested = []
    for _ in range(30):
        draft = sent(pool)
        rested.append(draft.rests)
        if not draft.rests:
            until(lambda: idle(pool))
        # Shared: each guess is wrong. Else: each guess is right, and costs nothing.
        outcomes = pool._levels[0].outcomes._named.values() if pool._levels else ()
        (fitting, *_) = [named for named in outcomes if named.complete] or [None]
        hit = fitting is not None and not shared
        pool.update(draft, Result(fitting.accepted, fitting.next_token, b"", 12) if hit else missed(draft))
        assert draft.rests <= (pool.origin.begun == 0)
    assert rested[:3] == [True, True, False]
    assert set(rested[15:]) == {shared}
    assert ("rests" in pool.explain()) is shared


def test_a_session_goes_on_with_what_an_earlier_one_learned(model, proposer):
    rounds = Rounds(with_it=2.1, without=1.0)
    rounds.run(20)
    pool = proposer(predraft_when="pays", rest=rounds.rest)
    assert [sent(pool).rests, "rests" in pool.explain()] == [True, True]


def test_a_pool_leaves_the_interpreter_as_it_found_it(model, proposer):
    before = sys.getswitchinterval()
    first, second = proposer(), proposer()
    for pool in (first, second):
        sent(pool)
        until(lambda pool=pool: idle(pool))
    assert sys.getswitchinterval() < before
    first.close()
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


def test_a_hook_that_ends_a_batched_growth_leaves_the_trees_as_they_were():
    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    model = Watched()
    sequences = [model.prefill(IMAGE, text) for text in ("go", "stop")]
    grow_trees_together([(one, [1, 2], [-1, -1]) for one in sequences])
    before = [one._cache.length for one in sequences]
    with pytest.raises(Stopped):
        grow_trees_together([(one, [3], [0]) for one in sequences], stop)
    assert [one._cache.length for one in sequences] == before
    rows = grow_trees_together([(one, [3], [0]) for one in sequences])
    assert [row.shape for row in rows] == [(1, 12), (1, 12)]
