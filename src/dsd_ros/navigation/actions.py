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

import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import yaml

from dsd_ros.paths import config_directory, user_path

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
class Wording:
    """How a grammar writes one kind of action. ``phrases``: the first is the one that is written; ``{}`` stands for the
    amount. ``amounts``: each as text and in cm or degrees.
    """

    kind: ActionKind
    phrases: tuple[str, ...]
    amounts: tuple[tuple[str, int], ...] = (("", 0),)


@dataclass(frozen=True)
class Grammar:
    """The words of a model's actions: a mark, a space and a phrase at a reply's end.

    ``end``: what may follow the phrase, such as a full stop. Made by :meth:`of` or :func:`read_grammar`, which check.
    """

    name: str
    wordings: tuple[Wording, ...]
    marks: tuple[str, ...] = ("Action:",)
    end: str = ""

    @classmethod
    def of(cls, data: Any, name: str) -> Grammar:
        """The grammar that ``data`` describes (docs/getting-started.md); ``name`` is for messages. GrammarError."""
        try:
            return _checked(_built(data, name))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, GrammarError) else f"it is damaged ({error})"
            raise GrammarError(f"The grammar {name} cannot be used: {why}; see docs/getting-started.md.") from error

    @cached_property
    def data(self) -> dict[str, Any]:
        """What :meth:`of` makes this grammar from."""
        found: dict[str, Any] = {"marks": list(self.marks), "end": self.end}
        for each in self.wordings:
            found[each.kind.name.lower()] = {"phrases": list(each.phrases)}
            if each.kind is not ActionKind.STOP:  # the texts as they are: a number would lose "025" or "0.50"
                found[each.kind.name.lower()]["amounts"] = dict(each.amounts)
        return found

    @cached_property
    def _actions(self) -> dict[str, tuple[ActionKind, int]]:
        return {
            _folded(phrase.replace("{}", text)): (each.kind, amount)
            for each in self.wordings
            for phrase in each.phrases
            for text, amount in each.amounts
        }

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        # re.ASCII matters: without it, case folding would let letters such as U+017F pass for "s".
        longest_first = sorted(self.marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)), re.ASCII | re.IGNORECASE)

    @cached_property
    def written(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The marks, and what may follow one with the space before it: for constrained replies."""
        texts = (
            f" {phrase.replace('{}', text)}{end}"
            for each in self.wordings
            for phrase in each.phrases
            for text, _ in each.amounts
            for end in dict.fromkeys(("", self.end))
        )
        return self.marks, tuple(text for text in texts if self._find(text[1:]))

    def _find(self, phrase: str) -> tuple[ActionKind, int] | None:
        """The kind and amount that the words after a mark mean, if they are an action's."""
        return self._actions.get(_folded(phrase).removesuffix(_folded(self.end)))

    def amounts(self, kind: ActionKind) -> tuple[int, ...]:
        """The amounts (cm, degrees) that a kind of action may have; empty: the grammar has no such action."""
        return tuple(amount for each in self.wordings if each.kind is kind for _, amount in each.amounts)

    def phrase(self, kind: ActionKind, amount: int) -> str:
        """The words for an action of this grammar, without mark and end."""
        wording = next(each for each in self.wordings if each.kind is kind)
        text = next(text for text, known in wording.amounts if known == amount)
        return wording.phrases[0].replace("{}", text)


@dataclass(frozen=True)
class Action:
    """One action. ``amount``: cm for FORWARD, degrees for turns, 0 for STOP. ``grammar``: whose action it is."""

    kind: ActionKind
    amount: int = 0
    grammar: Grammar = field(default_factory=lambda: SHIPPED, compare=False, repr=False)

    def __post_init__(self) -> None:
        allowed = self.grammar.amounts(self.kind)
        if self.amount not in allowed:
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
_MOST_TEXTS, _MOST_CHARS, _MOST_BYTES = 8, 80, 64 << 10
_UNITS = {"cm": 1, "m": 100, "degrees": 1}  # in cm or degrees
_DEFAULT_UNIT = {ActionKind.FORWARD: "cm"}


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
    return action.grammar.phrase(action.kind, action.amount)


def all_actions(grammar: Grammar | None = None) -> list[Action]:
    """Every action of the grammar, in the grammar's order."""
    grammar = grammar or SHIPPED
    return [Action(each.kind, amount, grammar) for each in grammar.wordings for _, amount in each.amounts]


def read_grammar(named: str) -> Grammar:
    """The grammar meant by the name of one in config/grammars, by a YAML or JSON file, or by JSON itself.

    :raises GrammarError: one sentence.
    """
    if named.lstrip().startswith("{"):
        return Grammar.of(_loaded(named, "given as text"), "given as text")
    folder = config_directory() / "grammars"
    presets = sorted(path.stem for path in folder.glob("*.yaml"))
    path = folder / f"{named}.yaml" if named in presets else user_path(named)
    if not path.is_file():
        raise GrammarError(f"There is no grammar '{named}': name {', '.join(presets)}, or a file.")
    try:
        text = path.read_bytes()[: _MOST_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"The grammar {named} cannot be read: {error}.") from error
    return Grammar.of(_loaded(text, named), named)


def _loaded(text: str, name: str) -> Any:
    if len(text) > _MOST_BYTES:
        raise GrammarError(f"The grammar {name} is longer than {_MOST_BYTES} bytes; shorten it.")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise GrammarError(f"The grammar {name} is not YAML: {' '.join(str(error).split())}.") from error


def _built(data: Any, name: str) -> Grammar:
    keys = [kind.name.lower() for kind in ActionKind]
    if not isinstance(data, Mapping) or set(data) - {"marks", "end", *keys}:
        raise GrammarError(f"it must hold marks, end, and of {', '.join(keys)} those that the model has, no more")
    wordings = tuple(
        _wording(kind, data[key], key) for kind, key in zip(ActionKind, keys, strict=True) if data.get(key) is not None
    )
    end = data.get("end") or ""
    return Grammar(name, wordings, _texts(data.get("marks"), "marks"), _texts([end], "end")[0] if end else "")


def _wording(kind: ActionKind, data: Any, key: str) -> Wording:
    stops = kind is ActionKind.STOP
    if not isinstance(data, Mapping) or set(data) - {"phrases", *(() if stops else ("amounts", "unit"))}:
        raise GrammarError(f"{key} must hold phrases{'' if stops else ', amounts and unit'}, no more")
    phrases = _texts(data.get("phrases"), f"{key}.phrases")
    if any(phrase.count("{}") != (0 if stops else 1) for phrase in phrases):
        raise GrammarError(f"a phrase of {key} must hold {{}}, for the amount, {'nowhere' if stops else 'once'}")
    return Wording(kind, phrases) if stops else Wording(kind, phrases, _amounts(kind, data, key))


def _amounts(kind: ActionKind, data: Mapping[str, Any], key: str) -> tuple[tuple[str, int], ...]:
    """A list of amounts, a mapping of texts to amounts, or a range {from, to, step}."""
    given, unit = data.get("amounts"), data.get("unit", _DEFAULT_UNIT.get(kind, "degrees"))
    units = ("cm", "m") if kind is ActionKind.FORWARD else ("degrees",)
    if unit not in units:
        raise GrammarError(f"{key}.unit is {_quoted(unit)}; use {' or '.join(units)}")
    most = _MOST[kind]
    if isinstance(given, Mapping) and set(given) == {"from", "to", "step"}:
        low, high, step = (_whole(given[word], _UNITS[unit], most, key) for word in ("from", "to", "step"))
        pairs = [(f"{amount / _UNITS[unit]:g}", amount) for amount in range(low, high + 1, step)]
    elif isinstance(given, Mapping):
        pairs = [(str(text), _whole(amount, _UNITS[unit], most, key)) for text, amount in given.items()]
    elif isinstance(given, list):
        pairs = [(f"{amount}", _whole(amount, _UNITS[unit], most, key)) for amount in given]
    else:
        pairs = []
    if not pairs:
        raise GrammarError(f"{key}.amounts must be a list of numbers, or from, to and step")
    _texts([text for text, _ in pairs], f"{key}.amounts", most)
    return tuple(pairs)


def _whole(amount: Any, unit: int, most: int, key: str) -> int:
    number = isinstance(amount, (int, float)) and not isinstance(amount, bool) and math.isfinite(amount)
    whole = round(amount * unit) if number else 0
    if not 1 <= whole <= most or abs(whole - amount * unit) > 1e-6:
        raise GrammarError(f"{key}.amounts has {_quoted(amount)}; use whole cm or degrees from 1 to {most}")
    return whole


def _texts(given: Any, what: str, most: int = _MOST_TEXTS) -> tuple[str, ...]:
    texts = given if isinstance(given, list) else []
    if not 1 <= len(texts) <= most:
        raise GrammarError(f"{what} must be a list of 1 to {most} texts")
    for text in texts:
        plain = isinstance(text, str) and text.isprintable() and text == _SPACE.sub(" ", text).strip(" ")
        if not plain or not 1 <= len(text) <= _MOST_CHARS or "<|" in text or "|>" in text:
            raise GrammarError(
                f"{what} has {_quoted(text)}; write printable words with single spaces, at most {_MOST_CHARS}"
            )
    return tuple(texts)


def _checked(grammar: Grammar) -> Grammar:
    """GrammarError unless each action can be told from every other, and a run can move and end."""
    kinds = {each.kind for each in grammar.wordings}
    if ActionKind.STOP not in kinds or len(kinds) < 2:
        raise GrammarError("it must have stop, which ends a run, and an action that moves the robot")
    written = sum(len(each.phrases) * len(each.amounts) for each in grammar.wordings)
    if written != len(grammar._actions):
        raise GrammarError("two of its actions are written alike")
    for each in grammar.wordings:
        for mark in grammar.marks:
            for phrase in each.phrases:
                text, amount = each.amounts[0]
                reply = f"{mark} {phrase.replace('{}', text)}{grammar.end}"
                try:
                    read = parse_reply(reply, grammar).action
                except UnparsableReply as error:
                    raise GrammarError(f"'{reply}' cannot be read, since {error}") from error
                if (read.kind, read.amount) != (each.kind, amount):
                    raise GrammarError(f"'{reply}' reads as '{format_action(read)}'")
    return grammar


def _in_dsds_words(name: str, forward: Sequence[int], turns: Sequence[int]) -> Grammar:
    data: dict[str, Any] = {"marks": ["Action:"], "stop": {"phrases": ["stop"]}}
    data["forward"] = {"phrases": ["forward {} cm"], "amounts": list(forward)}
    for side in ("left", "right"):
        data[f"turn_{side}"] = {"phrases": [f"turn {side} {{}} degrees"], "amounts": list(turns)}
    return Grammar.of(data, name)


SHIPPED: Grammar = _in_dsds_words("dsd", FORWARD_CM, TURN_DEGREES)
ANY: Grammar = _in_dsds_words("any", range(1, 101), range(1, 91))  # for showing any grammar's actions


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


def _quoted(value: Any) -> str:
    """A value in a message; not a collection's, which a few bytes of YAML can make endless."""
    return _tail(value) if isinstance(value, str) else f"a {type(value).__name__}"


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
