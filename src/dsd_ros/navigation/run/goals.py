# SPDX-License-Identifier: Apache-2.0
"""Goals that need the robot's memory: which ones do, what an answer makes of them, and what the robot asks without one.

With ``auto``, memory is asked when an instruction refers to its speaker: "the chair I like", "my daughter's ball". Me
and us do not count where they only name who benefits ("show us the ball"), nor does the wish itself ("I want you to
find the red chair"). Other goals that need memory require ``always``. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.navigation.run.settings import RunOutcome

WHEN = ("never", "auto", "always")

_WISH = re.compile(r"\b(?:i|we)(?:\s+(?:want|need|wish)|(?:\s+would|'d)\s+like)\s+(?:you\s+)?to\b", re.IGNORECASE)
_BENEFICIARY = re.compile(
    r"\b(?:bring|take|lead|guide|walk|drive|carry|find|show|get|fetch|tell|help|let|accompany|follow)\s+(?:me|us)\b",
    re.IGNORECASE,
)
_SPEAKER = re.compile(r"\b(?:i|we|my|our|mine|ours|me|us)\b", re.IGNORECASE)
_GO = re.compile(r"(?:^|\s)Go:")
_UNKNOWN = re.compile(r"\bI do not know\b")
_QUOTED = 400  # most characters of a goal in a question
_REMEDY = "Say it by its colour, or add a document that tells it."
_VERBS = re.compile(  # what is asked for, before the thing: "please bring me to", "go where ... is"
    r"^(?:please\s+)?(?:(?:can|could|would|will)\s+you\s+)?(?:(?:go|come)\s+and\s+)?"
    r"(?:bring|take|lead|guide|walk|drive|carry|find|show|get|fetch|go|come|move|navigate|look|search)"
    r"(?:\s+(?:me|us))?(?:\s+(?:to|towards?|for|where|from|at))?\s+",
    re.IGNORECASE,
)
_PLACED = re.compile(r"\s+(?:is|are|stands?|lies?)$", re.IGNORECASE)
_OWNED = re.compile(r"^((?:my|our|your|his|her|their|the)(?:\s+\w+)*?\s+\w+'s?)\s+(\w+)$", re.IGNORECASE)
_OWN = re.compile(r"^(my|our)\s+(\w+)$", re.IGNORECASE)
_WHICH = re.compile(r"^(?:the|that|this)\s+(\w+)(?:\s+(?:that|which|who))?\s+(?=\w)", re.IGNORECASE)
_OTHER_PERSON = {
    "i": "you", "we": "you", "me": "you", "us": "you", "my": "your", "our": "your", "mine": "yours", "ours": "yours",
    "am": "are", "myself": "yourself", "you": "I", "your": "my",
}  # fmt: skip


class ResolvedGoal(NamedTuple):
    """The instruction to carry out; if it is empty, ``outcome`` and ``sentence`` say why there is none.

    ``question``: what the robot asks the person then. ``sources``: the documents that tell the answer, as messages.
    """

    instruction: str
    answer: str = ""
    outcome: RunOutcome = RunOutcome.UNKNOWN
    sentence: str = ""
    question: str = ""
    sources: Sequence[Any] = ()

    def explain(self, original: str, sentence: str) -> str:
        """A run's final sentence, with what the goal's own words were resolved to."""
        if self.instruction == original:
            return sentence
        return f"'{original}' is '{self.instruction}'. {sentence}"


STOPPED = ResolvedGoal("", "", RunOutcome.SHUTDOWN, "The navigation node was stopped.")
CANCELLED = ResolvedGoal("", "", RunOutcome.CANCELLED, "Cancelled by the client.")


def needs_memory(instruction: str, when: str) -> bool:
    """Whether memory is asked first; ``when`` is one of WHEN."""
    if when != "auto":
        return when == "always"
    plain = instruction.replace("\u2019", "'")
    return _SPEAKER.search(_BENEFICIARY.sub(" ", _WISH.sub(" ", plain))) is not None


def instruction_in(answer: str) -> str:
    """The instruction in an answer, after the one ``Go:`` at its end; empty where the answer has none."""
    squeezed = " ".join(answer.split())
    parts = _GO.split(squeezed)
    if len(parts) != 2 or _UNKNOWN.search(squeezed):
        return ""
    instruction = parts[1].strip().rstrip(".").strip()
    return instruction if len(instruction) <= MAX_INSTRUCTION_CHARS else ""


def resolve_answer(goal: str, success: bool, message: str, text: str, sources: Sequence[Any] = ()) -> ResolvedGoal:
    """What ``goal`` means by memory's answer ``text``; NOT_KNOWN, and a question, where it names no instruction."""
    if not success:
        return unknown(goal, f"Memory did not answer: {message}", text)
    instruction = instruction_in(text)
    if instruction:
        return ResolvedGoal(instruction, text, sources=sources)
    return unknown(goal, f"Memory's answer: {text}", text, sources)


def question_about(goal: str) -> str:
    """What a robot that does not know ``goal`` says to the person who gave it.

    "bring me to the chair I like" gives "I do not know which chair you like. Say it by its colour, ...".
    """
    plain = " ".join(goal.replace("\u2019", "'").split())[:_QUOTED].rstrip(".!?, ")
    thing = _PLACED.sub("", _VERBS.sub("", _WISH.sub("", plain).strip(), count=1))
    if owned := _OWNED.match(thing):
        unclear = f"which {owned[2]} is {_turned(owned[1])}"
    elif owned := _OWN.match(thing):
        unclear = f"which {owned[2]} is yours"
    elif which := _WHICH.match(thing):
        unclear = f"which {which[1]} {_turned(thing[which.end() :])}"
    else:
        unclear = f"what '{plain}' means"
    return f"I do not know {unclear}. {_REMEDY}"


def _turned(words: str) -> str:
    """The speaker's words as the robot says them: "I like" becomes "you like"."""
    return re.sub(r"\b\w+\b", lambda word: _OTHER_PERSON.get(word[0].lower(), word[0]), words)


def unknown(goal: str, why: str, answer: str = "", sources: Sequence[Any] = ()) -> ResolvedGoal:
    """A goal that memory could not resolve, with the robot's question about it."""
    asked = question_about(goal)
    return ResolvedGoal("", answer, RunOutcome.NOT_KNOWN, f"{asked} {why}", asked, sources)
