"""`dsd-lab bench overhead`: what a round costs beyond the two models, per transport, over loopback."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.tree_cost import tree_costs
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import Channel, LinkClosed

TRANSPORTS = ("local", "websocket", "dds")
_ADDRESS = re.compile(r"wss?://\S+:\d+")
_WARM_UP = 3  # replies that are not counted


def measure_overhead(
    transports: Sequence[str],
    replies: int,
    draft: str,
    target: str,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Decode ``replies`` noise pictures in mode dsd over each transport, verifier in its own process.

    The overhead of a round is the time the robot waited for its outcome less the time the verifier's model
    ran, in milliseconds; drafting is not in it. First rounds, in which both sides still read the picture,
    are left out. What a tree adds to a pass of the verifier is measured beside (``tree_costs``).
    progress(share done, transport) after each reply. ValueError for an unknown transport.
    """
    for name in transports:
        if name not in TRANSPORTS:
            raise ValueError(f"unknown transport {name!r}; choose from {', '.join(TRANSPORTS)}")
    if replies < 1:
        raise ValueError(f"replies is {replies}; use 1 or more")
    # One thread each: both models share this machine, and their threads would wait for each other.
    model = load_model(ModelSettings(draft, threads=1))
    settings = DecodeSettings(mode="dsd", seed=seed)
    pictures = np.random.default_rng(seed).integers(0, 256, (replies, 112, 168, 3), dtype=np.uint8)
    rows, done = [], 0
    for name in transports:
        with _CHANNELS[name](target) as channel, EdgeSession(channel, model, settings) as session:
            for picture in pictures[:_WARM_UP]:
                session.decode(picture, "find the silver bottle")
            rounds = []
            for picture in pictures:
                reply = session.decode(picture, "find the silver bottle")
                rounds += [1e3 * (r.wait_seconds - r.verify_seconds) for r in reply.records[1:]]
                done += 1
                if progress is not None:
                    progress(done / (replies * len(transports)), name)
        median, p95 = np.percentile(rounds, [50, 95])
        rows.append(
            {
                "transport": name,
                "rounds": len(rounds),
                "median_ms": round(float(median), 3),
                "p95_ms": round(float(p95), 3),
            }
        )
    return {"bench": "overhead", "machine": machine(), "replies": replies, "rows": rows, "trees": tree_costs()}


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [f"{'transport':12} {'rounds':>8} {'median ms':>10} {'p95 ms':>10}"]
    for row in report["rows"]:
        lines.append(f"{row['transport']:12} {row['rounds']:8d} {row['median_ms']:10.3f} {row['p95_ms']:10.3f}")
    for row in report["trees"]:
        tree = f"{row['tree']} of {row['nodes']}"
        lines.append(f"mask and positions of a {tree:12} {row['median_ms']:7.3f} {row['p95_ms']:10.3f}")
    return "\n".join([*lines, report["machine"]])


def machine() -> str:
    """This machine in words: processor, cores, system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = found.group(1) if found else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"


@contextmanager
def _local(target: str) -> Iterator[Channel]:
    from dsd_ros.cloud.local import in_process_channel

    with in_process_channel(ModelSettings(target, threads=1)) as channel:
        yield channel


@contextmanager
def _websocket(target: str) -> Iterator[Channel]:
    from dsd_ros.wire.websocket import WebsocketChannel

    command = [sys.executable, "-m", "dsd_ros.cli", "verifier", "--port", "0", "--model", target]
    with _process(command) as process:
        channel = WebsocketChannel(_address(process))
        try:
            yield channel
        finally:
            channel.close()


@contextmanager
def _dds(target: str) -> Iterator[Channel]:
    from dsd_ros.ros.standalone import dds_channel

    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    command = [sys.executable, "-m", "dsd_ros.ros.entry", "verifier_node", "--ros-args"]
    command += ["-p", f"model.path:={target}", "-p", "model.threads:=1"]
    with _process(command) as process, dds_channel("overhead_bench") as channel:
        threading.Thread(target=_drain, args=(process,), daemon=True).start()
        yield channel


_CHANNELS = {"local": _local, "websocket": _websocket, "dds": _dds}


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _address(process: subprocess.Popen[str]) -> str:
    """The address that `dsd verifier` prints; what it says after that is read and dropped."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        found = _ADDRESS.search(line)
        if found:
            threading.Thread(target=_drain, args=(process,), daemon=True).start()
            return found.group()
    raise LinkClosed(f"the verifier did not start: {''.join(said).strip() or 'it said nothing'}")


def _drain(process: subprocess.Popen[str]) -> None:
    try:
        for _ in process.stdout or ():
            pass
    except ValueError:
        return  # closed at the end
