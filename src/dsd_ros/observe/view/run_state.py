# SPDX-License-Identifier: Apache-2.0
"""Follow a robot and its decoder message by message, of rclpy or of a bag: what views show, and what is new of it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from typing import Any

from dsd_ros.navigation.safety.causes import WAITING, Cause
from dsd_ros.observe.view.events import memory_event, stats_event, step_event
from dsd_ros.observe.view.figures import Figures, ReplyFigures, seconds_of
from dsd_ros.observe.view.state import Overlay, Pose, Round, ShownMemory, ShownReply, ShownStep, Walk

LINK_NODES = ("draft_node", "bridge_node")
NAVIGATION = "navigation_node"
_OK, _STALE = 0, 3  # of diagnostic_msgs/DiagnosticStatus; stale: a node that is starting
_END = re.compile(r"([A-Z][A-Z_]+): (.*)", re.DOTALL)  # outcome of a goal in the navigation node's diagnostics
_SILENT_S = 4.0  # a node that publishes its diagnostics every second and is silent for this long has ended
_GONE = "{} is silent: its session is closed, or the connection to it is lost"
_NEWS = 4096
_CAUSES = {cause.value: cause.name for cause in Cause}


class RunState:
    """The current state of a robot and its decoder.

    :param space: the robot's namespace.
    """

    def __init__(self, space: str = "") -> None:
        self._space = space.strip("/")
        self.overlay = Overlay()
        self.figures = Figures()
        self.walk = Walk()
        self.steps: list[ShownStep] = []
        self.pose: Pose | None = None
        self.begun = self.rounds = self.runs = 0  # numbers of replies begun, and of complete rounds and runs
        # What happened since a view took it, oldest first, as (kind, value): "reply" (number, ShownReply), and "stats",
        # "step", "memory", "hold", "link" and "end" as the page's events. Views that do not ask lose the oldest.
        self.news: deque[tuple[str, Any]] = deque(maxlen=_NEWS)
        self._links: dict[str, tuple[int, str, float]] = {}
        self._last: dict[str, Any] = {}

    def on_memory(self, message: Any) -> None:
        """Take a MemoryAnswer."""
        self.overlay = replace(self.overlay, memory=ShownMemory.of(message))
        self._report("memory", memory_event(self.overlay.memory))

    def on_progress(self, message: Any) -> None:
        """Take a ReplyProgress."""
        picture = seconds_of(message.header.stamp)
        reply = self.overlay.reply
        fresh = picture != reply.picture or (reply.done and not message.done)
        if fresh:
            reply = ShownReply(message.instruction, picture=picture, mode=message.mode)
            self.begun += 1
        if not message.done or fresh:
            reply = reply.with_round(Round.of(message.last_round))
            self.rounds += 1
        reply = replace(reply, text=message.text, done=message.done)
        self.overlay = replace(self.overlay, reply=reply)
        if reply.done:
            self.news.append(("reply", (self.begun, reply)))

    def on_stats(self, message: Any) -> None:
        """Take a DecodeStats."""
        newest = ReplyFigures.of(message)
        self.figures.add_reply(newest)
        self.news.append(("stats", stats_event(self.figures)))
        self.overlay = replace(self.overlay, newest=newest)

    def on_action(self, message: Any) -> None:
        """Take a NavAction; the first of a run begins a new path."""
        step = ShownStep.of(message, self.pose or (0.0, 0.0, 0.0))
        if step.number <= 1:
            self.runs += 1
            self.steps.clear()
            self.walk = Walk(changes=self.walk.changes + 1)
        self.steps.append(step)
        self.news.append(("step", step_event(step)))
        self.figures.add_step(seconds_of(message.step_time))
        self.overlay = replace(self.overlay, action=step.phrase, verified=step.verified)

    def on_safety(self, message: Any) -> None:
        """Take a SafetyState."""
        stopped, sentences = bool(message.stopped), tuple(message.sentences)
        self.overlay = replace(self.overlay, causes=sentences, stopped=stopped)
        names = [_CAUSES.get(int(cause), f"CAUSE_{cause}") for cause in message.causes]
        held = stopped and bool(names) and names != ["NO_ACTION"]
        self._report("hold", {"on": held, "causes": names * held, "sentences": list(sentences) * held})

    def on_health(self, message: Any, now: float) -> None:
        """Take a DiagnosticArray, at ``now``, s on any clock that `show_link` is told, too."""
        for status in message.status:
            space, _, name = status.name.rpartition("/")
            if space.strip("/") != self._space:  # /diagnostics is shared by all robots of a ROS domain
                continue
            if name in LINK_NODES:
                level = status.level[0] if isinstance(status.level, bytes) else status.level  # rclpy has bytes
                self._links[name] = (int(level), status.message, now)
            elif name == NAVIGATION:
                end = _END.fullmatch(status.message)
                outcome, sentence = end.groups() if end else ("", "")
                self._report("end", {"outcome": outcome, "sentence": sentence, "good": outcome == "ARRIVED"})

    def show_link(self, now: float) -> None:
        """Show the worst of the link's nodes; one that has been silent for long counts as bad."""
        if not self._links:
            return
        bad = [(text, False) for level, text, _ in self._links.values() if level != _OK]
        gone = [(_GONE.format(name), True) for name, (_, _, at) in self._links.items() if now - at > _SILENT_S]
        text, silent = (gone + bad + [(next(iter(self._links.values()))[1], False)])[0]
        self.overlay = replace(self.overlay, link=text, link_ok=not bad and not gone)
        starting = {level for level, _, _ in self._links.values()} - {_OK} == {_STALE} and not gone
        waits = bool(bad) and not gone and all(said.startswith(WAITING) for said, _ in bad)  # not lost yet
        ok = None if starting else not bad and not gone
        self._report("link", {"ok": ok, "text": text, "gone": silent, "waits": waits})

    def _report(self, kind: str, value: dict[str, Any]) -> None:
        """Add a state to the news if it has changed."""
        if self._last.get(kind) != value:
            self._last[kind] = value
            self.news.append((kind, value))
