# SPDX-License-Identifier: Apache-2.0
"""The reply grammar: reasoning, then exactly one action at the end.

    <reasoning> Action: forward 25|50|75 cm
                Action: turn left|right 15|30|45 degrees
                Action: stop

A reply that does not parse is not executed. The case of ASCII letters is ignored, and a run of ASCII white space
(line breaks included) counts as one space; neither can change the meaning. Nothing may follow the action, ``Action:``
occurs once, and amounts are written exactly as above.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


@dataclass(frozen=True)
class Action:
    """One action. ``amount``: cm for FORWARD, degrees for turns, 0 for STOP."""

    kind: ActionKind
    amount: int = 0

    def __post_init__(self) -> None:
        allowed = _AMOUNTS[self.kind]
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


_AMOUNTS = {
    ActionKind.FORWARD: FORWARD_CM,
    ActionKind.TURN_LEFT: TURN_DEGREES,
    ActionKind.TURN_RIGHT: TURN_DEGREES,
    ActionKind.STOP: (0,),
}

# re.ASCII matters: without it, case folding would let letters such as U+017F pass for "s".
_MARK = re.compile(r"action:", re.ASCII | re.IGNORECASE)
_SPACE = re.compile(r"\s+", re.ASCII)
_ACTION = re.compile(
    r"(?P<forward>forward) (?P<cm>25|50|75) cm"
    r"|(?P<turn>turn (?:left|right)) (?P<degrees>15|30|45) degrees"
    r"|stop",
    re.ASCII | re.IGNORECASE,
)


def parse_reply(text: str) -> ParsedReply:
    """Split a reply into reasoning and action.

    :raises UnparsableReply: with a sentence that quotes the end of the reply.
    """
    squeezed = _SPACE.sub(" ", text).strip(" ")
    marks = list(_MARK.finditer(squeezed))
    if len(marks) != 1:
        count = "no action" if not marks else f"{len(marks)} actions"
        raise UnparsableReply(f"the reply has {count} where one is wanted: {_tail(squeezed)}")
    mark = marks[0]
    if mark.start() > 0 and squeezed[mark.start() - 1] != " ":
        raise UnparsableReply(f"'Action:' does not stand on its own: {_tail(squeezed)}")
    phrase = squeezed[mark.end() :]
    if not phrase.startswith(" "):
        raise UnparsableReply(f"a space is missing after 'Action:': {_tail(squeezed)}")
    reasoning = squeezed[: mark.start()].rstrip(" ")
    return ParsedReply(reasoning=reasoning, action=parse_action(phrase[1:]))


def parse_action(phrase: str) -> Action:
    """Parse the words after ``Action: ``, white space already collapsed. Raises UnparsableReply."""
    match = _ACTION.fullmatch(phrase)
    if match is None:
        raise UnparsableReply(f"not an action of the grammar: {_tail(phrase)}")
    if match["forward"]:
        return Action(ActionKind.FORWARD, int(match["cm"]))
    if match["turn"]:
        return Action(ActionKind(match["turn"].lower()), int(match["degrees"]))
    return Action(ActionKind.STOP)


def format_action(action: Action) -> str:
    """The grammar's words for ``action``, without the ``Action: `` in front of them."""
    if action.kind is ActionKind.STOP:
        return "stop"
    unit = "cm" if action.kind is ActionKind.FORWARD else "degrees"
    return f"{action.kind.value} {action.amount} {unit}"


def all_actions() -> list[Action]:
    """Every action of the grammar, in the grammar's order."""
    return [Action(kind, amount) for kind in ActionKind for amount in _AMOUNTS[kind]]


def action_of(message: Any) -> Action:
    """The action that a NavAction announces, from rclpy or a bag. In older bags ``amount`` is its cm or degrees.

    :raises ValueError: with a sentence, when the grammar has no such action.
    """
    if not 0 <= message.kind < len(KINDS):
        raise ValueError(f"An action of kind {message.kind} is unknown; NavAction's kinds are 0 to {len(KINDS) - 1}.")
    kind = KINDS[message.kind]
    if hasattr(message, "amount"):
        return Action(kind, int(message.amount))
    known = [action for action in all_actions() if action.kind is kind]
    for action in known:
        if abs(action.metres - message.distance) < _ROUNDING and abs(action.radians - message.angle) < _ROUNDING:
            return action
    raise ValueError(
        f"'{kind.value}' over {message.distance:g} m and {message.angle:g} rad is not an action of the grammar; "
        f"it has {', '.join(f'{action.metres:g} m and {action.radians:.4f} rad' for action in known)}."
    )


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
