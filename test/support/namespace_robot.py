# SPDX-License-Identifier: Apache-2.0
"""The robot's half in a network namespace, decoding over a real websocket with a verifier in another.

    unshare --net python namespace_robot.py

Prints one line of JSON: what emulated the link, and for each thing that happens to it whether the tokens were those
of a run with no link at all. Both namespaces and the veth pair between them end with this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from table_model import TableModel  # noqa: E402

from dsd_ros.cloud.engine import VerifierEngine  # noqa: E402
from dsd_ros.decoding.settings import DecodeSettings  # noqa: E402
from dsd_ros.edge.client import LinkSettings  # noqa: E402
from dsd_ros.edge.session import EdgeSession  # noqa: E402
from dsd_ros.wire.channel import LocalChannel  # noqa: E402
from dsd_ros.wire.websocket import WebsocketChannel  # noqa: E402

ROBOT, MOVED, VERIFIER = "10.77.0.1/24", "10.77.0.9/24", "10.77.0.2/24"
DELAY_MS, JITTER_MS, LOSS, RATE_MBPS = 15, 10, 0.03, 4
PICTURE = np.random.default_rng(0).integers(0, 256, (112, 168, 3), dtype=np.uint8)
DRAFT = TableModel(4, 12, ends=False, noise=0.6, padding=3)
LINK = LinkSettings(response_timeout_s=0.6, attempts=20)
SETTINGS = DecodeSettings(mode="dsd", temperature=1.0, seed=3, max_tokens=40)
PATIENCE_S = 60.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Verifier:
    """The process in the other namespace."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("namespace_verifier.py")
        self.process = subprocess.Popen(
            ["unshare", "--net", sys.executable, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.port = self._answer()["port"]

    def tell(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def run(self, *words: str) -> dict[str, Any]:
        return self.tell(run=list(words))

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def join(verifier: Verifier) -> None:
    """A cable between the two namespaces."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(verifier.process.pid))
    ip("addr", "add", ROBOT, "dev", "veth0")
    ip("link", "set", "veth0", "up")
    for words in (["addr", "add", VERIFIER, "dev", "veth1"], ["link", "set", "veth1", "up"]):
        assert verifier.run("ip", *words)["code"] == 0


def emulate(verifier: Verifier) -> str:
    """Make the link slow and lossy, by the kernel where it can; what did it."""
    netem = ["tc", "qdisc", "add", "dev"], ["root", "netem", "delay", f"{DELAY_MS}ms", f"{JITTER_MS}ms",
             "loss", f"{100 * LOSS}%", "rate", f"{RATE_MBPS}mbit"]  # fmt: skip
    try:
        done = subprocess.run([*netem[0], "veth0", *netem[1]], capture_output=True, text=True)
    except FileNotFoundError:
        reason = "there is no tc"
    else:
        if done.returncode == 0:
            assert verifier.run(*netem[0], "veth1", *netem[1])["code"] == 0
            return "netem"
        reason = done.stderr.strip()
    verifier.tell(
        loss=LOSS, jitter_s=JITTER_MS / 1000, delay_up_s=DELAY_MS / 1000, delay_down_s=DELAY_MS / 1000,
        rate_up_bps=RATE_MBPS * 1e6, rate_down_bps=RATE_MBPS * 1e6,
    )  # fmt: skip
    return f"proxy: {reason}"


def decode(session: EdgeSession, number: int, at_round: int = 0, event: Any = None) -> list[int]:
    """One reply; ``event`` happens once a round has been verified."""
    rounds = 0

    def progress(*_: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == at_round:
            event()

    reply = session.decode(
        PICTURE, "go " + "on " * number, on_progress=progress,
        deadline=time.monotonic() + PATIENCE_S,
    )  # fmt: skip
    return list(reply.tokens)


def main() -> None:
    verifier = Verifier()
    join(verifier)
    report: dict[str, Any] = {"emulation": emulate(verifier)}

    def link_down() -> None:
        ip("link", "set", "veth0", "down")
        timer = threading.Timer(1.0, ip, ("link", "set", "veth0", "up"))
        timer.daemon = True
        timer.start()

    def roam() -> None:
        ip("addr", "del", ROBOT, "dev", "veth0")
        ip("addr", "add", MOVED, "dev", "veth0")

    events = {"as it is": (0, None), "link down and up": (2, link_down), "address changed": (2, roam)}
    with VerifierEngine(TableModel(4, 12, ends=False)) as engine, LocalChannel(engine) as channel:
        undisturbed = EdgeSession(channel, DRAFT, SETTINGS, LINK)
        expected = [decode(undisturbed, number) for number in range(len(events))]
        undisturbed.close()
    url = f"ws://{VERIFIER.partition('/')[0]}:{verifier.port}"
    with WebsocketChannel(url, connect_timeout=3.0, keepalive_s=1.0) as far:
        session = EdgeSession(far, DRAFT, SETTINGS, LINK)
        for number, (name, (at_round, event)) in enumerate(events.items()):
            began = time.monotonic()
            tokens = decode(session, number, at_round, event)
            report[name] = {
                "equal": tokens == expected[number],
                "tokens": len(tokens),
                "seconds": round(time.monotonic() - began, 3),
            }
        session.close()
    assert verifier.process.stdin is not None
    verifier.process.stdin.close()
    report["verifier ended"] = verifier.process.wait(20.0)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
