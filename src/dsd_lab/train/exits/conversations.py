# SPDX-License-Identifier: Apache-2.0
"""Conversations with and without images, from the JSONL or JSON files of public datasets.

A turn is {"from": "human", "value": ...} (ShareGPT, LLaVA) or {"role": "user", "content": ...}, whose content is a text
or a list of parts. Images are named under "image" or "images"; <image> marks their places.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_ROLES = {"human": "user", "user": "user", "system": "system"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")
_NAMED = 5  # skipped records that are named
_IMAGE_MARK = re.compile(r"\s*<image>\s*")


class ConversationError(ValueError):
    """A record or file that holds no conversation; the message says which and why."""


@dataclass(frozen=True)
class Turn:
    """One message; ``parts`` are texts, or None for an image."""

    role: str
    parts: tuple[str | None, ...]

    @property
    def text(self) -> str:
        """The message without its images."""
        return "".join(part for part in self.parts if part is not None)

    def as_message(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        if None not in self.parts:
            return {"role": self.role, "content": self.text}
        parts = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in self.parts]
        return {"role": self.role, "content": parts}


@dataclass(frozen=True)
class Conversation:
    """Turns with at least one reply to a question, and their images in order."""

    where: str
    turns: tuple[Turn, ...]
    images: tuple[Path, ...] = ()


def read_conversations(
    path: Path, images: bool = True, warn: Callable[[str], None] = _LOG.warning
) -> list[Conversation]:
    """All usable conversations of a ``.jsonl`` or ``.json`` file, in order; ConversationError where there are none.

    A bad record is skipped, and ``warn`` hears of the first few. Without ``images``, records with images are bad.
    """
    found: list[Conversation] = []
    skipped = 0
    for where, record in _records(path):
        try:
            if isinstance(record, Exception):
                raise ConversationError(f"it is not JSON ({record})")
            found.append(_conversation(where, record, path.parent, images))
        except ConversationError as error:
            skipped += 1
            if skipped <= _NAMED:
                warn(f"{path.name}, {where} is skipped: {error}")
    if skipped > _NAMED:
        warn(f"{path.name}: {skipped} records were skipped in all, {len(found)} are used")
    if not found:
        raise ConversationError(
            f"{path} holds no usable conversation; a record needs 'conversations' or 'messages' "
            "with a user's turn and a reply"
        )
    return found


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversationError(f"{path} cannot be read as text: {error}") from error
    if path.suffix == ".json":
        try:
            records = json.loads(text)
        except ValueError as error:
            raise ConversationError(f"{path} is not JSON ({error}); with one record a line name it .jsonl") from error
        if not isinstance(records, list):
            raise ConversationError(f"{path} must hold a JSON list of conversations")
        for number, record in enumerate(records, 1):
            yield f"record {number}", record
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            yield f"line {number}", error


def _conversation(where: str, record: Any, folder: Path, images: bool) -> Conversation:
    if not isinstance(record, dict):
        raise ConversationError("it is not a JSON object")
    turns = record.get("conversations", record.get("messages"))
    if not isinstance(turns, list) or not turns:
        raise ConversationError("it has no list under 'conversations' or 'messages'")
    read = [_turn(turn) for turn in turns]
    while read and read[0].role == "assistant":  # ShareGPT's continuations of a lost beginning
        read.pop(0)
    roles = [turn.role for turn in read]
    if "user" not in roles or "assistant" not in roles[roles.index("user") :]:
        raise ConversationError("no reply follows a user's turn")
    for before, after in itertools.pairwise(roles):
        if after in (before, "system"):
            raise ConversationError(f"a turn of {after} follows one of {before}")
    named = record.get("images", record.get("image")) or []
    paths = tuple(_image_path(name, folder) for name in (named if isinstance(named, list) else [named]))
    if paths and not images:
        raise ConversationError("it shows images and this model reads text only")
    return Conversation(where, tuple(_place_images(read, len(paths))), paths)


def _turn(turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise ConversationError("a turn is not a JSON object")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ConversationError(f"a turn is from {name!r}, neither user, assistant nor system")
    content = turn.get("content", turn.get("value"))
    parts: list[str | None] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict):
            part = "<image>" if part.get("type") == "image" else part.get("text")
        if not isinstance(part, str):
            raise ConversationError(f"a turn of {role} holds something that is not text")
        first, *rest = _IMAGE_MARK.split(part)
        found = [first, *(one for piece in rest for one in (None, piece))]
        parts += [piece for piece in found if piece != ""]
    kept = Turn(role, tuple(parts))
    if role != "user" and None in parts:
        raise ConversationError(f"a turn of {role} shows an image")
    if not kept.text.strip() and None not in parts:
        raise ConversationError(f"a turn of {role} is empty")
    return kept


def _place_images(turns: list[Turn], count: int) -> list[Turn]:
    """Images without a mark follow the first question, which the model then reads first."""
    marks = sum(turn.parts.count(None) for turn in turns)
    if marks == 0 and count:
        first = next(n for n, turn in enumerate(turns) if turn.role == "user")
        turns[first] = Turn("user", turns[first].parts + (None,) * count)
    elif marks != count:
        raise ConversationError(f"it marks {marks} images in its text and names {count}")
    return turns


def _image_path(name: Any, folder: Path) -> Path:
    if isinstance(name, dict):
        name = name.get("path")
    if not isinstance(name, str) or not name:
        raise ConversationError("an image is not named by its path")
    path = folder / name
    with suppress(OSError, ValueError):
        if path.is_file():
            return path
    raise ConversationError(f"the image {name[:200]} does not exist")
