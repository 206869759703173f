# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a demo: its start, a line a step with the tokens in colour, its result; nodes log to a file."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dsd_ros.cli.terminal import colours, console, is_terminal, token_legend, token_text
from dsd_ros.decoding.modes import unit_of
from dsd_ros.navigation.run.actions import action_of, format_action
from dsd_ros.observe.view.figures import Figures, percent
from dsd_ros.paths import cache_directory
from dsd_ros.shown import LINES, counted, shown

if TYPE_CHECKING:
    from rich.text import Text
    from typing_extensions import Self

    from dsd_ros.cli.demo_run import DemoReport
    from dsd_ros.observe.view.state import Round

_LOGS_KEPT = 20
_REPLIES_KEPT = 16  # rounds of replies whose action has not come yet
_ROS_LINE = re.compile(r"\[(WARN|ERROR|FATAL)\] \[[\d.]+\] \[[\w./]+\]: (.*)")
_PAGE = re.compile(r"live page at (https?://\S+)")
_MEANING = {
    "draft_node": "draft_node (the draft model, and a session with the verifier)",
    "memory_node": "memory_node (its model and documents)",
}


class Story:
    """Prints a demo's story on stdout; on a terminal also a line that says what is going on now. A context manager.

    Any thread may call it.

    :param live: keep that line.
    :param verbose: show what the nodes log, too.
    """

    def __init__(self, live: bool = True, verbose: bool = False) -> None:
        self.log = _log_path()
        self.page = ""  # address of the live page
        self._verbose, self._lives = verbose, live and is_terminal(sys.stdout)
        self._coloured = colours()
        self._lock = threading.Lock()
        self._drawing = threading.Lock()  # rich's own thread would draw between a line and what is below it
        self._last: dict[str, str] = {}  # each child's last line
        self._shows: Literal["errors", "warnings", "nothing"] = "errors"  # of what nodes log
        self._replies: dict[tuple[int, int], tuple[str, list[Round]]] = {}  # text and rounds, by the picture's stamp
        self._figures = Figures()
        self._now = ""

    def __enter__(self) -> Self:
        self._console = console()
        with ExitStack() as stack:
            self._file: TextIO = stack.enter_context(self.log.open("w", encoding="utf-8"))
            self._live: Any = None
            if self._lives:
                from rich.live import Live

                live = Live(
                    console=self._console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty()
                )
                self._live = stack.enter_context(live)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- the nodes ------------------------------------------------------------------------------

    def hear(self, name: str, line: str) -> None:
        """A line that a child printed."""
        line = shown(line, keep=LINES)
        with self._lock:
            if self._file.closed:
                return
            self._file.write(f"[{name}] {line}\n")
            self._file.flush()
            if line.strip():
                self._last[name] = line.strip()
        grave = _ROS_LINE.match(line)
        if self._shows == "nothing":
            return
        if self._verbose:
            self._say(f"[{name}] {line}")
        elif grave is not None and (self._shows == "warnings" or grave[1] != "WARN"):
            self._say(f"{name}: {grave[2]}", "red" if grave[1] != "WARN" else "yellow")
        if name == "view_node" and not self.page and (found := _PAGE.search(line)):
            self.page = found[1]
            self._say(f"live page at {self.page}")

    def news(self, name: str, line: str) -> None:
        """What happens to a child, such as a restart."""
        with self._lock:
            if not self._file.closed:
                self._file.write(f"[{name}] {line}\n")
        if self._shows != "nothing":
            self._say(f"{name} {line}", "yellow")

    def last_words(self, name: str) -> str:
        """The last line that a child printed, without the preamble of ROS."""
        with self._lock:
            line = self._last.get(name, "")
        found = _ROS_LINE.match(line)
        return found[2] if found else line

    # -- the run --------------------------------------------------------------------------------

    def start(self, text: str) -> None:
        """The run is to begin: what is started."""
        self._say(f"{text}; the nodes' log: {self.log}")
        self._began = time.monotonic()

    def wait_for(self, awaited: Sequence[str]) -> bool:
        """Show what the start waits for, and for how long; returns whether it still waits."""
        for_s = int(time.monotonic() - self._began)
        names = ", ".join(_MEANING.get(name, name) for name in awaited)
        self._show(f"starting, {for_s} s: waiting for {names}" if awaited else "")
        return bool(awaited)

    def begin(self, text: str, mode: str) -> None:
        """The goal is sent."""
        self._shows = "warnings"
        self._say(text)
        if self._coloured:
            self._print(token_legend(mode))

    def progress(self, message: Any) -> None:
        """A reply has grown by a pass or a round (ReplyProgress)."""
        from dsd_ros.observe.ros.live import round_from

        stamp = (message.header.stamp.sec, message.header.stamp.nanosec)
        rounds = self._replies.get(stamp, ("", []))[1]
        if not message.done:
            rounds.append(round_from(message.last_round))
        self._replies[stamp] = message.text, rounds
        while len(self._replies) > _REPLIES_KEPT:
            self._replies.pop(next(iter(self._replies)))
        self._show(token_text(rounds, message.mode))

    def step(self, action: Any, stats: Any) -> None:
        """The robot acts (NavAction), after a reply with these figures (DecodeStats; empty: there was none)."""
        stamp = (action.observation_stamp.sec, action.observation_stamp.nanosec)
        text, rounds = self._replies.pop(stamp, ("", []))
        phrase = format_action(action_of(action))
        head, figures = f"step {action.step:2}: {phrase:22}", ""
        if stats.tokens:
            from dsd_ros.observe.ros.live import reply_figures

            reply = reply_figures(stats)
            self._figures.add_reply(reply)
            figures = f"{counted(reply.tokens, 'token')} in {counted(reply.rounds, unit_of(reply.mode))}"
            figures += f", {reply.seconds:.2f} s"
        elif not action.verified and not action.retracing:
            figures = "by the draft alone"
        tokens = "".join(piece for one in rounds for piece in one.gained)
        if self._coloured and rounds and tokens.strip() == text.strip():
            self._tokens(head, token_text(rounds, stats.mode), figures)
        else:
            rest = f"{figures:32} | {shown(action.reasoning)}" if figures else shown(action.reasoning)
            self._say(f"{head} {rest}")
        self._show("")

    def memory(self, message: Any) -> None:
        """What the goal means by memory (MemoryAnswer), by which documents; or what the robot asks."""
        from dsd_ros.observe.view.state import ShownMemory

        memory = ShownMemory.of(message)
        for sentence, document in memory.told:
            self._say(shown(f"memory: {sentence}{f'  <- {document}' if document else ''}"))
        if memory.question:
            self._say(shown(f"the robot asks: {memory.question}"), "bold yellow")

    def end(self, report: DemoReport, bag: str) -> None:
        """The result, plainly, and where everything is; the last that is shown."""
        self._show("")
        self._shows = "nothing"
        where = "" if report.distance_m is None else f", {report.distance_m:.2f} m from the target"
        actions, collisions = counted(len(report.steps), "action"), counted(report.collisions, "collision")
        self._say(
            f"{'REACHED' if report.reached else 'not reached'} after {report.seconds:.1f} s and {actions}{where}, "
            f"{collisions}. {report.outcome}: {shown(report.message)}",
            "bold green" if report.reached else "bold red",
        )
        metres = sum(math.dist(a[:2], b[:2]) for a, b in zip(report.path, report.path[1:], strict=False))
        tokens, rounds = (sum(step[name] for step in report.steps) for name in ("tokens", "rounds"))
        drafted = self._figures.drafted / max(1, self._figures.tokens)
        share = f", {percent(drafted)} from drafts" if drafted else ""
        lines = [f"walked {metres:.1f} m; decoded {tokens} tokens in {counted(rounds, unit_of(report.mode))}{share}"]
        if report.speedup_estimate is not None:
            lines.append(
                f"decoding was about {report.speedup_estimate:.1f} times as fast as the target alone (an estimate: "
                "each token from a draft saved a pass)"
            )
        if bag:
            lines.append(f"bag: {bag} (dsd inspect {bag})")
        if self.page:
            lines.append(f"live page at {self.page}")
        for line in [*lines, f"the nodes' log: {self.log}"]:
            self._say(f"  {line}")

    def speedup(self) -> float | None:
        """About how many times as fast as the target alone (`ReplyFigures.sooner`); None where nothing tells."""
        return self._figures.sooner or None

    def close_line(self) -> None:
        """End the line that says what is going on."""
        with self._drawing:
            if self._live is not None:
                self._live.stop()
                self._live = None

    # -- the terminal ---------------------------------------------------------------------------

    def _tokens(self, head: str, tokens: Text, figures: str) -> None:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        grid.add_row(Text(head, "bold"), Text.assemble(tokens, "  ", (figures, "dim")))
        self._print(grid)

    def _say(self, line: str, style: str = "") -> None:
        from rich.text import Text

        self._print(Text(line, style))

    def _print(self, what: Any) -> None:
        with self._drawing:
            self._console.print(what, soft_wrap=not self._lives)
            self._console.file.flush()

    def _show(self, what: str | Text) -> None:
        """Let the line that says what is going on be this."""
        with self._drawing:
            if self._live is not None and str(what) != self._now:
                self._now = str(what)
                self._live.update(what, refresh=True)


def _log_path() -> Path:
    """A new log file in the cache directory, of which the newest are kept; in a temporary folder where that fails."""
    folder = cache_directory() / "demo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.log"))[: -_LOGS_KEPT + 1]:
            old.unlink(missing_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="dsd_demo_"))
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
