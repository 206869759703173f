"""Instructions in many wordings, with templates and words held out of training.

A template is a request and a way to name the thing: "walk over to" and "the {} on the left" (`wordings`). The splits
share no template, and each has words of its own. Only the words that tell which of two is meant ("rightmost",
"closest") occur in all splits, because a model cannot guess them.

No list holds all that people say, so half of the training's instructions have strange words, made up or out of
place, instead of some of their own ("grole blem the red chair on the left"). Words that do not name the goal must not
matter, known or not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np

from dsd_lab.worlds.guide import split_goal
from dsd_lab.worlds.situations import NAMES, Split
from dsd_lab.worlds.wordings import COMMON_WORDS, FIND, WORDINGS, Wording
from dsd_ros.robot.sim.world import COLOURS, KINDS, WHICH, World

INTENTS = (FIND, *WHICH)  # "find" asks for the only one of its name, the others for one of two
_PLAIN = "find the {}"  # how most people ask


@cache
def phrasings(intent: str, split: Split) -> tuple[str, ...]:
    """A split's templates for an intent; "{}" stands for "red chair", "{s}" for "red chairs".

    Training's leave out the tails, which would make a hundred thousand of them. Raises ValueError on an unknown intent.
    """
    if intent not in INTENTS:
        raise ValueError(f"'{intent}' is no intent; choose from {', '.join(INTENTS)}.")
    words = WORDINGS[split]
    made = [*words.whole.get(intent, ())]
    tails = ("",) if split is Split.TRAINING else words.tails
    for name in words.names[intent]:
        made += [f"{request} {name}{tail}" for request in words.requests for tail in tails]
        made += [f"{wish} {name}" for wish in words.wishes]
    return tuple(dict.fromkeys(made))


def instruction_for(goal: str, rng: np.random.Generator, split: Split = Split.TRAINING, unheard: float = 0.0) -> str:
    """One of a split's ways to ask for a goal such as "red chair" or "left red chair".

    In training, plain "find the" is the most frequent. `unheard`: the share that `with_unheard_words` changes.
    """
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
    """An instruction with about half of the words that do not name the goal replaced, and often more words around it.

    Some of these would tell sides or distances elsewhere ("right blem the red chair"), but never where they stand:
    they do not precede the name, follow "the" or come last.
    """

    def instead(match: re.Match[str]) -> str:
        word = match[0]
        tells = word in _TELLING or _SIDE_NEXT.match(text, match.end())
        return word if tells or rng.random() < 0.5 else _strange(rng)

    changed = re.sub(r"\w+", instead, text)
    before, behind = (_some_strange(rng, words) for words in (_ASTRAY_BEFORE, _ASTRAY_BEHIND))
    return " ".join([*before, changed, *behind])


def _some_strange(rng: np.random.Generator, astray: tuple[str, ...]) -> list[str]:
    """Up to six strange words, few more often than many; now and then one astray among them, never at the end."""
    some = [_strange(rng) for _ in range(int(rng.integers(7) * rng.random()))]
    if some and rng.random() < 0.4:
        some.insert(int(rng.integers(len(some))), _any(astray, rng))
    return some


_SIDE_NEXT = re.compile(r" (left|right)\b")
_ASTRAY_BEFORE = (
    "left", "right", "left a", "left the", "you left", "near", "far", "close", "closer to", "further", "nearer to",
    "you",
)  # fmt: skip
_ASTRAY_BEHIND = (
    "right", "you", "near", "far", "close", "you left", "right by", "to you", "from you", "with you",
)  # fmt: skip
_TELLING = {word for words in WHICH.values() for word in words} | {
    f"{word}{end}" for word in (*COLOURS, *KINDS) for end in ("", "s", "es")
}
_ONSETS = (
    "", *"bcdfghjklmnprstvwz", "bl", "br", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "sk", "st", "th", "tr",
)  # fmt: skip
_VOWELS = (*"aeiou", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("", *"bdglmnprstx", "ck", "ll", "nd", "ng", "nt", "rk", "rn", "sh", "ss", "st", "th")


@cache
def _words_of(split: Split) -> frozenset[str]:
    """The words of a split, without names."""
    words = WORDINGS[split]
    said = [
        template
        for part in vars(words).values()
        for some in (part.values() if isinstance(part, dict) else [part])
        for template in some
    ]
    return frozenset(re.findall(r"[a-z0-9]+", " ".join(said).lower()))


@cache
def _all_words() -> frozenset[str]:
    return frozenset(_TELLING).union(*map(_words_of, Split))


@cache
def _common() -> tuple[str, ...]:
    """Common words without those that are held out, which training must not show by mistake."""
    held_out = _TELLING.union(*(_words_of(split) for split in Split if split is not Split.TRAINING))
    return tuple(word for word in COMMON_WORDS.split() if word not in held_out)


def _strange(rng: np.random.Generator) -> str:
    """A common word out of place, or a made-up one of one or two syllables."""
    return _any(_common(), rng) if rng.random() < 0.5 else _made_up(rng)


def _made_up(rng: np.random.Generator) -> str:
    while True:
        word = "".join(
            part[int(rng.integers(len(part)))]
            for _ in range(int(rng.integers(1, 3)))
            for part in (_ONSETS, _VOWELS, _CODAS)
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
    behind = (*words.tails, *words.endings)
    texts += [f"{_PLAIN.format(name)}{end}" for end in behind for name in NAMES[::3]]
    return texts
