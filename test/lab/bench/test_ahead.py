# SPDX-License-Identifier: Apache-2.0
"""Runs with and without looking ahead, by one simulated clock."""

from __future__ import annotations

from dsd_lab.bench.ahead import compare
from dsd_ros.robot.sim.world import World


def test_both_ways_drive_the_same_room_and_only_one_looks_in_motion():
    said: list[str] = []

    def answer(asked):
        """Two drives, then stop, to each of the two runs, which are asked side by side."""
        said.extend(one.instruction for one in asked)
        action = "forward 25 cm" if len(said) <= 4 else "stop"
        return [(f"So it is. Action: {action}", 40) for _ in asked]

    at_rest, ahead = compare(answer, [World.from_seed(0)], token_ms=6.0, delay_s=0.0)
    assert at_rest["outcomes"] == ahead["outcomes"] == {"ARRIVED": 1}
    assert at_rest["right_in_motion"]["of"] == 0 < ahead["right_in_motion"]["of"]
    assert ahead["standing"]["value"] < at_rest["standing"]["value"]
    for row in (at_rest, ahead):
        assert (row["collisions"], row["refused"], row["unverified_motion"]) == (0, 0, 0)
