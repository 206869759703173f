"""Documents for the stores: text files read, and cut into chunks that end where sentences do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".md", ".txt")
MAX_BYTES = 16 << 20  # of one document
CHUNK_TOKENS = 128  # the length that all-MiniLM-L6-v2 was trained on; half of what it reads
OVERLAP_TOKENS = 24

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+")
_HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*\s*")
_BULLET = re.compile(r"\s*(?:[-*+]|\d{1,3}[.)])\s+")
_FRONT = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_TOLD = 200  # characters of a place, a time


class DocumentError(ValueError):
    """A document that cannot be taken: one sentence, with the remedy."""


@dataclass(frozen=True)
class Document:
    """A text and where it is from. ``source`` names it: another text of the same source replaces it.

    ``place`` and ``time`` tell where and when, in the owner's words or ISO 8601; empty where not known.
    """

    source: str
    text: str
    place: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise DocumentError("a document has no source; name the file or the program it is from")
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise DocumentError(f"{self.source} is larger than {MAX_BYTES >> 20} MiB; split it")
        if _CONTROL.search(self.text):
            raise DocumentError(f"{self.source} holds control characters; give plain text")
        for name, said in (("place", self.place), ("time", self.time)):
            if len(said) > _TOLD or "\n" in said:
                raise DocumentError(
                    f"the {name} of {self.source} is not one line of at most {_TOLD} characters; shorten it"
                )

    @property
    def digest(self) -> str:
        """32 hex digits over text, place and time."""
        return key_of("\0".join((self.text, self.place, self.time)))


@dataclass(frozen=True)
class Chunk:
    """A passage of a document. ``key`` is a digest of ``text``: the same text has the same key anywhere."""

    key: str
    text: str
    heading: str = ""


def key_of(text: str) -> str:
    """32 hex digits for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The text files (.md, .txt) that ``paths`` name: files themselves, and all those in folders, sorted.

    DocumentError for a path that is not there, is of another kind, or is a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise DocumentError(f"{path} holds no {' or '.join(SUFFIXES)} file; name another")
            found += inside
        elif path.suffix not in SUFFIXES:
            raise DocumentError(f"{path} is not a {' or '.join(SUFFIXES)} file; save it as plain text")
        elif not path.is_file():
            raise DocumentError(f"there is no file {path}; check its name")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read_document(path: Path, place: str = "", time: str = "") -> Document:
    """The document in a text file, UTF-8; its source is the file's absolute path.

    Lines ``place: ...`` and ``time: ...`` between two lines ``---`` at the top say where and when, unless
    ``place`` and ``time`` do. DocumentError for what is not such a file.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DocumentError(f"{path} is larger than {MAX_BYTES >> 20} MiB; split it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv -t UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    front = _FRONT.match(text)
    if front:
        text = text[front.end() :]
        for line in front[1].splitlines():
            name, _, said = line.partition(":")
            if name.strip() == "place":
                place = place or said.strip()
            elif name.strip() == "time":
                time = time or said.strip()
    return Document(str(path.absolute()), text, place, time)


def chunks(
    text: str, count_tokens: Callable[[str], int], size: int = CHUNK_TOKENS, overlap: int = OVERLAP_TOKENS
) -> Iterator[Chunk]:
    """``text`` in chunks of whole sentences, at most ``size`` tokens each.

    Each but a section's first begins with the last sentences, at most ``overlap`` tokens, of the one before it.
    A Markdown heading begins a section and is kept beside its chunks; list marks and line breaks are left out.
    A sentence longer than ``size`` is cut between words. Lazy: holds one chunk at a time.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"an overlap of {overlap} tokens needs chunks of more; they have {size}")
    section, held, length = "", [], 0  # type: str, list[tuple[str, int]], int
    fresh = False  # whether ``held`` has a sentence that no chunk has said yet
    for heading, sentence, tokens in _sentences(text, count_tokens, size):
        if heading != section or length + tokens > size:
            if fresh:
                yield _chunk(held, section)
            tail: list[tuple[str, int]] = []
            room = min(overlap, size - tokens) if heading == section else 0
            for said, cost in reversed(held):
                room -= cost
                if room < 0:
                    break
                tail.insert(0, (said, cost))
            held, length, section = tail, sum(cost for _, cost in tail), heading
        held.append((sentence, tokens))
        length += tokens
        fresh = True
    if fresh:
        yield _chunk(held, section)


def _chunk(sentences: list[tuple[str, int]], heading: str) -> Chunk:
    text = " ".join(sentence for sentence, _ in sentences)
    return Chunk(key_of(text), text, heading)


def _sentences(text: str, count_tokens: Callable[[str], int], size: int) -> Iterator[tuple[str, str, int]]:
    """(heading, sentence, its tokens) of a text, each sentence on one line and at most ``size`` tokens."""
    heading = ""
    for paragraph, title in _paragraphs(text):
        if title is not None:
            heading = title
            continue
        for sentence in _SENTENCE_END.split(paragraph):
            for part in _fitting(sentence.strip(), count_tokens, size):
                yield heading, part, count_tokens(part)


def _paragraphs(text: str) -> Iterator[tuple[str, str | None]]:
    """List items and paragraphs, each on one line, without marks; of headings the title is the second."""
    lines: list[str] = []
    for line in text.split("\n"):
        bullet = _BULLET.match(line)
        titled = _HEADING.fullmatch(line)
        if lines and (bullet or titled or not line.strip()):
            yield " ".join(lines), None
            lines = []
        if titled:
            yield "", titled[1]
        elif line.strip():
            lines.append(" ".join((line[bullet.end() :] if bullet else line).split()))
    if lines:
        yield " ".join(lines), None


def _fitting(sentence: str, count_tokens: Callable[[str], int], size: int) -> Iterator[str]:
    """The sentence, halved between words until each part fits; a word that does not fit is halved itself."""
    if not sentence:
        return
    if len(sentence) == 1 or count_tokens(sentence) <= size:
        yield sentence
        return
    middle = len(sentence) // 2
    cut = sentence.find(" ", middle)
    if cut < 0:
        cut = sentence.rfind(" ", 0, middle)
    if cut < 0:
        cut = middle
    yield from _fitting(sentence[:cut].strip(), count_tokens, size)
    yield from _fitting(sentence[cut:].strip(), count_tokens, size)
