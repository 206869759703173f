"""Instructions in many words: the ways to ask for a goal, with templates and words held out of training.

A template is a request and a way to name the thing: "walk over to" and "the {} on the left". No template of one
split is in another, and each split has words that the others never say. Words that say which one of two is meant
("rightmost", "closest") are everybody's: a model that has only ever read these templates cannot guess them.

Nobody can list all that people say, so half of what a training asks has made-up words in place of some of its own
("grole blem the red chair on the left"): what is not a goal's must not matter, heard or not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dsd_ros.robot.guide import split_goal
from dsd_ros.robot.situations import NAMES, Split
from dsd_ros.robot.world import COLOURS, KINDS, WHICH, World

FIND = "find"
INTENTS = (FIND, *WHICH)  # "find" asks for the only one, the others for one of two
_PLAIN = "find the {}"  # how most people ask


@dataclass(frozen=True)
class Wording:
    """What a split's templates are put together from. "{}" is the thing's name, "{s}" its plural."""

    requests: tuple[str, ...]  # before the thing, may be followed by a tail
    wishes: tuple[str, ...]  # before the thing, with nothing behind it
    tails: tuple[str, ...]
    whole: tuple[str, ...]  # templates of their own
    names: dict[str, tuple[str, ...]]  # by intent
    openings: tuple[str, ...]
    endings: tuple[str, ...]


def _sides(*templates: str) -> dict[str, tuple[str, ...]]:
    return {side: tuple(t.replace("SIDE", side) for t in templates) for side in ("left", "right")}


WORDINGS: dict[Split, Wording] = {
    Split.TRAINING: Wording(
        requests=(
            "find", "go to", "go find", "go and find", "go over to", "go up to", "walk to", "walk over to",
            "walk up to", "walk towards", "move to", "move over to", "move towards", "head to", "head for",
            "head over to", "look for", "look around for", "search for", "search the room for", "approach",
            "reach", "get to", "get close to", "navigate to", "run to", "run over to", "come to", "drive to",
            "drive up to", "step up to", "bring yourself to", "try to find", "try to reach", "turn to",
        ),
        wishes=(
            "find me", "stop at", "stop in front of", "stand by", "stand next to", "wait at", "show me",
            "take me to", "lead me to", "I want", "I need", "your goal is", "the goal is", "where is",
            "can you see", "do you see",
        ),
        tails=("", " and stop there", " and wait there", " in this room", " for me", " and stay"),
        whole=("{}", "the {}", "there is a {} here, find it", "a {}, find it"),
        names={
            FIND: ("the {}", "a {}"),
            **_sides(
                "the SIDE {}", "the SIDE-hand {}", "the {} on the SIDE", "the {} on your SIDE",
                "the {} that is on the SIDE", "the SIDE one of the two {s}", "the SIDEmost {} here",
                "the SIDEmost of the two {s}", "the SIDEmost of both {s}", "the {} that is SIDEmost",
            ),
            "nearer": (
                "the nearer {}", "the nearest {}", "the closer {}", "the {} that is nearer",
                "the {} nearest to you", "the nearer one of the two {s}", "the closest {} here",
                "the {} closest to you", "the closest of both {s}", "the {} that is closest",
            ),
            "farther": (
                "the farther {}", "the farthest {}", "the further {}", "the {} that is farther away",
                "the {} farthest from you", "the farther one of the two {s}", "the furthest {} here",
                "the {} furthest from you", "the furthest of both {s}", "the {} that is furthest",
            ),
        },
        openings=(
            "please ", "now ", "robot, ", "could you ", "can you ", "then ", "Go2, ", "right, ", "all right, ",
        ),
        endings=(".", "!", ", please", " right away", " right this minute", " straight away", " in the time left"),
    ),
    Split.VALIDATION: Wording(
        requests=(
            "seek", "travel to", "trot to", "trot over to", "hunt for", "visit", "hurry to", "hurry over to",
            "steer to", "steer towards", "take yourself to", "set out for", "march to", "march over to",
            "sniff out", "return to",
        ),
        wishes=("fetch me to", "I would like", "my wish is", "halt at"),
        tails=("", " and halt there", " without delay", " and pause there"),
        whole=("somewhere is a {}, seek it", "the {} is your destination"),
        names={
            FIND: ("the {}", "some {}", "that {}"),
            **_sides("the {} to the SIDE", "the {} which stands to the SIDE", "the SIDE of the two {s}"),
            "nearer": ("the {} which is closer", "the closer of the two {s}", "the {} lying nearer"),
            "farther": ("the {} which is further off", "the further of the two {s}", "the {} lying farther off"),
        },
        openings=("hey, ", "would you ", "quickly "),
        endings=(" soon", ", thanks"),
    ),
    Split.TEST: Wording(
        requests=(
            "locate", "proceed to", "make your way to", "track down", "discover", "wander over to",
            "advance to", "advance towards", "rush to", "press on to", "aim for", "stroll to", "dash to",
            "dash over to", "scout for", "continue to",
        ),
        wishes=("guide me to", "I am after", "my target would be", "park beside"),
        tails=("", " and remain beside it", " at once", " and rest there"),
        whole=("somebody left a {} around, locate it", "what I am after would be a {}"),
        names={
            FIND: ("the {}", "any {}", "our {}"),
            **_sides("the SIDEmost {}", "the {} being SIDEmost", "the SIDEmost one of those {s}"),
            "nearer": ("the closest {}", "the {} closest to us", "the closest one of those {s}"),
            "farther": ("the furthest {}", "the {} furthest from us", "the furthest one of those {s}"),
        },
        openings=("kindly ", "dog, ", "okay, "),
        endings=(" right now", ", will you"),
    ),
}  # fmt: skip


@cache
def phrasings(intent: str, split: Split) -> tuple[str, ...]:
    """A split's templates for an intent of INTENTS; "{}" is where "red chair" goes, "{s}" where "red chairs" does.

    Raises ValueError for what is no intent.
    """
    if intent not in INTENTS:
        raise ValueError(f"'{intent}' is no intent; choose from {', '.join(INTENTS)}.")
    words = WORDINGS[split]
    made = [*words.whole] if intent == FIND else []
    for name in words.names[intent]:
        # The sides' longer names need no tails to come to hundreds.
        tails = words.tails if intent == FIND or split is not Split.TRAINING else ("",)
        made += [f"{request} {name}{tail}" for request in words.requests for tail in tails]
        made += [f"{wish} {name}" for wish in words.wishes]
    return tuple(dict.fromkeys(made))


def instruction_for(
    goal: str, rng: np.random.Generator, split: Split = Split.TRAINING, unheard: float = 0.0
) -> str:
    """One of a split's ways to ask for a goal such as "red chair" or "left red chair".

    In training plain "find the" is the most frequent.

    :param unheard: share of the instructions in which `with_unheard_words` replaces some words.
    """
    which, name = split_goal(goal)
    if split is Split.TRAINING and rng.random() < 0.25:
        text = _PLAIN.format(goal)
    else:
        templates = phrasings(which or FIND, split)
        text = fill(templates[int(rng.integers(len(templates)))], name)
    if unheard and rng.random() < unheard:
        text = with_unheard_words(text, rng)
    words = WORDINGS[split]
    if rng.random() < 0.15:
        text = words.openings[int(rng.integers(len(words.openings)))] + text
    if rng.random() < 0.15:
        text += words.endings[int(rng.integers(len(words.endings)))]
    return text[0].upper() + text[1:] if rng.random() < 0.15 else text


def with_unheard_words(text: str, rng: np.random.Generator) -> str:
    """An instruction with about half of the words that do not tell of the goal made up, and now and then some more."""

    def instead(match: re.Match[str]) -> str:
        word = match[0]
        return word if word in _TELLING or rng.random() < 0.5 else _made_up(rng)

    text = re.sub(r"\w+", instead, text)
    # More behind than before: "and ... beside it", "at once, will you".
    before, behind = ([_made_up(rng) for _ in range(rng.integers(most))] for most in (3, 5))
    return " ".join([*before, text, *behind])


_TELLING = {word for words in WHICH.values() for word in words} | {
    f"{word}{end}" for word in (*COLOURS, *KINDS) for end in ("", "s", "es")
}
_ONSETS = (
    "", *"bcdfghjklmnprstvwz", "bl", "br", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "sk", "st", "th", "tr",
)  # fmt: skip
_VOWELS = (*"aeiou", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("", *"bdglmnprstx", "ck", "ll", "nd", "ng", "nt", "rk", "rn", "sh", "ss", "st", "th")


@cache
def _all_words() -> frozenset[str]:
    """What is said in any split."""
    said = [
        template
        for words in WORDINGS.values()
        for part in (*vars(words).values(), *words.names.values())
        for template in part
    ]
    return frozenset(re.findall(r"[a-z0-9]+", " ".join(said).lower())) | _TELLING


def _made_up(rng: np.random.Generator) -> str:
    """A word that is no split's, of one or two syllables."""
    while True:
        word = "".join(
            part[int(rng.integers(len(part)))]
            for _ in range(int(rng.integers(1, 3)))
            for part in (_ONSETS, _VOWELS, _CODAS)
        )
        if len(word) > 1 and word not in _all_words():
            return word


def instructed(world: World) -> World:
    """A world of a split with its goal asked for in one of the split's ways, drawn from its seed."""
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
    """Training's templates with all names, for the tokenizer's training."""
    words = WORDINGS[Split.TRAINING]
    texts = [_PLAIN.format(name) for name in NAMES]
    for number, intent in enumerate(INTENTS):
        for k, template in enumerate(phrasings(intent, Split.TRAINING)):
            texts += [fill(template, name) for name in NAMES[(k + number) % 5 :: 5]]
    texts += [f"{opening}{_PLAIN.format(name)}" for opening in words.openings for name in NAMES]
    texts += [f"{_PLAIN.format(name)}{ending}" for ending in words.endings for name in NAMES[::3]]
    return texts
