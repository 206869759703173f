"""Log lines as text or JSON, each with what it is about: session, reply, round and the like.

Code logs as ever, and names what a line is about by ``extra``; only FIELDS are written. What a peer may have put into
a line cannot end it: control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from dsd_ros.options import check_options, option

ROOT = "dsd_ros"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = (
    "session", "reply", "round", "mode", "drafted", "accepted", "tokens", "rounds", "tau", "seconds", "code", "attempt",
)  # fmt: skip
LINES_PER_SECOND = 200  # below warnings: what a peer provokes must not fill a disk


@dataclass(frozen=True)
class LogSettings:
    """What is logged to stderr, and how."""

    log_format: str = option("text", "format of log lines on stderr", choices=FORMATS)
    log_level: str = option("warning", "least level that is logged", choices=LEVELS)

    def __post_init__(self) -> None:
        check_options(self)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says it is about."""
    return {name: vars(record)[name] for name in FIELDS if name in vars(record)}


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO dsd_ros.cloud: session opened session=7 mode=fsd``."""

    def format(self, record: logging.LogRecord) -> str:
        about = "".join(f" {name}={_short(value)}" for name, value in fields_of(record).items())
        line = f"{_instant(record)} {record.levelname} {record.name}: {record.getMessage()}{about}"
        line = _printable(line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, FIELDS, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.StreamHandler[TextIO]):
    """To sys.stderr as it is when a line comes."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class RateLimit(logging.Filter):
    """Lets so many lines below a warning through in a second, and then says how many it left out."""

    def __init__(self, most: int = LINES_PER_SECOND) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.Lock()
        self._second = 0
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        with self._lock:
            second, left_out = int(time.monotonic()), 0
            if second != self._second:
                left_out = max(0, self._lines - self._most)
                self._second, self._lines = second, 0
            self._lines += 1
            if left_out:
                record.msg = f"{record.getMessage()} ({left_out} lines before this were left out)"
                record.args = None
            return self._lines <= self._most


@contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """Write this package's lines from ``settings.log_level`` up, and other packages' warnings."""
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    handler.addFilter(RateLimit())
    root, ours = logging.getLogger(), logging.getLogger(ROOT)
    before = ours.level
    # Others' lines may hold what must not be logged, e.g. the headers of a handshake.
    ours.setLevel(settings.log_level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)


def _instant(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
