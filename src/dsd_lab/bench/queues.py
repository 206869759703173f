# SPDX-License-Identifier: Apache-2.0
"""The queues that FSD compares in Table 7, beside the product's own by confidence: the robot's and the verifier's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dsd_lab.links.emulation import EmulatedChannel
from dsd_ros.edge.ahead import Ahead
from dsd_ros.edge.outcomes import OutcomeQueue, Predraft
from dsd_ros.wire.outbox import Outbox


class FifoQueue(OutcomeQueue):
    """The outcome that was named first goes first."""

    def _next(self, able: list[Predraft]) -> Predraft:
        return min(able, key=lambda predraft: predraft.order)


class RandomQueue(OutcomeQueue):
    """Any outcome; what was begun is finished first, or all would be begun and none finished."""

    def _next(self, able: list[Predraft]) -> Predraft:
        return random.Random(len(able)).choice([predraft for predraft in able if predraft.begun] or able)


class FifoOutbox(Outbox):
    """The early outcome that came first leaves first."""

    def _order(self, place: int) -> tuple[float, ...]:
        return (-place,)


CLIENT = {"priority": OutcomeQueue, "random": RandomQueue, "fifo": FifoQueue}
SERVER = {"priority": Outbox, "fifo": FifoOutbox}
SETTINGS: dict[str, Mapping[str, Any]] = {"client_queue": CLIENT, "server_queue": SERVER}


@contextmanager
def queues_of(own: Mapping[str, Any]) -> Iterator[None]:
    """Decode with the queues that a variant's own settings name."""
    before = Ahead.queue, EmulatedChannel.outbox
    Ahead.queue = CLIENT[own.get("client_queue", "priority")]
    EmulatedChannel.outbox = SERVER[own.get("server_queue", "priority")]
    try:
        yield
    finally:
        Ahead.queue, EmulatedChannel.outbox = before
