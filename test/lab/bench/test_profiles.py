# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest

from dsd_lab.bench.profiles import ProfileError, Times, load_profile, load_profiles

NAMED = ("loopback", "wifi6-lan", "go2-a100", "jetson-nano-a100", "rtx-a100", "lte", "satellite-300ms")


def test_every_named_profile_is_there_and_has_a_summary():
    profiles = load_profiles()
    assert set(NAMED) <= profiles.keys()
    for name, profile in profiles.items():
        assert profile.name == name and profile.summary


@pytest.mark.parametrize(
    ("name", "gamma_t_p", "t_q", "t_c"),
    [
        ("go2-a100", 0.288, 0.620, 0.120),  # FSD Table 8
        ("jetson-nano-a100", 0.334, 0.497, 0.095),  # FSD Table 5, Vicuna-68m/7B
        ("rtx-a100", 0.102, 0.442, 0.042),
    ],
)
def test_the_papers_profiles_have_the_papers_times(name, gamma_t_p, t_q, t_c):
    profile = load_profile(name)
    assert profile.paced and profile.gamma == 4
    assert 4 * profile.draft_s == pytest.approx(gamma_t_p)
    assert profile.target_s == pytest.approx(t_q)
    assert profile.link.delay_up_s == profile.link.delay_down_s == pytest.approx(t_c)


def test_stretching_multiplies_every_time():
    profile = load_profile("go2-a100")
    quick = profile.stretched(0.1)
    assert quick.target_s == pytest.approx(0.062)
    assert quick.draft_s == pytest.approx(0.0072)
    assert quick.link.delay_up_s == pytest.approx(0.012)
    assert quick.link.rate_up_bps == pytest.approx(10 * profile.link.rate_up_bps)
    assert not load_profile("lte").stretched(2).paced


def test_what_is_assumed_beyond_the_papers_times_can_be_left_out():
    profile = load_profile("go2-a100")
    times = profile.times
    assert times.draft_prefill_s > 10 * times.draft_s and times.target_prefill_s > times.target_s
    assert 0 < times.exit_s < 0.1 * times.target_s and times.batch_growth == 0.15 and times.thread_growth == 1.0
    quick = profile.stretched(0.5).times
    assert (quick.exit_s, quick.draft_prefill_s) == (times.exit_s / 2, times.draft_prefill_s / 2)
    assert (quick.batch_growth, quick.thread_growth) == (times.batch_growth, times.thread_growth)
    bare = profile.without("prefill", "exits", "batch", "threads").times
    assert bare == Times(times.draft_s, times.target_s)
    assert profile.without("exits").times == dataclasses.replace(times, exit_s=0.0)
    assert profile.without() == profile
    with pytest.raises(ProfileError, match="no assumption 'link'; name some of prefill, exits"):
        profile.without("link")
    with pytest.raises(ProfileError, match="lte gives no times"):
        load_profile("lte").without("exits")


def test_an_unknown_profile_error_lists_the_profiles():
    with pytest.raises(ProfileError, match="unknown profile 'mars'.*go2-a100"):
        load_profile("mars")


def test_a_profile_that_cannot_be_used_is_refused_with_a_sentence(tmp_path):
    for text, said in [
        ("", "no profiles"),
        ("a: [", "no YAML"),
        ("a: {delay_ms: 1, delya_ms: 2}", "delya_ms"),
        ("a: {delay_ms: -1}", "delay_ms of profile a is -1"),
        ("a: {up_mbps: 1}", "needs either delay_ms"),
        ("a: {delay_up_ms: 1}", "needs both delay_up_ms"),
        ("a: {delay_ms: 1, draft_ms: 1}", "needs both draft_ms"),
        ("a: {delay_ms: 1, draft_ms: 0, target_ms: 1}", "draft_ms of profile a is 0"),
        ("a: {delay_ms: 1, exit_ms: 1}", "has exit_ms without draft_ms"),
        ("a: {delay_ms: 1, gamma: 0}", "gamma of profile a"),
        ("a: {delay_ms: 1, up_mbps: 0.0001}", "rate_up_bps"),
    ]:
        path = tmp_path / "profiles.yaml"
        path.write_text(text)
        with pytest.raises(ProfileError, match=said) as error:
            load_profiles(path)
        assert "\n" not in str(error.value)


def test_both_ways_may_differ(tmp_path):
    path = tmp_path / "profiles.yaml"
    path.write_text("a: {delay_up_ms: 1, delay_down_ms: 2, up_mbps: 3, down_mbps: 4}")
    link = load_profile("a", path).link
    assert (link.delay_up_s, link.delay_down_s) == (0.001, 0.002)
    assert (link.rate_up_bps, link.rate_down_bps) == (3e6, 4e6)
