"""Brings a lost session back while nobody decodes, so that the node's health says when the link has returned."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dsd_ros.edge.errors import DecodeCancelled
from dsd_ros.wire.channel import Backoff, LinkError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0


class LinkKeeper:
    """A thread that sleeps until ``lost`` is called, and then mends until it worked or ``found`` is called.

    :param mend: one attempt; raises LinkError, or DecodeCancelled when somebody else wants the session.
    :param on_found: called after an attempt that worked.
    :param on_failed: called with what an attempt raised.
    """

    def __init__(
        self, mend: Callable[[], None], on_found: Callable[[], None], on_failed: Callable[[LinkError], None]
    ) -> None:
        self._mend, self._on_found, self._on_failed = mend, on_found, on_failed
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
        """The link failed. Any thread."""
        with self._wake:
            self._losses += 1
            self._wake.notify_all()

    def found(self) -> None:
        """The link works, or is not wanted any more. Any thread."""
        with self._wake:
            self._losses = 0
            self._wake.notify_all()

    def close(self, timeout: float = 0.3) -> None:
        """End the thread; it may outlive this call by the attempt it is in."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._losses)
            backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
            while self._still_down(backoff.next_delay()):
                with self._wake:
                    losses = self._losses
                failure: LinkError | None = None
                try:
                    self._mend()
                except DecodeCancelled:
                    continue
                except LinkError as error:
                    failure = error
                except Exception as error:  # a defect, or a node that ends: no reason to stop trying
                    failure = LinkError(f"the session cannot be mended: {error!r}")
                with self._wake:
                    if self._losses != losses:
                        continue  # it was lost anew meanwhile, or found, or is not wanted any more
                    self._losses = losses if failure is not None else 0
                if failure is not None:
                    self._on_failed(failure)
                else:
                    self._on_found()
            if self._closed:
                return

    def _still_down(self, seconds: float) -> bool:
        """Wait; whether there is still something to mend then."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or not self._losses, seconds)
            return bool(self._losses) and not self._closed
