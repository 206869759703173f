# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest

from dsd_lab.faults.plan import FaultSettings, Kind, Moment, Trial, plan, render, rows_of, variants


@pytest.mark.parametrize("transport", ["dds", "websocket"])
def test_a_plan_depends_on_its_seed_alone_and_leaves_nothing_out(transport):
    kinds = variants(transport)
    faults = plan(2 * len(kinds), 7, transport)
    assert faults == plan(2 * len(kinds), 7, transport)
    assert faults != plan(2 * len(kinds), 8, transport)
    assert faults[:5] == plan(5, 7, transport)  # a longer plan begins like a shorter one
    counts = Counter((fault.kind, fault.target) for fault in faults)
    assert counts == dict.fromkeys(kinds, 2)
    assert {fault.moment for fault in faults} == set(Moment)
    assert all(0.0 <= fault.delay <= 0.8 for fault in faults)


def test_every_process_of_a_transport_is_killed_and_stopped():
    common = {"simulator_node", "supervisor_node", "navigation_node", "draft_node"}
    for transport, own in (("dds", {"verifier_node"}), ("websocket", {"bridge_node", "verifier"})):
        for kind in (Kind.KILL, Kind.PAUSE):
            targets = {target for k, target in variants(transport) if k is kind}
            assert targets == common | own


def test_what_must_stop_the_robot_at_once():
    faults = {fault.name: fault for fault in plan(44, 0, "websocket") + plan(30, 0, "dds")}
    at_once = {name for name, fault in faults.items() if fault.stops_at_once}
    parts = ("simulator_node", "supervisor_node", "navigation_node", "draft_node")
    expected = {f"{what} {part}" for what in ("kill -9", "SIGSTOP") for part in parts}
    assert at_once == expected | {"camera silent", "camera frozen"}
    ends = {name for name, fault in faults.items() if fault.ends_the_system}
    assert ends == {"kill -9 simulator_node", "kill -9 supervisor_node"}


def test_transports_share_the_faults():
    for settings, shares in [
        ({"count": 100}, {"websocket": 50, "dds": 50}),
        ({"count": 1}, {"websocket": 1}),
        ({"count": 7, "transport": "dds"}, {"dds": 7}),
    ]:
        assert FaultSettings(**settings).shares() == shares


def test_bad_settings_are_refused():
    for settings, sentence in [({"count": 0}, "use 1 or more"), ({"transport": "pigeon"}, "choose from both, dds")]:
        with pytest.raises(ValueError, match=sentence):
            FaultSettings(**settings).shares()


def test_the_table_has_a_row_for_each_fault():
    trials = [
        Trial(1, "dds", "kill -9 draft_node", "KILL", "moving", moving=True, zero_s=0.4, rest_s=0.5,
              noticed_s=0.39, run="went on", recovered_s=6.0),
        Trial(2, "dds", "kill -9 draft_node", "KILL", "moving", run="SAFETY_STOP", recovered_s=4.0),
        Trial(3, "websocket", "link cut", "CUT", "deciding", problems=["a problem"]),
    ]  # fmt: skip
    killed, cut = rows_of(trials)
    assert (killed["n"], killed["moving"], killed["recovered"]) == (2, 1, 2)
    assert killed["runs"] == {"went on": 1, "SAFETY_STOP": 1}
    assert (killed["zero_worst_s"], killed["recovered_median_s"]) == (0.4, 5.0)
    assert (cut["recovered"], cut["problems"], cut["zero_worst_s"]) == (0, 1, None)
    part = {"transport": "dds", "faults": 2, "runs": {"ARRIVED": 1}, "actions": 9,
            "equal_to_target": 8, "pictures_not_seen": 1}  # fmt: skip
    text = render({"rows": [killed, cut], "transports": [part], "problems": ["a problem"], "seconds": 61.0})
    assert "kill -9 draft_node" in text and "PROBLEM: a problem" in text
    assert "worst time from cause to zero commanded velocity: 0.400 s" in text
    assert "9 actions, 8 equal to the target's own, 1 whose picture" in text
