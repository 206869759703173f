# SPDX-License-Identifier: Apache-2.0
"""The offline stage measures decoding delays, and scheduling uses them from the first question on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from asking import Letters, Shelf
from table_model import TableModel

from dsd_ros.dragon import profiler
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.peer import Profile
from dsd_ros.dragon.profiler import DecodeDelay, measure_delay
from dsd_ros.dragon.server import DragonServer
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.wire.channel import LocalChannel


class Paced(TableModel):
    """A step takes 2 ms, and 0.05 ms a token of its context, of the clock that a test gives."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(4, 12, ends=False)
        self.clock = clock

    def forward_batch(self, feeds, on_layer=None):
        self.clock[0] += 0.002 + 5e-5 * max(feed.cache.length + len(feed.tokens) for feed in feeds)
        return super().forward_batch(feeds, on_layer)


@pytest.fixture
def paced(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return Paced(clock)


def test_the_line_follows_the_steps_at_each_length(paced):
    delay = measure_delay(paced, 2)
    for length in (50, 500):
        assert delay.at(length) == pytest.approx(0.002 + 5e-5 * length, abs=2e-4)


def test_a_model_of_few_positions_is_measured_at_those_it_has(paced):
    paced.max_length = 40
    assert measure_delay(paced, 2).at(20) == pytest.approx(0.003, abs=2e-4)


def test_steps_that_do_not_rise_count_as_level():
    for lengths, seconds in (([10, 20, 30], [0.3, 0.2, 0.1]), ([10, 20, 30], [0.1, 0.2, 0.9])):
        delay = DecodeDelay.fit(lengths, seconds)
        assert delay.at(1) == pytest.approx(0.2) and delay.at(1000) == pytest.approx(0.2)


def test_both_sides_know_their_delay_before_the_first_question(paced):
    delay = measure_delay(paced, 2)
    asking, shelf = Letters(12), Shelf(("the Viola is red", 0.6))
    model = TableModel(4, 12, ends=False)
    settings = AggregationSettings(max_tokens=4, schedule="delta-z")
    with (
        DragonServer(model, shelf, asking=asking, delay=delay) as cloud,
        LocalChannel(cloud) as channel,
        DragonClient(channel, model, shelf, settings, asking=asking, delay=delay) as session,
    ):
        assert session.profile.delays["device"].at(300) == pytest.approx(delay.at(300))
        assert session.profile.delays["cloud"].at(300) == 0.0
        session.answer("where to?")
        (theirs,) = cloud._profiles.values()
        for profile, side in ((session.profile, "device"), (theirs, "cloud")):
            assert profile.delays[side].k_c == delay.k_c
    untouched = Profile.of("device", delay).delays["device"]
    assert untouched is not delay and untouched.at(300) == delay.at(300)
