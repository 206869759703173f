# SPDX-License-Identifier: Apache-2.0
"""What a robot has seen, as sentences for its document store: which thing, where and when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from dsd_ros.dragon.documents.chunking import Document

SAME_PLACE_M = 0.5
KEPT = 1000  # sightings; the oldest is dropped first
MAX_THING = 80  # characters

_SENTENCE = re.compile(r"On (\d{4}-\d\d-\d\d) at (\d\d:\d\d) I saw (.+?) at x (-?\d+\.\d) m, y (-?\d+\.\d) m\.")


@dataclass(frozen=True)
class Sighting:
    """A thing at a place (odometry frame, metres) and a time (with its zone)."""

    thing: str
    x: float
    y: float
    time: datetime

    def __post_init__(self) -> None:
        if not self.thing.strip() or len(self.thing) > MAX_THING or "\n" in self.thing:
            raise ValueError(f"a thing's name is one line of 1 to {MAX_THING} characters; shorten it")
        if not (math.isfinite(self.x) and math.isfinite(self.y)):
            raise ValueError(f"{self.thing} cannot be at x {self.x}, y {self.y}; give metres")
        if self.time.tzinfo is None:
            raise ValueError(f"the time of {self.thing} has no zone; give it one, e.g. UTC")

    @property
    def sentence(self) -> str:
        """To the minute, UTC, and the tenth of a metre."""
        when = self.time.astimezone(timezone.utc)
        x, y = (round(value, 1) + 0.0 for value in (self.x, self.y))  # + 0.0: no -0.0
        return f"On {when:%Y-%m-%d} at {when:%H:%M} I saw {self.thing} at x {x:.1f} m, y {y:.1f} m."


def seen(
    text: str,
    x: float,
    y: float,
    heading: float,
    time: datetime,
    colours: Sequence[str],
    kinds: Sequence[str],
    ahead: float = 0.0,
) -> list[Sighting]:
    """The things that ``text``, an instruction or a true reply, names by colour and kind, each once.

    ``x``, ``y`` (metres) and ``heading`` (radians, anticlockwise from the x axis): the robot's pose. ``ahead``: how
    far in front of the robot the things are, metres.
    """
    pattern = rf"\b({'|'.join(map(re.escape, colours))})\s+({'|'.join(map(re.escape, kinds))})\b"
    names = [f"the {colour} {kind}" for colour, kind in re.findall(pattern, text.casefold())]
    place = x + ahead * math.cos(heading), y + ahead * math.sin(heading)
    return [Sighting(name, *place, time) for name in dict.fromkeys(names)]


class Memory:
    """Sightings, of the same thing within half a metre only the newest. For one thread."""

    def __init__(self, sightings: Sequence[Sighting] = ()) -> None:
        self._kept: list[Sighting] = []  # by time
        for sighting in sightings:
            self.add(sighting)

    @classmethod
    def read(cls, text: str) -> Memory:
        """Read the sentences that ``document`` wrote; others are skipped."""
        memory = cls()
        for found in _SENTENCE.finditer(text):
            date, minute, thing, x, y = found.groups()
            with suppress(ValueError):  # no date
                memory.add(Sighting(thing, float(x), float(y), datetime.fromisoformat(f"{date}T{minute}+00:00")))
        return memory

    def add(self, sighting: Sighting) -> bool:
        """Record a sighting; False if a newer one of the same thing at that place is known."""
        same = [kept for kept in self._kept if _same(kept, sighting)]
        if any(kept.time > sighting.time for kept in same):
            return False
        self._kept = [kept for kept in self._kept if kept not in same]
        self._kept.append(sighting)
        self._kept.sort(key=lambda kept: kept.time)
        del self._kept[:-KEPT]
        return True

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """The oldest first."""
        return tuple(self._kept)

    def document(self, source: str) -> Document:
        """All sightings as one document with a section for each thing, so that a chunk is about one thing."""
        things: dict[str, list[str]] = {}
        for kept in reversed(self._kept):
            things.setdefault(kept.thing, [f"# {kept.thing}"]).append(kept.sentence)
        text = "\n\n".join("\n\n".join(lines) for lines in things.values())
        return Document(source, text)


def _same(one: Sighting, other: Sighting) -> bool:
    near = math.hypot(one.x - other.x, one.y - other.y) <= SAME_PLACE_M
    return near and one.thing == other.thing
