# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings as profile, strategies as st
from table_model import TableModel

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.draft_model import Drafting, ModelDraft
from dsd_ros.edge.outcome_predictor import Guess
from dsd_ros.edge.outcomes import FLOOR, OutcomeQueue

MODEL = TableModel(1, 12, ends=False, noise=0.5)  # never says token 11, which ends replies
IMAGE = np.full((2, 2, 3), 1, np.uint8)


def drafted(gamma: int = 4, max_tokens: int = 50, eos: tuple[int, ...] = (11,)) -> ModelDraft:
    drafting = Drafting(DecodeSettings(draft_length=gamma, max_tokens=max_tokens), frozenset(eos), 1)
    of = ModelDraft(drafting, 1, [], MODEL.prefill(IMAGE, "go"))
    of.finish()
    return of


def outcomes(budget=100, paper=False, **values) -> OutcomeQueue:
    return OutcomeQueue(drafted(**values), budget, paper)


named = st.tuples(st.integers(0, 4), st.integers(0, 10), st.floats(0.01, 1.0))


@given(st.lists(named, min_size=1, max_size=30), st.integers(1, 10))
@profile(max_examples=60)
def test_no_more_are_begun_than_the_budget_and_what_is_begun_goes_on(items, budget):
    queue = outcomes(budget)
    for accepted, token, score in items:
        queue.name(accepted, token, "guess", score)
    steps = 0
    while (predraft := queue.pop()) is not None:
        steps += 1
        if steps % 3:
            queue.put_back(predraft)
    different = len({(a, t) for a, t, _ in items})
    assert queue.begun == min(budget, different) and steps <= 3 * budget


@given(st.lists(st.one_of(named.map(lambda n: ("guess", n)), named.map(lambda n: ("exit", n)))))
@profile(max_examples=80)
def test_exits_rerank_guesses_and_nothing_begun_is_dropped(news):
    queue = outcomes()
    scores: dict[tuple[int, int], float] = {}
    begun = []
    for kind, (accepted, token, value) in news:
        key = accepted, token
        if kind == "guess":
            queue.guess([Guess(accepted, token, value)])
            found = queue.find(*key)
            if found is not None:
                scores[key] = found.score
        else:
            before = queue.find(*key)
            old = before.score if before is not None else 0.0
            others = {k: queue.find(*k).score for k in scores if queue.find(*k) is not None}
            queue.forecast(accepted, token, value)
            assert queue.find(*key).score == pytest.approx(value + (1 - value) * old)
            for other, score in others.items():
                left = queue.find(*other)
                if other != key:
                    assert left is None or left.score == pytest.approx((1 - value) * score)
                    assert (left is None) <= ((1 - value) * score < FLOOR)
            scores[key] = queue.find(*key).score
        if len(begun) < 3 and (predraft := queue.pop()) is not None:
            begun.append(predraft)
        assert all(queue.find(p.accepted, p.next_token) is p for p in begun)


def test_places_are_kept_for_what_is_still_to_be_named():
    queue = outcomes(budget=3)
    queue.guess([Guess(0, token, 0.1) for token in range(4)])
    first, second = queue.pop(1), queue.pop(1)
    assert first is not None and second is not None
    assert queue.pop(1) is None and queue.begun == 2
    queue.put_back(second)
    assert queue.pop(1) is second  # what was begun goes on
    queue.guess([Guess(4, 1, 0.9)])
    assert queue.pop() is queue.find(4, 1) and queue.pop() is None


def test_exits_alone_score_by_their_confidence():
    queue = outcomes(paper=True)
    queue.forecast(1, 5, 0.4)
    queue.forecast(2, 6, 0.9)
    queue.forecast(1, 5, 0.6)
    assert [(p.accepted, p.score) for p in (queue.pop(), queue.pop())] == [(2, 0.9), (1, 0.6)]
    assert queue.find(1, 5).source == "exit"


def test_an_exit_that_confirms_a_guess_not_begun_takes_it_over():
    queue = outcomes()
    queue.guess([Guess(0, 1, 0.5), Guess(0, 2, 0.4)])
    assert queue.pop() is queue.find(0, 1)
    queue.forecast(0, 1, 0.5)
    queue.forecast(0, 2, 0.9)
    assert queue.find(0, 1).source == "guess" and queue.find(0, 2).source == "exit"
