# SPDX-License-Identifier: Apache-2.0
"""The reply grammar: reasoning, then exactly one action at the end.

The shipped models' grammar is

    <reasoning> Action: forward 25|50|75 cm
                Action: turn left|right 15|30|45 degrees
                Action: stop

and :class:`Grammar` reads other models' from data. A reply that does not parse is not executed. The case of ASCII
letters is ignored, and a run of ASCII white space (line breaks included) counts as one space; neither can change the
meaning. Nothing may follow the action, its mark (``Action:``) occurs once, and amounts are written exactly as above.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import yaml

from dsd_ros.paths import user_path

GRAMMAR_HELP = (
    "actions of the model's replies: dsd (the shipped models), navila, or a YAML file; navigation_node and "
    "supervisor_node need the same"
)
FORWARD_CM = (25, 50, 75)
TURN_DEGREES = (15, 30, 45)


class ActionKind(Enum):
    """The kind of an action; the value is the grammar's word for it."""

    FORWARD = "forward"
    TURN_LEFT = "turn left"
    TURN_RIGHT = "turn right"
    STOP = "stop"


KINDS = (ActionKind.STOP, ActionKind.FORWARD, ActionKind.TURN_LEFT, ActionKind.TURN_RIGHT)  # by NavAction's constants
_ROUNDING = 1e-3  # m and rad: a message's float32, and what other programs round


class UnparsableReply(ValueError):
    """A reply that is not reasoning followed by exactly one action of the grammar."""


class GrammarError(ValueError):
    """A grammar that cannot be used; one sentence."""


@dataclass(frozen=True)
class Grammar:
    """The words of a model's actions: a mark, a space and a phrase at a reply's end.

    ``end``: what may follow the phrase, such as a full stop. ``actions``: the kind and amount (cm, degrees) of each
    phrase; the first of those that mean the same is the one that is written. ``data``: what :meth:`of` made it from.
    """

    name: str
    marks: tuple[str, ...]
    end: str
    actions: dict[str, tuple[ActionKind, int]]
    data: Mapping[str, Any]

    @classmethod
    def of(cls, data: Any, name: str) -> Grammar:
        """The grammar that ``data`` describes (docs/getting-started.md); ``name`` is for messages. GrammarError."""
        try:
            keys = {"marks", "end", *(kind.name.lower() for kind in ActionKind)}
            if set(data) - keys:
                raise GrammarError(f"it must hold no more than {', '.join(sorted(keys))}")
            actions = {
                phrase: (kind, amount)
                for kind in ActionKind
                if (words := data.get(kind.name.lower())) is not None
                for phrase, amount in _phrases(kind, words)
            }
            made = cls(name, tuple(_texts(data.get("marks"), "marks")), data.get("end") or "", actions, data)
            made._check()
        except (AttributeError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, GrammarError) else f"it is damaged ({error!r})"
            raise GrammarError(f"The grammar {name} cannot be used: {why}; see docs/getting-started.md.") from error
        return made

    def _check(self) -> None:
        """GrammarError unless a run can move and end, and each action reads as what it is."""
        kinds = {kind for kind, _ in self.actions.values()}
        if ActionKind.STOP not in kinds or len(kinds) < 2:
            raise GrammarError("it must have stop, which ends a run, and an action that moves the robot")
        for mark in self.marks:
            for phrase, action in self.actions.items():
                for reply in (f"{mark} {phrase}", f"{mark} {phrase}{self.end}"):
                    try:
                        read = parse_reply(reply, self).action
                    except UnparsableReply as error:
                        raise GrammarError(f"'{reply}' cannot be read, since {error}") from error
                    if (read.kind, read.amount) != action:
                        raise GrammarError(f"'{reply}' reads as '{format_action(read)}'")

    @cached_property
    def _folded(self) -> dict[str, tuple[ActionKind, int]]:
        return {_folded(phrase): action for phrase, action in self.actions.items()}

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        # re.ASCII matters: without it, case folding would let letters such as U+017F pass for "s".
        longest_first = sorted(self.marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)), re.ASCII | re.IGNORECASE)

    @property
    def written(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The marks, and what may follow one with the space before it: for constrained replies."""
        ends = dict.fromkeys(("", self.end))
        return self.marks, tuple(f" {phrase}{end}" for phrase in self.actions for end in ends)

    def _find(self, phrase: str) -> tuple[ActionKind, int] | None:
        """The kind and amount that the words after a mark mean, if they are an action's."""
        return self._folded.get(_folded(phrase).removesuffix(_folded(self.end)))


def _phrases(kind: ActionKind, words: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The phrases of one kind of action, each with its amount: "{}" in ``phrases`` stands for it.

    ``amounts``: numbers, or texts with the number that each means; in cm or degrees.
    """
    key, given = kind.name.lower(), words.get("amounts")
    if set(words) - {"phrases", "amounts"}:
        raise GrammarError(f"{key} must hold phrases and amounts, no more")
    amounts = dict(given) if isinstance(given, Mapping) else {str(amount): amount for amount in given or ()}
    if kind is ActionKind.STOP:
        amounts = {"": 0}
    elif not amounts or not all(type(amount) is int and 1 <= amount <= _MOST[kind] for amount in amounts.values()):
        raise GrammarError(f"{key}.amounts must be whole cm or degrees from 1 to {_MOST[kind]}")
    for phrase in _texts(words.get("phrases"), f"{key}.phrases"):
        if phrase.count("{}") != (kind is not ActionKind.STOP):
            raise GrammarError(f"a phrase of {key} must hold {{}}, for the amount, once (stop: nowhere)")
        yield from ((phrase.replace("{}", str(text)), amount) for text, amount in amounts.items())


def _texts(given: Any, what: str) -> list[str]:
    if not (isinstance(given, list) and given and all(isinstance(text, str) and text for text in given)):
        raise GrammarError(f"{what} must be a list of texts")
    return given


@dataclass(frozen=True)
class Action:
    """One action. ``amount``: cm for FORWARD, degrees for turns, 0 for STOP. ``grammar``: whose action it is."""

    kind: ActionKind
    amount: int = 0
    grammar: Grammar = field(default_factory=lambda: SHIPPED, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.kind, self.amount) not in self.grammar.actions.values():
            allowed = [amount for kind, amount in self.grammar.actions.values() if kind is self.kind]
            raise ValueError(f"'{self.kind.value}' takes an amount of {allowed}, not {self.amount!r}.")

    @property
    def metres(self) -> float:
        """Distance to drive ahead, m; 0 for turns and stop."""
        return self.amount / 100.0 if self.kind is ActionKind.FORWARD else 0.0

    @property
    def radians(self) -> float:
        """Angle to turn, rad, positive to the left (counter-clockwise); 0 for the other actions."""
        if self.kind is ActionKind.TURN_LEFT:
            return math.radians(self.amount)
        if self.kind is ActionKind.TURN_RIGHT:
            return -math.radians(self.amount)
        return 0.0


@dataclass(frozen=True)
class ParsedReply:
    """A parsed reply; ``reasoning`` is the text before the action, white space collapsed."""

    reasoning: str
    action: Action


_SPACE = re.compile(r"\s+", re.ASCII)
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_MOST = {ActionKind.FORWARD: 100, ActionKind.TURN_LEFT: 90, ActionKind.TURN_RIGHT: 90}  # cm and degrees of one action


def _folded(text: str) -> str:
    return text.translate(_ASCII_LOWER)


def parse_reply(text: str, grammar: Grammar | None = None) -> ParsedReply:
    """Split a reply into reasoning and action.

    :raises UnparsableReply: with a sentence that quotes the end of the reply.
    """
    grammar = grammar or SHIPPED
    squeezed = _SPACE.sub(" ", text).strip(" ")
    marks = list(grammar._mark.finditer(squeezed))
    if len(marks) != 1:
        count = "no action" if not marks else f"{len(marks)} actions"
        raise UnparsableReply(f"the reply has {count} where one is wanted: {_tail(squeezed)}")
    mark = marks[0]
    if mark.start() > 0 and squeezed[mark.start() - 1] != " ":
        raise UnparsableReply(f"'{grammar.marks[0]}' does not stand on its own: {_tail(squeezed)}")
    phrase = squeezed[mark.end() :]
    if not phrase.startswith(" "):
        raise UnparsableReply(f"a space is missing after '{grammar.marks[0]}': {_tail(squeezed)}")
    reasoning = squeezed[: mark.start()].rstrip(" ")
    return ParsedReply(reasoning=reasoning, action=parse_action(phrase[1:], grammar))


def parse_action(phrase: str, grammar: Grammar | None = None) -> Action:
    """Parse the words after the mark, white space already collapsed. Raises UnparsableReply."""
    grammar = grammar or SHIPPED
    known = grammar._find(phrase)
    if known is None:
        raise UnparsableReply(f"not an action of the grammar: {_tail(phrase)}")
    return Action(*known, grammar)


def action_in(text: str, grammar: Grammar | None = None) -> str:
    """The action that a reply ends in, as the grammar writes it; empty when it does not parse."""
    try:
        return format_action(parse_reply(text, grammar).action)
    except UnparsableReply:
        return ""


def format_action(action: Action) -> str:
    """Its grammar's words for ``action``, without the mark in front of them."""
    meant = action.kind, action.amount
    return next(phrase for phrase, meaning in action.grammar.actions.items() if meaning == meant)


def all_actions(grammar: Grammar | None = None) -> list[Action]:
    """Every action of the grammar, in the grammar's order."""
    grammar = grammar or SHIPPED
    return [Action(kind, amount, grammar) for kind, amount in dict.fromkeys(grammar.actions.values())]


def read_grammar(named: str) -> Grammar:
    """The grammar meant by a preset's name, by a YAML file, or by JSON itself.

    :raises GrammarError: one sentence.
    """
    if named in PRESETS:
        return PRESETS[named]
    is_text, path = named.lstrip().startswith("{"), user_path(named)
    name = "given as text" if is_text else named
    if not is_text and not path.is_file():
        raise GrammarError(f"There is no grammar '{named}': name {', '.join(PRESETS)}, or a file.")
    try:
        data = json.loads(named) if is_text else yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise GrammarError(f"The grammar {name} cannot be read: {' '.join(str(error).split())}.") from error
    return Grammar.of(data, name)


def _in_dsds_words(name: str, forward: Sequence[int], turns: Sequence[int]) -> Grammar:
    data: dict[str, Any] = {"marks": ["Action:"], "stop": {"phrases": ["stop"]}}
    data["forward"] = {"phrases": ["forward {} cm"], "amounts": list(forward)}
    for side in ("left", "right"):
        data[f"turn_{side}"] = {"phrases": [f"turn {side} {{}} degrees"], "amounts": list(turns)}
    return Grammar.of(data, name)


SHIPPED: Grammar = _in_dsds_words("dsd", FORWARD_CM, TURN_DEGREES)
ANY: Grammar = _in_dsds_words("any", range(1, 101), range(1, 91))  # for showing any grammar's actions
# The actions of NaVILA (arXiv 2412.04453), as in "The next action is turn left 15 degrees." Its training data says
# "degree", and ends a run by the sentence of the second mark.
_NAVILA = {
    "marks": ["The next action is", "I think I should"],
    "forward": {"phrases": ["move forward {} cm"], "amounts": list(FORWARD_CM)},
    "turn_left": {"phrases": ["turn left {} degrees", "turn left {} degree"], "amounts": list(TURN_DEGREES)},
    "turn_right": {"phrases": ["turn right {} degrees", "turn right {} degree"], "amounts": list(TURN_DEGREES)},
    "stop": {"phrases": ["stop", "stop because I have finished the instruction"]},
    "end": ".",
}
PRESETS = {"dsd": SHIPPED, "navila": Grammar.of(_NAVILA, "navila")}


def action_of(message: Any, grammar: Grammar | None = None) -> Action:
    """The action that a NavAction announces, from rclpy or a bag.

    :param grammar: whose action it must be; ANY for showing it.
    :raises ValueError: with a sentence, when the grammar has no such action.
    """
    if not 0 <= message.kind < len(KINDS):
        raise ValueError(f"An action of kind {message.kind} is unknown; NavAction's kinds are 0 to {len(KINDS) - 1}.")
    kind, grammar = KINDS[message.kind], grammar or SHIPPED
    known = [action for action in all_actions(grammar) if action.kind is kind]
    for action in known:
        if abs(action.metres - message.distance) < _ROUNDING and abs(action.radians - message.angle) < _ROUNDING:
            return action
    raise ValueError(
        f"'{kind.value}' over {message.distance:g} m and {message.angle:g} rad is not an action of the grammar; "
        f"it has {', '.join(f'{each.metres:g} m and {each.radians:.4f} rad' for each in known[:9])}"
        f"{', and more' if len(known) > 9 else '' if known else 'no such action'}."
    )


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
