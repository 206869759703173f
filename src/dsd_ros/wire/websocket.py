# SPDX-License-Identifier: Apache-2.0
"""The robot's end of a websocket to `dsd verifier`: the robot dials, since robots sit behind NAT."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from dsd_ros.addresses import check_verifier_address
from dsd_ros.paths import user_path
from dsd_ros.wire.channel import LinkClosed, LinkRefused, LinkTimeout, TokenSource, bearer, token_now
from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import MAX_FRAME_BYTES, Message
from dsd_ros.wire.outbox import UNSENT_BYTES, UNSENT_OPTION

if TYPE_CHECKING:
    from typing_extensions import Self

# A peer that answers no ping raises LinkClosed here; the library would print a traceback as well.
_quiet = logging.getLogger(f"{__name__}.connection")
_quiet.setLevel(logging.CRITICAL)

MAX_RETRY_AFTER_S = 60.0  # a gateway that asks for a longer pause is asked again after this
# OpenSSL's codes X509_V_ERR_...
_OUT_OF_TIME = (9, 10)  # not yet valid, expired
_WRONG_HOST = (62, 64)  # another host name, another IP address


class WebsocketChannel:
    """See ``wire.channel.Channel``. ``reconnect`` dials; before it the link is down.

    Each message is one binary frame, uncompressed: distributions do not compress, and small frames would only wait.
    """

    def __init__(
        self,
        url: str,
        token: TokenSource = None,
        ca_file: str | Path | None = None,
        connect_timeout: float = 5.0,
        keepalive_s: float = 5.0,
    ) -> None:
        """For wss://, ``ca_file`` (PEM) is trusted instead of the system's authorities.

        ``token``: the token, or a function that reads it. It is called before each dial, and ``ca_file`` is read
        again, so that either can be changed while the robot runs.
        A link whose other end answers no ping for ``keepalive_s`` is taken down within twice that time.
        ValueError for anything but a ws:// or wss:// address, or for an unusable certificate file.
        """
        self.url = check_verifier_address(url)
        self.bytes_up = 0
        self.bytes_down = 0
        self._connect_timeout = connect_timeout
        self._keepalive = keepalive_s
        self._token, self._ca_file = token, ca_file
        self._options()  # reports unusable files now
        self._connection: ClientConnection | None = None
        self._proven: ClientConnection | None = None  # the last that carried a message to us
        self._closed = False
        self._lock = threading.Lock()  # guards the two fields above; never held while waiting for the network

    def send(self, message: Message) -> None:
        data = encode(message)
        connection = self._up()
        try:
            connection.send(data)
        except ConnectionClosed as error:
            raise self._down(error) from error
        except OSError as error:
            raise LinkClosed(f"the link to {self.url} broke: {error}") from error
        self.bytes_up += len(data)

    @property
    def busy(self) -> bool:
        """Whether the kernel holds bytes that the link has not carried yet."""
        connection = self._connection
        if connection is None:
            return False
        free = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            free.register(connection.socket.fileno(), select.POLLOUT)
            return not free.poll(0)
        return False

    def receive(self, timeout: float) -> Message:
        try:
            connection = self._up()
            data = connection.recv(timeout=max(0.0, timeout), decode=False)
        except TimeoutError:
            raise LinkTimeout(f"the verifier at {self.url} sent nothing for {timeout:.1f} s") from None
        except ConnectionClosed as error:
            raise self._down(error) from error
        self.bytes_down += len(data)
        try:
            message = decode(data)
        except WireError as error:
            if connection is self._proven:
                raise LinkClosed(f"{self.url} sent a damaged message: {error}") from error
            raise LinkRefused(f"{self.url} is not a verifier of this version: {error}") from error
        self._proven = connection
        return message

    def reconnect(self) -> None:
        self._drop()
        connection = self._dial()
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if UNSENT_OPTION is not None:
                with contextlib.suppress(OSError):  # a kernel without this option buffers more
                    connection.socket.setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)
            _bound_sends(connection.socket, 2 * self._keepalive)
        except OSError as error:  # it has been closed already, by a gateway without a verifier
            raise LinkClosed(f"the link to {self.url} was closed as soon as it was open") from error
        with self._lock:
            if not self._closed:
                self._connection = connection
                return
        connection.close()
        raise LinkClosed("the channel was closed")

    def _dial(self) -> ClientConnection:
        try:
            connection: ClientConnection = connect(
                self.url,
                compression=None,
                open_timeout=self._connect_timeout,
                close_timeout=0.2,
                ping_interval=self._keepalive,
                ping_timeout=self._keepalive,
                max_size=MAX_FRAME_BYTES,
                max_queue=256,
                proxy=None,
                logger=_quiet,
                **self._options(),
            )
        except InvalidStatus as error:
            raise self._perhaps_passing(self._rejected(error)) from error
        except ssl.SSLCertVerificationError as error:
            raise self._perhaps_passing(self._untrusted(error)) from error
        except (OSError, ConnectionClosed, InvalidHandshake, InvalidURI, EOFError, ValueError) as error:
            # TimeoutError and most TLS errors are OSErrors. ConnectionClosed: a verifier that goes away during the
            # handshake. ValueError: a resolver or a redirect that Python cannot read; a file of ours.
            reason = str(error) or type(error).__name__
            if isinstance(error, socket.gaierror):
                reason = "no such host is known; check its name, or the name server"
            raise LinkClosed(f"the verifier at {self.url} cannot be reached: {reason}") from error
        return connection

    def _options(self) -> dict[str, Any]:
        """What is read anew for each dial; ValueError for a file that cannot be used."""
        token = token_now(self._token)
        options: dict[str, Any] = {"additional_headers": {"Authorization": bearer(token)} if token else {}}
        if self.url.lower().startswith("wss:"):
            options["ssl"] = _client_tls(self._ca_file)
        return options

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _up(self) -> ClientConnection:
        connection = self._connection
        if connection is None:
            raise LinkClosed(f"the link to {self.url} is down")
        return connection

    def _drop(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _down(self, error: ConnectionClosed) -> LinkClosed:
        reason = error.rcvd.reason or f"code {error.rcvd.code}" if error.rcvd else "it broke"
        return LinkClosed(f"the link to the verifier at {self.url} closed: {reason}")

    def _perhaps_passing(self, error: LinkClosed | LinkRefused) -> LinkClosed | LinkRefused:
        """A link that has worked may work again: a captive portal answers for a while, or files are being changed."""
        return LinkClosed(error) if self._proven is not None and isinstance(error, LinkRefused) else error

    def _rejected(self, error: InvalidStatus) -> LinkClosed | LinkRefused:
        """Only a refused token is final: a gateway gives any other answer while it or the verifier is deployed."""
        status, headers = error.response.status_code, error.response.headers
        said = " ".join((error.response.body or b"")[:300].decode("utf-8", "replace").split())
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return LinkRefused(f"the verifier at {self.url} refused the token; give the one in its token file")
        if status >= 500:
            sentence = f"the verifier at {self.url} is not ready (HTTP {status}): {said}"
        elif status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY):
            sentence = f"{self.url} asks to be dialled later (HTTP {status}): {said}"
        else:
            sentence = f"{self.url} is not a verifier now: it answered HTTP {status}; check the address if that stays"
        return LinkClosed(sentence, _retry_after(headers))

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> LinkClosed | LinkRefused:
        """A certificate out of its time is not final: this machine's clock or the certificate may be put right."""
        why = f"the certificate of {self.url} is not trusted ({error.verify_message})"
        if error.verify_code in _OUT_OF_TIME:
            now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
            return LinkClosed(f"{why}; set this machine's clock, which says {now}, or renew the certificate")
        if error.verify_code in _WRONG_HOST:
            return LinkRefused(f"{why}; dial the host that the certificate names")
        return LinkRefused(f"{why}; name the authority that signed it as CA file")


def _bound_sends(link: socket.socket, seconds: float) -> None:
    """Have a send that makes no progress for so long break the link: not even pings would get past it.

    Without this option, which not every system has, the kernel gives up after a quarter of an hour.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        link.setsockopt(socket.IPPROTO_TCP, option, max(1, round(1000 * seconds)))


def _retry_after(headers: Headers) -> float:
    """The pause that a response asks for, s; 0.0 if none, or not in seconds."""
    given = headers.get_all("Retry-After")
    text = given[0].strip() if len(given) == 1 else ""
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _client_tls(ca_file: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(user_path(ca_file)) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the CA file {ca_file} cannot be used: {error}") from error
