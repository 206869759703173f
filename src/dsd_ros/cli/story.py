# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a demo: its start, a line a step with the tokens in colour, its result; nodes log to a file."""

from __future__ import annotations

import math
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsd_ros.cli.terminal import colours, console, token_legend, token_text
from dsd_ros.decoding.modes import unit_of
from dsd_ros.navigation.run.actions import ANY, action_of, format_action
from dsd_ros.observe.view.figures import Figures, ReplyFigures, percent
from dsd_ros.shown import LINES, counted, shown

if TYPE_CHECKING:
    from dsd_ros.cli.demo_run import DemoReport
    from dsd_ros.observe.view.state import Round

_REPLIES_KEPT = 16  # rounds of replies whose action has not come yet
_ROS_LINE = re.compile(r"\[(WARN|ERROR|FATAL)\] \[[\d.]+\] \[[\w./]+\]: (.*)")
_LESSER = re.compile(r"\[(DEBUG|INFO|WARN)\] ")
_PAGE = re.compile(r"live page at (https?://\S+)")
_MEANING = {
    "draft_node": "draft_node (the draft model, and a session with the verifier)",
    "memory_node": "memory_node (its model and documents)",
}


class Story:
    """Prints a demo's story on stdout. Any thread may call it.

    :param verbose: show what the nodes log, too.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="dsd_demo_")) / "nodes.log"
        self.page = ""  # address of the live page
        self._verbose, self._coloured, self._console = verbose, colours(), console()
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # each child's last line
        self._shows: Literal["errors", "warnings", "nothing"] = "errors"  # of what nodes log
        self._replies: dict[tuple[int, int], tuple[str, list[Round]]] = {}  # by the picture's stamp; "": not whole yet
        self._figures = Figures()
        self._awaited: Sequence[str] = ()

    # -- the nodes ------------------------------------------------------------------------------

    def hear(self, name: str, line: str) -> None:
        """A line that a child printed."""
        line = shown(line, keep=LINES)
        self._keep(name, line)
        if line.strip() and not _LESSER.match(line):
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
        self._keep(name, line)
        if self._shows != "nothing":
            self._say(f"{name} {line}", "yellow")

    def last_words(self, name: str) -> str:
        """The last error that a child printed, or line of none, without the preamble of ROS."""
        line = self._last.get(name, "")
        found = _ROS_LINE.match(line)
        return found[2] if found else line

    def _keep(self, name: str, line: str) -> None:
        with self._lock, self.log.open("a", encoding="utf-8") as file:
            file.write(f"[{name}] {line}\n")

    # -- the run --------------------------------------------------------------------------------

    def start(self, text: str) -> None:
        """The run is to begin: what is started."""
        self._say(f"{text}; the nodes' log: {self.log}")
        self._began = time.monotonic()

    def wait_for(self, awaited: Sequence[str]) -> bool:
        """Say what the start waits for, once it changes; returns whether it still waits."""
        if awaited and awaited != self._awaited:
            self._awaited = awaited
            names = ", ".join(_MEANING.get(name, name) for name in awaited)
            self._say(f"starting, {time.monotonic() - self._began:.0f} s: waiting for {names}", "dim")
        return bool(awaited)

    def begin(self, text: str, mode: str) -> None:
        """The goal is sent."""
        self._shows = "warnings"
        self._say(text)
        if self._coloured:
            self._print(token_legend(mode))

    def progress(self, message: Any) -> None:
        """A reply has grown by a pass or a round (ReplyProgress)."""
        from dsd_ros.observe.view.state import Round

        stamp = (message.header.stamp.sec, message.header.stamp.nanosec)
        rounds = self._replies.get(stamp, ("", []))[1]
        if not message.done:
            rounds.append(Round.of(message.last_round))
        self._replies[stamp] = message.text if message.done else "", rounds
        while len(self._replies) > _REPLIES_KEPT:
            self._replies.pop(next(iter(self._replies)))

    def step(self, action: Any, stats: Any) -> None:
        """The robot acts (NavAction), after a reply with these figures (DecodeStats; empty: there was none)."""
        stamp = (action.observation_stamp.sec, action.observation_stamp.nanosec)
        text, rounds = self._replies.pop(stamp, ("", []))
        head, figures = f"step {action.step:2}: {format_action(action_of(action, ANY)):22}", ""
        if stats.tokens:
            reply = ReplyFigures.of(stats)
            self._figures.add_reply(reply)
            figures = f"{counted(reply.tokens, 'token')} in {counted(reply.rounds, unit_of(reply.mode))}"
            figures += f", {reply.seconds:.2f} s"
        elif not action.verified and not action.retracing:
            figures = "by the draft alone"
        if (
            self._coloured
            and rounds
            and "".join(piece for one in rounds for piece in one.gained).strip() == text.strip()
        ):
            from rich.text import Text

            self._print(Text.assemble((head, "bold"), " ", token_text(rounds, stats.mode), "  ", (figures, "dim")))
        else:
            rest = f"{figures:32} | {shown(action.reasoning)}" if figures else shown(action.reasoning)
            self._say(f"{head} {rest}")

    def memory(self, message: Any) -> None:
        """What the goal means by memory (MemoryAnswer), by which documents; or what the robot asks."""
        from dsd_ros.observe.view.state import ShownMemory

        memory = ShownMemory.of(message)
        for sentence, document in memory.told:
            self._say(shown(f"memory: {sentence}{f'  <- {document}' if document else ''}"))
        if memory.question:
            self._say(shown(f"the robot asks: {memory.question}"), "bold yellow")

    def closing(self, bag: str) -> None:
        """The run has ended, and its bag is closed."""
        self._shows = "nothing"
        self._say(f"closing the bag {bag}", "dim")

    def end(self, report: DemoReport, bag: str, loss: str = "") -> None:
        """The result, plainly, and where everything is; the last that is shown. ``loss``: what the bag lacks."""
        self._shows = "nothing"
        where = "" if report.distance_m is None else f", {report.distance_m:.2f} m from the goal"
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
        if bag and not loss:
            lines.append(f"bag: {bag} (dsd inspect {bag})")
        if self.page:
            lines.append(f"live page at {self.page}")
        for line in [*lines, f"the nodes' log: {self.log}"]:
            self._say(f"  {line}")
        if loss:
            self._say(f"  bag: {bag}: {loss}", "bold red")

    def speedup(self) -> float | None:
        """About how many times as fast as the target alone (`ReplyFigures.sooner`); None where nothing tells."""
        return self._figures.sooner or None

    def _say(self, line: str, style: str = "") -> None:
        from rich.text import Text

        self._print(Text(line, style))

    def _print(self, what: Any) -> None:
        with self._lock:
            self._console.print(what, soft_wrap=True)
            self._console.file.flush()
