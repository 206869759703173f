# SPDX-License-Identifier: Apache-2.0
"""Instructions in many wordings, with templates and words held out of training.

A template is a request and a way to name the thing: "walk over to" and "the {} on the left" (wordings.toml). The splits
share no template, and each has words of its own. Only the words that tell which of two is meant ("rightmost",
"closest") occur in all splits, because a model cannot guess them.

Half of the training's instructions have strange words, made up or out of place, instead of some of their own ("grole
blem the red chair on the left"): words that do not name the goal must not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from dsd_lab import read_data
from dsd_lab.worlds.guide import split_goal
from dsd_lab.worlds.situations import NAMES, Split
from dsd_ros.robot.sim.world import COLOURS, KINDS, WHICH, World

FIND = "find"
INTENTS = (FIND, *WHICH)  # "find" asks for the only one of its name, the others for one of two
_PLAIN = "find the {}"  # how most people ask
_OFTEN = 3  # how often the templates in "often" count
_DISTANCES = {
    "nearer": ("to", ("nearer", "closer"), ("nearest", "closest")),
    "farther": ("from", ("farther", "further"), ("farthest", "furthest")),
}


@dataclass(frozen=True)
class Wording:
    """The parts of a split's templates, as wordings.toml explains them; ``whole`` and ``names`` by intent."""

    requests: tuple[str, ...]
    wishes: tuple[str, ...]
    tails: tuple[str, ...]
    whole: dict[str, tuple[str, ...]]
    names: dict[str, tuple[str, ...]]
    openings: tuple[str, ...]
    endings: tuple[str, ...]


def _wording(parts: dict[str, Any]) -> Wording:
    return Wording(**{k: _by_intent(part) if isinstance(part, dict) else tuple(part) for k, part in parts.items()})


def _by_intent(part: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Templates by intent: those for sides and for distances in words for each of them."""
    often = part.pop("often", {})
    found = {name: often.get(name, []) * _OFTEN + templates for name, templates in part.items()}
    sides = [one for template in found.pop("sides", ()) for one in _either(template)]
    for side in ("left", "right") if sides else ():
        found[side] = [one.replace("SIDE", side) for one in sides]
    distances = [one for template in found.pop("distances", ()) for one in _either(template)]
    for intent, (where, mores, mosts) in _DISTANCES.items() if distances else ():
        found[intent] = [
            one.replace("MORE", more).replace("MOST", most).replace("FROM", where)
            for one in distances
            for more, most in zip(mores, mosts, strict=True)
        ]
    return {intent: tuple(templates) for intent, templates in found.items()}


def _either(template: str) -> list[str]:
    """A template with "[a|b]" in it once for each choice."""
    parts = re.split(r"\[([^]]*)\]", template)
    return ["".join(some) for some in product(*(p.split("|") if n % 2 else [p] for n, p in enumerate(parts)))]


_DATA = read_data("worlds/wordings.toml")
_STRANGE = {name: tuple(words.split() if name == "common" else words) for name, words in _DATA.pop("strange").items()}
WORDINGS = {Split(name): _wording(parts) for name, parts in _DATA.items()}


@cache
def phrasings(intent: str, split: Split) -> tuple[str, ...]:
    """A split's templates for an intent; "{}" stands for "red chair", "{s}" for "red chairs".

    Training's leave out the tails, which would make a hundred thousand of them.
    """
    words = WORDINGS[split]
    made = [*words.whole.get(intent, ())]
    tails = ("",) if split is Split.TRAINING else words.tails
    for name in words.names[intent]:
        made += [f"{request} {name}{tail}" for request in words.requests for tail in tails]
        made += [f"{wish} {name}" for wish in words.wishes]
    return tuple(dict.fromkeys(made))


def instruction_for(goal: str, rng: np.random.Generator, split: Split = Split.TRAINING, unheard: float = 0.0) -> str:
    """One of a split's ways to ask for a goal; `unheard`: the share that `with_unheard_words` changes."""
    which, name = split_goal(goal)
    words = WORDINGS[split]
    if split is not Split.TRAINING:
        text = fill(_any(phrasings(which or FIND, split), rng), name)
    elif rng.random() < 0.25:
        text = _PLAIN.format(goal)
    else:
        text = fill(_training_template(words, which or FIND, rng), name)
    if unheard and rng.random() < unheard:
        text = with_unheard_words(text, rng)
    often = 0.3 if split is Split.TRAINING else 0.15
    if rng.random() < often:
        text = _any(words.openings, rng) + text
    if rng.random() < often:
        text += _any(words.endings, rng)
    return text[0].upper() + text[1:] if rng.random() < 0.15 else text


def _training_template(words: Wording, intent: str, rng: np.random.Generator) -> str:
    """Drawn part by part, so that the many requests with tails do not crowd out the others."""
    kind = rng.random()
    if kind < 0.08:
        return _any(words.whole[intent], rng)
    name = _any(words.names[intent], rng)
    if kind < 0.35:
        return f"{_any(words.wishes, rng)} {name}"
    return f"{_any(words.requests, rng)} {name}{_any(words.tails, rng)}"


def _any(some: tuple[str, ...], rng: np.random.Generator) -> str:
    return some[int(rng.integers(len(some)))]


def with_unheard_words(text: str, rng: np.random.Generator) -> str:
    """An instruction with half of the words that do not name the goal replaced, and often more words around it.

    Words that would tell sides or distances never stand where they do: before the name, after "the", or last.
    """

    def instead(match: re.Match[str]) -> str:
        word = match[0]
        tells = word in _TELLING or _SIDE_NEXT.match(text, match.end())
        return word if tells or rng.random() < 0.5 else _strange(rng)

    changed = re.sub(r"\w+", instead, text)
    before, after = (_some_strange(rng, _STRANGE[f"astray_{where}"]) for where in ("before", "after"))
    return " ".join([*before, changed, *after])


def _some_strange(rng: np.random.Generator, astray: tuple[str, ...]) -> list[str]:
    """Up to six strange words, few more often than many; now and then one astray among them, never at the end."""
    some = [_strange(rng) for _ in range(int(rng.integers(7) * rng.random()))]
    if some and rng.random() < 0.4:
        some.insert(int(rng.integers(len(some))), _any(astray, rng))
    return some


_SIDE_NEXT = re.compile(r" (left|right)\b")
_TELLING = {word for words in WHICH.values() for word in words} | {
    f"{word}{end}" for word in (*COLOURS, *KINDS) for end in ("", "s", "es")
}


@cache
def _words_of(split: Split) -> frozenset[str]:
    """The words of a split, without names."""
    words = WORDINGS[split]
    parts = [part.values() if isinstance(part, dict) else [part] for part in vars(words).values()]
    said = " ".join(template for part in parts for some in part for template in some)
    return frozenset(re.findall(r"[a-z0-9]+", said.lower()))


@cache
def _all_words() -> frozenset[str]:
    return frozenset(_TELLING).union(*map(_words_of, Split))


@cache
def _common() -> tuple[str, ...]:
    """Common words without those that are held out, which training must not show by mistake."""
    held_out = _TELLING.union(*(_words_of(split) for split in Split if split is not Split.TRAINING))
    return tuple(word for word in _STRANGE["common"] if word not in held_out)


def _strange(rng: np.random.Generator) -> str:
    """A common word out of place, or a made-up one of one or two syllables."""
    return _any(_common(), rng) if rng.random() < 0.5 else _made_up(rng)


def _made_up(rng: np.random.Generator) -> str:
    while True:
        word = "".join(
            part[int(rng.integers(len(part)))]
            for _ in range(int(rng.integers(1, 3)))
            for part in (_STRANGE["onsets"], _STRANGE["vowels"], _STRANGE["codas"])
        )
        if len(word) > 1 and word not in _all_words():
            return word


def instructed(world: World) -> World:
    """A split's world with its goal asked for in one of the split's wordings, drawn from its seed."""
    if world.look is None:
        return world
    split = world.look.split
    rng = np.random.default_rng([world.seed, 27, split.number])
    return replace(world, instruction=instruction_for(world.goal, rng, split))


def fill(template: str, name: str) -> str:
    """A template with a name such as "red box" put in."""
    plural = name + ("es" if name.endswith("x") else "s")
    text = template.format(name, s=plural)
    return text.replace(f"a {name}", f"an {name}") if name[0] == "o" else text


def all_instructions() -> list[str]:
    """Training's words with all names, for the tokenizer's training."""
    words = WORDINGS[Split.TRAINING]
    texts = [_PLAIN.format(name) for name in NAMES]
    for number, intent in enumerate(INTENTS):
        templates = phrasings(intent, Split.TRAINING)
        for k, template in enumerate(templates[:: len(templates) // 500]):
            texts += [fill(template, name) for name in NAMES[(k + number) % 5 :: 5]]
    texts += [f"{opening}{_PLAIN.format(name)}" for opening in words.openings for name in NAMES[::3]]
    texts += [f"{_PLAIN.format(name)}{end}" for end in (*words.tails, *words.endings) for name in NAMES[::3]]
    return texts
