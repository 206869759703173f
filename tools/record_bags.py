#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record the shipped bags (test/bags) again, as is needed after every training of the pair.

    .venv/bin/python tools/record_bags.py [NAME ...]

Each is a run of the demo. A run is checked for what its test requires, and repeated if it lacks any of it; only a bag
that passes replaces the old one. What comes before the run, while the models load, is left out. The demo runs in a copy
of this checkout in the temporary folder, because a bag contains the paths of its models.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from rosbags.interfaces import QosDurability
from rosbags.rosbag2 import Reader

from dsd_lab.links.emulation import LinkProfile
from dsd_lab.links.proxy import Conditions, LinkProxy, Way
from dsd_ros.cli.demo import DemoSettings
from dsd_ros.cli.demo_run import run_demo
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run
from dsd_ros.observe.bag.writer import BagWriter

ROOT = Path(__file__).resolve().parents[1]
COPY = Path(tempfile.gettempdir()) / "dsd_ros"
PARTS = ("src", "models", "config", "launch", "resource", "tools", "package.xml", "setup.py")
TRIES = 4
RUNS = {
    "straight": {"mode": "stream", "transport": "dds", "seed": 24, "instruction": "find the silver bottle"},
    "faults": {"mode": "stream", "transport": "websocket", "seed": 24, "instruction": "find the silver bottle"},
    "ball": {"mode": "fsd", "transport": "websocket", "seed": 4, "instruction": "find the yellow ball"},
}  # fmt: skip
# For `faults`: a picture outlives the cut of its reply. (file, old line, new line)
PATIENT = (
    ("navigation.yaml", "max_observation_age_s: 5.0", "max_observation_age_s: 14.0"),
    ("supervisor.yaml", "observation_age_s: 5.0", "observation_age_s: 14.0"),
)
SPARE = ("record.yaml", "camera_hz: 0.0", "camera_hz: 1.0")
SHOWN = (
    "robot_description", "tf", "tf_static", "dsd/visual/markers", "dsd/visual/path_walked", "dsd/visual/path_intended",
)  # fmt: skip
TRIM_NS, SAVE_NS = 1_000_000_000, 500_000_000
LATCHED = 10  # messages of a latched topic that a trimmed bag begins with
PICTURE_BYTES = 8_000  # an upload of at least this much within a quarter of a second is a picture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(RUNS)} (default: all)")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # the copy's part of the work
    args = parser.parse_args()
    unknown = sorted({*args.names} - {*RUNS})
    if unknown:
        parser.error(f"there is no bag '{unknown[0]}'; choose from {', '.join(RUNS)}.")
    if args.into is not None:
        return record(args.names[0], args.into)
    if COPY.exists():
        parser.error(f"{COPY} exists already; remove it first.")
    done = [again(name) for name in args.names or RUNS]
    return 0 if all(done) else 1


def again(name: str) -> bool:
    """Record one bag in place of the old one; returns whether that succeeded."""
    for _ in range(TRIES):
        try:
            COPY.mkdir()
            for part in PARTS:
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                copy(ROOT / part, COPY / part)
            for file, old, new in (SPARE, *(PATIENT if name == "faults" else ())):
                replace_in(COPY / "config" / file, old, new)
            bag = COPY / "bags" / name
            subprocess.run(
                [sys.executable, COPY / "tools" / Path(__file__).name, name, "--into", bag],
                env=os.environ | {"PYTHONPATH": str(COPY / "src")},
                cwd=COPY,
                check=False,
            )
            lacks = missing(name, bag)
            if not lacks:
                place = ROOT / "test" / "bags" / name
                part = ROOT / ".cache" / f"{name}.part"  # swapped in whole
                shutil.rmtree(part, ignore_errors=True)
                part.parent.mkdir(exist_ok=True)
                trim(bag, part / name)
                shutil.rmtree(place, ignore_errors=True)
                (part / name).rename(place)
                part.rmdir()
                print(f"{name}: recorded into {place}")
                return True
            print(f"{name}: {lacks}; trying again.")
        finally:
            shutil.rmtree(COPY, ignore_errors=True)
    print(f"{name}: {TRIES} tries failed; the old bag stays.", file=sys.stderr)
    return False


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{path.name} has '{old}' {text.count(old)} times, not once.")
    path.write_text(text.replace(old, new))


def record(name: str, bag: Path) -> int:
    """In the copy: run the demo once with its recorder."""
    settings = DemoSettings(**RUNS[name], headless=True, record=str(bag))
    shown = {"visual": "true"}  # what RViz shows is in the bag
    if name != "faults":
        return run_demo(settings, shown)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    link = BadLink(port)
    try:
        return run_demo(settings, shown | {"verifier": link.proxy.url, "verifier_port": str(port)})
    finally:
        link.close()


class BadLink:
    """A relay with jitter and packet loss, cut for 4 s during the third reply, silent for 1 s at the fifth.

    The fifth picture is the sixth upload, since the third is sent again.
    """

    def __init__(self, verifier_port: int) -> None:
        self.proxy = LinkProxy(("127.0.0.1", verifier_port), seed=1)
        self.proxy.set(Conditions(LinkProfile(jitter_s=0.08), loss=0.05))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._spoil, name="bad link")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.proxy.close()

    def _spoil(self) -> None:
        pictures, coming, carried = 0, False, []
        while not self._ended.wait(0.05):
            carried.append(self.proxy.carried[Way.UP])
            before, coming = coming, carried[-1] - carried[-6:][0] > PICTURE_BYTES
            if before or not coming:
                continue
            pictures += 1
            if pictures == 3:
                self._ended.wait(0.05)  # the reply is under way
                self.proxy.cut()
                self._ended.wait(4.0)
                self.proxy.restore()
            elif pictures == 6:  # one was sent again after the cut
                self.proxy.silence()
                self._ended.wait(1.0)
                self.proxy.restore()


def trim(bag: Path, out: Path) -> None:
    """Copy a bag from a second before its first instruction on, with what is latched then."""
    with Reader(bag) as reader:
        texts = {c.msgtype: (str(c.msgdef.data), c.digest) for c in reader.connections}
        begin = min(at for c, at, _ in reader.messages() if c.topic.endswith("/instruction")) - TRIM_NS
        writer = BagWriter(out, texts.__getitem__)
        for key, text in open_bag(bag).custom.items():
            writer.set_metadata(key, text)

        def write(connection: Any, at: int, data: bytes) -> None:
            writer.write(connection.topic, connection.msgtype, connection.ext.offered_qos_profiles, at, data)

        latched: dict[str, deque[tuple[Any, bytes]]] = defaultdict(lambda: deque(maxlen=LATCHED))
        for connection, _, data in reader.messages(stop=begin):
            if connection.ext.offered_qos_profiles[0].durability is QosDurability.TRANSIENT_LOCAL:
                latched[connection.topic].append((connection, data))
        for early in latched.values():
            for connection, data in early:
                write(connection, begin, data)
        saved = begin
        for connection, at, data in reader.messages(start=begin):
            if at - saved > SAVE_NS:
                writer.save()
                saved = at
            write(connection, at, data)
        writer.close()


def missing(name: str, bag: Path) -> str:
    """What a bag lacks of what test_replay.py requires; "" for nothing."""
    if not bag.is_dir():
        return "no bag was written"
    run = read_run(open_bag(bag))
    if run.bag.notes or len(run.steps) < 3 or not all(step.text and step.instruction for step in run.steps):
        return "replies are missing or incomplete"
    if not any(topic.endswith("/instruction") for topic in run.bag.counts):
        return "the instruction is missing"
    if not run.requests or not run.verifiers:
        return "the opening of the session is missing"
    if not run.ends or not run.ends[-1][1].startswith("ARRIVED: "):
        return "the robot did not arrive"
    lacks = sorted(name for name in SHOWN if run.bag.topic(name) not in run.bag.counts)
    if lacks:
        return f"what RViz shows is missing: {', '.join(lacks)}"
    if name == "faults" and not any("LINK_LOST" in stop.causes for stop in run.stops):
        return "the link was not lost in the middle of a reply"
    if name == "faults" and max(step.stats["seconds"] for step in run.steps) <= 3.0:
        return "no reply waited for the link"
    return ""


if __name__ == "__main__":
    sys.exit(main())
