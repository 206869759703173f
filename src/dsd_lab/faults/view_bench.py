# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench view`: what overlay and live page take of a CPU core, and of a reply's time."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from dsd_lab.report import header
from dsd_msgs.srv import Decode
from dsd_ros.bringup.processes import Child, ProcessGroup, use_own_ros_domain
from dsd_ros.bringup.systems import plan
from dsd_ros.paths import models_directory
from dsd_ros.ros import qos
from dsd_ros.ros.managed import LifecycleWatch
from dsd_ros.ros.stamps import seconds, to_duration
from dsd_ros.ros.standalone import SpinningNode

if TYPE_CHECKING:
    from typing_extensions import Self

RATE = 15.0  # pictures per second that the figures are for
CORE_LIMIT, REPLY_LIMIT = 5.0, 3.0  # percent
_READY_S = 120.0
_NEEDED = ("simulator_node", "draft_node", "verifier_node")
_SETTLE_S = 0.2
_RECEIVER_S = 5.0  # until a receiver has what was kept for it
_PAUSE_S = 0.7  # between two replies: a robot moves in between

Progress = Callable[[str], None]


class ViewBenchError(RuntimeError):
    """The bench cannot go on; one sentence."""


def measure_views(pairs: int, mode: str, progress: Progress) -> dict[str, Any]:
    """Decode two replies per pair, one beside running views and one with the views held, in turns ABBA.

    As many replies follow while the page's data is received as by a browser. CPU time is that of the views' processes,
    scaled to RATE pictures a second. The two replies of a pair follow each other, so that the machine's other work
    slows both: what counts is the median of their differences. ViewBenchError.
    """
    use_own_ros_domain()
    lines: list[str] = []
    with ProcessGroup(lambda _, line: lines.append(line)) as group:
        for start in plan("demo", {"mode": mode}):
            if start.name in _NEEDED:
                group.start_planned(start)
        views = start_views(group)
        with _Client() as client:
            client.wait(_READY_S)
            report = _measure(client, views, pairs, progress)
            with receiver(next(page for line in lines if (page := _page(line)))):
                time.sleep(_RECEIVER_S)
                progress("the same with the page open")
                cpu, frames = _used(client, views, pairs)
    report["core_percent_watched"] = round(100.0 * cpu * RATE / max(1, frames), 2)
    return report


def start_views(group: ProcessGroup) -> list[Child]:
    """Start both views in one process, the web page at the picture rate of RViz."""
    (start,) = (start for start in plan("demo", {"view": "true"}) if start.name == "view_node")
    start.parameters.update(web_port=0, rate=RATE, visual=True)
    return [group.start_planned(start)]


def _measure(client: _Client, views: Sequence[Child], pairs: int, progress: Progress) -> dict[str, Any]:
    taken = {child.name: 0.0 for child in views}
    span, frames = 0.0, 0
    replies: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        client.decode()
    for pair in range(pairs):
        for running in (True, False) if pair % 2 else (False, True):
            _hold(views, signal.SIGCONT if running else signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            before = {child.name: cpu_seconds(child.pid) for child in views}
            began, frames_before = time.monotonic(), client.frames
            replies[running].append(client.decode())
            time.sleep(_PAUSE_S)
            if running:
                span += time.monotonic() - began
                frames += client.frames - frames_before
                for child in views:
                    taken[child.name] += cpu_seconds(child.pid) - before[child.name]
        progress(
            f"{statistics.median(replies[True]):.3f} s a reply with views, "
            f"{statistics.median(replies[False]):.3f} without"
        )
    _hold(views, signal.SIGCONT)
    if frames == 0:
        raise ViewBenchError("No overlaid picture came; run `dsd demo` to see whether the nodes work.")
    per_core = {name: 100.0 * cpu * RATE / frames for name, cpu in taken.items()}
    with_views, without = statistics.median(replies[True]), statistics.median(replies[False])
    longer, error = median_difference(replies[True], replies[False])
    models = {role: models_directory() / role for role in ("draft", "target")}
    return {
        **header("view", ("dsd_ros/observe",), **models),
        "replies": len(replies[True]),
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


def _used(client: _Client, views: Sequence[Child], replies: int) -> tuple[float, int]:
    """CPU time of the views (s) and overlaid pictures during so many replies, the views never held."""
    before, frames = sum(cpu_seconds(child.pid) for child in views), client.frames
    for _ in range(replies):
        client.decode()
        time.sleep(_PAUSE_S)
    return sum(cpu_seconds(child.pid) for child in views) - before, client.frames - frames


@contextmanager
def receiver(page: str) -> Iterator[list[int]]:
    """Receive what a browser with the page open would receive; yields a list of the sizes of what came."""
    sizes: list[int] = []
    url = urlsplit(page)
    with socket.create_connection((url.hostname, url.port), timeout=30.0) as connection:
        connection.sendall(f"GET /events HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())

        def read() -> None:
            with suppress(OSError):
                while part := connection.recv(1 << 16):
                    sizes.append(len(part))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield sizes
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            thread.join()


def _page(line: str) -> str:
    """The address of the live page, if a line that it printed names it; else ""."""
    found = re.search(r"live page at (http://\S+)", line)
    return found[1] if found else ""


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{name:12} {value:6.2f} % of a core" for name, value in report["core_percent"].items()]
    lines.append(f"{'together':12} {report['core_percent_together']:6.2f} % at {report['rate']:.0f} pictures a second")
    lines.append(f"{'page open':12} {report['core_percent_watched']:6.2f} % with a receiver")
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
    """Median of a_i - b_i, and its standard error sqrt(pi / 2) sigma / sqrt(n) with sigma = 1.4826 MAD."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    middle = statistics.median(differences)
    spread = 1.4826 * statistics.median(abs(d - middle) for d in differences)
    return middle, float((math.pi / 2 / len(differences)) ** 0.5 * spread)


class _Client:
    """Receives what the visualization node publishes, and asks for replies."""

    def __enter__(self) -> Self:
        self._ros = SpinningNode("view_bench")
        node = self._ros.node
        self.frames = 0
        # Reliable: pictures that come while this process waits for the processor count as well.
        node.create_subscription(Image, "dsd/visual/image", self._count, qos.STATE, raw=True)
        node.create_subscription(MarkerArray, "dsd/visual/markers", lambda _: None, qos.STATE, raw=True)
        self._decode = node.create_client(Decode, "dsd/decode")
        self._draft_node = LifecycleWatch(node, "draft_node")
        self._ros.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ros.close()

    def wait(self, limit: float) -> None:
        """Until the draft node is active and overlaid pictures come."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self.frames and self._draft_node.active():
                return
            time.sleep(0.1)
        raise ViewBenchError(f"The nodes did not get ready within {limit:.0f} s; `dsd demo` shows what they print.")

    def decode(self) -> float:
        """Seconds of one reply."""
        done = threading.Event()
        future = self._decode.call_async(
            Decode.Request(instruction="find the silver bottle", timeout=to_duration(30.0))
        )
        future.add_done_callback(lambda _: done.set())
        answer = future.result() if done.wait(40.0) else None
        if answer is None or not answer.success:
            reason = "no answer" if answer is None else answer.message
            raise ViewBenchError(f"A reply failed: {reason}")
        return seconds(answer.stats.total_time)

    def _count(self, _: bytes) -> None:
        self.frames += 1
