# SPDX-License-Identifier: Apache-2.0
"""Two sides of an answer under any order of drafts and deliveries: same tokens, nothing stale, no deadlock."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from msgspec.structs import replace
from torch.nn import functional
from two_sides import Sides, Tables, question, synchronous

from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.dragon.mixture import Local
from dsd_ros.dragon.state import AggregationState, Contradiction
from dsd_ros.wire.messages import EndCode, Proposal, Reveal, Verdict

SWITCHES = {
    "never": lambda *_: False,
    "always": lambda *_: True,
    "at rejections": lambda _side, found: not (found.device_accepted and found.cloud_accepted),
}


class Abstaining(Tables):
    """A side has nothing to say behind some prefixes: there it mostly says 4 or 5, which end the answer."""

    def __init__(self, seed: int = 0, teller: str = "") -> None:
        super().__init__(seed, noise=0.0 if teller else 0.6)
        self.seed, self.teller = seed, teller

    def local(self, side, prefix):
        drawn = random.Random(f"{self.seed} {side} {prefix[-2:]}").random()
        tells = side == self.teller if self.teller else drawn < 0.6
        found = super().local(side, prefix)
        p = found.p.clone()
        p[4:6] = torch.tensor([0.0, 1e-3]) if tells else torch.tensor([1.0, 2.0 + 9.0 * (len(prefix) % 2)])
        return found._replace(p=p / p.sum(), log_weight=1.0 if tells else -1.0)


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
    ends=st.sampled_from([frozenset(), frozenset({5}), frozenset({4, 5})]),
)
@profile(max_examples=90)
def test_whatever_the_order_the_tokens_are_those_of_the_synchronous_mixture(
    order, temperature, evidence, window, head, aggregator, switch, ordered, tables, ends
):
    asked = question(temperature=temperature, window=window, head=head, aggregator=aggregator, seed=tables)
    models = Abstaining(tables) if len(ends) == 2 else Tables(tables, padding=2)
    sides = Sides(asked, models, ends, SWITCHES[switch], ordered, AblationSettings(evidence=evidence))
    assert sides.run(order.randrange) == synchronous(models, asked, ends)


@given(order=st.randoms(use_true_random=False), cut=st.integers(0, 60), tables=st.integers(0, 20))
@profile(max_examples=20)
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(order, cut, tables):
    models, asked = Tables(tables), question(seed=tables)
    first = Sides(asked, models, switch=SWITCHES["at rejections"])
    for _ in range(cut):
        if actions := first.actions():
            first.act(actions[order.randrange(len(actions))])
    held = first.sides["device"].tokens
    again = replace(asked, attempt=1, answered=held)
    again_sides = Sides(again, models)
    if len(held) < asked.max_tokens:
        again_sides.run(order.randrange)
    assert again_sides.sides["device"].tokens == synchronous(models, asked)


def test_the_aggregator_sends_its_drafts_without_evidence():
    sides = Sides(question(), Tables(1))
    for side in ("device", "cloud"):
        sides.act(("begin", side))
        sides.act(("finish", side))
        (message,) = sides.links[side, ""]
        assert isinstance(message, Proposal) and (message.position, message.rejections) == (0, 0)
        assert bool(message.evidence) == (side == "cloud")


def test_nobody_follows_a_draft_behind_other_tokens():
    """The device drafted 3 behind 1, where the cloud has 2: what the cloud would say behind 2 and 3 is not asked."""
    models = Tables(1)
    sure = {"device": {(): 1, (1,): 3, (2,): 0}, "cloud": {(): 2, (2,): 5, (2, 0): 2, (2, 3): 1}}
    models.local = lambda side, prefix: Local(
        functional.one_hot(torch.tensor(sure[side].get(tuple(prefix), 5)), 6).float(),
        {"device": 0.0, "cloud": -3.0}[side] if prefix == [2] else {"device": -3.0, "cloud": 0.0}[side],
    )
    sides = Sides(question(temperature=0.0, max_tokens=4, aggregator="device"), models, frozenset({4, 5}))
    for side in ("device", "device", "cloud", "cloud"):
        sides.act(("begin", side))
        sides.act(("finish", side))
    for _ in range(2):
        sides.act(("deliver", "device", ""))
    assert not sides.sides["cloud"].drafts
    assert sides.run(lambda count: count - 1)[:3] == [2, 0, 2]


@pytest.mark.parametrize("teller", ["device", "cloud"])
def test_neither_side_waits_for_verdicts_while_one_tells(teller):
    """The device aggregates; nothing comes back from it while three positions are drafted on both sides."""
    abstains = {"device": "cloud", "cloud": "device"}[teller]
    sides = Sides(question(temperature=0.0, window=4), Abstaining(3, teller), frozenset({4, 5}))
    for _ in range(3):
        for side in (teller, abstains):
            sides.act(("begin", side))
            sides.act(("finish", side))
        sides.act(("deliver", teller, ""))
    if teller == "device":
        assert sides.sides["cloud"].tokens == [] and len(sides.sides["cloud"]._own) == 3
        for _ in range(3):
            sides.act(("deliver", "cloud", ""))
    assert len(sides.sides["device"].tokens) == 3
    assert sides.sides["device"].rejections == {"device": 0, "cloud": 0}


def one_side(**changes) -> AggregationState:
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
        (replace(PROPOSAL, evidence=bytes(500)), {"aggregator": "cloud"}, EndCode.BAD_EVIDENCE),
        (PROPOSAL, {"aggregator": "cloud"}, EndCode.BAD_EVIDENCE),
        (Reveal(7, 0, 0, 0, [900]), {}, EndCode.OUT_OF_STEP),
    ],
)  # fmt: skip
def test_impossible_messages_are_reported(message, changes, code):
    with pytest.raises(Contradiction) as told:
        one_side(**changes).receive(message)
    assert told.value.code == code and str(told.value)


def test_a_verdict_that_lies_about_a_draft_is_reported():
    state = one_side()
    drafted = state.take()[0].token
    with pytest.raises(Contradiction):
        state.receive(Verdict(7, 0, 0, drafted, False, False))


def test_doubled_and_early_messages_change_nothing():
    state = one_side()
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
