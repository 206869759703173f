"""Instructions that only memory can make plain: which they are, and what an answer makes of them. Pure.

``auto`` asks memory where an instruction speaks of its speaker: "the chair I like", "my daughter's ball", "what belongs
to me". It does so in the words I, we, my, our, mine, ours, in capitals or not, and in me, us unless these only say for
whom something is done ("bring me to the red chair", "show us the ball"); and not in the wish itself ("I want you to
find the red chair", "I would like to go ..."). Whatever else needs memory is for ``always``.
"""

from __future__ import annotations

import re

from dsd_ros.limits import MAX_INSTRUCTION_CHARS

WHEN = ("never", "auto", "always")

_WISH = re.compile(r"\b(?:i|we)(?:\s+(?:want|need|wish)|(?:\s+would|'d)\s+like)\s+(?:you\s+)?to\b", re.IGNORECASE)
_FOR_WHOM = re.compile(
    r"\b(?:bring|take|lead|guide|walk|drive|carry|find|show|get|fetch|tell|help|let|accompany|follow)\s+(?:me|us)\b",
    re.IGNORECASE,
)
_SPEAKER = re.compile(r"\b(?:i|we|my|our|mine|ours|me|us)\b", re.IGNORECASE)
_GO = re.compile(r"(?:^|\s)Go:")
_UNKNOWN = re.compile(r"\bI do not know\b")


def needs_memory(instruction: str, when: str) -> bool:
    """Whether memory is asked first; ``when`` is one of WHEN."""
    if when != "auto":
        return when == "always"
    plain = instruction.replace("\u2019", "'")
    return _SPEAKER.search(_FOR_WHOM.sub(" ", _WISH.sub(" ", plain))) is not None


def instruction_in(answer: str) -> str:
    """What an answer has the robot do: what stands behind the one ``Go:`` at its end; empty where it does not know."""
    squeezed = " ".join(answer.split())
    parts = _GO.split(squeezed)
    if len(parts) != 2 or _UNKNOWN.search(squeezed):
        return ""
    instruction = parts[1].strip().rstrip(".").strip()
    return instruction if len(instruction) <= MAX_INSTRUCTION_CHARS else ""
