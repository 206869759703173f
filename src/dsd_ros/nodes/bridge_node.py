# SPDX-License-Identifier: Apache-2.0
"""Relays between a robot's DDS topics and a remote verifier's websocket. No model and no torch in this process.

Each transport has its own authentication: TLS and the token on the websocket, tags on the topics, and the bridge stands
between them with one token file for both.

configure checks the address, the token and the certificate, which each dial reads again; activate starts to dial
without waiting for the verifier; deactivate disconnects. When the websocket breaks, messages under way are dropped and
the bridge redials with backoff; the draft node's session notices by its own time-out, resends and resumes, because
rounds are idempotent. A refusal ends the bridge only where the link has never worked.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.ros import health
from dsd_ros.ros.dds_channel import VerifierTopics
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.running import EXIT_BAD_START, run_main
from dsd_ros.ros.settings import BridgeNodeSettings
from dsd_ros.wire.authentication import bare
from dsd_ros.wire.channel import Backoff, LinkClosed, LinkRefused, LinkTimeout, read_token
from dsd_ros.wire.messages import Message, Question, SessionReply, SessionRequest
from dsd_ros.wire.websocket import WebsocketChannel

_OUTBOX = 256


def _channel(settings: BridgeNodeSettings) -> WebsocketChannel:
    """A channel that has not dialled yet.

    :raises ValueError, OSError: for an unusable address, token or certificate.
    """
    token = partial(read_token, settings.token_file) if settings.token_file else None
    return WebsocketChannel(settings.url, token=token, ca_file=settings.ca_file or None)


class BridgeNode(ManagedNode[BridgeNodeSettings]):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("bridge_node", BridgeNodeSettings)
        self._relay: Relay | None = None
        self.autostart()

    def load(self) -> None:
        _channel(self._settings).close()  # reports unusable files now

    def begin(self) -> None:
        self._relay = Relay(self, self._settings, self._health.report)

    def end(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()


class Relay:
    """One activation of the bridge: one thread connects and receives, another sends."""

    def __init__(
        self, node: ManagedNode[BridgeNodeSettings], settings: BridgeNodeSettings, report: Callable[..., None]
    ) -> None:
        self._node, self._settings, self._report_health = node, settings, report
        self._channel = _channel(settings)
        self._stop = threading.Event()
        self._up = threading.Event()
        self._outbox: queue.Queue[Message | None] = queue.Queue(_OUTBOX)
        self._relayed = 0
        self._tokens = Tokens.of(settings.token_file)
        self._guard = Authenticator(self._take, self._tokens) if self._tokens is not None else None
        self._openings: dict[int, Callable[[Message], object]] = {}  # requests of this link -> their answer's way
        self._topics = VerifierTopics(node, self._on_message)
        self._report(health.WARN, f"no link yet: dialling {settings.url}", calm=True)
        self._topics.start()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"bridge {work.__name__}", daemon=True)
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

    def _report(self, *what: object, **how: bool) -> None:
        if not self._stop.is_set():
            self._report_health(*what, **how)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread; if it fails, end the process so that it is started again."""
        try:
            work()
        except LinkRefused as error:
            # A wrong token or certificate, which a restart would not fix.
            self._node.give_up(str(error), EXIT_BAD_START)
        except Exception as error:
            if not self._stop.is_set():
                self._node.give_up(f"The bridge failed: {error!r}")

    def _on_message(self, message: Message) -> None:
        if not self._up.is_set():
            return  # the sender times out and resends
        if self._guard is None or self._tokens is None:
            self._outbox_put(message)
            return
        if isinstance(message, SessionRequest | Question):
            self._tokens.reload()  # the robot's nodes read their file anew for each opening, too
        self._guard.submit(message, self._topics.publish, None)

    def _take(self, message: Message, answer: Callable[[Message], object], _: Hashable) -> bool:
        """Pass on what a robot with the token has sent."""
        if isinstance(message, SessionRequest):
            self._openings[message.request] = answer
        self._outbox_put(bare(message))
        return True

    def _answer(self, message: Message) -> None:
        if self._guard is None:
            self._topics.publish(message)
        elif not isinstance(message, SessionReply):
            self._topics.publish(self._guard.sign(message))
        elif (answer := self._openings.pop(message.request, None)) is not None:
            answer(message)

    def _outbox_put(self, message: Message | None) -> None:
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            self._node.get_logger().warning("the link is slower than the drafts; one is dropped")

    def _write(self) -> None:
        while not self._stop.is_set():
            try:
                message = self._outbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if message is None or not self._up.is_set():
                continue
            try:
                self._channel.send(message)
                self._relayed += 1
            except LinkClosed:
                # The reader notices by itself and redials; it may already have done so.
                self._node.get_logger().debug("a message was lost with the link")

    def _read(self) -> None:
        backoff = Backoff(0.1, self._settings.longest_wait_s)
        failures = 0  # to dial, in a row
        while not self._stop.is_set():
            try:
                self._channel.reconnect()
            except LinkClosed as error:
                self._report(health.WARN, f"no link: {error}", news=not failures)
                failures += 1
                self._stop.wait(backoff.next_delay(error))
                continue
            failures = 0
            self._up.set()
            began = time.monotonic()
            received = False
            try:
                received = self._forward()
            finally:
                self._up.clear()
                self._openings.clear()
            # Do not reset for a link that is accepted and closed at once, or that carries no valid message.
            if received or time.monotonic() - began > self._settings.longest_wait_s:
                backoff.reset()
            self._stop.wait(backoff.next_delay())

    def _forward(self) -> bool:
        """Publish the verifier's messages until the link fails; returns whether any came."""
        received = False
        while not self._stop.is_set():
            try:
                message = self._channel.receive(timeout=1.0)
            except LinkTimeout:
                figures = {"bytes up": self._channel.bytes_up, "bytes down": self._channel.bytes_down}
                if self._guard is not None:
                    figures["dropped messages"] = self._guard.dropped.count
                self._report(health.OK, f"linked to {self._settings.url}", {"relayed": self._relayed, **figures})
                continue
            except (LinkClosed, LinkRefused) as error:
                self._report(health.WARN, f"the link broke: {error}")
                return received
            if not received:  # not when connected: a gateway without a verifier accepts a link and ends it
                self._report(health.OK, f"linked to {self._settings.url}")
            received = True
            self._answer(message)
        return received


def main() -> None:
    run_main(BridgeNode, threads=3)
