"""What a replay asks and gets, step by step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One recorded step: what a reply is asked about."""

    stamp: int  # of the picture, ns
    png: bytes
    format: str  # of a CompressedImage
    instruction: str
    history: tuple[tuple[int, str], ...] = ()  # (stamp in ns, action) of the steps before, oldest first


@dataclass(frozen=True)
class Reply:
    """What came of it. ``tokens`` None where they could not be read off the topics; ``message``: why there is none."""

    text: str = ""
    tokens: list[int] | None = None
    count: int = 0  # of its tokens
    rounds: int = 0
    seconds: float = 0.0
    stamp: int = 0  # of the picture it is about, ns
    message: str = ""
