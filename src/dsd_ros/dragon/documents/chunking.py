# SPDX-License-Identifier: Apache-2.0
"""Read files as documents and cut them into chunks of whole sentences."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dsd_ros.dragon.documents.extraction import REFUSED

EXTRACTED = (".pdf", ".docx", ".html", ".htm")  # by ``extraction``, in a process of its own
SUFFIXES = (".md", ".txt", *EXTRACTED)
MAX_FILE_BYTES = 64 << 20  # of a file whose text is extracted
MAX_BYTES = 16 << 20  # of one document
CHUNK_TOKENS = 128  # the length all-MiniLM-L6-v2 was trained on, half of what it reads
OVERLAP_TOKENS = 24

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+")
_HEADING = re.compile(r"#{1,6}\s")
_BULLET = re.compile(r"\s*(?:[-*+]|\d{1,3}[.)])\s+")
_FRONT = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_MAX_FRONT = 16 << 10  # characters of front matter
_NAMED = 8  # of the files that are left out
_EXTRACTING_S = 120.0

_log = logging.getLogger(__name__)


class DocumentError(ValueError):
    """A document cannot be used: one sentence, with the remedy."""


@dataclass(frozen=True)
class Document:
    """A text and its ``source``, by which a later text replaces it."""

    source: str
    text: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise DocumentError("a document has no source; name the file or the program it comes from")
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise DocumentError(f"{self.source} is larger than {MAX_BYTES >> 20} MiB; split it")
        if _CONTROL.search(self.text):
            raise DocumentError(f"{self.source} holds control characters; give plain text")


@dataclass(frozen=True)
class Chunk:
    """A passage of a document, and the heading above it."""

    text: str
    heading: str = ""


def key_of(text: str) -> str:
    """32 hex digits for a text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The documents (SUFFIXES) among ``paths`` and in the folders among them, sorted within a folder.

    Of a folder, other files are left out, and a warning names them. DocumentError for a missing path, another kind of
    file, or a folder without documents.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file())
            documents = [each for each in inside if each.suffix.lower() in SUFFIXES]
            if others := [ascii(str(each))[1:-1] for each in inside if each.suffix.lower() not in SUFFIXES]:
                more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
                _log.warning("left out of %s: %s%s", ascii(str(path))[1:-1], ", ".join(others[:_NAMED]), more)
            if not documents:
                raise DocumentError(f"{path} holds no {' or '.join(SUFFIXES)} file; name another")
            found += documents
        elif not path.is_file():
            raise DocumentError(f"there is no file {path}; check its name")
        elif path.suffix.lower() not in SUFFIXES:
            raise DocumentError(f"{path} is not a {' or '.join(SUFFIXES)} file; save it as plain text or PDF")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read_document(path: Path) -> Document:
    """Read a UTF-8 text file, or the text of a PDF, DOCX or HTML file; its absolute path is the document's source.

    Lines between two ``---`` are left out as front matter only at the top and only if they are a YAML mapping; others
    are text. DocumentError for a file that cannot be used.
    """
    extracted = path.suffix.lower() in EXTRACTED
    most = MAX_FILE_BYTES if extracted else MAX_BYTES
    try:
        str(path.absolute()).encode()
        if path.stat().st_size > most:
            raise DocumentError(f"{path} is larger than {most >> 20} MiB; split it")
        if extracted:
            return Document(str(path.absolute()), _extracted(path))
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeEncodeError:
        raise DocumentError(f"the name {str(path)!a} is not UTF-8; rename the file") from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv -t UTF-8") from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    front = _FRONT.match(text)
    if front and _is_mapping(front[1]):
        text = text[front.end() :]
    return Document(str(path.absolute()), text)


def _extracted(path: Path) -> str:
    """The text in a file that is not plain text; DocumentError if there is none."""
    path.open("rb").close()  # may it be read?
    program = [sys.executable, str(Path(__file__).with_name("extraction.py")), str(path.absolute())]
    try:
        done = subprocess.run(program, capture_output=True, timeout=_EXTRACTING_S, check=False)
    except subprocess.TimeoutExpired:
        raise DocumentError(f"{path} takes more than {_EXTRACTING_S:g} s to read; split it") from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if done.returncode != REFUSED:
            reason = "crashes or takes too long to read; save it again, or as plain text"
        raise DocumentError(f"{path} {reason}")
    text = _CONTROL.sub(" ", done.stdout.decode("utf-8", "replace"))
    if not text.strip():
        raise DocumentError(f"{path} holds no text, only pictures perhaps; save it with text")
    return text


def read_documents(paths: Iterable[Path], refused: Callable[[str], object]) -> list[Document]:
    """Those files that can be used, as documents; ``refused`` gets a sentence for each other one."""
    found = []
    for path in paths:
        try:
            found.append(read_document(path))
        except DocumentError as error:
            refused(str(error))
    return found


def _is_mapping(front: str) -> bool:
    """Whether a text is a YAML mapping."""
    if len(front) > _MAX_FRONT:
        return False
    try:
        return isinstance(yaml.safe_load(front), dict)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


def chunks(
    text: str, count_tokens: Callable[[str], int], size: int = CHUNK_TOKENS, overlap: int = OVERLAP_TOKENS
) -> Iterator[Chunk]:
    """Cut ``text`` lazily into chunks of whole sentences, at most ``size`` tokens each.

    Each chunk but a section's first repeats the last sentences of the one before, up to ``overlap`` tokens. A
    Markdown heading begins a section and is stored beside its chunks; list marks and line breaks are dropped. A
    sentence longer than ``size`` is cut between words.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"an overlap of {overlap} tokens needs longer chunks than {size}; make one of them shorter")
    section, held, length = "", list[tuple[str, int]](), 0
    fresh = False  # whether ``held`` has a sentence that is in no chunk yet
    for heading, sentence, tokens in _sentences(text, count_tokens, size):
        if heading != section or length + tokens > size:
            if fresh:
                yield _chunk(held, section)
            tail: list[tuple[str, int]] = []
            room = min(overlap, size - tokens) if heading == section else 0
            for earlier, cost in reversed(held):
                room -= cost
                if room < 0:
                    break
                tail.insert(0, (earlier, cost))
            held, length, section = tail, sum(cost for _, cost in tail), heading
        held.append((sentence, tokens))
        length += tokens
        fresh = True
    if fresh:
        yield _chunk(held, section)


def _chunk(sentences: list[tuple[str, int]], heading: str) -> Chunk:
    text = " ".join(sentence for sentence, _ in sentences)
    return Chunk(text, heading)


def _sentences(text: str, count_tokens: Callable[[str], int], size: int) -> Iterator[tuple[str, str, int]]:
    """(heading, sentence, its number of tokens) of a text; a sentence is one line of at most ``size`` tokens."""
    heading = ""
    for paragraph, title in _paragraphs(text):
        if title is not None:
            heading = title
            continue
        for sentence in _SENTENCE_END.split(paragraph):
            for part in _fitting(sentence.strip(), count_tokens, size):
                yield heading, part, count_tokens(part)


def _paragraphs(text: str) -> Iterator[tuple[str, str | None]]:
    """(paragraph or list item on one line without marks, None), or ("", title) for a heading."""
    lines: list[str] = []
    for line in text.split("\n"):
        bare = "".join(line.split())
        rule = len(bare) >= 3 and bare[0] in "-*_" and not bare.strip(bare[0])
        bullet = _BULLET.match(line)
        titled = _HEADING.match(line)
        if lines and (bullet or titled or rule or not bare):
            yield " ".join(lines), None
            lines = []
        if titled:
            yield "", line[titled.end() :].strip().rstrip("#").rstrip()
        elif bare and not rule:
            lines.append(" ".join((line[bullet.end() :] if bullet else line).split()))
    if lines:
        yield " ".join(lines), None


def _fitting(sentence: str, count_tokens: Callable[[str], int], size: int) -> Iterator[str]:
    """The sentence, halved between words until each part fits; a word that is too long is halved too."""
    if not sentence:
        return
    if len(sentence) == 1 or count_tokens(sentence) <= size:
        yield sentence
        return
    middle = len(sentence) // 2
    cut = max(sentence.find(" ", middle), sentence.rfind(" ", 0, middle))
    if cut < 0:
        cut = middle
    yield from _fitting(sentence[:cut].strip(), count_tokens, size)
    yield from _fitting(sentence[cut:].strip(), count_tokens, size)
