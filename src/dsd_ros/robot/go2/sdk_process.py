"""Carries a Go2's messages between the vendor's SDK and two pipes; a program of its own, started by sdk_link.py.

It is a separate process because the SDK's DDS library must be the robot's (Cyclone DDS 0.10) and must not share a
process with another one. It may run under another Python, so it needs only the standard library and the SDK.

Lines of JSON, bytes in base64. In: ``{service, id, api_id, parameter, noreply}``. Out, once: ``{ready}`` with versions,
or ``{error}`` when it cannot work; then ``{service, id, api_id, code, data, binary}``, ``{state}``, ``{battery}``. When
its input ends, it stops the robot and exits: the robot stands even if the node is killed in mid-motion.
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
from typing import Any

SERVICES = ("sport", "obstacles_avoid", "videohub")
STOP_MOVE = 1003
LOOPBACK = "lo"
# Loopback has no multicast, so the peer must be named.
LOOPBACK_CONFIG = """<CycloneDDS><Domain Id="any">
<General><Interfaces><NetworkInterface name="lo"/></Interfaces><AllowMulticast>false</AllowMulticast></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><Peers><Peer address="127.0.0.1"/></Peers></Discovery>
</Domain></CycloneDDS>"""
STATE_PAUSE_S = 0.005  # the robot may send its state 500 times a second, more than needed
BATTERY_PAUSE_S = 0.5


def check_versions(interface: str) -> dict[str, str]:
    """The installed versions; RuntimeError if they would endanger a robot."""
    if importlib.util.find_spec("unitree_sdk2py") is None:
        raise RuntimeError(f"unitree_sdk2py is not installed for {sys.executable}.")
    versions = {}
    for name in ("unitree-sdk2py-dimos", "unitree_sdk2py", "cyclonedds"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cyclone = versions.get("cyclonedds", "unknown")
    if not cyclone.startswith("0.10") and interface != LOOPBACK:
        raise RuntimeError(
            f"cyclonedds {cyclone} crashes the 0.10 peers that a Go2 runs, so it is not let onto a network: install "
            "0.10.2 (pip install --no-binary cyclonedds cyclonedds==0.10.2), or use the link over ROS messages."
        )
    return versions


class Carrier:
    """The SDK's side. ``write`` writes one line of output, from any thread."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._state_time = self._battery_time = 0.0
        self._publishers: dict[str, Any] = {}
        self._subscribers: list[Any] = []  # kept, so that they go on

    def write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        view = memoryview(data)
        with self._lock, contextlib.suppress(OSError):  # the reader is gone, so the input ends too
            while view:
                view = view[os.write(self._output, view) :]

    def open(self, domain: int, interface: str) -> None:
        from unitree_sdk2py.core import channel
        from unitree_sdk2py.core.channel import ChannelFactoryInitialize, ChannelPublisher, ChannelSubscriber
        from unitree_sdk2py.idl.unitree_api.msg.dds_ import Request_, Response_
        from unitree_sdk2py.idl.unitree_go.msg.dds_ import LowState_, SportModeState_

        if interface == LOOPBACK:
            channel.ChannelConfigHasInterface = LOOPBACK_CONFIG
        ChannelFactoryInitialize(domain, interface or None)
        for service in SERVICES:
            publisher = ChannelPublisher(f"rt/api/{service}/request", Request_)
            publisher.Init()
            self._publishers[service] = publisher
            self._listen(
                ChannelSubscriber(f"rt/api/{service}/response", Response_),
                lambda response, service=service: self._on_response(service, response),
            )
        self._listen(ChannelSubscriber("rt/sportmodestate", SportModeState_), self._on_state)
        self._listen(ChannelSubscriber("rt/lf/lowstate", LowState_), self._on_battery)

    def _listen(self, subscriber: Any, handler: Any) -> None:
        subscriber.Init(handler, 10)
        self._subscribers.append(subscriber)

    def send(self, service: str, identity: int, api_id: int, parameter: str, noreply: bool) -> None:
        from unitree_sdk2py.idl.unitree_api.msg.dds_ import (
            Request_,
            RequestHeader_,
            RequestIdentity_,
            RequestLease_,
            RequestPolicy_,
        )

        header = RequestHeader_(RequestIdentity_(identity, api_id), RequestLease_(0), RequestPolicy_(0, noreply))
        self._publishers[service].Write(Request_(header, parameter, []))

    def _on_response(self, service: str, response: Any) -> None:
        identity = response.header.identity
        self.write(
            {
                "service": service,
                "id": identity.id,
                "api_id": identity.api_id,
                "code": response.header.status.code,
                "data": response.data,
                "binary": base64.b64encode(bytes(response.binary)).decode(),
            }
        )

    def _on_state(self, state: Any) -> None:
        now = time.monotonic()
        if now - self._state_time >= STATE_PAUSE_S:
            self._state_time = now
            self.write({"state": base64.b64encode(state.serialize()).decode()})

    def _on_battery(self, low: Any) -> None:
        now = time.monotonic()
        if now - self._battery_time >= BATTERY_PAUSE_S:
            self._battery_time = now
            self.write({"battery": low.bms_state.soc / 100.0})

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
        carrier.write({"error": str(error) or type(error).__name__})
        return 2
    carrier.write({"ready": versions})
    for line in sys.stdin:
        request = json.loads(line)
        carrier.send(
            request["service"],
            int(request["id"]),
            int(request["api_id"]),
            request["parameter"],
            bool(request["noreply"]),
        )
    carrier.stop_robot()
    sys.stderr.flush()
    os._exit(0)  # the SDK's threads do not end by themselves


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
