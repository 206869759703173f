# SPDX-License-Identifier: Apache-2.0
"""Sightings become sentences: the newest one per thing and place."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest

from dsd_ros.dragon.documents.memory import KEPT, Memory, Sighting, seen

THEN = datetime(2026, 11, 22, 10, 15, 40, tzinfo=timezone.utc)
COLOURS, KINDS = ("red", "silver"), ("chair", "bottle")


def sighting(thing="the red chair", x=1.2, y=-0.4, minutes=0) -> Sighting:
    return Sighting(thing, x, y, THEN + timedelta(minutes=minutes))


def test_the_sentence():
    said = "On 2026-11-22 at 10:15 I saw the red chair at x 1.2 m, y -0.4 m."
    assert sighting().sentence == said
    east = THEN.astimezone(timezone(timedelta(hours=2)))
    assert Sighting("the red chair", 1.2, -0.4, east).sentence == said
    assert sighting(x=-0.01, y=0.04).sentence.endswith("x 0.0 m, y 0.0 m.")


def test_things_are_read_from_instructions_and_replies():
    found = seen("Find the RED chair.", 1.0, 2.0, math.pi / 2, THEN, COLOURS, KINDS, ahead=0.5)
    assert [one.sentence for one in found] == [sighting(x=1.0, y=2.5).sentence]
    reply = "The silver bottle is left of the red chair; the red chair is near. Action: stop"
    things = [one.thing for one in seen(reply, 0.0, 0.0, 0.0, THEN, COLOURS, KINDS)]
    assert things == ["the silver bottle", "the red chair"]
    assert seen("a reddish chair, chair", 0.0, 0.0, 0.0, THEN, COLOURS, KINDS) == []


def test_the_same_thing_at_the_same_place_is_kept_once_the_newest():
    memory = Memory([sighting(), sighting(x=1.5, minutes=5)])
    assert memory.sightings == (sighting(x=1.5, minutes=5),)
    assert not memory.add(sighting(minutes=1))
    assert memory.add(sighting(x=2.1, minutes=6))  # 0.6 m away: another red chair, or it was moved
    assert memory.add(sighting("the silver bottle", minutes=7))
    assert len(memory.sightings) == 3


def test_a_memory_outlasts_its_process():
    memory = Memory([sighting(), sighting("the silver bottle", 3.0, 0.0, 9), sighting(x=4.0, minutes=2)])
    document = memory.document("seen")
    again = Memory.read(f"{document.text}\nOn 2026-99-22 at 10:15 I saw it at x 1.0 m, y 1.0 m.\n")
    assert [one.sentence for one in again.sightings] == [one.sentence for one in memory.sightings]
    assert again.document("seen").text == document.text


def test_the_oldest_goes_first():
    memory = Memory([sighting(x=float(place), minutes=place) for place in range(KEPT + 3)])
    assert len(memory.sightings) == KEPT and memory.sightings[0].x == 3.0


@pytest.mark.parametrize(
    ("thing", "x", "time", "said"),
    [
        ("", 0.0, THEN, "one line"),
        ("the chair\nIgnore", 0.0, THEN, "one line"),
        ("the chair", math.nan, THEN, "give metres"),
        ("the chair", 0.0, THEN.replace(tzinfo=None), "no zone"),
    ],
)
def test_what_is_no_sighting_is_refused(thing, x, time, said):
    with pytest.raises(ValueError, match=said):
        Sighting(thing, x, 0.0, time)
