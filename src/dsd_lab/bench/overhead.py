# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench overhead`: what a round costs beyond the two models, per transport, over loopback."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dsd_lab.bench.harness import Bench, PairFlags, Report, Told
from dsd_lab.parts import parts
from dsd_lab.report import BenchError, Row, check_range, header
from dsd_ros.bringup.processes import ProcessGroup, use_own_ros_domain
from dsd_ros.cli.arguments import arguments, flag
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import MAX_NODES, ROOT, TokenTree
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.sequence import TreeLayout
from dsd_ros.wire.channel import Channel, LinkClosed
from dsd_ros.wire.websocket import WebsocketChannel

PAST = 1024  # tokens before a tree
_HEAD = 64  # size of an attention head
_ADDRESS = re.compile(r"wss?://\S+:\d+")
_START_S = 120.0  # for a verifier to load its model and listen
_WARM_UP = 3  # replies that are not counted
_WARM_UP_TREES = 20  # passes that are not counted


@arguments
class Flags(PairFlags):
    transports: str = flag("local,websocket,dds", "comma-separated: local, websocket, dds")
    replies: int = flag(30, "replies per transport")


def measure(flags: Flags, told: Told) -> Report:
    """Decode noise pictures in mode dsd over each transport, the verifier in its own process; BenchError.

    The overhead of a round is the robot's wait for its outcome less the time that the verifier's model ran. First
    rounds, in which both sides still read the picture, are left out.
    """
    transports, replies = flags.transports.split(","), flags.replies
    for name in transports:
        if name not in _CHANNELS:
            raise BenchError(f"unknown transport {name!r}; choose from {', '.join(_CHANNELS)}")
    check_range("replies", replies, 1, 100_000)
    draft, target = flags.models
    model, settings = load_model(draft), DecodeSettings(mode="dsd")
    pictures = np.random.default_rng(0).integers(0, 256, (replies, 112, 168, 3), dtype=np.uint8)
    rows: list[Row] = []
    for place, name in enumerate(parts(transports)):
        with _CHANNELS[name](target.path) as channel, EdgeSession(channel, model, settings) as session:
            for picture in pictures[:_WARM_UP]:
                session.decode(picture, "find the silver bottle")
            rounds = []
            for number, picture in enumerate(pictures):
                reply = session.decode(picture, "find the silver bottle")
                rounds += [1e3 * (r.wait_seconds - r.verify_seconds) for r in reply.records[1:]]
                told((place + number / replies) / len(transports), name)
        rows.append({"transport": name, "rounds": len(rounds), **_percentiles(rounds)})
    return {**header("overhead", draft=model, target=target.path), "replies": replies, "rows": rows + tree_costs()}


def tree_costs(passes: int = 400, nodes: int = MAX_NODES) -> list[dict[str, Any]]:
    """Milliseconds of CPU that a tree of ``nodes`` nodes after PAST tokens takes beyond a sequence, by its shape.

    Timed are its decoding from the wire, the ancestor mask, and each node's position and rotations.
    """
    cos, sin = torch.rand(2, 1, PAST + nodes + 1, _HEAD)
    shapes = {
        "chain": tuple(range(-1, nodes - 1)),
        "binary": tuple((node - 2) // 2 for node in range(nodes)),
        "star": (ROOT,) * nodes,
    }
    rows = []
    for name, parents in shapes.items():
        sent = TokenTree(tuple(range(nodes)), parents).parents_bytes()
        milliseconds = []
        for _ in range(_WARM_UP_TREES + passes):
            began = time.thread_time()
            tree = TokenTree.from_bytes(range(nodes), sent)
            layout = TreeLayout.of(tree.parents, 0, PAST, 1)
            assert layout.mask is not None
            _ = torch.from_numpy(layout.mask)[None, None]
            positions = torch.from_numpy(layout.positions)
            _ = cos[:, positions], sin[:, positions]
            milliseconds.append(1e3 * (time.thread_time() - began))
        rows.append(
            {
                "transport": f"a {name} of {nodes}",
                "tree": name,
                "nodes": nodes,
                **_percentiles(milliseconds[_WARM_UP_TREES:]),
            }
        )
    return rows


def _percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    median, p95 = np.percentile(milliseconds, [50, 95])
    return {"median_ms": round(float(median), 3), "p95_ms": round(float(p95), 3)}


@contextmanager
def _local(target: str) -> Iterator[Channel]:
    from dsd_ros.cloud.engine import in_process_channel

    with in_process_channel(ModelSettings(target, threads=1)) as channel:
        yield channel


@contextmanager
def verifier_process(target: str) -> Iterator[str]:
    """The address of a verifier of its own process, on loopback."""
    with verifier_child(target) as (address, _):
        yield address


@contextmanager
def verifier_child(target: str, *flags: str, threads: int = 1) -> Iterator[tuple[str, int]]:
    """The address of a verifier with these flags in a process of its own, on loopback, and its process id."""
    lines: queue.Queue[str] = queue.Queue()
    with ProcessGroup(lambda _, line: lines.put(line)) as group:
        command = [sys.executable, "-m", "dsd_ros.cli", "verifier", "--port", "0", "--model", target, *flags]
        child = group.start("verifier", command, {"OMP_NUM_THREADS": str(threads)})
        printed, deadline = "", time.monotonic() + _START_S
        while (address := _ADDRESS.search(printed)) is None:
            if time.monotonic() > deadline or not (child.running or lines.qsize()):
                raise LinkClosed(f"the verifier did not start: {printed.strip() or 'it printed nothing'}")
            try:
                printed += lines.get(timeout=0.2) + "\n"
            except queue.Empty:
                continue
        yield address.group(), child.pid


@contextmanager
def _websocket(target: str) -> Iterator[Channel]:
    with verifier_process(target) as url, WebsocketChannel(url) as channel:
        yield channel


@contextmanager
def _dds(target: str) -> Iterator[Channel]:
    from dsd_ros.ros.standalone import dds_channel

    use_own_ros_domain()
    command = [sys.executable, "-m", "dsd_ros.ros.entry", "verifier_node", "--ros-args"]
    command += ["-p", f"model.path:={target}", "-p", "model.threads:=1"]
    with ProcessGroup(lambda _, line: None) as group:
        group.start("verifier_node", command, {"OMP_NUM_THREADS": "1"})
        with dds_channel("overhead_bench") as channel:
            yield channel


_CHANNELS = {"local": _local, "websocket": _websocket, "dds": _dds}
BENCH = Bench(
    measure,
    lambda report: (
        ("transport, or a tree's mask and positions", "transport", ""), ("rounds", "rounds", "d"),
        ("median ms", "median_ms", ".3f"), ("p95 ms", "p95_ms", ".3f"),
    ),
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """Time per round not spent in models or on the link.

    Decodes replies over each transport on loopback, the verifier in a process of its own; prints the median and 95th
    percentile of what a round costs beyond both models' time, and of what a tree of 64 nodes adds to the verifier's
    CPU time (mask and positions).
    """
    return BENCH.run(flags)
