# SPDX-License-Identifier: Apache-2.0
"""Colours, the tokens of a reply, a line that says what is going on, and a progress bar for the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
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
    """A reply round by round, or pass by pass: accepted drafts, rejected ones struck out, the target's own tokens.

    The rejected tokens of a tree are no text, so they are counted.
    """
    from rich.text import Text

    text = Text()
    for one in rounds:
        sequence = one.drafted <= one.depth or streams(mode)
        rejected = one.rejected if sequence else (f"[{len(one.rejected)}]",) if one.rejected else ()
        for pieces, style in (
            (one.gained[: one.accepted], ACCEPTED),
            (rejected, REJECTED if sequence else "red"),
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
