# SPDX-License-Identifier: Apache-2.0
"""Parses the documentation: links, quotations, code blocks and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted(DOCS.glob("*.md"))]
_FENCE = re.compile(r"^ {0,3}```([^\n]*)\n(.*?)^ {0,3}```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_OPERATORS = ("&&", "||", "|", ";", "&")


@dataclass(frozen=True)
class Block:
    """A code block. ``run``: its fence says ``bash run``, so its commands are quick and change nothing."""

    page: str
    language: str
    text: str

    @property
    def run(self) -> bool:
        return self.language == "bash run"


@dataclass(frozen=True)
class Command:
    """One command of a block, as words."""

    page: str
    words: tuple[str, ...]
    run: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[str]:
    """Targets of the page's links and pictures, code left out."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text_of(page)))
    return _LINK.findall(prose)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text_of(page))):
        plain = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def blocks(page: Path) -> list[Block]:
    """Fenced and indented code blocks."""
    text = text_of(page)
    found = [Block(page.name, m[1].strip(), m[2]) for m in _FENCE.finditer(text)]
    indented: list[str] = []
    for line in [*_FENCE.sub("\n", text).splitlines(), "."]:
        if line.startswith("    ") or (indented and not line.strip()):
            indented.append(line.strip())
        elif indented:
            found.append(Block(page.name, "", "\n".join(indented)))
            indented = []
    return found


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block: comments away, continued lines joined, taken apart at ``|`` and ``&&``."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language not in ("", "bash", "bash run", "sh"):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:  # no shell: a listing
            continue
        part: list[str] = []
        for word in [*words, ";"]:
            if word in _OPERATORS:
                if part:
                    yield Command(block.page, tuple(_plain(part)), block.run)
                part = []
            else:
                part.append(word)


def _plain(words: list[str]) -> list[str]:
    """Without a prompt, ``sudo``, variables in front, redirections, and the path of the program."""
    while words and (words[0] in ("$", "sudo") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words = words[1:]
    redirected = next((i for i, word in enumerate(words) if word in (">", "<", ">>")), len(words))
    words = words[:redirected]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else words


def all_commands() -> list[Command]:
    return [c for page in PAGES for block in blocks(page) for c in commands(block) if c.words]


def inline_commands(page: Path) -> list[Command]:
    """Commands of ours that stand in prose and tables; ``...`` at their end stands for what else one gives."""
    prose = re.sub(r"^    .*$", "", _FENCE.sub("", text_of(page)), flags=re.MULTILINE)
    spans = {" ".join(span.split()) for span in re.findall(r"`(dsd(?:-lab)?(?: [^`]+)?)`", prose)}
    words = [shlex.split(span.replace("\\|", "|").replace("…", "...")) for span in sorted(spans)]
    return [Command(page.name, tuple(word for word in each if word != "..."), run=False) for each in words]
