# SPDX-License-Identifier: Apache-2.0
"""Goals that need the robot's memory: which ones do, and the instruction that an answer from memory makes of them.

With ``auto``, memory is asked when an instruction refers to its speaker: "the chair I like", "my daughter's ball". Me
and us do not count where they only name who benefits ("show us the ball"), nor does the wish itself ("I want you to
find the red chair"). Other goals that need memory require ``always``. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.navigation.settings import RunOutcome

WHEN = ("never", "auto", "always")

_WISH = re.compile(r"\b(?:i|we)(?:\s+(?:want|need|wish)|(?:\s+would|'d)\s+like)\s+(?:you\s+)?to\b", re.IGNORECASE)
_BENEFICIARY = re.compile(
    r"\b(?:bring|take|lead|guide|walk|drive|carry|find|show|get|fetch|tell|help|let|accompany|follow)\s+(?:me|us)\b",
    re.IGNORECASE,
)
_SPEAKER = re.compile(r"\b(?:i|we|my|our|mine|ours|me|us)\b", re.IGNORECASE)
_GO = re.compile(r"(?:^|\s)Go:")
_UNKNOWN = re.compile(r"\bI do not know\b")


class ResolvedGoal(NamedTuple):
    """The instruction to carry out; if it is empty, ``outcome`` and ``sentence`` say why there is none."""

    instruction: str
    answer: str = ""
    outcome: RunOutcome = RunOutcome.UNKNOWN
    sentence: str = ""

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


def resolve_answer(success: bool, message: str, text: str) -> ResolvedGoal:
    """The goal that memory's answer ``text`` names; NOT_KNOWN where it names none."""
    if not success:
        return unknown(f"Memory did not answer: {message}", text)
    instruction = instruction_in(text)
    if not instruction:
        return unknown(f"Memory does not say where to go: {text}", text)
    return ResolvedGoal(instruction, text)


def unknown(sentence: str, answer: str = "") -> ResolvedGoal:
    """A goal that memory could not resolve."""
    return ResolvedGoal("", answer, RunOutcome.NOT_KNOWN, sentence)
