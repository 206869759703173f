# SPDX-License-Identifier: Apache-2.0
"""Forward passes held to given times, on a fake clock that only sleeping advances."""

from __future__ import annotations

import math

import pytest
import torch

from dsd_lab.bench import pace as pace_module
from dsd_lab.bench.pace import Pace, paced
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.sequence import PromptChunk, TreeCheck, next_logits_together, verify_trees_together

INSTRUCTION = "find the silver bottle"


class Clock:
    """Stands in for the time module: each sleep falls short by a third at first, as sleeps may."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now += seconds if len(self.sleeps) % 2 == 0 else seconds * 2 / 3


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


@pytest.fixture
def slow_model(model):
    return paced(model, Pace(0.6, batch_growth=0.15))


def test_a_batch_takes_longer_as_it_grows():
    pace = Pace(7.76e-3, batch_growth=0.15)
    assert pace.seconds() == pytest.approx(7.76e-3)
    assert pace.seconds(8) == pytest.approx(8.97e-3, rel=0.01)  # FSD Table 9
    assert Pace(0.5).seconds(30) == 0.5
    target = Pace(0.1, batch_curve=((1, 1.0), (8, 1.7), (32, 5.4)))
    assert [target.seconds(n) for n in (1, 8, 20, 32, 64)] == pytest.approx([0.1, 0.17, 0.355, 0.54, 1.08])


def test_a_pass_may_take_longer_for_more_tokens(clock, model):
    held = paced(model, Pace(0.6, token_curve=((1, 1.0), (5, 1.5))))
    sequence = held.prefill(None, INSTRUCTION)
    sequence.next_logits()
    began = clock.now
    sequence.append([3])
    sequence.next_logits()
    assert clock.now - began == pytest.approx(0.6)
    began = clock.now
    sequence.verify([3, 4])
    assert clock.now - began == pytest.approx(0.6 * 1.125)
    several = [sequence.fork() for _ in range(2)]
    began = clock.now
    verify_trees_together([TreeCheck(each, [5, 6, 7], range(-1, 2)) for each in several])
    assert clock.now - began == pytest.approx(0.6 * 1.25)


def test_values_out_of_place_are_refused():
    for name in ("forward_seconds", "batch_growth", "prefill_seconds", "exit_seconds", "thread_growth"):
        for value in (-1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match=name):
                Pace(**{"forward_seconds": 1.0, name: value})


def test_every_pass_lasts_as_long_as_its_pace(slow_model, picture, clock):
    sequence = slow_model.prefill(picture(), INSTRUCTION)
    assert clock.now == pytest.approx(100.6)
    sequence.append([3])
    sequence.next_logits()
    assert clock.now == pytest.approx(101.2)
    sequence.next_logits()  # known: no pass
    sequence.verify([4, 5, 6])
    assert clock.now == pytest.approx(101.8)
    others = [sequence.fork() for _ in range(8)]
    for token, other in enumerate(others):
        other.append([token])
    next_logits_together(others)
    assert clock.now == pytest.approx(101.8 + 0.6 * 1.15)


def test_a_prompt_has_a_time_of_its_own(model, picture, clock):
    held = paced(model, Pace(0.6, batch_growth=0.7, prefill_seconds=5.0))
    one, other = held.prefill(picture(), INSTRUCTION), held.open(picture(1), INSTRUCTION)
    assert clock.now == pytest.approx(105.0)
    one.append([3])
    verify_trees_together([TreeCheck(one, [4], [-1]), TreeCheck(other, [], [])])  # a round and a prompt in one pass
    assert clock.now == pytest.approx(105.0 + 0.6 + 5.0)
    part = held.open(picture(2), INSTRUCTION)
    for count in (4, 10_000):  # a prompt in two parts costs its time once, and a pass for the first part
        verify_trees_together([TreeCheck(one, [5], [-1])], chunks=[PromptChunk(part, count)])
        one.keep_path([])
    assert clock.now == pytest.approx(110.6 + 0.6 * 1.1 + 0.6 + 5.0)


def test_an_exit_adds_its_cost_to_the_pass_that_it_listens_to(model, picture, clock):
    model.exits = ExitAdapters.untrained(model)
    try:
        held = paced(model, Pace(0.6, exit_seconds=0.25))
    finally:
        model.exits = None
    sequence = held.prefill(picture(), INSTRUCTION)
    began, layers, heard = clock.now, held.num_layers, []

    def listen(layer, hidden):
        if layer + 1 < layers:
            heard.append(clock.now - began)
            held.exits.logits(held, layer + 1, hidden)
            heard.append(clock.now - began)

    sequence.verify([4, 5], listen)
    assert heard[:2] == pytest.approx([0.6 / layers, 0.6 / layers + 0.25])
    assert clock.now - began == pytest.approx(0.6 + 0.25 * (layers - 1))


def test_passes_side_by_side_slow_each_other_down(model, picture, clock):
    held = paced(model, Pace(0.6, thread_growth=0.5))
    first, second = held.prefill(picture(), INSTRUCTION), held.prefill(picture(1), INSTRUCTION)
    began, lasted = clock.now, []

    def another(layer, hidden):
        if layer == 0:  # while the first pass is under way
            before = clock.now
            second.verify([4])
            lasted.append(clock.now - before)

    first.verify([4, 5], another)
    assert lasted == pytest.approx([0.9])
    before = clock.now
    first.verify([6])
    assert clock.now - before == pytest.approx(0.6) and clock.now > began


def test_layer_hooks_see_the_paced_clock(slow_model, picture, clock):
    sequence = slow_model.prefill(picture(), INSTRUCTION)
    began, seen = clock.now, []
    sequence.verify([4, 5], lambda layer, hidden: seen.append(clock.now - began))
    layers = slow_model.num_layers
    assert seen == pytest.approx([0.6 * (i + 1) / layers for i in range(layers)])


def test_time_spent_in_a_hook_counts(slow_model, picture, clock):
    sequence = slow_model.prefill(picture(), INSTRUCTION)
    began = clock.now

    def slow(layer, hidden):
        clock.now += 0.5

    sequence.verify([4, 5], slow)
    # Layer 1 is due at 0.3 s, the hook ends at 0.8, layer 2 was due at 0.6: nothing to wait for.
    assert clock.now - began == pytest.approx(1.3)


def test_results_do_not_depend_on_the_pace(model, picture, clock):
    def reply(model):
        sequence = model.prefill(picture(), INSTRUCTION)
        return torch.cat([sequence.next_logits().unsqueeze(0), sequence.verify([1, 2, 3])])

    held = paced(model)
    assert held.processors is None  # those of this process
    free = reply(held)
    held.pace = Pace(0.1)
    assert held.processors is not None
    assert torch.equal(reply(held), free) and torch.equal(reply(model), free)
