# SPDX-License-Identifier: Apache-2.0
"""Every sentence that docs/troubleshooting.md quotes is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache

from every import every
from pages import DOCS, ROOT, text_of

QUOTES = re.findall(r"^> (?:- )?(.+)$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
GAP = "\0"  # what an f-string or a %s puts in


@cache
def sentences() -> tuple[str, ...]:
    """Every text of the source, docstrings apart, GAP where something is put in."""
    found: set[str] = set()
    for path in (ROOT / "src" / "dsd_ros").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                found.add("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("%s", GAP))
        for node in ast.walk(tree):
            docs = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if docs and (said := ast.get_docstring(node, clean=False)):
                found.discard(said)
    return tuple(found)


def said_somewhere(quote: str) -> bool:
    """Whether a text of the source holds the quotation; ``…`` of it stands for anything."""
    parts = [re.escape(part.strip()) for part in quote.split("…")]
    pattern = re.compile(rf"\s*{GAP}?[^\n]*?\s*".join(parts))
    # An inserted part is sometimes a text of its own, such as a name before "has been silent".
    return any(pattern.search(text) for text in sentences())


@every(QUOTES)
def test_the_code_says_what_is_quoted(quote: str) -> None:
    assert said_somewhere(quote), f"no text of the source reads {quote!r}; quote what it says now"


def test_there_are_quotations_and_invented_ones_are_found_out() -> None:
    assert len(QUOTES) > 30 and len(set(QUOTES)) == len(QUOTES)
    assert not said_somewhere("The robot is out of coffee; refill it.")
    assert not said_somewhere("The camera … out of coffee")
