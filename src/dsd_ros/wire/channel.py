"""What a link to the verifier looks like to the robot's half, whatever carries it."""

from __future__ import annotations

import random
from typing import Protocol

from dsd_ros.wire.messages import Message


class LinkError(Exception):
    """The link or the verifier failed; one sentence for people."""


class LinkClosed(LinkError):
    """The link is down. ``reconnect`` may bring it back."""


class LinkTimeout(LinkError):
    """Nothing arrived in time. The link may still be up."""


class LinkRefused(LinkError):
    """The other side refuses us for good (token, certificate, no verifier): reconnecting is no use."""


class Channel(Protocol):
    """A bidirectional link that carries messages of ``wire.messages``.

    A new channel may be down; ``reconnect`` brings it up. One thread may send while another receives.
    ``bytes_up`` and ``bytes_down`` count the encoded messages, without the transport's own framing.
    Messages may be lost, doubled or reordered where the transport does so; the protocol copes.
    """

    bytes_up: int
    bytes_down: int

    def send(self, message: Message) -> None:
        """Hand a message to the link; does not wait for the other side. Raises LinkClosed."""
        ...

    def receive(self, timeout: float) -> Message:
        """The next message; LinkTimeout after ``timeout`` seconds without one, LinkClosed when down."""
        ...

    def reconnect(self) -> None:
        """One attempt to bring the link up, replacing a connection that may still seem to be.

        Raises LinkClosed (may work later) or LinkRefused (will not). What was under way is lost.
        """
        ...

    def close(self) -> None:
        """Take the link down for good and give back its threads and sockets; any number of times."""
        ...


class Backoff:
    """Waiting times between attempts to reconnect: doubling, bounded, and with jitter.

    Jitter (half to all of the nominal time) keeps robots cut off together from returning together.
    """

    def __init__(self, first: float = 0.05, longest: float = 5.0) -> None:
        self.first = first
        self.longest = longest
        self._failures = 0

    def reset(self) -> None:
        """The link is up: the next wait is short again."""
        self._failures = 0

    def next_delay(self) -> float:
        """Seconds to wait before the next attempt."""
        nominal = min(self.longest, self.first * 2.0**self._failures)
        self._failures = min(self._failures + 1, 32)
        return nominal * random.uniform(0.5, 1.0)
