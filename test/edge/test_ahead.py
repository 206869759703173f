# SPDX-License-Identifier: Apache-2.0
"""Pre-drafting that does not hurt: the round itself goes first, and workers take no more processors than there are."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from table_model import TableModel

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge import ahead
from dsd_ros.edge.ahead import Ahead
from dsd_ros.edge.request import ReplyRequest
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
    """proposer(processors, settings): one that has begun a reply."""
    made = []

    def begin(processors=2, **values) -> Ahead:
        monkeypatch.setattr(ahead, "processors", lambda: processors)
        chosen = {"mode": "fsd", "predraft_source": "guesses", "max_tokens": 200} | values
        found = Ahead(model, DecodeSettings(**chosen), lambda draft: None)
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
    draft = pool.propose()
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
    assert most == (4 if workers == 1 else 1)


def test_no_worker_begins_a_pass_while_the_round_drafts_or_takes_its_verdict_in(model, proposer):
    pool = proposer(predraft_budget=64, predraft_workers=1)
    draft = sent(pool)
    until(lambda: model.by_workers())
    pool.update(draft, missed(draft))
    until(lambda: idle(pool))
    begun = len(model.by_workers())
    pool.propose()
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
    assert len(pool.propose().tree) == 4


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
