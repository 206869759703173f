# SPDX-License-Identifier: Apache-2.0
"""Small worlds of facts, pages that hold some of them, and questions whose answers go from fact to fact. Pure Python.

An answer is a chain: first the name of what the question describes, then what is said of that name.

    which colour has the chair I like?  ->  It is the Viola. The Viola is red.

So the side that knows the name speaks first, and the other side, which now reads the name, goes on. A page speaks
only the sentences that it tells; everywhere else the reader abstains (``Said.own`` is None).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from dsd_lab import read_data

Key = tuple[str, ...]  # of a fact: the property, the thing's number, and of a denial the value
Language = dict[str, Any]
_WORDS = read_data("train/reader/words.toml")
_MOST_FACTS = 10
_HOLES: dict[str, Callable[[random.Random, Language], str]] = {  # of names such as "pump {d}"
    "w": lambda rng, _: draw_name(rng),
    "c": lambda rng, _: draw_name(rng)[:4].upper(),
    "first": lambda rng, lang: _of_person(rng, lang, "first"),
    "last": lambda rng, lang: _of_person(rng, lang, "last"),
    "d": lambda rng, _: str(rng.randint(1, 9)),
    "L": lambda rng, _: rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ"),
}
_TOLD = {(1, 0): 5, (0, 1): 5, (1, 1): 2, (0, 0): 2, (1,): 5, (0,): 3}  # how often a page tells such steps of a chain


class Said(NamedTuple):
    """A sentence of an answer, and what the page itself would say there: the same, another one, or nothing (None).

    "": it would end its answer there, and another page objects.
    """

    text: str
    own: str | None


class Asked(NamedTuple):
    """A question about a page, and its answer; ``kind`` is for the figures."""

    kind: str
    question: str
    chain: tuple[Said, ...]

    @property
    def answer(self) -> str:
        return " ".join(said.text for said in self.chain)


@dataclass(frozen=True)
class Page:
    """A document and questions about it."""

    document: str
    asked: tuple[Asked, ...]


class Fact(NamedTuple):
    """A sentence that tells something, and the answer's words for it."""

    key: Key
    sentence: str
    answer: str  # "The Viola is red."
    value: str  # "red"
    date: str = ""  # ISO 8601


class Step(NamedTuple):
    """One step of a chain: the fact that tells it, or none ("Go: ...", "No."), then told by whoever told the last."""

    text: str
    key: Key | None = None


class Question(NamedTuple):
    """A question with the steps of its answer."""

    kind: str
    text: str
    steps: tuple[Step, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(step.key for step in self.steps if step.key is not None)


@dataclass
class Thing:
    """A named thing, person, room or matter, and how a question describes it."""

    number: str
    domain: Language
    kind: str
    name: str
    described: dict[str, Any] = field(default_factory=dict)

    def short(self) -> str:
        return str(self.domain["short"]).format(n=self.name)

    def mention(self, rng: random.Random) -> str:
        return str(rng.choice(self.domain["mentions"])).format(n=self.name, k=self.kind, l=self.name.split()[-1])

    def words(self, rng: random.Random, value: str = "") -> dict[str, str]:
        """What fills the holes of a sentence."""
        m, s = self.mention(rng), self.short()
        found = {"m": m, "M": _upper(m), "s": s, "S": _upper(s), "n": self.name, "N": _upper(self.name)}
        return {**found, "k": self.kind, "ks": plural(self.kind), "v": value, "V": _upper(value)}


@dataclass
class World:
    """Facts, and the questions that they answer."""

    facts: list[Fact]
    questions: list[Question]


@cache
def language() -> Language:
    """The words and sentences of facts.toml and of the files that it names."""
    found = read_data("train/reader/facts.toml")
    for name in found["with"]:
        more = read_data(f"train/reader/{name}")
        for domain in more.get("domains", ()):
            for about in domain.get("properties", {}).values():
                if isinstance(about["value"], str):
                    about["value"] = more["values"].get(about["value"], about["value"])
            for row in domain.get("free", ()):
                row[3] = more["values"].get(row[3], row[3]) if isinstance(row[3], str) else row[3]
        for key in ("bring", "fillers", "other", "domains"):
            found[key] = found[key] + more.get(key, [])
    return found


def plural(kind: str) -> str:
    return str(_WORDS["plurals"].get(kind, f"{kind}{'es' if kind.endswith(('s', 'x', 'ch', 'sh')) else 's'}"))


def draw_name(rng: random.Random) -> str:
    """A name, real or of syllables; one in eight, by its letters, is never drawn."""
    while True:
        if rng.random() < 0.12:
            name = str(rng.choice(_WORDS["names"]))
        else:
            name = "".join(
                rng.choice(_WORDS["onsets"]) + rng.choice(_WORDS["vowels"]) for _ in range(rng.choice((1, 2, 2, 2, 3)))
            )
            name = (name + rng.choice(_WORDS["codas"]) * (rng.random() < 0.4)).capitalize()
        if 3 <= len(name) <= 9 and zlib.crc32(name.encode()) % 8 != 0:
            return name


def draw_page(rng: random.Random, lang: Language, questions: int = 4) -> Page:
    """A page and some questions, of which the page tells all, a part or nothing."""
    world = draw_world(rng, lang)
    told = _draw_told(rng, world)
    sentences = [fact.sentence for fact in told]
    sentences += rng.choices(lang["fillers"], k=rng.choice((0, 0, 0, 1, 1, 2)))
    rng.shuffle(sentences)
    for place in range(len(sentences) - 1):
        if rng.random() < 0.06 and sentences[place + 1].startswith("The "):
            sentences[place : place + 2] = sentences[place].removesuffix(".") + ", and", f"t{sentences[place + 1][1:]}"
    document = " ".join(sentences) if rng.random() > 0.04 else ""
    if not document:
        told = []
    asked = [_asked(rng, lang, world, told, question) for question in _choose(rng, world, told, questions)]
    return Page(document, tuple(asked))


def draw_world(rng: random.Random, lang: Language) -> World:
    """Things of one or two domains, with all that can be said and asked of them."""
    world, used = World([], []), set[str]()
    first = rng.choices(lang["domains"], [domain.get("often", 1) for domain in lang["domains"]])[0]
    domains = [first, rng.choice([domain for domain in lang["domains"] if domain is not first])]
    for domain, count in zip(domains, (rng.randint(2, 6), rng.randint(0, 3)), strict=True):
        if "free" in domain:
            _free(rng, lang, domain, world)
            continue
        kinds = rng.choices(domain["kinds"], k=2)
        names = list(domain["properties"])  # where there are many, few, so that several things have the same
        names = rng.sample(names, k=min(len(names), rng.randint(2, 5)))
        for _ in range(count):
            thing = _draw_thing(rng, lang, domain, rng.choice(kinds), used)
            _tell(rng, lang, thing, world, names)
    return world


def _draw_thing(rng: random.Random, lang: Language, domain: Language, kind: str, used: set[str]) -> Thing:
    persons = domain["names"] == "persons"  # no two have the same last name
    while (name := _name(rng, lang, domain)) in used or (persons and name.split()[-1] in used):
        pass
    used |= {name, name.split()[-1]} if persons else {name}
    thing = Thing(str(len(used)), domain, kind, name)
    while domain.get("describe") or domain.get("described"):
        thing.described = _describe(rng, lang, domain, kind)
        if thing.described["ask"] not in used:
            used.add(thing.described["ask"])
            break
    return thing


def _name(rng: random.Random, lang: Language, domain: Language) -> str:
    if domain["names"] == "syllables":
        return draw_name(rng)
    if domain["names"] == "persons":
        return f"{_of_person(rng, lang, 'first')} {_of_person(rng, lang, 'last')}"
    return re.sub(r"{(\w+)}", lambda hole: _HOLES[hole[1]](rng, lang), rng.choice(domain["names"]))


def _of_person(rng: random.Random, lang: Language, which: str) -> str:
    """A "first" or "last" name; one in three is made of syllables, so that names are copied."""
    return draw_name(rng) if rng.random() < 0.33 else str(rng.choice(lang["people"][which]))


def _describe(rng: random.Random, lang: Language, domain: Language, kind: str) -> dict[str, Any]:
    """A description: as a question has it (``ask``), as documents have it (``docs``), and its parts."""
    people = lang["people"]
    if "described" in domain:
        events = next(one["events"] for one in lang["domains"] if "events" in one)
        drawn = {"role": rng.choice(people["roles"]), "event": rng.choice(events), "k": kind, "ks": plural(kind)}
        said = rng.choice(domain["described"])
        x = said["x"].format(**drawn)
        return {"ask": x, "x": x, "drawn": drawn, "tells": said["tell"], "asks": said["ask"]}
    if domain["describe"] == "event":
        event = rng.choice(domain["events"])
        return {
            "ask": event,
            "docs": [event, event.replace("my ", "the owner's ")],
            "x": domain["phrase"].format(x=event),
        }
    role = rng.choice(people["roles"])
    mine = [f"my {role}", f"my {role}", f"the owner's {role}", f"its owner's {role}"]
    if domain["describe"] == "role":
        return {"ask": f"my {role}", "docs": mine, "x": f"my {role}"}
    if rng.random() < 0.25:
        trait = rng.choice(people["traits"])
        ask = f"{kind} that {trait}"
        return {"ask": ask, "docs": [ask], "x": f"the {ask}", "trait": trait}
    i, she, base = rng.choice(people["verbs"])
    if rng.random() < 0.3:
        who = [("I", i), ("I", i), ("the owner", she), ("its owner", she)]
        do = ("did" if i == she else "do", "I")
    else:
        who = [(one, she) for one in mine]
        do = ("did" if i == she else "does", f"my {role}")
    docs = [f"{kind} {that}{one} {does}" for one, does in who for that in ("", "that ")]
    ask = f"{kind} {rng.choice(('', '', 'that '))}{who[0][0]} {who[0][1]}"
    return {"ask": ask, "docs": docs, "x": f"the {ask}", "who": who, "do": do, "base": base}


def _tell(rng: random.Random, lang: Language, thing: Thing, world: World, names: list[str]) -> None:
    """Add a thing's facts and questions to a world, of the properties of these names."""
    domain, described = thing.domain, thing.described
    bridge = _upper(f"it is {thing.short()}.")
    direct = bool(domain.get("direct")) and rng.random() < 0.12
    if described and not direct:
        key = ("who", thing.number)
        world.facts.append(Fact(key, _who(rng, thing), bridge, thing.short()))
        world.questions.append(Question("which", _ask_who(rng, thing), (Step(bridge, key),)))
    properties = [(name, domain["properties"][name]) for name in names]
    drawn = rng.sample(properties, k=min(len(properties), rng.randint(1, 3)))
    if domain.get("go") and rng.random() < 0.4:
        drawn.append(("colour", domain["properties"]["colour"]))
    for name, about in dict(drawn).items():
        _property(rng, lang, thing, name, about, world, direct)


def _who(rng: random.Random, thing: Thing) -> str:
    domain, described = thing.domain, thing.described
    words = thing.words(rng)
    if "tells" in described:
        return str(_upper(rng.choice(described["tells"]).format(**words | described["drawn"])))
    if "trait" in described and rng.random() < 0.6:
        return str(rng.choice(domain["tell_trait"])).format(trait=described["trait"], **words)
    if "who" in described and rng.random() < 0.4:
        who, does = rng.choice(described["who"])
        return str(rng.choice(domain["tell_deed"])).format(who=who, Who=_upper(who), does=does, **words)
    d = rng.choice(described["docs"])
    return str(rng.choice(domain["tell_who"])).format(d=d, D=_upper(d), **words)


def _ask_who(rng: random.Random, thing: Thing) -> str:
    domain, described = thing.domain, thing.described
    words = {"k": thing.kind, "ks": plural(thing.kind), "x": described["ask"]}
    if "asks" in described:
        return str(rng.choice(described["asks"])).format(**words | described["drawn"])
    if "trait" in described and rng.random() < 0.6:
        return str(rng.choice(domain["ask_trait"])).format(trait=described["trait"], **words)
    if "who" in described and rng.random() < 0.6:
        do, who = described["do"]
        return str(rng.choice(domain["ask_deed"])).format(do=do, who=who, base=described["base"], **words)
    return str(rng.choice(domain["ask_who"])).format(**words)


def _property(
    rng: random.Random, lang: Language, thing: Thing, name: str, about: Language, world: World, direct: bool
) -> None:
    """Add a property of a thing: its fact, at times a denial or a second value, and the questions."""
    key = (name, thing.number)
    value, asks, verdict = _value(rng, lang, about)
    subject = thing.described["x"] if direct else ""
    facts = [_fact(rng, thing, about, key, value, subject)]
    if not verdict and rng.random() < lang["chances"]["second_value"]:
        other, _, _ = _value(rng, lang, about, value)
        facts.append(_fact(rng, thing, about, key, other, subject))
        if rng.random() < 0.6:
            dates = sorted(_date(rng) for _ in range(2))
            facts = [_dated(rng, lang, one, date) for one, date in zip(facts, dates, strict=True)]
    elif not verdict and rng.random() < 0.05:
        facts = [_dated(rng, lang, facts[0], _date(rng))]
    world.facts += facts
    told = Step(facts[-1].answer, key)
    ends = (Step(verdict),) if verdict else ()
    ways: list[tuple[str, tuple[Step, ...]]] = []
    if not direct:
        ways.append((rng.choice((thing.short(), thing.mention(rng))), (told, *ends)))
    if direct:
        ways.append((subject, (told, *ends)))
    elif thing.described:
        bridge = Step(_upper(f"it is {thing.short()}."), ("who", thing.number))
        ways.append((thing.described["x"], (bridge, told, *ends)))
    for x, steps in ways:
        kind = f"{'two' if len({s.key for s in steps} - {None}) > 1 else 'one'}-{name}"
        world.questions.append(Question(kind, rng.choice(asks).format(x=x, k=thing.kind), steps))
        if "check" in about and len(facts) == 1 and rng.random() < lang["chances"]["check"]:
            _check(rng, lang, thing, about, world, x, steps, value)
        if name == "colour" and thing.domain.get("go"):
            go = Step(f"Go: find the {value} {thing.kind}")
            for form in rng.sample(lang["bring"], k=2 if len(facts) == 1 else 0):
                world.questions.append(Question("go", form.format(x=x), (*steps, go)))


def _value(rng: random.Random, lang: Language, about: Language, but: str = "") -> tuple[str, list[str], str]:
    """A value of a property, the questions about it, and the verdict of a permission."""
    if about["value"] == "permission":
        if "pairs" in about:
            which, yes = rng.randrange(len(about["pairs"])), rng.randrange(2)
            return about["pairs"][which][yes], about["asks"][which], ("Yes.", "No.")[yes]
        said, asks, verdicts = rng.choice(list(lang["permission"].values()))
        which = rng.randrange(len(said))
        return said[which], asks, f"{verdicts.split()[which].capitalize()}."
    while True:
        if about["value"] == "person":
            value = _of_person(rng, lang, "first")
            value += f" {_of_person(rng, lang, 'last')}" * (rng.random() < 0.5)
        else:
            value = rng.choice(about["value"] if isinstance(about["value"], list) else lang["values"][about["value"]])
        if value != but:
            return value, about["ask"], ""


def _fact(rng: random.Random, thing: Thing, about: Language, key: Key, value: str, subject: str) -> Fact:
    words = thing.words(rng, value)
    if subject:  # known by its description alone: "the chair I like is red"
        words |= {"m": subject, "M": _upper(subject), "s": "it", "S": "It"}
    tells = [tell for tell in about["tell"] if not subject or "{n}" not in tell.lower()]
    return Fact(key, rng.choice(tells or about["tell"]).format(**words), about["answer"].format(**words), value)


def _check(
    rng: random.Random, lang: Language, thing: Thing, about: Language, world: World, x: str,
    steps: tuple[Step, ...], value: str,
) -> None:  # fmt: skip
    """Ask for a yes or a no: of the value, of another one, or of one that the document only denies."""
    other, _, _ = _value(rng, lang, about, value)
    same = rng.random() < 0.5
    asked = about["check"].format(x=x, w=value if same else other)
    world.questions.append(Question("check", asked, (*steps, Step("Yes." if same else "No."))))
    if rng.random() < lang["chances"]["denial"] and steps[-1].key is not None:
        words = thing.words(rng, value) | {"w": other}
        tell, answer = about["deny"].format(**words), about["deny"].format(**words | {"M": words["S"]})
        if rng.random() < 0.5:
            said = about["answer"].format(**words | {"v": other, "V": _upper(other), "S": words["m"]}).removesuffix(".")
            tell = rng.choice(lang["denied"]).format(c=re.sub("^The ", "the ", said))
        denial = Fact(("not", thing.number, other), tell, answer, other)
        if len(steps) == 1 and not x.startswith(thing.described.get("x", "-")):
            world.facts.append(denial)
            asked = about["check"].format(x=x, w=other)
            world.questions.append(Question("denied", asked, (Step(denial.answer, denial.key), Step("No."))))


def _free(rng: random.Random, lang: Language, domain: Language, world: World) -> None:
    for number, (tell, ask, answer, values) in enumerate(rng.sample(domain["free"], k=rng.randint(1, 4))):
        value, _, _ = _value(rng, lang, {"value": values, "ask": []})
        key = ("free", f"f{number}")
        said = answer.format(v=value)
        world.facts.append(Fact(key, tell.format(v=value, V=_upper(value)), said, value))
        world.questions.append(Question("free", ask, (Step(said, key),)))
    for number, (tell, ask, said) in enumerate(rng.sample(domain["facts"], k=rng.randint(0, 3))):
        key = ("free", f"y{number}")
        world.facts.append(Fact(key, tell, said, said))
        world.questions.append(Question("yes-no", ask, (Step(said, key),)))


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(19, 27)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _dated(rng: random.Random, lang: Language, fact: Fact, date: str) -> Fact:
    form = rng.choice(lang["dated"])
    sentence = form.format(d=date, s=fact.sentence, b=fact.sentence.removesuffix("."))
    return fact._replace(sentence=sentence, answer=f"{fact.answer.removesuffix('.')} ({date}).", date=date)


def _draw_told(rng: random.Random, world: World) -> list[Fact]:
    """The facts that a page holds; of a second value at times only one."""
    count = min(len(world.facts), rng.choice((1, 2, 3, 3, 4, 4, 5, 6, 7, 8, _MOST_FACTS)))
    return rng.sample(world.facts, k=count)


def _choose(rng: random.Random, world: World, told: list[Fact], count: int) -> Iterator[Question | None]:
    """Questions, by how much of their answer the page tells; None: one about nothing."""
    keys = {fact.key for fact in told}
    by_told: dict[tuple[int, ...], list[Question]] = {}
    for question in world.questions:
        by_told.setdefault(tuple(int(key in keys) for key in question.keys), []).append(question)
    for _ in range(count):
        if not by_told or rng.random() < 0.03:
            yield None
            continue
        told_so = rng.choices(list(by_told), [_TOLD[one] for one in by_told])[0]
        chosen = by_told[told_so].pop(rng.randrange(len(by_told[told_so])))
        if not by_told[told_so]:
            del by_told[told_so]
        yield chosen


def _asked(rng: random.Random, lang: Language, world: World, told: list[Fact], question: Question | None) -> Asked:
    """A question with its answer as this page takes part in it; any of the values that are known may be said."""
    if question is None:
        return Asked("other", _spoken(rng, lang, rng.choice(lang["other"])), (Said("It is", None),))
    chain: list[Said] = []
    knows = False
    for step in question.steps:
        if step.key is None:
            chain.append(Said(step.text, step.text if knows else None))
            continue
        mine = [fact for fact in told if fact.key == step.key]
        mine.sort(key=lambda fact: fact.date)  # stable: the order of the page where there are no dates
        knows = bool(mine)
        own = mine[-1 if mine and mine[-1].date else 0].answer if mine else None
        known = [fact for fact in world.facts if fact.key == step.key]
        spoken = own if own is not None and rng.random() < 0.3 else rng.choice(known).answer
        chain.append(Said(spoken, own))
        objection = _objection(mine, spoken)
        if not objection and step == question.steps[-1] and rng.random() < 0.5:  # another page has one
            objection = [Said(said.text, "") for said in _objection([f for f in known if f not in mine], spoken)]
        chain += objection
    return Asked(question.kind, _spoken(rng, lang, question.text), tuple(chain))


def _objection(mine: list[Fact], spoken: str) -> list[Said]:
    """What the page adds where it knows another value than the one said: a newer one, or one that contradicts."""
    said_on = spoken.rpartition("(")[2].rstrip(").") if "(" in spoken else ""
    for fact in mine:
        if fact.answer != spoken and (not fact.date or fact.date > said_on):
            text = f"Newer: {fact.value} ({fact.date})." if fact.date else f"Elsewhere: {fact.value}."
            return [Said(text, text)]
    return []


def _spoken(rng: random.Random, lang: Language, text: str) -> str:
    """A question as people write it."""
    draw = rng.random()
    if draw < 0.2:
        return str(rng.choice(lang["spoken"])).format(q=text)
    if draw < 0.08:
        text = f"please tell me: {text}" if text.endswith("?") else f"please {text}"
    elif draw < 0.25:
        text = text.rstrip("?") + rng.choice((".", "", "!", ", please"))
    return _upper(text) if rng.random() < 0.5 else text


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
