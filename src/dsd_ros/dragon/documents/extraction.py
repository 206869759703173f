# SPDX-License-Identifier: Apache-2.0
"""The text of .pdf, .docx and .html files, read in a process of its own: ``python extraction.py FILE`` writes it out.

A file may be made to exhaust or crash whoever reads it. So the process has limits of memory, time and output, and
whatever happens to it is a sentence about that file. It imports nothing of the project. Headings become lines that
begin with ``#``, list items lines that begin with ``-``, paragraphs are apart by empty lines.
"""

from __future__ import annotations

import html.parser
import logging
import re
import resource
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

REFUSED = 3  # exit status; the reason is on stderr
MOST_MEMORY, MOST_SECONDS = 1 << 30, 60
MOST_TEXT = 16 << 20  # bytes written
_MOST_XML = 64 << 20
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_OLE = b"\xd0\xcf\x11\xe0"  # how an encrypted Office file begins
_BLOCK = re.compile("p|div|br|tr|table|[uod]l|d[td]|section|article|header|footer|main|aside|pre|blockquote|hr")
_UNSEEN = ("script", "style", "template", "noscript", "svg")


class Refused(Exception):
    """The file cannot be used: the rest of a sentence that begins with its name."""


def pdf_text(path: Path) -> Iterator[str]:
    """The pages' text, in the order in which it was written."""
    try:
        import pypdf
    except ImportError:
        raise Refused("is a PDF, which needs the package pypdf; pip install pypdf") from None
    reader = pypdf.PdfReader(path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise Refused("is locked by a password; save it without one")
    for page in reader.pages:
        text = page.extract_text()
        yield re.sub(r"(\w)-\n(?=[a-z])", r"\1", text)  # words that were hyphenated
        yield "\n\n"


def docx_text(path: Path) -> Iterator[str]:
    """The body's paragraphs, list items and rows of tables."""
    with path.open("rb") as stream:
        if stream.read(4) == _OLE:
            raise Refused("is locked by a password, or an old .doc; save it as .docx without one")
    with zipfile.ZipFile(path) as archive:
        about = archive.getinfo("word/document.xml")
        if about.file_size > _MOST_XML:
            raise Refused(f"unpacks to more than {_MOST_XML >> 20} MiB; split it")
        with archive.open(about) as stream:
            content = stream.read(_MOST_XML + 1)
    if len(content) > _MOST_XML or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise Refused("is not as a word processor writes it; save it again")
    body = ElementTree.fromstring(content).find(f"{_WORD}body")  # noqa: S314 (no entities, and within limits)
    for block in () if body is None else body:
        if block.tag == f"{_WORD}tbl":
            for row in block.iter(f"{_WORD}tr"):
                cells = (" ".join(map(_paragraph, cell.iter(f"{_WORD}p"))).strip() for cell in row.iter(f"{_WORD}tc"))
                yield ", ".join(filter(None, cells)) + ".\n\n"
        else:
            for paragraph in block.iter(f"{_WORD}p"):
                yield _mark(paragraph) + _paragraph(paragraph) + "\n\n"


def _paragraph(paragraph: ElementTree.Element) -> str:
    spaces = {f"{_WORD}tab": " ", f"{_WORD}br": " "}
    parts = (part.text or "" if part.tag == f"{_WORD}t" else spaces.get(part.tag, "") for part in paragraph.iter())
    return " ".join("".join(parts).split())


def _mark(paragraph: ElementTree.Element) -> str:
    """What makes a line a heading or a list item."""
    style = paragraph.find(f"{_WORD}pPr/{_WORD}pStyle")
    name = "" if style is None else style.get(f"{_WORD}val", "")
    if name.lower().startswith(("heading", "title")):
        return "# "
    return "- " if paragraph.find(f"{_WORD}pPr/{_WORD}numPr") is not None else ""


class _Page(html.parser.HTMLParser):
    """Collects what a browser would show."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in _UNSEEN
        if re.fullmatch(r"h[1-6]|title", tag):
            self.parts.append("\n\n# ")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        elif _BLOCK.fullmatch(tag):
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= self._unseen > 0 and tag in _UNSEEN
        if _BLOCK.fullmatch(tag) or re.fullmatch(r"h[1-6]|title|li", tag):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(re.sub(r"\s+", " ", data))


def html_text(path: Path) -> Iterator[str]:
    """What a browser would show of a page."""
    content = path.read_bytes()
    named = re.search(rb"charset=[\"']?([\w.:-]+)", content[:4096])
    page = _Page()
    try:
        page.feed(content.decode(named[1].decode() if named else "utf-8-sig"))
    except (UnicodeDecodeError, LookupError):
        raise Refused("is in no character set that it names; save it as UTF-8") from None
    page.close()
    yield from page.parts


READERS = {".pdf": pdf_text, ".docx": docx_text, ".html": html_text, ".htm": html_text}


def main(path: Path) -> int:
    """Write a file's text to stdout, or why there is none to stderr."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    logging.disable()  # parsers log as much as a file makes them
    written = 0
    try:
        for part in READERS[path.suffix.lower()](path):
            content = part.encode("utf-8", "replace")
            written += len(content)
            if written > MOST_TEXT:
                raise Refused(f"holds more than {MOST_TEXT >> 20} MiB of text; split it")
            sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except Refused as refusal:
        reason = str(refusal)
    except MemoryError:
        reason = f"takes more than {MOST_MEMORY >> 20} MiB to read; split it"
    except Exception as error:  # parsers have errors of their own, which a damaged file may raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        reason = f"is damaged ({why}); save it again"
    else:
        return 0
    sys.stderr.write(f"{reason}\n")
    return REFUSED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
