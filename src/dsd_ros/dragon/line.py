"""A channel with a thread that receives from it and dials when somebody wants it up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dsd_ros.wire.channel import Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import Message

_POLL_S = 0.1  # how soon a silent link notices that it should end


class Line:
    """``send`` from any thread; what comes goes to ``on_message`` in the line's own.

    A link that is down stays so until ``up`` is called: one attempt each time.
    """

    def __init__(self, channel: Channel, on_message: Callable[[Message], None], wake: threading.Condition) -> None:
        """``wake`` is notified when the link goes up or down; the channel stays the caller's."""
        self._channel = channel
        self._on_message = on_message
        self._wake = wake  # guards all below
        self._sending = threading.Lock()
        self._is_up = False
        self._dial = False
        self._closing = False
        self.failure: LinkError | None = None  # why it is down, once it was wanted
        self._thread = threading.Thread(target=self._run, name="ask-link", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> tuple[int, int]:
        """Up and down so far."""
        return self._channel.bytes_up, self._channel.bytes_down

    def up(self, check: Callable[[], None]) -> None:
        """Bring the link up where it is down; LinkError when that fails, and what ``check`` raises, which is polled."""
        with self._wake:
            if self._is_up:
                return
            self.failure, self._dial = None, True
            self._wake.notify_all()
            while not (self._is_up or self.failure or self._closing):
                self._wake.wait(_POLL_S)
                check()
            if self.failure is not None:
                raise self.failure
            if not self._is_up:
                raise LinkClosed("the session was closed")

    def drop(self) -> None:
        """Take the link for dead: the next ``up`` dials anew."""
        with self._wake:
            self._is_up = False

    def send(self, message: Message) -> None:
        """Send a message; nothing where the link is down, which ``failure`` tells of."""
        if not self._is_up:
            return
        try:
            with self._sending:
                self._channel.send(message)
        except LinkError as error:
            self._down(error)

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _down(self, error: LinkError) -> None:
        with self._wake:
            if self._is_up:
                self._is_up, self.failure = False, error
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_up or self._dial or self._closing)
                if self._closing:
                    return
                dial, self._dial = self._dial and not self._is_up, False
            if dial:
                self._connect()
                continue
            try:
                message = self._channel.receive(_POLL_S)
            except LinkTimeout:
                continue
            except Exception as error:  # whatever it is, who waits for the link has to hear of it
                self._down(_link_error(error))
                continue
            self._on_message(message)

    def _connect(self) -> None:
        failure: LinkError | None = None
        try:
            self._channel.reconnect()
        except Exception as error:
            failure = _link_error(error)
        with self._wake:
            self._is_up, self.failure = failure is None, failure
            self._wake.notify_all()


def _link_error(error: Exception) -> LinkError:
    return error if isinstance(error, LinkError) else LinkClosed(f"the link failed: {error}")
