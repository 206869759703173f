"""Relays between a robot's DDS topics and a remote verifier's websocket. No model and no torch in this process.

Both directions flow on their own, so any number of messages is in flight. When the websocket breaks, what was
under way is dropped and the bridge redials with backoff; the draft node's session notices by its own
time-out, resends and resumes, because rounds are idempotent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rclpy.node import Node

from dsd_ros.nodes import health
from dsd_ros.nodes.dds_channel import VerifierTopics
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.wire.channel import Backoff, LinkClosed, LinkRefused, LinkTimeout
from dsd_ros.wire.credentials import read_token
from dsd_ros.wire.messages import Message
from dsd_ros.wire.websocket_client import WebsocketChannel

_OUTBOX = 256


@dataclass(frozen=True)
class BridgeSettings:
    """Parameters of the bridge."""

    url: str = field(
        default="ws://127.0.0.1:8765",
        metadata={"help": "address of the verifier, ws://host:port or wss://host:port"},
    )
    token_file: str = field(
        default="", metadata={"help": "file that holds the bearer token; empty: none is sent"}
    )
    ca_file: str = field(
        default="",
        metadata={"help": "certificate authority (PEM) to trust; empty: the system's"},
    )
    longest_wait_s: float = field(
        default=5.0,
        metadata={"help": "longest pause between two attempts to dial, s", "min": 0.1, "max": 60.0},
    )


class BridgeNode(Node):
    """See the module. One thread keeps the connection and reads, another sends."""

    def __init__(self) -> None:
        super().__init__("bridge_node")
        self.failure: str | None = None
        self._settings = settings = declare(self, BridgeSettings)
        refuse_unknown(self)
        self._channel = WebsocketChannel(
            settings.url,
            token=read_token(settings.token_file) if settings.token_file else None,
            ca_file=settings.ca_file or None,
        )
        self._stop = threading.Event()
        self._up = threading.Event()
        self._outbox: queue.Queue[Message | None] = queue.Queue(_OUTBOX)
        self._relayed = 0
        self._topics = VerifierTopics(self, self._on_message)
        self._health = health.Health(self, settings.url)
        self._topics.start()
        self._threads = [
            threading.Thread(
                target=self._guarded, args=(work,), name=f"bridge {work.__name__}", daemon=True
            )
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        self._outbox_put(None)
        self._topics.close()
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout=0.3)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A bridge with one of its threads gone relays nothing: better to end, and be started again."""
        try:
            work()
        except Exception as error:
            if not self._stop.is_set():
                self.failure = f"The bridge failed: {error!r}"

    def _on_message(self, message: Message) -> None:
        if (
            self._up.is_set()
        ):  # else the sender's time-out deals with it; an old message is of no use
            self._outbox_put(message)

    def _outbox_put(self, message: Message | None) -> None:
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            self.get_logger().warning("the link is slower than the drafts; one is dropped")

    def _write(self) -> None:
        while not self._stop.is_set():
            message = self._outbox.get()
            if message is None or not self._up.is_set():
                continue
            try:
                self._channel.send(message)
                self._relayed += 1
            except LinkClosed:
                # The reader finds out by itself and redials; by now it may even have done so.
                self.get_logger().debug("a message was lost with the link")

    def _read(self) -> None:
        backoff = Backoff(0.1, self._settings.longest_wait_s)
        while not self._stop.is_set():
            try:
                self._channel.reconnect()
            except LinkRefused as error:
                self.failure = str(error)
                return
            except LinkClosed as error:
                self._health.report(health.WARN, f"no link: {error}")
                self._stop.wait(backoff.next_delay())
                continue
            backoff.reset()
            self._up.set()
            self._health.report(health.OK, f"linked to {self._settings.url}")
            try:
                self._pass_on()
            except LinkRefused as error:
                self.failure = str(error)
                return
            finally:
                self._up.clear()

    def _pass_on(self) -> None:
        """Publish what the verifier says until the link breaks."""
        while not self._stop.is_set():
            try:
                message = self._channel.receive(timeout=1.0)
            except LinkTimeout:
                self._health.report(
                    health.OK,
                    f"linked to {self._settings.url}",
                    {
                        "relayed": self._relayed,
                        "bytes up": self._channel.bytes_up,
                        "bytes down": self._channel.bytes_down,
                    },
                )
                continue
            except LinkClosed as error:
                if not self._stop.is_set():
                    self._health.report(health.WARN, f"the link broke: {error}")
                return
            self._topics.publish(message)


def main() -> None:
    run_main(BridgeNode)
