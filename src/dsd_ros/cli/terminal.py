# SPDX-License-Identifier: Apache-2.0
"""Colours and a progress bar for the terminal."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from dsd_ros.shown import shown

if TYPE_CHECKING:
    from typing_extensions import Self

_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
_REDRAW_S = 0.1
_LOG_S = 60.0


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in a colour if ``stream`` (default: stdout) is a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or not is_terminal(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


class Progress:
    """A bar on stderr, followed by the latest line; without a terminal, that line at most once a minute."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._drawn = 0.0
        self._began = self._logged = time.monotonic()
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def to(self, share: float, line: str) -> None:
        """Show ``share`` of the whole, 0 to 1, and ``line``."""
        share = min(max(share, 0.0), 1.0)
        line = shown(" ".join(line.split()))
        if not is_terminal(sys.stderr):
            self._log(share, line)
            return
        if self._bar is None:
            from tqdm import tqdm

            form = "{percentage:3.0f}% |{bar:20}| {desc} [{elapsed}]"
            self._bar = tqdm(total=1000, bar_format=form, leave=False, dynamic_ncols=True)
        self._bar.n = int(1000 * share)
        now = time.monotonic()
        due = now - self._drawn > _REDRAW_S
        self._bar.set_description_str(line, refresh=due)
        if due:
            self._drawn = now

    def _log(self, share: float, line: str) -> None:
        now = time.monotonic()
        if now - self._logged < _LOG_S:
            return
        self._logged = now
        elapsed = timedelta(seconds=int(now - self._began))
        print(f"{share:4.0%} {line} [{elapsed}]", file=sys.stderr, flush=True)

    def step(self, of: int, line: str) -> None:
        """Count one more of ``of`` parts as done."""
        self._steps += 1
        self.to(self._steps / of, line)

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print to stdout, or ``stream``, above the bar."""
        stream = sys.stdout if stream is None else stream
        if self._bar is None:
            print(text, file=stream, flush=True)
        else:
            self._bar.write(text, file=stream)
            stream.flush()

    def report(self, line: str, share: float) -> None:
        """`to` with its arguments in the order that trainings and evaluations use."""
        self.to(share, line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
