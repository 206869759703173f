# SPDX-License-Identifier: Apache-2.0
"""Structured log lines on stderr, as text or JSON, with fields such as session, reply and round.

Code logs as usual and passes fields in ``extra``; only FIELDS are written. Control characters are escaped, so that
text from a peer cannot forge a line, and passwords in URLs are left out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsd_ros.options import check_options, option
from dsd_ros.shown import LINES, masked, shown

ROOT = "dsd_ros"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = (
    "robot", "session", "reply", "round", "mode", "drafted", "accepted", "tokens", "rounds", "tau", "seconds", "code",
    "attempt",
)  # fmt: skip


@dataclass(frozen=True)
class LogSettings:
    """What is logged to stderr, and in which format."""

    log_format: str = option("text", "format of log lines on stderr", choices=FORMATS)
    log_level: str = option("warning", "least level that is logged", choices=LEVELS)

    def __post_init__(self) -> None:
        check_options(self)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A record's fields, seconds to 1 ms."""
    found = {name: vars(record)[name] for name in FIELDS if name in vars(record)}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


class LogLimit:
    """Limits how often something that stays wrong is logged: once in ``every_s`` seconds.

    ``left_out``: how often it was not due since it was logged before.
    """

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s, self._next = every_s, -math.inf
        self._since = self.left_out = 0

    def due(self, now: bool = False) -> bool:
        """Whether to log it: ``every_s`` after the last time, or ``now``."""
        time_s = time.monotonic()
        if not now and time_s < self._next:
            self._since += 1
            return False
        self._next = time_s + self._every_s
        self.left_out, self._since = self._since, 0
        return True


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO dsd_ros.cloud: session opened session=7 mode=fsd``."""

    def format(self, record: logging.LogRecord) -> str:
        about = "".join(f" {name}={_short(value)}" for name, value in fields_of(record).items())
        line = shown(f"{_instant(record)} {record.levelname} {record.name}: {record.getMessage()}{about}")
        return f"{line}\n{shown(self.formatException(record.exc_info), keep=LINES)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, FIELDS, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = masked(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


@contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """Log this package's lines from ``settings.log_level`` up, and other packages' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    root, package = logging.getLogger(), logging.getLogger(ROOT)
    before = package.level
    # Other packages' lines may hold secrets, e.g. the headers of a handshake.
    package.setLevel(settings.log_level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        package.setLevel(before)


def _instant(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
