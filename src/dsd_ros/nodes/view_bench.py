"""`dsd bench view`: what overlay and web view take of a CPU core, and of a reply's time."""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from dsd_msgs.srv import Decode
from dsd_ros.nodes import qos
from dsd_ros.nodes.bringup import NodeEntry, NodeStart, plan
from dsd_ros.nodes.processes import Child, ProcessGroup
from dsd_ros.nodes.standalone import SpinningNode

RATE = 15.0  # pictures per second that the figures are for
CORE_LIMIT, REPLY_LIMIT = 5.0, 3.0  # percent
_READY_S = 120.0
_NEEDED = ("simulator_node", "draft_node", "verifier_node")
_SETTLE_S = 0.2
_PAUSE_S = 0.7  # between two replies: a robot moves in between

Progress = Callable[[str], None]


class ViewBenchError(RuntimeError):
    """The bench cannot go on; one sentence."""


def measure_views(pairs: int, mode: str, progress: Progress) -> dict[str, Any]:
    """Decode two replies per pair, one beside running views and one with the views held, in turns ABBA.

    CPU time is that of the views' processes while they ran, scaled to a picture rate of :data:`RATE`; a core is
    never fully there for a loaded machine, but CPU time is counted all the same. The two replies of a pair follow
    each other within two seconds, so that both meet the same machine: what counts is the median of their differences.

    :raises ViewBenchError: when a node does not get ready, or a reply fails.
    """
    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    with ProcessGroup(lambda *_: None) as group:
        for start in plan("demo", {"mode": mode}):
            if start.entry.executable in _NEEDED:
                group.start_node(start)
        views = [
            group.start_node(NodeStart(NodeEntry("visual_node", "visual.yaml"))),
            group.start_node(
                NodeStart(NodeEntry("view_node", "view.yaml"), {"web_port": "0", "data_port": "0"})
            ),
        ]
        with _Client() as client:
            client.wait(_READY_S)
            return _measure(client, views, pairs, progress)


def _measure(
    client: _Client, views: Sequence[Child], pairs: int, progress: Progress
) -> dict[str, Any]:
    taken = {child.name: 0.0 for child in views}
    span, frames = 0.0, 0
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        client.decode()
    for pair in range(pairs):
        for running in (True, False) if pair % 2 else (False, True):
            _hold(views, signal.SIGCONT if running else signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            before = {child.name: cpu_seconds(child.pid) for child in views}
            began, frames_before = time.monotonic(), client.frames
            seconds[running].append(client.decode())
            time.sleep(_PAUSE_S)
            if running:
                span += time.monotonic() - began
                frames += client.frames - frames_before
                for child in views:
                    taken[child.name] += cpu_seconds(child.pid) - before[child.name]
        progress(
            f"{statistics.median(seconds[True]):.3f} s a reply with views, "
            f"{statistics.median(seconds[False]):.3f} without"
        )
    _hold(views, signal.SIGCONT)
    if frames == 0:
        raise ViewBenchError(
            "No overlaid picture came; run `dsd demo` to see whether the nodes work."
        )
    per_core = {name: 100.0 * cpu * RATE / frames for name, cpu in taken.items()}
    with_views, without = statistics.median(seconds[True]), statistics.median(seconds[False])
    longer, error = median_difference(seconds[True], seconds[False])
    return {
        "bench": "view",
        "replies": len(seconds[True]),
        "pictures": frames,
        "pictures_per_second": round(frames / span, 2),
        "rate": RATE,
        "core_percent": {name: round(value, 2) for name, value in per_core.items()},
        "core_percent_together": round(sum(per_core.values()), 2),
        "seconds_per_reply_with": round(with_views, 4),
        "seconds_per_reply_without": round(without, 4),
        "reply_percent": round(100.0 * longer / without, 2),
        "reply_percent_standard_error": round(100.0 * error / without, 2),
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{name:12} {value:6.2f} % of a core" for name, value in report["core_percent"].items()
    ]
    lines.append(
        f"{'together':12} {report['core_percent_together']:6.2f} % at {report['rate']:.0f} pictures a second"
    )
    lines.append(
        f"seconds per reply: {report['seconds_per_reply_with']:.3f} with, "
        f"{report['seconds_per_reply_without']:.3f} without views "
        f"({report['reply_percent']:+.1f} % +- {report['reply_percent_standard_error']:.1f} %)"
    )
    return "\n".join(lines)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children, user and system, s."""
    total = 0.0
    for number in [pid, *_children(pid)]:
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(number) for number in text.split()]


def _hold(views: Sequence[Child], number: int) -> None:
    for child in views:
        for pid in [child.pid, *_children(child.pid)]:
            os.kill(pid, number)


def median_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Median of a_i - b_i, and its standard error.

    The error is that of a median of normal samples, sqrt(pi / 2) sigma / sqrt(n), with sigma from the median absolute
    deviation (1.4826 MAD): a reply that the machine held up once says nothing about either.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    middle = statistics.median(differences)
    spread = 1.4826 * statistics.median(abs(d - middle) for d in differences)
    return middle, float((math.pi / 2 / len(differences)) ** 0.5 * spread)


class _Client:
    """Looks at what the visualization node publishes, and asks for replies."""

    def __enter__(self) -> _Client:
        self._ros = SpinningNode("view_bench")
        node = self._ros.node
        self.frames = 0
        node.create_subscription(Image, "visual/image", self._on_frame, qos.NEWEST_STATE, raw=True)
        node.create_subscription(MarkerArray, "visual/markers", lambda _: None, qos.STATE, raw=True)
        self._decode = node.create_client(Decode, "decode")
        self._state = node.create_client(GetState, "draft_node/get_state")
        self._ros.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ros.close()

    def wait(self, limit: float) -> None:
        """Until the draft node is active and overlaid pictures come."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self.frames and self._state.service_is_ready():
                answer = self._call(self._state, GetState.Request(), 5.0)
                if answer is not None and answer.current_state.id == State.PRIMARY_STATE_ACTIVE:
                    return
            time.sleep(0.1)
        raise ViewBenchError(
            f"The nodes did not get ready within {limit:.0f} s; `dsd demo` shows what they say."
        )

    def decode(self) -> float:
        """Seconds of one reply."""
        request = Decode.Request(instruction="find the silver bottle", timeout=30.0)
        answer = self._call(self._decode, request, 40.0)
        if answer is None or not answer.success:
            reason = "no answer" if answer is None else answer.message
            raise ViewBenchError(f"A reply failed: {reason}")
        return float(answer.stats.seconds)

    def _call(self, client: Any, request: Any, timeout: float) -> Any:
        done = threading.Event()
        future = client.call_async(request)
        future.add_done_callback(lambda _: done.set())
        return future.result() if done.wait(timeout) else None

    def _on_frame(self, _: bytes) -> None:
        self.frames += 1
