# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench overhead`: what a round costs beyond the two models, per transport, over loopback."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from dsd_lab.bench.scenes import held_out_scenes
from dsd_lab.report import BenchError, check_range, header, table
from dsd_ros.bringup.processes import ProcessGroup, use_own_ros_domain
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import MAX_NODES, ROOT, TokenTree
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import TreeLayout
from dsd_ros.wire.channel import Channel, LinkClosed
from dsd_ros.wire.websocket import WebsocketChannel

PAST = 1024  # tokens before a tree
_HEAD = 64  # size of an attention head
_ADDRESS = re.compile(r"wss?://\S+:\d+")
_START_S = 120.0  # for a verifier to load its model and listen
_WARM_UP = 3  # replies that are not counted
_WARM_UP_TREES = 20  # passes that are not counted


def measure_overhead(
    transports: Sequence[str],
    replies: int,
    draft: str,
    target: str,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Decode ``replies`` noise pictures in mode dsd over each transport, the verifier in its own process; BenchError.

    The overhead of a round is the robot's wait for its outcome less the time that the verifier's model ran. First
    rounds, in which both sides still read the picture, are left out. "ahead" (``drafting_ahead``) is measured where
    ``transports`` has its websocket.
    """
    for name in transports:
        if name not in _CHANNELS:
            raise BenchError(f"unknown transport {name!r}; choose from {', '.join(_CHANNELS)}")
    check_range("replies", replies, 1, 100_000)
    # One thread each: the models share this machine, and their threads would wait for each other.
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
        rows.append({"transport": name, "rounds": len(rounds), **_percentiles(rounds)})
    models = {"draft": model, "target": target}
    report = {**header("overhead", **models), "replies": replies, "rows": rows, "trees": tree_costs()}
    return report | ({"ahead": drafting_ahead(model, target, replies)} if "websocket" in transports else {})


def drafting_ahead(model: VisionLanguageModel, target: str, replies: int) -> dict[str, float]:
    """Seconds of a reply in modes dsd and fsd over a websocket, and how much faster fsd is, picture by picture.

    Both models share this machine and run as fast as it lets them: this is what drafting ahead costs the round itself.
    """
    seconds: dict[str, list[float]] = {"dsd": [], "fsd": []}
    with verifier_process(target) as url, ExitStack() as stack:
        sessions = {}
        for mode in seconds:
            link = stack.enter_context(WebsocketChannel(url))
            sessions[mode] = stack.enter_context(EdgeSession(link, model, DecodeSettings(mode=mode)))
        for scene in held_out_scenes(_WARM_UP + replies):
            for mode, session in sessions.items():
                seconds[mode].append(session.decode(scene.image, scene.instruction).seconds)
    dsd, fsd = (np.array(measured[_WARM_UP:]) for measured in seconds.values())
    return {"dsd_s": float(np.median(dsd)), "fsd_s": float(np.median(fsd)), "fsd_over_dsd": float(np.median(dsd / fsd))}


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
        rows.append({"tree": name, "nodes": nodes, **_percentiles(milliseconds[_WARM_UP_TREES:])})
    return rows


def render(report: dict[str, Any]) -> str:
    """The report as tables."""
    rows = [[r["transport"], f"{r['rounds']}", f"{r['median_ms']:.3f}", f"{r['p95_ms']:.3f}"] for r in report["rows"]]
    rows += [
        [f"mask and positions of a {r['tree']} of {r['nodes']}", "", f"{r['median_ms']:.3f}", f"{r['p95_ms']:.3f}"]
        for r in report["trees"]
    ]
    lines = table([["transport", "rounds", "median ms", "p95 ms"], *rows])
    if ahead := report.get("ahead"):
        said = "a reply at real speed: dsd {dsd_s:.3f} s, fsd {fsd_s:.3f} s; fsd over dsd {fsd_over_dsd:.2f} times"
        lines.append(said.format(**ahead))
    return "\n".join([*lines, report["machine"]])


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
