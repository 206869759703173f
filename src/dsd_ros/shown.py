# SPDX-License-Identifier: Apache-2.0
"""Text from peers, files and other nodes as a terminal, a log or a bag may hold it; counts, durations, the machine."""

from __future__ import annotations

import difflib
import os
import platform
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

LINES = "\n\t"  # what text of several lines keeps
_SECONDS = {
    "total_time": "seconds", "start_offset": "began_seconds", "exit_times": "exit_seconds",
    "link_delay": "link_delay_seconds", "observation_age": "observation_age",
}  # fmt: skip

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s@]*(?:[^/?#\s]*)@")
_SECRETS = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|passw|passphrase|secret|credential|signature|api.?key)[\w.-]*|pwd|auth|key|sig)=)[^&;#\s'\"]+"
)


def shown(text: object, keep: str = "") -> str:
    """``text`` for people: control characters as escapes, passwords in URLs as ``***``.

    Escapes also what changes the direction of a line, and surrogates, which cannot be printed.

    :param keep: control characters that stay, such as line ends.
    """
    return "".join(c if c in keep or _harmless(c) else c.encode("unicode_escape").decode() for c in masked(str(text)))


def counted(count: int, what: str) -> str:
    """``1 round``, ``2 rounds``, ``2 passes``."""
    return f"{count} {what}{('es' if what.endswith('s') else 's') * (count != 1)}"


def meant(word: str, known: Iterable[str]) -> str:
    """A question that names the known word most like a misspelt one; "" if none is like it."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean '{near[0]}'?" if near else ""


def seconds_name(field: str) -> str:
    """The name in records, reports and CSV files, in seconds, of a message's duration: of draft_time, draft_seconds."""
    return _SECONDS.get(field) or field.removesuffix("_time") + "_seconds"


def masked(text: str) -> str:
    """``text`` without the passwords and tokens of the URLs in it."""
    if "://" not in text:
        return text
    return _SECRETS.sub(r"\1***", _CREDENTIALS.sub("***@", text))


def _harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def machine() -> str:
    """The machine in words, nameless: processor, cores, memory, system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = found.group(1) if found else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}"
