# SPDX-License-Identifier: Apache-2.0
"""The words of the reader's sentences: names, kinds, relations, properties. Pure Python."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

from dsd_lab import read_data
from dsd_ros.robot.sim.world import COLOURS, KINDS

WORDS = SimpleNamespace(**read_data("train/reader/words.toml"))


@dataclass(frozen=True)
class Relation:
    """What ties a thing to its name: a person's doing, or a trait. ``person`` is "" for the owner."""

    person: str = ""
    verb: int = -1  # row of the verbs; -1: a trait
    trait: str = ""

    def asked(self) -> str:
        """As the owner says it behind the kind: "I like", "my daughter hid", "that is fragile"."""
        if self.trait:
            return f"that {self.trait}"
        if self.person:
            return f"my {self.person} {WORDS.verbs[self.verb][1]}"
        return f"I {WORDS.verbs[self.verb][0]}"

    def answered(self) -> str:
        """As the reader says it back: "you like", "your daughter hid", "that is fragile"."""
        if self.trait:
            return f"that {self.trait}"
        if self.person:
            return f"your {self.person} {WORDS.verbs[self.verb][1]}"
        return f"you {WORDS.verbs[self.verb][0]}"


def relations(held_out: bool) -> tuple[Relation, ...]:
    """Every relation of the training, or those kept for validation: combinations of known words."""
    found = [Relation(trait=trait) for trait in WORDS.traits]
    for verb in range(len(WORDS.verbs)):
        found += [Relation(person, verb) for person in ("", *WORDS.people)]
    return tuple(r for r in found if _kept(r) == held_out)


def goals(held_out: bool) -> tuple[tuple[str, str], ...]:
    """(colour, kind) combinations of the training, or the five kept for validation."""
    every = [(colour, kind) for colour in COLOURS for kind in KINDS]
    return tuple(goal for goal in every if (every.index(goal) % 8 == 3) == held_out)


def plural(kind: str) -> str:
    return WORDS.plurals.get(kind, f"{kind}{'es' if kind.endswith(('s', 'x', 'ch', 'sh')) else 's'}")


def draw_name(rng: random.Random, held_out: bool, like: str = "") -> str:
    """A name, real or of syllables; ``like``: begins as that one. One in eight is held out by its letters."""
    while True:
        if like:
            name = like[: rng.randint(1, 3)] + draw_name(rng, held_out)[rng.randint(1, 2) :]
        elif rng.random() < 0.12:
            name = rng.choice(WORDS.names)
        else:
            name = "".join(
                rng.choice(WORDS.onsets) + rng.choice(WORDS.vowels) for _ in range(rng.choice((1, 2, 2, 2, 3)))
            )
            name = (name + rng.choice(WORDS.codas) * (rng.random() < 0.4)).capitalize()
        if 3 <= len(name) <= 9 and (zlib.crc32(name.encode()) % 8 == 0) == held_out:
            return name


def _kept(relation: Relation) -> bool:
    """One combination of person and verb in nine; the owner's likes and loves are always trained."""
    if relation.trait or (not relation.person and relation.verb < 2):
        return False
    people = ("", *WORDS.people)
    return (people.index(relation.person) * 4 + relation.verb * 5) % 9 == 0
