# SPDX-License-Identifier: Apache-2.0
"""Carries a Go2's messages between the vendor's SDK and two pipes; a program of its own, started by sdk_link.py.

It is a separate process because the SDK's DDS library must be the robot's (Cyclone DDS 0.10) and must not share a
process with another one. It may run under another Python, so it needs only the standard library and the SDK.

Lines of JSON, bytes in base64. In: ``[service, id, api_id, parameter, noreply]``. Out, once: ``{ready}`` with versions,
or ``{error}`` when it cannot work; then ``{response: [service, id, api_id, code, data, binary]}``, ``{state}`` and
``{battery}``. When its input ends, even because the node was killed, it stops the robot and exits.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

SERVICES = ("sport", "obstacles_avoid", "videohub")
STOP_MOVE = 1003
LOOPBACK = "lo"
# Loopback has no multicast, so the peer must be named.
LOOPBACK_CONFIG = """<CycloneDDS><Domain Id="any">
<General><Interfaces><NetworkInterface name="lo"/></Interfaces><AllowMulticast>false</AllowMulticast></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><Peers><Peer address="127.0.0.1"/></Peers></Discovery>
</Domain></CycloneDDS>"""
# Shortest time between two messages of a kind. The robot may send its state 500 times a second, more than needed.
PAUSES_S = {"state": 0.005, "battery": 0.5}


def check_versions(interface: str) -> dict[str, str]:
    """The installed versions; RuntimeError if they would endanger a robot."""
    if importlib.util.find_spec("unitree_sdk2py") is None:
        raise RuntimeError(f"unitree_sdk2py is not installed for {sys.executable}.")
    versions = {}
    for name in ("unitree-sdk2py-dimos", "unitree_sdk2py", "cyclonedds"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cyclone = versions.get("cyclonedds", "unknown")
    if not cyclone.startswith("0.10") and interface != LOOPBACK:
        raise RuntimeError(
            f"cyclonedds {cyclone} crashes the 0.10 peers that a Go2 runs, so it is not allowed on a network: install "
            "0.10.2 (pip install --no-binary cyclonedds cyclonedds==0.10.2), or use link: ros."
        )
    return versions


class Carrier:
    """The SDK's side. ``write`` writes one line of output, from any thread."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._times = dict.fromkeys(PAUSES_S, 0.0)  # of the last message of a kind
        self._publishers: dict[str, Any] = {}
        self._subscribers: list[Any] = []  # kept, so that they go on

    def write(self, **message: Any) -> None:
        view = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        with self._lock, contextlib.suppress(OSError):  # the reader is gone, so the input ends too
            while view:
                view = view[os.write(self._output, view) :]

    def open(self, domain: int, interface: str) -> None:
        from unitree_sdk2py.core import channel
        from unitree_sdk2py.idl.unitree_api.msg.dds_ import Request_, Response_
        from unitree_sdk2py.idl.unitree_go.msg.dds_ import LowState_, SportModeState_

        def listen(topic: str, kind: type, handler: Any) -> None:
            subscriber = channel.ChannelSubscriber(topic, kind)
            subscriber.Init(handler, 10)
            self._subscribers.append(subscriber)

        if interface == LOOPBACK:
            channel.ChannelConfigHasInterface = LOOPBACK_CONFIG
        channel.ChannelFactoryInitialize(domain, interface or None)
        for name in SERVICES:
            self._publishers[name] = channel.ChannelPublisher(f"rt/api/{name}/request", Request_)
            self._publishers[name].Init()
            listen(f"rt/api/{name}/response", Response_, lambda response, name=name: self._on_response(name, response))
        listen("rt/sportmodestate", SportModeState_, self._on_state)
        listen("rt/lf/lowstate", LowState_, self._on_battery)

    def send(self, service: str, identity: int, api_id: int, parameter: str, noreply: bool) -> None:
        from unitree_sdk2py.idl.unitree_api.msg import dds_ as api

        header = api.RequestHeader_(
            api.RequestIdentity_(identity, api_id), api.RequestLease_(0), api.RequestPolicy_(0, noreply)
        )
        self._publishers[service].Write(api.Request_(header, parameter, []))

    def _on_response(self, service: str, response: Any) -> None:
        identity, code = response.header.identity, response.header.status.code
        binary = base64.b64encode(bytes(response.binary)).decode()
        self.write(response=[service, identity.id, identity.api_id, code, response.data, binary])

    def _on_state(self, state: Any) -> None:
        if self._is_due("state"):
            self.write(state=base64.b64encode(state.serialize()).decode())

    def _on_battery(self, low: Any) -> None:
        if self._is_due("battery"):
            self.write(battery=low.bms_state.soc / 100.0)

    def _is_due(self, kind: str) -> bool:
        now = time.monotonic()
        due = now - self._times[kind] >= PAUSES_S[kind]
        if due:
            self._times[kind] = now
        return due

    def stop_robot(self) -> None:
        for _ in range(3):
            self.send("sport", time.monotonic_ns(), STOP_MOVE, "{}", True)
            time.sleep(0.05)


def main(domain: int, interface: str) -> int:
    # Ctrl-C reaches the whole process group, but the driver must stop the robot first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # the SDK prints
    carrier = Carrier(output)
    try:
        versions = check_versions(interface)
        carrier.open(domain, interface)
    except Exception as error:
        carrier.write(error=str(error) or type(error).__name__)
        return 2
    carrier.write(ready=versions)
    code = 0
    try:
        for line in sys.stdin:
            carrier.send(*json.loads(line))
    except Exception:  # the robot must be stopped all the same
        traceback.print_exc()
        code = 1
    carrier.stop_robot()
    sys.stderr.flush()
    os._exit(code)  # the SDK's threads do not end by themselves


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
