# SPDX-License-Identifier: Apache-2.0
"""Restore a lost session in the background, so that the node's health reports when the link is back."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dsd_ros.wire.channel import Backoff, LinkError
from dsd_ros.wire.client import DecodeCancelled

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0


class LinkKeeper:
    """A thread that sleeps until :meth:`lost` is called, then reconnects until that works or :meth:`found` is called.

    :param reconnect: one attempt; raises LinkError, or DecodeCancelled when a decode needs the session.
    :param on_found: called after a successful attempt.
    :param on_failed: called with the error of a failed attempt.
    """

    def __init__(
        self, reconnect: Callable[[], None], on_found: Callable[[], None], on_failed: Callable[[LinkError], None]
    ) -> None:
        self._reconnect, self._on_found, self._on_failed = reconnect, on_found, on_failed
        self._wake = threading.Condition()
        self._losses = 0  # 0: the link is not known to be down
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="link-keeper", daemon=True)
        self._thread.start()

    @property
    def down(self) -> bool:
        """Whether the link is known to be down."""
        return self._losses > 0

    def lost(self) -> None:
        """Report that the link failed. Any thread."""
        with self._wake:
            self._losses += 1
            self._wake.notify_all()

    def found(self) -> None:
        """Report that the link works, or is no longer wanted. Any thread."""
        with self._wake:
            self._losses = 0
            self._wake.notify_all()

    def close(self, timeout: float = 0.3) -> None:
        """End the thread; an attempt under way may outlast this call."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._losses)
            backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
            failure: LinkError | None = None
            while self._still_down(backoff.next_delay(failure)):
                failure = self._attempt()
            if self._closed:
                return

    def _attempt(self) -> LinkError | None:
        """Reconnect once; returns why that failed, if it did."""
        with self._wake:
            losses = self._losses
        failure: LinkError | None = None
        try:
            self._reconnect()
        except DecodeCancelled:
            return None
        except LinkError as error:
            failure = error
        except Exception as error:  # a bug, or the node is shutting down; keep trying
            failure = LinkError(f"the session cannot be restored: {error!r}")
        with self._wake:
            if self._losses != losses:
                return failure  # lost again, found, or no longer wanted in the meantime
            self._losses = losses if failure is not None else 0
        if failure is not None:
            self._on_failed(failure)
        else:
            self._on_found()
        return failure

    def _still_down(self, seconds: float) -> bool:
        """Wait; returns whether the link is still down."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or not self._losses, seconds)
            return bool(self._losses) and not self._closed
