# SPDX-License-Identifier: Apache-2.0
"""Two halves of an answer under any order of drafts and deliveries: same tokens, nothing stale, no deadlock."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings as profile, strategies as st
from msgspec.structs import replace
from scipy import stats
from two_sides import Sides, Tables, question, synchronous

from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.state import AggregationState, Contradiction
from dsd_ros.wire.messages import EndCode, Proposal, Reveal, Verdict

SWITCHES = {
    "never": lambda *_: False,
    "always": lambda *_: True,
    "at rejections": lambda _side, found: not (found.device_accepted and found.cloud_accepted),
}


@given(
    order=st.randoms(use_true_random=False),
    temperature=st.sampled_from([0.0, 1.0]),
    evidence=st.sampled_from(["sparse", "full"]),
    window=st.sampled_from([1, 2, 5]),
    head=st.sampled_from([1, 2, 6]),
    aggregator=st.sampled_from(["device", "cloud"]),
    switch=st.sampled_from(sorted(SWITCHES)),
    ordered=st.booleans(),
    tables=st.integers(0, 50),
    ends=st.booleans(),
)
@profile(max_examples=60)
def test_whatever_the_order_the_tokens_are_those_of_the_synchronous_mixture(
    order, temperature, evidence, window, head, aggregator, switch, ordered, tables, ends
):
    asked = question(
        temperature=temperature, evidence=evidence, window=window, head=head, aggregator=aggregator,
        seed=tables,
    )  # fmt: skip
    models = Tables(tables, padding=2)
    eos = frozenset({5}) if ends else frozenset()
    sides = Sides(asked, models, eos, SWITCHES[switch], ordered)
    assert sides.run(order.randrange) == synchronous(models, asked, eos)


@given(order=st.randoms(use_true_random=False), tables=st.integers(0, 20), said=st.integers(0, 7))
@profile(max_examples=20)
def test_an_answer_continues_after_accepted_tokens(order, tables, said):
    models = Tables(tables)
    whole = synchronous(models, question(seed=tables))
    asked = question(seed=tables, attempt=1, answered=whole[:said])
    assert Sides(asked, models, switch=SWITCHES["always"]).run(order.randrange) == whole


@given(order=st.randoms(use_true_random=False), cut=st.integers(0, 60), tables=st.integers(0, 20))
@profile(max_examples=20)
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(order, cut, tables):
    models, asked = Tables(tables), question(seed=tables)
    first = Sides(asked, models, switch=SWITCHES["at rejections"])
    for _ in range(cut):
        if actions := first.actions():
            first.act(actions[order.randrange(len(actions))])
    held = first.halves["device"].tokens
    again = replace(asked, attempt=1, answered=held)
    again_sides = Sides(again, models)
    if len(held) < asked.max_tokens:
        again_sides.run(order.randrange)
    assert again_sides.halves["device"].tokens == synchronous(models, asked)


@pytest.mark.parametrize(
    ("evidence", "switch", "samples"),
    [
        ("sparse", "at rejections", 300),
        pytest.param("sparse", "always", 4000, marks=pytest.mark.slow),
        pytest.param("full", "never", 4000, marks=pytest.mark.slow),
    ],
)
def test_algorithm_1_draws_from_the_mixture(evidence, switch, samples):
    """The joint distribution of three tokens, whatever the timing."""
    length = 3
    models = Tables(11, size=4, noise=1.2)
    expected = np.zeros((4,) * length)
    for path in itertools.product(range(4), repeat=length):
        chance = 1.0
        for place in range(length):
            device, cloud = (models.local(side, list(path[:place])) for side in ("device", "cloud"))
            p = mixture(device.p, cloud.p, device.log_weight, cloud.log_weight)
            chance *= float(p[path[place]])
        expected[path] = chance
    counts = np.zeros_like(expected)
    order = random.Random(5)
    for reply in range(samples):
        asked = question(
            reply=reply, randomness="independent", evidence=evidence, head=1, max_tokens=length, window=2,
            vocab_size=4,
        )  # fmt: skip
        tokens = Sides(asked, models, switch=SWITCHES[switch]).run(order.randrange)
        counts[tuple(tokens)] += 1
    expected *= samples / expected.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_the_aggregator_alone_keeps_its_drafts_to_itself():
    sides = Sides(question(), Tables(1))
    sides.act(("begin", "device"))
    sides.act(("finish", "device"))
    assert not sides.links
    sides.act(("begin", "cloud"))
    sides.act(("finish", "cloud"))
    (message,) = sides.links["cloud", ""]
    assert isinstance(message, Proposal) and (message.position, message.rejections) == (0, 0)


def test_a_window_of_one_goes_in_step():
    sides = Sides(question(window=1), Tables(1))
    for side in ("device", "cloud"):
        sides.act(("begin", side))
        sides.act(("finish", side))
        assert not sides.halves[side].drafts
    sides.act(("deliver", "cloud", ""))
    assert sides.halves["device"].drafts and not sides.halves["cloud"].drafts


def half(**changes) -> AggregationState:
    models = Tables(1)
    state = AggregationState(question(**changes), "cloud", 6, 6, frozenset())
    state.drafted(models.local("cloud", []))
    return state


PROPOSAL = Proposal(7, 0, 0, 0, 1, 0.0, b"?")


@pytest.mark.parametrize(
    ("message", "changes", "code"),
    [
        (Verdict(7, 0, 0, 0, False, True), {"aggregator": "cloud"}, EndCode.OUT_OF_STEP),
        (Verdict(7, 0, 0, 900, False, False), {}, EndCode.OUT_OF_STEP),
        (replace(PROPOSAL, position=7, evidence=b""), {"window": 1}, EndCode.OUT_OF_STEP),
        (replace(PROPOSAL, position=100), {}, EndCode.OUT_OF_STEP),
        (replace(PROPOSAL, evidence=bytes(500)), {}, EndCode.BAD_EVIDENCE),
        (PROPOSAL, {"aggregator": "cloud"}, EndCode.BAD_EVIDENCE),
        (replace(PROPOSAL, evidence=bytes(24)), {"aggregator": "cloud", "evidence": "full"}, EndCode.BAD_EVIDENCE),
        (Reveal(7, 0, 0, 0, [900]), {}, EndCode.OUT_OF_STEP),
    ],
)  # fmt: skip
def test_impossible_messages_are_reported(message, changes, code):
    with pytest.raises(Contradiction) as told:
        half(**changes).receive(message)
    assert told.value.code == code and str(told.value)


def test_a_verdict_that_lies_about_a_draft_is_reported():
    state = half()
    drafted = state.take()[0].token
    with pytest.raises(Contradiction):
        state.receive(Verdict(7, 0, 0, drafted, False, False))


def test_doubled_and_early_messages_change_nothing():
    state = half()
    drafted = state.take()[0].token
    state.receive(Verdict(7, 0, 3, drafted, False, True))  # the three before got lost
    assert state.tokens == []
    for _ in range(2):
        state.receive(Verdict(7, 0, 0, drafted, False, True))
        assert state.tokens == [drafted]
    state.receive(replace(PROPOSAL, position=0))  # decided
    assert state.waiting == {"cloud": 0, "device": 0}
    for _ in range(2):
        state.receive(replace(PROPOSAL, position=2, rejections=1))
    assert state.waiting["device"] == 1
    state.receive(replace(PROPOSAL, position=3, rejections=0))  # rejected before
    assert state.waiting["device"] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_nucleus_answers_too(temperature):
    asked = question(evidence="lossy-nucleus", temperature=temperature)
    tokens = Sides(asked, Tables(4)).run(random.Random(0).randrange)
    assert len(tokens) == asked.max_tokens
