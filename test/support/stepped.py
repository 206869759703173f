# SPDX-License-Identifier: Apache-2.0
"""Targets whose passes wait for the test, or take their time."""

from __future__ import annotations

import queue
import threading
import time

from dsd_ros.cloud.rounds import Generation, PendingRound
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.wire.messages import DraftTokens


class Stepped(LocalTarget):
    """Each pass over rounds, or steps of streams, waits until ``step`` or ``free`` lets it run."""

    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.passes: list[dict[int, list[int]]] = []  # session -> what its robot had drafted
        self._begun, self._may_run = threading.Semaphore(0), threading.Semaphore(0)

    def verify(self, work, on_early):
        rounds = [item for item in work if isinstance(item, PendingRound)]
        if rounds:
            self.passes.append({item.session.id: list(item.draft.tokens) for item in rounds})
            self._begun.release()
            assert self._may_run.acquire(timeout=60)
        yield from super().verify(work, on_early)

    def begun(self, count: int = 1) -> None:
        """Wait until ``count`` more passes have begun; the last one waits for ``step``."""
        for _ in range(count):
            assert self._begun.acquire(timeout=60)

    def step(self, count: int = 1) -> None:
        """Let ``count`` passes run, now or when they begin."""
        self._may_run.release(count)

    def free(self) -> None:
        """Let all further passes run."""
        self.step(100_000)


class Unhurried(LocalTarget):
    """Takes as long for a pass as a larger model would, so that drafts come in time."""

    def verify(self, work, on_early):
        time.sleep(0.003)
        yield from super().verify(work, on_early)


class Speaking:
    """Decodes replies itself, the tokens and steps that the test says."""

    exit_layers = ()

    def __init__(self, model: object) -> None:
        self.model, self.prefill = model, LocalTarget(model).prefill
        self.begun: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self.drafts: list[DraftTokens] = []

    def check(self, request, sampling) -> None:
        pass

    def generate(self, generation: Generation) -> None:
        self.begun.put(generation)

    def draft(self, message: DraftTokens) -> None:
        self.drafts.append(message)
