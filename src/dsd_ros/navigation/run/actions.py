# SPDX-License-Identifier: Apache-2.0
"""The reply grammar: reasoning, then one action at the end, or a few in sequence.

The shipped models' grammar is

    <reasoning> Action: forward 25|50|75 cm
                Action: turn left|right 15|30|45 degrees
                Action: stop

and :class:`Grammar` reads other models' from data: with numbers in a range, points in the picture, up to four actions
a reply. A reply that does not parse is not executed. The case of ASCII letters is ignored, and a run of ASCII white
space (line breaks included) counts as one space; neither can change the meaning. Nothing may follow the action, its
mark (``Action:``) occurs once, and amounts are written exactly as in the grammar. Words that can be read in two ways
are not read at all.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import yaml

from dsd_ros.paths import user_path

GRAMMAR_HELP = (
    "actions of the model's replies: dsd (the shipped models), navila, streamvln, internvla-n1, or a YAML file; "
    "navigation_node and supervisor_node need the same"
)
PARSERS = "dsd_ros.reply_parsers"  # entry points: text of a reply -> the same in the grammar's words, or ValueError
FORWARD_CM = (25, 50, 75)
TURN_DEGREES = (15, 30, 45)


class ActionKind(Enum):
    """The kind of an action; the value is the grammar's word for it."""

    FORWARD = "forward"
    TURN_LEFT = "turn left"
    TURN_RIGHT = "turn right"
    STOP = "stop"
    GO_TO = "go to"


# By NavAction's constants.
KINDS = (ActionKind.STOP, ActionKind.FORWARD, ActionKind.TURN_LEFT, ActionKind.TURN_RIGHT, ActionKind.GO_TO)
_MOST = {ActionKind.FORWARD: 500, ActionKind.TURN_LEFT: 180, ActionKind.TURN_RIGHT: 180}  # cm and degrees of one action
_MOST_ACTIONS = 4  # of a reply
_LAST = (ActionKind.STOP, ActionKind.GO_TO)  # no action follows them in a reply
_MOST_PIXELS = 4096  # of a picture's side
_ROUNDING = 1e-3  # m and rad: a message's float32, and what other programs round


class UnparsableReply(ValueError):
    """A reply that is not reasoning followed by what the grammar allows."""


class GrammarError(ValueError):
    """A grammar that cannot be used; one sentence."""


_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")
Point = tuple[int, int]  # x, y in pixels of a grammar's picture
Meaning = tuple[ActionKind, int, "Point | None"]


@dataclass(frozen=True)
class Phrase:
    """Words for actions of one kind. Each ``{lo..hi}`` in ``text`` stands for a whole number in that range.

    ``names``: what these numbers are, "amount", or "x" and "y". ``amount``: cm or degrees where no number says it.
    """

    text: str
    kind: ActionKind
    amount: int = 0
    names: tuple[str, ...] = ()

    @cached_property
    def ranges(self) -> list[range]:
        return [range(int(low), int(high) + 1) for low, high in _RANGE.findall(self.text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = [re.escape(_folded(each)) for each in _RANGE.sub("\0", self.text).split("\0")]
        return re.compile("(0|[1-9][0-9]{0,3})".join(words))

    def read(self, words: str) -> tuple[Meaning, str] | None:
        """What folded ``words`` that begin with this phrase mean, and the words after it."""
        found = self._pattern.match(words)
        numbers = [int(number) for number in found.groups()] if found else []
        if found is None or any(n not in some for n, some in zip(numbers, self.ranges, strict=True)):
            return None
        said = dict(zip(self.names, numbers, strict=True))
        point = (said["x"], said["y"]) if "x" in said else None
        return (self.kind, said.get("amount", self.amount), point), words[found.end() :]

    def write(self, meaning: Meaning) -> str | None:
        """The words for this meaning; None where the phrase does not have it."""
        kind, amount, point = meaning
        said = {"amount": amount} if point is None else {"x": point[0], "y": point[1]}
        numbers = [said.get(name, -1) for name in self.names]
        known = kind is self.kind and ("amount" in self.names or amount == self.amount)
        if not known or any(n not in some for n, some in zip(numbers, self.ranges, strict=True)):
            return None
        rest = iter(numbers)
        return _RANGE.sub(lambda _: str(next(rest)), self.text)

    @property
    def examples(self) -> list[Meaning]:
        """The only thing it means, or its least and its greatest numbers."""
        texts = dict.fromkeys(_RANGE.sub(rf"\{end}", self.text) for end in (1, 2))
        return [found[0] for text in texts if (found := self.read(_folded(text)))]


@dataclass(frozen=True)
class Grammar:
    """The words of a model's actions: a mark, a space and a phrase at a reply's end.

    ``marks``: none where a reply is nothing but its actions. ``end``: what may follow the last phrase, such as a full
    stop. ``phrases``: the first of those that mean the same is the one that is written. ``most``: actions of a reply,
    with ``between`` between two. ``picture``: width and height that points count in. ``parser``: the entry point that
    turns a reply into these words; empty for none. ``data``: what :meth:`of` made it from.
    """

    name: str
    marks: tuple[str, ...]
    end: str
    phrases: tuple[Phrase, ...]
    data: Mapping[str, Any]
    most: int = 1
    between: str = ""
    picture: Point = (0, 0)
    parser: str = ""
    rewrite: Callable[[str], str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, data: Any, name: str) -> Grammar:
        """The grammar that ``data`` describes (docs/models.md); ``name`` is for messages. GrammarError."""
        try:
            kinds = [kind.name.lower() for kind in ActionKind]
            keys = {"marks", "end", "most", "between", "parser", *kinds}
            if set(data) - keys:
                raise GrammarError(f"it must hold no more than {', '.join(sorted(keys))}")
            phrases = tuple(
                phrase
                for kind, key in zip(ActionKind, kinds, strict=True)
                if (words := data.get(key)) is not None
                for phrase in _phrases(kind, words)
            )
            marks = tuple(_texts(data["marks"], "marks")) if "marks" in data else ()
            most, between, parser = data.get("most", 1), data.get("between", ""), data.get("parser", "")
            picture = tuple(data["go_to"]["picture"]) if "go_to" in data else (0, 0)
            rewrite = _parser(parser) if parser else None
            made = cls(name, marks, data.get("end") or "", phrases, data, most, between, picture, parser, rewrite)
            made._check()
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            why = str(error) if isinstance(error, GrammarError) else f"it is damaged ({error!r})"
            raise GrammarError(f"The grammar {name} cannot be used: {why}; see docs/models.md.") from error
        return made

    def _check(self) -> None:
        """GrammarError unless a run can move and end, and each action reads as what it is."""
        kinds = {phrase.kind for phrase in self.phrases}
        if ActionKind.STOP not in kinds or len(kinds) < 2:
            raise GrammarError("it must have stop, which ends a run, and an action that moves the robot")
        if type(self.most) is not int or not 1 <= self.most <= _MOST_ACTIONS:
            raise GrammarError(f"most, the actions of a reply, must be 1 to {_MOST_ACTIONS}")
        if self.most > 1 and self.marks and not self.between.endswith(" "):
            raise GrammarError("between, which stands between two actions, must end in a space")
        for phrase in self.phrases:
            for meaning in phrase.examples:
                text, action = phrase.write(meaning) or "", Action.of(meaning, self)
                self._check_reads(text, (action,))
                self._check_reads(f"{text}{self.end}", (action,))
                if self.most > 1 and phrase.kind not in _LAST:
                    self._check_reads(f"{text}{self.between}{text}", (action, action))

    def _check_reads(self, words: str, actions: tuple[Action, ...]) -> None:
        for lead in [f"{mark} " for mark in self.marks] or [""]:
            try:
                read = _parsed(lead + words, self)
            except UnparsableReply as error:
                raise GrammarError(f"'{lead}{words}' cannot be read, since {error}") from error
            if (read.action, *read.then) != actions:
                raise GrammarError(f"'{lead}{words}' reads as '{format_actions((read.action, *read.then))}'")

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        # re.ASCII matters: without it, case folding would let letters such as U+017F pass for "s".
        longest_first = sorted(self.marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)), re.ASCII | re.IGNORECASE)

    @property
    def written(self) -> dict[str, Any]:
        """For a constrained reply's form: marks, actions as they are written, and those that another follows."""
        lead, ends = " " if self.marks else "", dict.fromkeys(("", self.end))
        moves = [phrase.text for phrase in self.phrases if phrase.kind not in _LAST]
        return {
            "marks": self.marks,
            "actions": tuple(f"{lead}{phrase.text}{end}" for phrase in self.phrases for end in ends),
            "before": tuple(f"{lead}{text}{self.between.removesuffix(lead)}" for text in moves if self.most > 1),
            "most": self.most,
        }

    def longest(self, kind: ActionKind) -> int:
        """The greatest amount of a kind, cm or degrees; 0 where it has none."""
        some = [phrase for phrase in self.phrases if phrase.kind is kind]
        return max((amount for phrase in some for _, amount, _ in phrase.examples), default=0)

    def words_for(self, meaning: Meaning) -> str | None:
        """The words for a meaning, as they are written; None where the grammar has none."""
        return next((text for phrase in self.phrases if (text := phrase.write(meaning)) is not None), None)

    def amounts(self, kind: ActionKind) -> str:
        """The amounts of a kind, for messages."""
        some = [phrase for phrase in self.phrases if phrase.kind is kind]
        texts = dict.fromkeys(
            f"{phrase.ranges[0][0]} to {phrase.ranges[0][-1]}" if "amount" in phrase.names else str(phrase.amount)
            for phrase in some
        )
        return ", ".join(list(texts)[:9]) + (", and more" if len(texts) > 9 else "")

    def readings(self, words: str, most: int) -> Iterator[tuple[Meaning, ...]]:
        """Each way to read folded words as 1 to ``most`` actions, the last of which may be followed by the end."""
        for phrase in self.phrases:
            found = phrase.read(words)
            if found is None:
                continue
            meaning, rest = found
            if rest in ("", _folded(self.end)):
                yield (meaning,)
            if most > 1 and phrase.kind not in _LAST and rest.startswith(_folded(self.between)):
                for then in self.readings(rest[len(self.between) :], most - 1):
                    yield (meaning, *then)


def _phrases(kind: ActionKind, words: Mapping[str, Any]) -> Iterator[Phrase]:
    """The phrases of one kind of action. "{}" in ``phrases`` stands for the amount, "{x}" and "{y}" for a point.

    ``amounts``: numbers, texts with the number that each means, or a range such as "20..300"; in cm or degrees.
    ``picture``: width and height of the picture that points count in, in pixels.
    """
    key, amounts = kind.name.lower(), words.get("amounts")
    others = {ActionKind.STOP: set[str](), ActionKind.GO_TO: {"picture"}}.get(kind, {"amounts"})
    if set(words) - {"phrases"} - others:
        raise GrammarError(f"{key} must hold {' and '.join(sorted({'phrases', *others}))}, no more")
    for text in _texts(words.get("phrases"), f"{key}.phrases"):
        if _RANGE.search(text):
            raise GrammarError(f"a range of {key} must stand in its amounts, and {{}} in its phrases")
        if kind is ActionKind.STOP:
            if "{}" in text:
                raise GrammarError("a phrase of stop must hold {} nowhere")
            yield Phrase(text, kind)
        elif kind is ActionKind.GO_TO:
            yield _pointing(text, words.get("picture"))
        elif text.count("{}") != 1:
            raise GrammarError(f"a phrase of {key} must hold {{}}, for the amount, once")
        else:
            yield from _with_amounts(kind, text, amounts)


def _with_amounts(kind: ActionKind, text: str, amounts: Any) -> Iterator[Phrase]:
    key, most = kind.name.lower(), _MOST[kind]
    given = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", amounts) if isinstance(amounts, str) else None
    if given is not None:
        if not 1 <= int(given[1]) <= int(given[2]) <= most:
            raise GrammarError(f"{key}.amounts must be a range within 1..{most} cm or degrees")
        yield Phrase(text.replace("{}", f"{{{int(given[1])}..{int(given[2])}}}"), kind, names=("amount",))
        return
    named = dict(amounts) if isinstance(amounts, Mapping) else {str(amount): amount for amount in amounts or ()}
    if not named or not all(type(amount) is int and 1 <= amount <= most for amount in named.values()):
        raise GrammarError(f"{key}.amounts must be whole cm or degrees from 1 to {most}, or a range such as 20..60")
    yield from (Phrase(text.replace("{}", str(each)), kind, amount) for each, amount in named.items())


def _pointing(text: str, picture: Any) -> Phrase:
    sides = picture if isinstance(picture, list) else []
    if len(sides) != 2 or not all(type(side) is int and 2 <= side <= _MOST_PIXELS for side in sides):
        raise GrammarError(f"go_to.picture must be a width and a height, 2 to {_MOST_PIXELS} pixels each")
    names = tuple(name[1] for name in re.findall(r"\{[xy]\}", text))
    if sorted(names) != ["x", "y"]:
        raise GrammarError("a phrase of go_to must hold {x} and {y} once")
    for name, side in zip("xy", sides, strict=True):
        text = text.replace(f"{{{name}}}", f"{{0..{side - 1}}}")
    return Phrase(text, ActionKind.GO_TO, names=names)


def _parser(name: str) -> Callable[[str], str]:
    """The parser that an installed package offers under this name. GrammarError."""
    found = list(entry_points(group=PARSERS, name=name))
    if len(found) != 1:
        raise GrammarError(
            f"{len(found)} installed packages offer the parser '{name}' (entry points {PARSERS}), and one must"
        )
    try:
        parser: Callable[[str], str] = found[0].load()
    except Exception as error:  # another package's code
        raise GrammarError(f"the parser '{name}' cannot be loaded ({error!r})") from error
    return parser


def _texts(given: Any, what: str) -> list[str]:
    if not (isinstance(given, list) and given and all(isinstance(text, str) and text for text in given)):
        raise GrammarError(f"{what} must be a list of texts")
    return given


@dataclass(frozen=True)
class Action:
    """One action. ``amount``: cm for FORWARD, degrees for turns, else 0. ``grammar``: whose action it is.

    ``point``: of GO_TO, in pixels of the grammar's picture; None where only the goal is known. ``goal``: of GO_TO, m
    and rad to the left from where the robot stands; None until the point's place is known.
    """

    kind: ActionKind
    amount: int = 0
    grammar: Grammar = field(default_factory=lambda: SHIPPED, compare=False, repr=False)
    point: Point | None = None
    goal: tuple[float, float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        placed = self.kind is ActionKind.GO_TO and self.point is None and self.goal is not None
        allowed = [phrase.kind for phrase in self.grammar.phrases] if placed else []
        if self.kind not in allowed and self.grammar.words_for(self.meaning) is None:
            allowed_amounts = self.grammar.amounts(self.kind)
            raise ValueError(f"'{self.kind.value}' takes an amount of [{allowed_amounts}], not {self.amount!r}.")

    @classmethod
    def of(cls, meaning: Meaning, grammar: Grammar) -> Action:
        kind, amount, point = meaning
        return cls(kind, amount, grammar, point)

    @property
    def meaning(self) -> Meaning:
        return self.kind, self.amount, self.point

    @property
    def metres(self) -> float:
        """Distance to drive ahead, or to the goal, m; 0 for turns and stop."""
        if self.goal is not None:
            return self.goal[0]
        return self.amount / 100.0 if self.kind is ActionKind.FORWARD else 0.0

    @property
    def radians(self) -> float:
        """Angle to turn, or towards the goal, rad, positive to the left (counter-clockwise); 0 for forward and stop."""
        if self.goal is not None:
            return self.goal[1]
        if self.kind is ActionKind.TURN_LEFT:
            return math.radians(self.amount)
        if self.kind is ActionKind.TURN_RIGHT:
            return -math.radians(self.amount)
        return 0.0


@dataclass(frozen=True)
class ParsedReply:
    """A parsed reply; ``reasoning`` is the text before the action, white space collapsed. ``then``: more actions."""

    reasoning: str
    action: Action
    then: tuple[Action, ...] = ()


_SPACE = re.compile(r"\s+", re.ASCII)
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def _folded(text: str) -> str:
    return text.translate(_ASCII_LOWER)


def parse_reply(text: str, grammar: Grammar | None = None) -> ParsedReply:
    """Split a reply into reasoning and actions.

    :raises UnparsableReply: with a sentence that quotes the end of the reply.
    """
    grammar = grammar or SHIPPED
    if grammar.rewrite is not None:
        try:
            text = grammar.rewrite(text)
        except Exception as error:  # another package's code: nothing that it does may move the robot
            raise UnparsableReply(f"the parser '{grammar.parser}' cannot read it ({error}): {_tail(text)}") from error
        if not isinstance(text, str):
            raise UnparsableReply(f"the parser '{grammar.parser}' gave no text but {_tail(repr(text))}")
    return _parsed(text, grammar)


def _parsed(text: str, grammar: Grammar) -> ParsedReply:
    squeezed = _SPACE.sub(" ", text).strip(" ")
    if not grammar.marks:
        actions = _read_actions(squeezed, grammar)
        return ParsedReply("", actions[0], actions[1:])
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
    actions = _read_actions(phrase[1:], grammar)
    return ParsedReply(squeezed[: mark.start()].rstrip(" "), actions[0], actions[1:])


def _read_actions(words: str, grammar: Grammar) -> tuple[Action, ...]:
    """The actions that the words after the mark mean, white space already collapsed. Raises UnparsableReply."""
    found = list(dict.fromkeys(grammar.readings(_folded(words), grammar.most)))
    if not found:
        raise UnparsableReply(f"not an action of the grammar: {_tail(words)}")
    if len(found) > 1:
        raise UnparsableReply(f"it reads as {len(found)} different things: {_tail(words)}")
    return tuple(Action.of(meaning, grammar) for meaning in found[0])


def parse_action(phrase: str, grammar: Grammar | None = None) -> Action:
    """Parse the words of one action. Raises UnparsableReply."""
    actions = _read_actions(phrase, grammar or SHIPPED)
    if len(actions) > 1:
        raise UnparsableReply(f"more than one action: {_tail(phrase)}")
    return actions[0]


def action_in(text: str, grammar: Grammar | None = None) -> str:
    """The actions that a reply ends in, as the grammar writes them; empty when it does not parse."""
    try:
        reply = parse_reply(text, grammar)
    except UnparsableReply:
        return ""
    return format_actions((reply.action, *reply.then))


def format_actions(actions: Sequence[Action]) -> str:
    """Their grammar's words for the actions of one reply."""
    return actions[0].grammar.between.join(map(format_action, actions))


def format_action(action: Action) -> str:
    """Its grammar's words for ``action``, without the mark in front of them."""
    written = action.grammar.words_for(action.meaning)
    if written is None:  # a goal whose point is not known
        side = "left" if action.radians >= 0.0 else "right"
        return f"go {action.metres:.2f} m, {math.degrees(abs(action.radians)):.0f} degrees to the {side}"
    return written


def all_actions(grammar: Grammar | None = None) -> list[Action]:
    """The actions of the grammar, in the grammar's order; of a range its least and its greatest."""
    grammar = grammar or SHIPPED
    meanings = dict.fromkeys(meaning for phrase in grammar.phrases for meaning in phrase.examples)
    return [Action.of(meaning, grammar) for meaning in meanings]


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


def _in_dsds_words(name: str, forward: Any, turns: Any, **more: Any) -> Grammar:
    data: dict[str, Any] = {"marks": ["Action:"], "stop": {"phrases": ["stop"]}} | more
    data["forward"] = {"phrases": ["forward {} cm"], "amounts": forward}
    for side in ("left", "right"):
        data[f"turn_{side}"] = {"phrases": [f"turn {side} {{}} degrees"], "amounts": turns}
    return Grammar.of(data, name)


SHIPPED: Grammar = _in_dsds_words("dsd", list(FORWARD_CM), list(TURN_DEGREES))
_ANYWHERE = {"phrases": ["go to ({x}, {y})"], "picture": [_MOST_PIXELS, _MOST_PIXELS]}
ANY: Grammar = _in_dsds_words("any", "1..500", "1..180", go_to=_ANYWHERE)  # for showing any grammar's actions
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
# The four actions of StreamVLN (arXiv 2507.05240), up to four a reply: arrows of 25 cm and 15 degrees, and STOP, as its
# repository's streamvln_eval.py reads them.
_STREAMVLN = {
    "forward": {"phrases": ["{}"], "amounts": {"↑": 25}},
    "turn_left": {"phrases": ["{}"], "amounts": {"←": 15}},
    "turn_right": {"phrases": ["{}"], "amounts": {"→": 15}},
    "stop": {"phrases": ["STOP"]},
    "most": 4,
}
# The same arrows, or a pixel goal "x y" in 640 x 480 pictures, of InternVLA-N1's System 2, as internvla_n1_policy.py of
# the repository InternNav reads them. Its "↓" asks for a picture of a camera that looks down: the next one, here.
_INTERNVLA = _STREAMVLN | {"go_to": {"phrases": ["{x} {y}", "{x}, {y}"], "picture": [640, 480]}, "end": "↓"}
PRESETS = {
    grammar.name: grammar
    for grammar in (
        SHIPPED,
        Grammar.of(_NAVILA, "navila"),
        Grammar.of(_STREAMVLN, "streamvln"),
        Grammar.of(_INTERNVLA, "internvla-n1"),
    )
}


def action_of(message: Any, grammar: Grammar | None = None) -> Action:
    """The action that a NavAction announces, from rclpy or a bag.

    :param grammar: whose action it must be; ANY for showing it.
    :raises ValueError: with a sentence, when the grammar has no such action.
    """
    if not 0 <= message.kind < len(KINDS):
        raise ValueError(f"An action of kind {message.kind} is unknown; NavAction's kinds are 0 to {len(KINDS) - 1}.")
    kind, grammar = KINDS[message.kind], grammar or SHIPPED
    distance, angle = message.distance, message.angle
    if math.isfinite(distance) and math.isfinite(angle):
        for action in _announced(kind, distance, angle, grammar):
            if abs(action.metres - distance) < _ROUNDING and abs(action.radians - angle) < _ROUNDING:
                return action
    raise ValueError(
        f"'{kind.value}' over {distance:g} m and {angle:g} rad is not an action of the grammar; "
        f"it has {grammar.amounts(kind) or 'no such action'}{'' if kind not in _MOST else _UNIT[kind]}."
    )


_UNIT = {ActionKind.FORWARD: " cm", ActionKind.TURN_LEFT: " degrees", ActionKind.TURN_RIGHT: " degrees"}


def _announced(kind: ActionKind, distance: float, angle: float, grammar: Grammar) -> Iterator[Action]:
    """The action of this kind, if the grammar has one of about this size."""
    goes = any(phrase.kind is kind for phrase in grammar.phrases)
    if kind is ActionKind.GO_TO:
        if goes and distance > 0.0 and abs(angle) <= math.pi:
            yield Action(kind, goal=(distance, angle), grammar=grammar)
        return
    amount = distance * 100.0 if kind is ActionKind.FORWARD else math.degrees(abs(angle))
    if grammar.words_for((kind, round(amount), None)) is not None:
        yield Action(kind, round(amount), grammar=grammar)


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
