# SPDX-License-Identifier: Apache-2.0
"""The state that views show, as plain values: reply and its passes or rounds, link, safety, path."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from dsd_ros.decoding.modes import streams
from dsd_ros.navigation.run.actions import ANY, action_of, format_action
from dsd_ros.observe.view.figures import ReplyFigures, seconds_of

PATH_SPACING_M = 0.03
PATH_TURN_RAD = 0.2
PATH_POINTS = 4000  # 120 m of walking; then the path is thinned out
OWNERS = {1: "robot", 2: "cloud"}  # the sides of dsd_msgs/AnswerSource

Pose = tuple[float, float, float]  # x, y (m), yaw (rad)


@dataclass(frozen=True)
class Round:
    """One round of a reply, or one pass of the target (modes stream and ar).

    Times are on the robot's clock, ``verify`` on the verifier's, in seconds.

    ``gained``: tokens added to the reply: ``accepted`` drafted ones, then the target's own.
    ``exits``: (layer, seconds after the draft was sent) of early exits, in order of arrival.
    ``source`` of the draft: "exit" or "guess" (pre-drafted), "flight" (sent ahead), "" (drafted in turn).
    """

    drafted: int = 0
    accepted: int = 0
    gained: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    source: str = ""
    ready: bool = False
    began: float = 0.0  # since the reply began
    draft: float = 0.0  # drafting while nothing else ran
    wait: float = 0.0  # from sending the draft to its outcome; a pass: since the pass before
    verify: float = 0.0  # in the target model
    model: float = 0.0  # time to make this draft, whenever it was made; a pass: drafting since the pass before
    exits: tuple[tuple[int, float], ...] = ()
    first_exit: int = 0
    predrafts: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    depth: int = 0  # passes of the draft model meanwhile: tokens, or a tree's levels

    def rejected_text(self, mode: str) -> tuple[str, ...]:
        """The rejected tokens as they are shown: those of a tree are no text, so they are counted, as "[17]"."""
        if streams(mode) or self.drafted <= self.depth or not self.rejected:
            return self.rejected
        return (f"[{len(self.rejected)}]",)

    @classmethod
    def of(cls, message: Any) -> Round:
        """From a dsd_msgs/RoundStats, of rclpy or of a bag."""
        same = ("drafted", "source", "ready", "first_exit", "predrafts", "bytes_up", "bytes_down", "depth")
        figures: dict[str, Any] = {name: getattr(message, name) for name in same}
        figures |= {name: seconds_of(getattr(message, f"{name}_time")) for name in ("draft", "wait", "verify", "model")}
        return cls(
            **figures,
            began=seconds_of(message.start_offset),
            accepted=min(message.accepted, len(message.gained)),
            gained=tuple(message.gained),
            rejected=tuple(message.rejected),
            exits=tuple(zip(map(int, message.exit_layers), map(seconds_of, message.exit_times), strict=False)),
        )


@dataclass(frozen=True)
class ShownReply:
    """The verified part of a reply. ``picture``: stamp of its picture, s."""

    instruction: str = ""
    text: str = ""
    rounds: tuple[Round, ...] = ()
    done: bool = False
    picture: float = 0.0
    mode: str = ""

    def with_round(self, news: Round) -> ShownReply:
        """The reply after one more round or pass."""
        return replace(self, rounds=(*self.rounds, news))


@dataclass(frozen=True)
class ShownStep:
    """An announced action. ``phrase``: e.g. "turn left 30 degrees"; it begins at ``pose``."""

    number: int
    phrase: str
    ahead: float  # m to drive
    turn: float  # rad, to the left
    verified: bool
    pose: Pose
    reasoning: str = ""
    retracing: bool = False
    took: float = 0.0  # s since the action before, or the goal

    @classmethod
    def of(cls, message: Any, pose: Pose) -> ShownStep:
        """From a dsd_msgs/NavAction whose action begins at ``pose``."""
        phrase, ahead, turn = "unknown action", 0.0, 0.0
        with contextlib.suppress(ValueError):
            action = action_of(message, ANY)
            phrase, ahead, turn = format_action(action), action.metres, action.radians
        return cls(
            message.step, phrase, ahead, turn, message.verified, pose, message.reasoning, message.retracing,
            seconds_of(message.step_time),
        )  # fmt: skip


@dataclass(frozen=True)
class ShownMemory:
    """What a goal's words mean, or what the robot asks the person because memory does not know.

    ``told``: the answer's sentences, each with its document as people read it ("owner.md, robot"; "": none is known).
    """

    goal: str = ""
    told: tuple[tuple[str, str], ...] = ()
    instruction: str = ""
    question: str = ""

    @classmethod
    def of(cls, message: Any) -> ShownMemory:
        """From a dsd_msgs/MemoryAnswer; empty where memory was not asked."""
        rest, told = str(message.answer).strip(), []
        if not rest and not message.question:
            return cls()
        for source in message.sources:
            before, found, after = rest.partition(source.sentence)
            if found:
                told += [(before.strip(), ""), (found, f"{source.document}, {OWNERS.get(source.side, 'unknown')}")]
                rest = after
        told = [(sentence, document) for sentence, document in [*told, (rest.strip(), "")] if sentence]
        return cls(message.goal, tuple(told), message.instruction, message.question)


@dataclass(frozen=True)
class Overlay:
    """Everything written on the robot's view; compared to decide whether to redraw."""

    reply: ShownReply = ShownReply()
    action: str = ""
    verified: bool = True
    link: str = ""  # diagnostics of the link's nodes
    link_ok: bool | None = None  # None: unknown yet
    causes: tuple[str, ...] = ()  # why the robot must not move, most severe first
    stopped: bool = False
    memory: ShownMemory = ShownMemory()
    newest: ReplyFigures = ReplyFigures()  # of the newest complete reply


@dataclass
class Walk:
    """The path walked, as poses a few centimetres apart."""

    poses: deque[Pose] = field(default_factory=deque)
    changes: int = 0  # number of poses kept so far

    def add(self, pose: Pose) -> bool:
        """Keep a pose if it is far enough from the last; returns whether it was kept."""
        if self.poses:
            x, y, yaw = self.poses[-1]
            turned = abs(math.remainder(pose[2] - yaw, 2 * math.pi))
            if math.hypot(pose[0] - x, pose[1] - y) < PATH_SPACING_M and turned < PATH_TURN_RAD:
                return False
        if len(self.poses) >= PATH_POINTS:
            self.poses = deque(list(self.poses)[::2])
        self.poses.append(pose)
        self.changes += 1
        return True


def motion_of(pose: Pose, ahead: float, turn: float, spacing: float = 0.05) -> list[Pose]:
    """The poses of an action that starts at ``pose``: a turn on the spot (rad), then straight ahead (m)."""
    x, y, yaw = pose
    if not ahead and not turn:
        return [pose]
    if ahead and turn:
        return [*motion_of(pose, 0.0, turn, spacing), *motion_of((x, y, yaw + turn), ahead, 0.0, spacing)]
    pieces = max(1, round(abs(ahead) / spacing), round(abs(turn) / math.radians(5.0)))
    shares = (piece / pieces for piece in range(pieces + 1))
    return [
        (x + share * ahead * math.cos(yaw), y + share * ahead * math.sin(yaw), yaw + share * turn) for share in shares
    ]
