# SPDX-License-Identifier: Apache-2.0
"""Colours, the tokens of a reply, a line that says what is going on, and progress for the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from dsd_ros.decoding.modes import PRESETS, streams
from dsd_ros.shown import LINES, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from typing_extensions import Self

    from dsd_ros.observe.view.state import Round

_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
ACCEPTED, REJECTED, OWN = "green", "red strike", "bright_blue"  # tokens: drafted ones, and the target's own
_REDRAW_S = 0.1
_LOG_S = 60.0


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colours(stream: TextIO | None = None) -> bool:
    """Whether ``stream`` (default: stdout) is shown in colours."""
    return is_terminal(sys.stdout if stream is None else stream) and not os.environ.get("NO_COLOR")


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in a colour if ``stream`` (default: stdout) is a terminal and NO_COLOR is not set."""
    if not colours(stream):
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def console(stream: TextIO | None = None) -> Console:
    """A console of rich on ``stream`` (default: stdout): no colours if NO_COLOR is set, nothing but text in a file."""
    from rich.console import Console  # 40 ms

    stream = sys.stdout if stream is None else stream
    system: Any = "auto" if colours(stream) else None
    return Console(
        file=stream, force_terminal=is_terminal(stream), color_system=system, markup=False, highlight=False, emoji=False
    )


def token_text(rounds: Iterable[Round], mode: str) -> Text:
    """A reply round by round, or pass by pass: accepted drafts, rejected ones struck out, the target's own tokens."""
    from rich.text import Text

    text = Text()
    for one in rounds:
        rejected = one.rejected_text(mode)
        for pieces, style in (
            (one.gained[: one.accepted], ACCEPTED),
            (rejected, REJECTED if rejected is one.rejected else "red"),
            (one.gained[one.accepted :], OWN),
        ):
            for piece in pieces:
                text.append(shown(piece, keep=LINES), style)
    return text


def token_legend(mode: str) -> Text:
    """What the colours of `token_text` mean."""
    from rich.text import Text

    text = Text()
    if PRESETS[mode].drafts:
        text.append("accepted drafts", ACCEPTED).append(", ").append("rejected drafts", REJECTED)
        if not streams(mode):
            text.append(" (").append("[n]", "red").append(": n of a tree)")
        text.append(", ")
    return text.append("the target's own tokens", OWN)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what a slow command is doing, gone when it is done; none without a terminal.

    Gives a function that changes the line.
    """
    if not is_terminal(sys.stderr):
        yield lambda line: None
        return
    with console(sys.stderr).status(what, spinner="line") as status:
        yield status.update


class Progress:
    """A line on stderr that says how far a command is; without a terminal, at most once a minute."""

    def __init__(self) -> None:
        self._live: Any = None
        self._drawn = 0.0
        self._began = self._logged = time.monotonic()
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def to(self, share: float, line: str) -> None:
        """Show ``share`` of the whole, 0 to 1, and ``line``."""
        now = time.monotonic()
        elapsed = timedelta(seconds=int(now - self._began))
        text = f"{min(max(share, 0.0), 1.0):4.0%} {shown(' '.join(line.split()))} [{elapsed}]"
        if not is_terminal(sys.stderr):
            if now - self._logged >= _LOG_S:
                self._logged = now
                print(text, file=sys.stderr, flush=True)
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=console(sys.stderr), transient=True, auto_refresh=False, redirect_stdout=False,
                redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
        if now - self._drawn > _REDRAW_S:
            self._drawn = now
            self._live.update(text, refresh=True)

    def step(self, of: int, line: str) -> None:
        """Count one more of ``of`` parts as done."""
        self._steps += 1
        self.to(self._steps / of, line)

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print to stdout, or ``stream``, above that line."""
        if self._live is not None:
            self._live.stop()  # erases it; `to` begins another
            self._live = None
        print(text, file=sys.stdout if stream is None else stream, flush=True)

    def report(self, line: str, share: float) -> None:
        """`to` with its arguments in the order that trainings and evaluations use."""
        self.to(share, line)
