"""Decoding delays are measured once, kept beside a store, and used by scheduling from the first question on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from asking import Letters, Shelf
from table_model import TableModel

from dsd_ros.dragon import profiler
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.peer import Profile
from dsd_ros.dragon.profiler import FILE, delay_of, fitted, kept_delay, measure
from dsd_ros.dragon.server import DragonServer
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.wire.channel import LocalChannel


class Paced(TableModel):
    """A step takes 2 ms, and 0.05 ms a token of its context, of the clock that a test gives."""

    def __init__(self, clock: list[float], noise: float = 0.0) -> None:
        super().__init__(4, 12, ends=False, noise=noise)
        self.clock, self.passes = clock, 0

    def forward_batch(self, feeds, on_layer=None):
        self.passes += 1
        longest = max(feed.cache.length + len(feed.tokens) for feed in feeds)
        self.clock[0] += 0.002 + 5e-5 * longest
        return super().forward_batch(feeds, on_layer)


@pytest.fixture
def paced(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return Paced(clock)


def test_the_line_is_that_of_the_steps_at_each_length(paced):
    lengths, seconds = measure(paced, 2)
    assert lengths == [32, 128, 320]
    delay = fitted(lengths, seconds)
    for length in (50, 500):
        assert delay.at(length) == pytest.approx(0.002 + 5e-5 * length, abs=2e-4)


def test_it_is_measured_once_for_a_model_and_a_machine(paced, tmp_path):
    first = delay_of(paced, 2, tmp_path)
    passes = paced.passes
    again = delay_of(paced, 2, tmp_path)
    assert paced.passes == passes and again.at(200) == first.at(200)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert kept_delay(paced, 3, tmp_path) is None  # of other passes
    assert kept_delay(Paced([0.0], noise=0.5), 2, tmp_path) is None  # of another model
    assert kept_delay(paced, 2, None) is None
    delay_of(paced, 3, tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["documents"] == 3
    for damaged in ("{", "[]", '{"format": 1}', "\xff"):
        (tmp_path / FILE).write_text(damaged, encoding="latin-1")
        passes = paced.passes
        assert delay_of(paced, 2, tmp_path).at(200) == pytest.approx(first.at(200))
        assert paced.passes > passes
    spoilt = json.loads((tmp_path / FILE).read_text()) | {"seconds": [-1.0, 2.0, 3.0]}
    (tmp_path / FILE).write_text(json.dumps(spoilt))
    assert kept_delay(paced, 2, tmp_path) is None


def test_a_folder_that_takes_nothing_costs_a_measurement_and_no_more(paced, tmp_path, caplog):
    nowhere = tmp_path / "gone"
    assert delay_of(paced, 2, nowhere).at(200) > 0.0
    assert "measured again next time" in caplog.text


def test_steps_that_do_not_rise_are_taken_for_level():
    for lengths, seconds in (([10, 20, 30], [0.3, 0.2, 0.1]), ([10, 20, 30], [0.1, 0.2, 0.9])):
        delay = fitted(lengths, seconds)
        assert delay.at(1) == pytest.approx(0.2) and delay.at(1000) == pytest.approx(0.2)


def test_both_sides_know_it_before_the_first_question(paced):
    delay = fitted(*measure(paced, 2))
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
