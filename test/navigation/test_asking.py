# SPDX-License-Identifier: Apache-2.0
"""When the draft node dies, the run asks the next one again, within the same time-out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_bench import GO, SETTINGS, STOP, Bench, report, silent

from dsd_ros.navigation.run.records import DecodeAnswer
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause


def restarted(bench: Bench, after: float = 3.0) -> None:
    """The draft node dies, and is there again ``after`` seconds later."""
    bench.safety = silent("draft_node")
    bench.ticks(after)
    bench.safety = report()
    bench.tick()


def test_a_restarted_draft_node_is_asked_again_with_the_time_that_is_left():
    bench = Bench()
    first = bench.until_request()
    restarted(bench)
    assert [request.number for request in bench.asked] == [1, 1]
    assert bench.asked[1].timeout == pytest.approx(SETTINGS.decode_timeout_s - 3.0, abs=0.2)
    assert bench.asked[1].not_before == first.not_before
    bench.answer(GO)
    bench.run.on_answer(1, DecodeAnswer(GO, first.not_before), bench.moment)  # the dead one's last word
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED
    assert len(bench.run.steps) == 2


def test_what_a_draft_node_says_while_it_comes_up_does_not_end_the_run():
    bench = Bench()
    bench.until_request()
    bench.safety = silent("draft_node")
    bench.ticks(1.0)
    bench.run.on_failure(1, RunOutcome.LINK_LOST, "No node offers the service.")
    bench.ticks(1.0)
    bench.safety = report()
    bench.tick()
    for _ in range(4):
        count = len(bench.asked)
        bench.run.on_failure(1, RunOutcome.LINK_LOST, "There is no session yet.")
        bench.until(lambda count=count: len(bench.asked) > count, 1.0)
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED


def test_a_draft_node_that_does_not_come_back_ends_the_run_by_its_time_out():
    bench = Bench()
    bench.until_request()
    began = bench.now
    bench.safety = silent("draft_node")
    bench.ticks(1.0)
    bench.run.on_failure(1, RunOutcome.LINK_LOST, "No node offers the service.")
    assert bench.finish() is RunOutcome.DECODE_TIMEOUT
    assert bench.now - began < SETTINGS.decode_timeout_s + 0.2


def test_one_that_comes_back_and_has_no_session_in_time_ends_it_too():
    bench = Bench(replace(SETTINGS, decode_timeout_s=4.0))
    bench.until_request()
    restarted(bench, 2.0)
    while not bench.run.ended:
        bench.run.on_failure(1, RunOutcome.LINK_LOST, "There is no session yet.")
        bench.ticks(0.6)
    assert bench.run.outcome in (RunOutcome.DECODE_TIMEOUT, RunOutcome.LINK_LOST)
    assert len(bench.asked) < 8


@pytest.mark.parametrize("safety", [silent("verifier_node"), report(Cause.LINK_LOST), report(Cause.CAMERA_STALE)])
def test_other_troubles_ask_nothing_again(safety):
    bench = Bench()
    bench.until_request()
    bench.safety = safety
    bench.ticks(2.0)
    bench.safety = report()
    bench.ticks(1.0)
    assert len(bench.asked) == 1
    bench.run.on_failure(1, RunOutcome.LINK_LOST, "gone")
    assert bench.run.outcome is RunOutcome.LINK_LOST


def test_a_heart_that_skips_a_beat_asks_nothing_again():
    bench = Bench()
    bench.until_request()
    restarted(bench, 0.5)
    bench.ticks(1.0)
    assert len(bench.asked) == 1


def test_a_refusal_ends_the_run_even_of_a_restarted_node():
    bench = Bench()
    bench.until_request()
    restarted(bench)
    bench.run.on_failure(1, RunOutcome.VERIFIER_REFUSED, "another model")
    assert bench.run.outcome is RunOutcome.VERIFIER_REFUSED


def test_a_request_that_was_dropped_for_a_withdrawn_one_is_asked_again():
    bench = Bench(replace(SETTINGS, decode_timeout_s=5.0))
    request = bench.until_request()
    began = bench.now
    bench.run.on_dropped(7)
    bench.ticks(0.2)
    assert len(bench.asked) == 1
    bench.run.on_dropped(1)
    bench.until(lambda: len(bench.asked) == 2)
    assert bench.asked[1].number == 1 and bench.asked[1].timeout < request.timeout
    while not bench.run.ended:  # for ever: the time-out is the end
        bench.run.on_dropped(1)
        bench.ticks(0.2)
    assert bench.run.outcome is RunOutcome.DECODE_TIMEOUT and bench.now - began < 5.5
