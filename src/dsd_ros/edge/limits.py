"""When a decode has to end, whatever it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

from dsd_ros.edge.errors import DeadlineExceeded, DecodeCancelled, LinkSilent

_POLL_S = 0.05  # how soon a cancellation is noticed


class Limits:
    """When a decode has to end: at ``deadline`` (time.monotonic()), or once ``cancelled()`` says so."""

    def __init__(
        self, deadline: float | None = None, cancelled: Callable[[], bool] | None = None, patience: float | None = None
    ) -> None:
        """``patience``: seconds of silence from the verifier after which its robot goes on without it."""
        self._deadline = deadline
        self._cancelled = cancelled
        self._patience = patience
        self._heard = time.monotonic()

    def heard(self) -> None:
        """The verifier has spoken, or is asked something: its silence begins now."""
        self._heard = time.monotonic()

    def check(self) -> None:
        """DecodeCancelled, DeadlineExceeded or LinkSilent when it is time."""
        if self._cancelled is not None and self._cancelled():
            raise DecodeCancelled("the decode was cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded("the reply was not complete at its deadline")
        if self._patience is not None and time.monotonic() >= self._heard + self._patience:
            raise LinkSilent(f"nothing came from the verifier for {self._patience:g} s")

    def slice(self, seconds: float) -> float:
        """How much of ``seconds`` may be waited before the next ``check``."""
        if self._cancelled is not None:
            seconds = min(seconds, _POLL_S)
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        if self._patience is not None:
            seconds = min(seconds, self._heard + self._patience - time.monotonic())
        return max(0.0, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait, ending early (by raising) when it is time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(self.slice(left))
        self.check()
