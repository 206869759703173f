# SPDX-License-Identifier: Apache-2.0
"""What happened in a recorded run: replies with their passes or rounds, actions, pictures; stops; the robot's way."""

from __future__ import annotations

import bisect
import io
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from dsd_ros.navigation.run.actions import (
    ANY,
    SHIPPED,
    Grammar,
    GrammarError,
    action_in,
    action_of,
    format_action,
    read_grammar,
)
from dsd_ros.navigation.safety.odometry import OdometryError, checked_pose
from dsd_ros.observe.bag.reader import Bag, BagError, Record
from dsd_ros.observe.bag.replay_tokens import Traffic, TrafficLog
from dsd_ros.observe.view.run_state import RunState
from dsd_ros.observe.view.state import Round, ShownReply
from dsd_ros.pictures import raw_rgb
from dsd_ros.shown import seconds_name
from dsd_ros.wire.messages import PROTOCOL_VERSION

_CAMERA = "camera/image_raw"  # and image_transport's topic below it
_PATH_S = 0.1
_SAME_STOP_S = 0.5


@dataclass
class RecordedStep:
    """A completed reply. Times in ns; ``tokens`` is None in rounds, and when the bag lacks some messages."""

    number: int
    stamp: int  # of its picture
    at: int  # when it was complete
    text: str
    instruction: str
    reply: int  # its number in the session; 0: unknown
    tokens: list[int] | None
    stats: dict[str, Any]
    rounds: list[dict[str, Any]]
    shown: ShownReply  # the reply as views show it
    executed: str = ""  # the action that the navigation node announced; empty: none
    verified: bool = True
    grammar: Grammar | None = None  # None: the shipped models'
    seen: Traffic | None = None  # its messages, with the picture as the verifier received it
    taken_at: tuple[float, float, float] | None = None  # x, y (m), yaw (rad) of the robot at the picture; None: unknown
    begun_at: tuple[float, float, float] | None = None  # likewise where its action began; None: none was announced

    @property
    def action(self) -> str:
        """The action that the reply ends in, as the grammar writes it; empty when it does not parse."""
        return self.action_in(self.text)

    def action_in(self, text: str) -> str:
        """The action that a reply in this run's grammar ends in; empty when it does not parse."""
        return action_in(text, self.grammar)


@dataclass
class Stop:
    """A period in which the supervisor kept the robot from moving, with every cause it named."""

    began: int
    ended: int
    causes: list[str]
    sentences: list[str]


@dataclass
class Run:
    """A bag, read as a run."""

    bag: Bag
    steps: list[RecordedStep]
    stops: list[Stop]
    refusals: list[tuple[int, str, str]]  # when, code, sentence
    requests: list[Any]  # SessionRequest, in order
    verifiers: list[Any]  # SessionReply
    actions: list[Any]  # NavAction
    path: list[tuple[int, float, float, float]]  # when, x, y (m), yaw (rad)
    markers: list[Any] = field(default_factory=list)  # of a simulated world: walls, furniture, things, the goal
    ends: list[tuple[int, str]] = field(default_factory=list)  # when each goal ended, and its outcome
    began: int = 0
    ended: int = 0
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    grammar: Grammar | None = None  # of the replies; None: the shipped models'

    @property
    def seconds(self) -> float:
        """Duration from the first to the last message."""
        return (self.ended - self.began) * 1e-9

    def parameters_of(self, node: str) -> dict[str, Any]:
        """The parameters of the robot's node of that name; empty when the bag has none."""
        values = self.parameters.get(f"{self.bag.namespace}/{node}")
        return values if isinstance(values, dict) else {}


def read_run(bag: Bag) -> Run:
    """Read all messages of a bag but its pictures, in one pass.

    :raises BagError: when a release with another protocol recorded it.
    """
    run = Run(bag, [], [], [], [], [], [], [])
    run.parameters = _object(bag.custom.get("parameters"))
    run.versions = _object(bag.custom.get("versions"))
    reading = _Reading(run)
    handlers = {bag.topic(name): handler for name, handler in reading.handlers.items()}
    damaged = Counter[str]()
    for record in bag.messages():
        run.began = min(run.began or record.at, record.at)
        run.ended = max(run.ended, record.at)
        handler = handlers.get(record.topic)
        if handler is None:
            continue
        try:
            handler(bag.decode(record), record)
        except BagError as error:
            damaged[record.topic] += 1
            if damaged[record.topic] == 1:
                bag.damage(str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # another type of that name
            damaged[record.topic] += 1
    reading.check_release()
    for topic, count in damaged.items():
        bag.damage(f"{count} of {bag.counts.get(topic, count)} messages on {topic} are left out: they are damaged.")
    reading.finish()
    return run


def pictures_of(bag: Bag, stamps: set[int]) -> dict[int, bytes]:
    """The camera's pictures with these stamps (ns), as files; missing ones are left out.

    Of a picture that the bag has both raw and compressed, the raw one counts: it lost nothing.
    """
    found: dict[int, bytes] = {}
    raw = bag.topic(_CAMERA)
    for record in bag.messages([raw, f"{raw}/compressed"]):
        try:
            stamp = header_stamp(record.data)
            if stamp in stamps and (stamp not in found or record.topic == raw):
                message = bag.decode(record)
                found[stamp] = _as_png(raw_rgb(message)) if record.topic == raw else message.data.tobytes()
        except (AttributeError, LookupError, ValueError):
            bag.damage(f"A picture on {record.topic} is damaged and left out.")
    return found


def picture_sent(step: RecordedStep) -> bytes | None:
    """A reply's picture as it was sent to the verifier, as a file; None when it is unknown."""
    sent = step.seen
    if sent is None or not sent.picture:
        return None
    if sent.encoding != "rgb8":
        return sent.picture
    if len(sent.picture) != 3 * sent.height * sent.width:
        return None
    return _as_png(np.frombuffer(sent.picture, np.uint8).reshape(sent.height, sent.width, 3))


def _as_png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


class _Reading:
    """Assembles a Run from its messages."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._traffic = TrafficLog()
        self._texts: dict[int, list[str]] = {}
        self._rounds: dict[int, list[dict[int, tuple[dict[str, Any], Round]]]] = {}
        self._stats: list[tuple[Any, int]] = []
        self._state, self._held = RunState(run.bag.namespace), False
        self._last_pose = -(2**63)
        self._stamps: list[int] = []  # of the odometry, ns, with the poses of the same places in _poses
        self._poses: list[tuple[float, float, float]] = []
        self.handlers: dict[str, Any] = {
            "dsd/observation": lambda m, r: self._traffic.observation(m, r.at),
            "dsd/verified_tokens": lambda m, r: self._traffic.verified(m),
            "dsd/refusal": lambda m, r: run.refusals.append((r.at, m.code, m.sentence)),
            "dsd/session_request": lambda m, r: run.requests.append(m),
            "dsd/session_reply": lambda m, r: run.verifiers.append(m),
            "dsd/nav_action": lambda m, r: run.actions.append(m),
            "dsd/grammar": self._words,
            "dsd/reply_progress": self._progress,
            "dsd/decode_stats": lambda m, r: self._stats.append((m, r.at)),
            "dsd/safety_state": self._safety,
            "odom": self._odometry,
            "ground_truth/markers": self._world,
            "diagnostics": self._health,
            "/diagnostics": self._health,
        }

    def _words(self, message: Any, record: Record) -> None:
        if not message.data.startswith("{"):
            raise GrammarError("it is not JSON")  # a bag must not name a file of this machine
        self._run.grammar = read_grammar(message.data)

    def _progress(self, message: Any, record: Record) -> None:
        stamp = stamp_of(message.header.stamp)
        of_stamp = self._rounds.setdefault(stamp, [])
        if message.done:
            self._texts.setdefault(stamp, []).append(message.text)
            return
        number = int(message.rounds)
        if not of_stamp or number <= max(of_stamp[-1], default=0):
            of_stamp.append({})
        of_stamp[-1][number] = {"round": number} | plain(message.last_round), Round.of(message.last_round)

    def _watch(self, at: int) -> None:
        """Note when the robot was held and let go, and how its goals ended."""
        stops = self._run.stops
        for kind, value in self._state.news:
            if kind == "end" and value["outcome"]:
                self._run.ends.append((at, f"{value['outcome']}: {value['sentence']}"))
            elif kind == "hold":
                if value["on"] and not self._held and not (stops and at - stops[-1].ended < _SAME_STOP_S * 1e9):
                    stops.append(Stop(at, at, [], []))  # a stop that returns at once never ended
                if value["on"]:
                    causes = zip(value["causes"], value["sentences"], strict=False)
                    new = [cause for cause in causes if cause[0] not in stops[-1].causes]
                    stops[-1].causes += [name for name, _ in new]
                    stops[-1].sentences += [sentence for _, sentence in new]
                if value["on"] or self._held:
                    stops[-1].ended = at
                self._held = value["on"]
        self._state.news.clear()

    def _safety(self, message: Any, record: Record) -> None:
        self._state.on_safety(message)
        self._watch(record.at)

    def _health(self, message: Any, record: Record) -> None:
        self._state.on_health(message, record.at * 1e-9)
        self._watch(record.at)

    def _world(self, message: Any, record: Record) -> None:
        self._run.markers = list(message.markers)

    def _odometry(self, message: Any, record: Record) -> None:
        place, q = message.pose.pose.position, message.pose.pose.orientation
        with suppress(OdometryError):
            at = checked_pose((place.x, place.y), (q.x, q.y, q.z, q.w))
            self._stamps.append(stamp_of(message.header.stamp))
            self._poses.append((at.x, at.y, at.yaw))
            if record.at - self._last_pose >= _PATH_S * 1e9:
                self._last_pose = record.at
                self._run.path.append((record.at, at.x, at.y, at.yaw))

    def _pose_at(self, stamp: int) -> tuple[float, float, float] | None:
        """The first pose at or after a stamp (ns), within _PATH_S."""
        place = bisect.bisect_left(self._stamps, stamp)
        known = place < len(self._stamps) and self._stamps[place] - stamp <= _PATH_S * 1e9
        return self._poses[place] if known else None

    def check_release(self) -> None:
        """Raise BagError for a bag of a release with another protocol."""
        other = {int(request.protocol_version) for request in self._run.requests} - {PROTOCOL_VERSION}
        if other or not all(hasattr(message, "sooner") for message, _ in self._stats):
            by, protocol = self._run.versions.get("dsd_ros", "of another version"), min(other, default="unknown")
            raise BagError(
                f"{self._run.bag.path} was recorded by dsd_ros {by} with protocol {protocol}; this release has "
                f"protocol {PROTOCOL_VERSION} and can neither show nor replay it: use the release that recorded it."
            )

    def finish(self) -> None:
        if self._held:
            self._run.stops[-1].ended = self._run.ended
        executed: dict[int, list[Any]] = {}
        for announced in self._run.actions:
            executed.setdefault(stamp_of(announced.observation_stamp), []).append(announced)
        for number, (message, at) in enumerate(self._stats, 1):
            stamp = stamp_of(message.observation_stamp)
            stats = plain(message)
            drafts = message.speculative_decoding
            stats["speculative_decoding"] = plain(drafts) if drafts.num_spec_tokens else None
            texts, rounds = self._texts.get(stamp, []), self._rounds.get(stamp, [])
            text = texts.pop(0) if texts else ""
            mine: dict[int, tuple[dict[str, Any], Round]] = {}
            while rounds and len(mine) < stats["rounds"]:  # an abandoned reply may come first
                mine = rounds.pop(0)
            traffic = self._traffic.before(at)
            actions = executed.get(stamp, [])
            self._run.steps.append(
                RecordedStep(
                    number=number,
                    stamp=stamp,
                    at=at,
                    text=text,
                    instruction=traffic.instruction if traffic is not None else "",
                    reply=traffic.reply if traffic is not None else 0,
                    tokens=traffic.tokens(int(stats["tokens"])) if traffic is not None else None,
                    stats=stats,
                    rounds=[mine[key][0] for key in sorted(mine)],
                    shown=ShownReply(
                        text=text, rounds=tuple(mine[key][1] for key in sorted(mine)), mode=stats["mode"], done=True
                    ),
                    executed=executed_phrases(actions, self._run.grammar),
                    verified=bool(actions[-1].verified) if actions else True,
                    grammar=self._run.grammar,
                    seen=traffic,
                    taken_at=self._pose_at(stamp),
                    begun_at=self._pose_at(stamp_of(actions[0].header.stamp)) if actions else None,
                )
            )


def executed_phrases(messages: Sequence[Any], grammar: Grammar | None = None) -> str:
    """The actions of NavActions about one picture, as the run's grammar writes them in a reply."""
    return (grammar or SHIPPED).between.join(executed_phrase(message, grammar) for message in messages)


def executed_phrase(message: Any, grammar: Grammar | None = None) -> str:
    """A NavAction's action as the run's grammar writes it; a way back's may be none of it."""
    with suppress(ValueError):
        return format_action(action_of(message, grammar))
    try:
        return format_action(action_of(message, ANY))
    except ValueError as error:
        return str(error)


def stamp_of(time: Any) -> int:
    """A stamp in ns."""
    return int(time.sec) * 1_000_000_000 + int(time.nanosec)


def plain(message: Any) -> dict[str, Any]:
    """A message's fields as plain values, durations in seconds, without other nested messages."""
    values: dict[str, Any] = {}
    for name, value in vars(message).items():
        parts = value if isinstance(value, list) else [value]
        if parts and all(type(part).__name__.endswith("__Duration") for part in parts):
            spans = [stamp_of(part) * 1e-9 for part in parts]
            values[seconds_name(name)] = spans if parts is value else spans[0]
        elif not name.startswith("__"):
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, list, tuple))}


def header_stamp(data: bytes) -> int:
    """The stamp (ns) in the CDR of a message whose first field is its header."""
    order = "<" if data[1] & 1 else ">"
    sec, nanosec = np.frombuffer(data[4:12], dtype=order + "i4")
    return int(sec) * 1_000_000_000 + int(nanosec)


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
