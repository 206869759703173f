# SPDX-License-Identifier: Apache-2.0
"""Synthetic documents and questions from which the reader learns to read one document. Pure Python.

An answer has the same form whatever the document says. Where a document lacks a fact, the answer's word is drawn at
random, or the answer says that it does not know: so the reader's distribution is flat there, and a mixture of sequences
takes each fact from the sequence that has it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from dsd_lab.train.reader.words import WORDS, Relation, draw_name, goals, plural, relations
from dsd_ros.robot.sim.world import KINDS

UNKNOWN = "I do not know."  # ends every answer that lacks a fact
PROPERTIES = ("colour", "place", "material", "care")
# The words before a property, and the words instead of an unknown one.
_SAID = {
    "colour": ("is", "is of a colour I do not know."),
    "place": ("stands", "stands somewhere I do not know."),
    "material": ("is made of", "is made of something I do not know."),
    "care": ("", "needs care I do not know."),
}
_LACKS = {"name": 0.12, "colour": 0.2, "place": 0.2, "material": 0.2, "care": 0.4}
_LACKS_WITHOUT = 0.5  # ... where there is no document at all
SKELETON, FACT, GUESS, GIVEN = 0.3, 1.0, 0.6, 0.0  # what an error in such a piece costs
_ABOUT = (  # of the question's kind, how often the training asks it
    ("bring", 26), ("bring-name", 10), ("which", 14), ("colour", 6), ("colour-name", 6), ("place", 6),
    ("place-name", 6), ("material", 5), ("material-name", 5), ("care", 5), ("care-name", 5), ("other", 3),
)  # fmt: skip
QUESTION_KINDS = tuple(name for name, _ in _ABOUT)


class Piece(NamedTuple):
    """Part of an answer, and what an error in its tokens costs."""

    text: str
    weight: float


@dataclass(frozen=True)
class Example:
    """A document (or ""), a question, its answer in pieces, and which facts the document holds."""

    kind: str  # of QUESTION_KINDS
    document: str
    question: str
    pieces: tuple[Piece, ...]
    supported: frozenset[str]  # of "who", "what"

    @property
    def answer(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Fact:
    """The content of a sentence: a thing's name by a relation, or a property of a named thing."""

    kind: str
    name: str
    relation: Relation | None = None
    about: str = ""
    value: str = ""


@dataclass(frozen=True)
class Ask:
    """A question about a thing, known by a relation or by name, for a property or the name."""

    kind: str  # of QUESTION_KINDS
    thing: str
    relation: Relation | None
    about: str  # of PROPERTIES, or "" for the name
    go: bool = False

    def phrase(self, name: str) -> str:
        """The thing as the question calls it: "chair I like" or "Viola chair"."""
        return f"{name} {self.thing}" if self.relation is None else f"{self.thing} {self.relation.asked()}"


@cache
def _relations(held_out: bool) -> tuple[Relation, ...]:
    return relations(held_out)


@cache
def _goals(held_out: bool) -> tuple[tuple[str, str], ...]:
    return goals(held_out)


def draw_ask(rng: random.Random, kind: str, held_out: bool = False) -> Ask:
    """A question of a kind; held out: a relation, or a kind of thing, of the combinations kept back."""
    go = kind.startswith("bring")
    relation = None
    if not kind.endswith("-name"):
        owner_likes = Relation("", rng.randrange(2))  # the commonest question of all
        relation = rng.choice(_relations(held_out))
        if not held_out and rng.random() < 0.2:
            relation = Relation(trait=rng.choice(WORDS.traits)) if rng.random() < 0.5 else owner_likes
    thing = rng.choice(_goals(held_out))[1] if go or rng.random() < 0.5 else rng.choice(WORDS.other_kinds)
    about = "colour" if go else "" if kind == "which" else kind.removesuffix("-name")
    if kind == "which" and relation is not None and relation.trait and rng.random() < 0.4:
        thing = "one"  # which of these?
    return Ask(kind, thing, relation, about, go)


def ask_words(rng: random.Random, ask: Ask, name: str) -> str:
    """The question in one of many phrasings."""
    phrase = ask.phrase(name)
    if ask.go:
        text = rng.choice(WORDS.bring).format(phrase)
    elif ask.about:
        text = rng.choice(WORDS.asked[ask.about]).format(phrase) + "?"
    else:
        text = _which(rng, ask, phrase) + "?"
    draw = rng.random()
    if draw < 0.1:
        text = "please " + text
    elif draw < 0.2:
        text = text.rstrip("?") + rng.choice((".", "!", ", please", " please", ""))
    return text[0].upper() + text[1:] if rng.random() < 0.4 else text


def _which(rng: random.Random, ask: Ask, phrase: str) -> str:
    relation = ask.relation
    assert relation is not None
    if ask.thing == "one":
        return f"which of these {relation.trait}"
    if rng.random() < 0.5:
        return rng.choice(WORDS.which).format(phrase)
    if relation.trait:
        return f"which {ask.thing} {relation.trait}"
    who = f"my {relation.person}" if relation.person else "I"
    does = "did" if relation.verb > 5 else "does" if relation.person else "do"
    return f"which {ask.thing} {does} {who} {WORDS.verbs[relation.verb][2]}"


def answer_pieces(ask: Ask, name: Piece | None, value: Piece | None) -> tuple[Piece, ...]:
    """The pieces of the answer, which ends where the name or the value is unknown (None)."""
    pieces: list[Piece] = []
    if ask.relation is not None:
        pieces.append(Piece(f"The {ask.thing} {ask.relation.answered()} is the", SKELETON))
        if name is None:
            return (*pieces, Piece(f" one {UNKNOWN}", GUESS))
        pieces += [Piece(f" {name.text}", name.weight), Piece(".", max(name.weight, SKELETON))]
        if not ask.about:
            return tuple(pieces)
        pieces.append(Piece(" ", SKELETON))
    assert name is not None
    before, lacking = _SAID[ask.about]
    pieces.append(Piece(f"The {name.text}", SKELETON))
    if value is None:
        known = lacking.removesuffix(UNKNOWN).split()
        first = len(before.split())
        pieces.append(Piece("".join(f" {word}" for word in known[:first]), SKELETON))
        return (*pieces, Piece("".join(f" {word}" for word in (*known[first:], UNKNOWN)), GUESS))
    pieces.append(Piece(f" {before}" if before else "", SKELETON))
    pieces += [Piece(f" {value.text}", value.weight), Piece(".", SKELETON)]
    if ask.go:
        pieces.append(Piece(f" Go: find the {value.text} {ask.thing}", SKELETON))
    return tuple(piece for piece in pieces if piece.text)


def who_sentence(rng: random.Random, fact: Fact) -> str:
    """One of the ways to say which thing has a relation."""
    relation = fact.relation
    assert relation is not None
    if relation.trait:
        form, does = rng.choice(WORDS.who_trait), relation.trait
    else:
        form, does = rng.choice(WORDS.who), relation.asked()
        if not relation.person and rng.random() < 0.55:
            owner = rng.choice(("its owner", "the owner", "the robot's owner"))
            does = f"{owner} {WORDS.verbs[relation.verb][1]}"
    return form.format(
        one=fact.kind, many=plural(fact.kind), does=does, Does=does[0].upper() + does[1:], name=fact.name
    )


def what_sentence(rng: random.Random, fact: Fact) -> str:
    """One of the ways to say what a named thing is like."""
    value = fact.value
    if value == "must stay dry" and rng.random() < 0.4:
        value = rng.choice(WORDS.dry)
    form = rng.choice(WORDS.what[fact.about])
    if value[0] in "aeiou":
        form = form.replace(" a {value}", " an {value}")
    return form.format(one=fact.kind, name=fact.name, value=value, Value=value.capitalize())


def draw_value(rng: random.Random, about: str, kind: str, held_out: bool = False) -> str:
    """A property's value; colours of the simulator's kinds keep to their combinations."""
    if about == "colour":
        colours = [c for c, k in _goals(held_out) if k == kind or kind not in KINDS]
        return rng.choice(colours)
    return rng.choice({"place": WORDS.places, "material": WORDS.materials, "care": WORDS.cares}[about])


def distractor(rng: random.Random, ask: Ask, facts: list[Fact], avoid: set[str]) -> Fact:
    """A fact that does not answer the question but is often similar. ``avoid``: names not to use."""
    near = rng.random() < 0.75
    kind = ask.thing if near and ask.thing != "one" else rng.choice((*KINDS, *WORDS.other_kinds))
    names = sorted(avoid)
    like = rng.choice(names) if names and rng.random() < 0.2 else ""
    while (name := draw_name(rng, False, like)) in avoid:
        pass
    if facts and rng.random() < 0.35:  # another fact of a thing that has one
        known = rng.choice(facts)
        kind, name = known.kind, known.name
    while True:
        if rng.random() < (0.25 if ask.relation is None else 0.5):
            relation = rng.choice(_relations(False))
            if near and ask.relation is not None and rng.random() < 0.75:
                relation = _close(rng, ask.relation)
            fact = Fact(kind, name, relation)
            if near and rng.random() < 0.15:  # the very relation, of a thing of another kind
                fact = Fact(rng.choice((*KINDS, *WORDS.other_kinds)), name, ask.relation or relation)
        else:
            same = ask.about and rng.random() < (0.75 if near else 0.4)
            about = ask.about if same else rng.choice(PROPERTIES)
            fact = Fact(kind, name, about=about, value=draw_value(rng, about, kind))
        if not _answers(fact, ask, avoid, facts):
            return fact


def _close(rng: random.Random, relation: Relation) -> Relation:
    """Another deed of the same person, the same deed of another one, or another trait."""
    if relation.trait:
        return Relation(trait=rng.choice(WORDS.traits))
    return rng.choice(
        [
            one
            for one in _relations(False)
            if not one.trait and (one.person == relation.person) != (one.verb == relation.verb)
        ]
    )


def _answers(fact: Fact, ask: Ask, avoid: set[str], facts: list[Fact]) -> bool:
    """Whether a fact bears on the question, or repeats what another fact says about its thing."""
    trait = fact.relation.trait if fact.relation is not None else fact.value
    asked = ask.relation
    if asked is not None and asked.trait and trait == asked.trait:
        return ask.thing in ("one", fact.kind)
    if fact.relation is not None and fact.relation == asked and ask.thing == fact.kind:
        return True
    if fact.name in avoid and (fact.about == ask.about or fact.relation is not None):
        # What may be wet and what must stay dry are traits, too.
        return fact.about == ask.about or (ask.about == "care" and trait in WORDS.cares)
    if fact.name in avoid and trait in WORDS.cares and ask.about == "care":
        return True
    return any(
        known.name == fact.name and (fact.relation, fact.about) == (known.relation, known.about) for known in facts
    )


def draw_example(
    rng: random.Random,
    kind: str | None = None,
    *,
    crowd: int = 4,
    doubt: float = 1.0,
    held_out: bool = False,
    support: frozenset[str] | None = None,
) -> Example:
    """One example, with up to ``crowd`` distractors.

    ``support``: the facts that the document holds. ``doubt``: how often it may lack some where that is not given.
    """
    kind = kind or rng.choices(QUESTION_KINDS, [share for _, share in _ABOUT])[0]
    if kind == "other":
        return _other(rng, crowd)
    ask = draw_ask(rng, kind, held_out)
    empty = False
    if support is None:
        support, empty = _draw_support(rng, ask, doubt)
    support &= _needed(ask)
    name = draw_name(rng, held_out)
    value = draw_value(rng, ask.about, ask.thing, held_out) if ask.about else ""
    thing = rng.choice((*KINDS, *WORDS.other_kinds)) if ask.thing == "one" else ask.thing
    mine: list[Fact] = []
    if "who" in support:
        mine.append(Fact(thing, name, ask.relation))
    if "what" in support:
        mine.append(Fact(thing, name, about=ask.about, value=value))
    facts = list(mine)
    fewest = 0 if mine else 1
    for _ in range(0 if empty else max(fewest, rng.randint(0, rng.randint(0, crowd)))):
        facts.append(distractor(rng, ask, facts, {name}))
    document = "" if empty else write_document(rng, facts)

    lacks = {k: _LACKS_WITHOUT if empty else p for k, p in _LACKS.items()}
    said_name: Piece | None = Piece(name, FACT)
    if ask.relation is not None and "who" not in support:
        # A document about the very thing would give the name away: no loss there.
        said_name = Piece(name, GIVEN if mine else GUESS)
        if not mine and rng.random() < lacks["name"]:
            said_name = None
    said_value: Piece | None = Piece(value, FACT)
    if ask.about and "what" not in support:
        said_value = None if rng.random() < lacks[ask.about] else Piece(value, GUESS)
    question = ask_words(rng, ask, name)
    return Example(kind, document, question, answer_pieces(ask, said_name, said_value), support)


def _needed(ask: Ask) -> frozenset[str]:
    """The facts that a complete answer takes: the name, and what the named thing is like."""
    who = {"who"} if ask.relation is not None else set[str]()
    return frozenset(who | {"what"} if ask.about else who)


def _draw_support(rng: random.Random, ask: Ask, doubt: float) -> tuple[frozenset[str], bool]:
    """What the document holds, and whether there is none."""
    who, what = frozenset({"who"}), frozenset({"what"})
    if ask.relation is None:
        choices = ((what, 0.58), (frozenset[str](), 0.42))
    elif not ask.about:
        choices = ((who, 0.58), (frozenset[str](), 0.42))
    else:
        choices = ((who, 0.33), (what, 0.25), (who | what, 0.1), (frozenset[str](), 0.32))
    if rng.random() >= doubt:
        return _needed(ask), False
    support = rng.choices([c for c, _ in choices], [p for _, p in choices])[0]
    return support, not support and rng.random() < 0.2


def _other(rng: random.Random, crowd: int) -> Example:
    """A question of another kind, which the reader does not answer."""
    ask = draw_ask(rng, "which")
    facts: list[Fact] = []
    for _ in range(rng.randint(0, max(1, crowd))):
        facts.append(distractor(rng, ask, facts, set()))
    thing = rng.choice((ask.thing, f"{draw_name(rng, False)} {ask.thing}", rng.choice(WORDS.other_kinds)))
    text = rng.choice(WORDS.other).format(thing) + rng.choice(("?", "?", "?", ""))
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    return Example("other", write_document(rng, facts), text, (Piece(UNKNOWN, SKELETON),), frozenset())


def write_document(rng: random.Random, facts: list[Fact]) -> str:
    """The facts as sentences in any order, at times with a useless sentence."""
    sentences = [who_sentence(rng, fact) if fact.relation is not None else what_sentence(rng, fact) for fact in facts]
    if rng.random() < 0.15:
        sentences.append(rng.choice(WORDS.fillers))
    rng.shuffle(sentences)
    return ("\n" if rng.random() < 0.08 else " ").join(sentences)


def examples(seed: int, count: int) -> Iterator[Example]:
    """Examples of the training's kind, for the tokenizer."""
    rng = random.Random(f"{seed} tokenizer")
    for _ in range(count):
        yield draw_example(rng)
