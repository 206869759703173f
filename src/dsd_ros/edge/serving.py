# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API on the robot: what other programs ask is answered by the session with the verifier.

``GET /v1/models`` and ``POST /v1/chat/completions``, in whole or streamed by verified tokens as server-sent events.
Replies are decoded one at a time; a client that goes away ends its own.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from dsd_ros.addresses import is_loopback
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.chat_request import MAX_BODY_BYTES, ApiError, ChatRequest, read_request
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.edge.drafters import Worth
from dsd_ros.edge.engine import DraftEngine
from dsd_ros.edge.results import DecodedReply, Progress, RoundRecord
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings, ServeSettings
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.vlm.backbones import smart_resize
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import prompt_ids
from dsd_ros.wire.channel import Channel, LinkError, bearer
from dsd_ros.wire.client import DecodeCancelled
from dsd_ros.wire.messages import RefusalCode, SessionReply

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
_IDLE_S = 30.0  # a client that sends or takes nothing for this long is gone
_MOST_WAITING = 64  # requests, the one being answered included
_POLL_S = 0.05
_CLOSE_S = 0.5  # for the reply under way, when the server ends
_INCOMPLETE = "\ufffd"  # the first bytes of a character whose last tokens are still to come


class ChatSession:
    """Decodes conversations, one at a time, over a channel that stays the caller's. Thread-safe."""

    def __init__(
        self,
        channel: Channel,
        draft: VisionLanguageModel | DraftEngine,
        settings: DecodeSettings,
        link: LinkSettings,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """``settings``: of requests that say nothing else. ValueError as from ``EdgeSession``."""
        self.settings = settings
        self._channel, self._draft, self._link, self._vocabulary = channel, draft, link, vocabulary
        self._worth = Worth()
        self._line: deque[object] = deque()  # who holds the session, and those that wait for it
        self._moved = threading.Condition()
        self._session = self._new(settings)
        self._verifier: SessionReply | None = None

    def model(self, cancelled: Callable[[], bool]) -> str:
        """The target's name; LinkError when no verifier answers."""
        if self._verifier is None:
            with self._turn(cancelled):
                return self._open(cancelled)
        return self._verifier.target_name

    def decode(self, request: ChatRequest, on_progress: Progress, cancelled: Callable[[], bool]) -> DecodedReply:
        """The target's reply; ApiError, or what ``EdgeSession.decode`` raises."""
        with self._turn(cancelled):
            if request.seeded or request.settings != self._session.settings:
                self._renew(request.settings)
            check_model(request.model, self._open(cancelled))
            present = request.pictures[-1] if request.pictures else None
            history = [(picture, "") for picture in request.pictures[:-1]]
            try:
                return self._session.decode(present, request.chat, on_progress, None, cancelled, history)
            except BaseException as error:
                self._renew(self.settings)  # the verifier ends the reply with its session
                refused = isinstance(error, VerifierRefused) and error.code == RefusalCode.BAD_OBSERVATION
                if refused and self.prompt_tokens(request) >= self._draft.max_length:
                    raise ContextError(str(error)) from error  # as the draft says, which reads the prompt meanwhile
                raise

    def prompt_tokens(self, request: ChatRequest) -> int:
        """Tokens of a request's prompt, those of its pictures as the target reads them; 0 before there is a session."""
        verifier = self._verifier
        if verifier is None:
            return 0
        factor, least, most = verifier.side_factor or 1, verifier.min_pixels, verifier.max_pixels
        sides = [smart_resize(picture.shape[0], picture.shape[1], factor, least, most) for picture in request.pictures]
        counts = [height * width // factor**2 for height, width in sides] or [0]
        prompt = self._draft.template.render(request.chat, counts[-1], [(count, "") for count in counts[:-1]])
        return len(prompt_ids(self._draft.tokenizer, prompt))

    def close(self) -> None:
        """End the session at the verifier, if no reply is in the way."""
        until = time.monotonic() + _CLOSE_S
        with contextlib.suppress(DecodeCancelled, ApiError), self._turn(lambda: time.monotonic() > until):
            self._session.close()

    @contextlib.contextmanager
    def _turn(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Hold the session, first come, first served. DecodeCancelled; ApiError where too many wait."""
        me = object()
        with self._moved:
            if len(self._line) >= _MOST_WAITING:
                raise ApiError(429, f"{_MOST_WAITING} requests are waiting already; try again later", None, "busy")
            self._line.append(me)
        try:
            with self._moved:
                while self._line[0] is not me and not cancelled():
                    self._moved.wait(_POLL_S)
            if cancelled():
                raise DecodeCancelled
            yield
        finally:
            with self._moved:
                self._line.remove(me)
                self._moved.notify_all()

    def _open(self, cancelled: Callable[[], bool]) -> str:
        self._session.open(cancelled=cancelled)
        self._verifier = self._session.verifier
        assert self._verifier is not None
        return self._verifier.target_name

    def _renew(self, settings: DecodeSettings) -> None:
        self._session.close()
        self._session = self._new(settings)

    def _new(self, settings: DecodeSettings) -> EdgeSession:
        return EdgeSession(
            self._channel, self._draft, settings, self._link, vocabulary=self._vocabulary, worth=self._worth
        )


class ApiServer(ThreadingTCPServer):
    """Serves a session to other programs, as a context manager; a thread for each of them."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, session: ChatSession, settings: ServeSettings) -> None:
        """OSError, one sentence, when it cannot listen; ValueError for the token file."""
        self.session, self.token = session, settings.token()
        self.stopping = False
        self.alone = self.token is None and is_loopback(settings.host)
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            super().__init__((settings.host, settings.port), _Handler)
        except OSError as error:
            where = f"port {settings.port} on {settings.host}"
            raise OSError(f"{where} cannot be listened on ({error.strerror}); choose another, or 0 for any") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="api", daemon=True)

    def start(self) -> None:
        """Answer, on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """End every reply and the session, within two seconds."""
        self.stopping = True
        self.shutdown()
        self.server_close()
        self.session.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client has gone, or sent what is no request."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of one client."""

    server: ApiServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    _unread = 0  # bytes of the body
    _streams = False  # whether an answer has begun as a stream

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return self.server.stopping or bool(poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return True

    def event(self, value: Any) -> None:
        """Send one event of a stream, which the first one begins; None ends it."""
        chunked = self.request_version == "HTTP/1.1"
        if not self._streams:
            self._streams = True
            self.close_connection |= not chunked
            self._begin(200, "text/event-stream; charset=utf-8", {"Transfer-Encoding": "chunked"} if chunked else {})
        text = b"data: " + (b"[DONE]" if value is None else msgspec.json.encode(value)) + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text) if chunked else text)

    def send(self, status: int, value: Any) -> None:
        """Send a whole answer."""
        body = msgspec.json.encode(value)
        self._begin(status, "application/json", {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: replies are logged as such."""

    def _answer(self, do: Callable[[str], None]) -> None:
        length = self.headers.get("Content-Length", "0")
        self._streams, self._unread = False, int(length) if length.isdecimal() else 0
        try:
            try:
                self._admit()
                do(unquote(urlsplit(self.path).path))
            except (ConnectionError, TimeoutError, DecodeCancelled):
                raise
            except Exception as error:
                self._fail(_told(error))
            if self._streams and self.request_version == "HTTP/1.1":
                self.wfile.write(b"0\r\n\r\n")
        except (ConnectionError, TimeoutError, DecodeCancelled):  # the client has gone, or this server ends
            self.close_connection = True

    def _admit(self) -> None:
        """ApiError for a client that may not ask."""
        token = self.server.token
        shown = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(shown.encode(), bearer(token).encode()):
            raise ApiError(
                401, "the API key is wrong or missing; give the token of this server", None, "invalid_api_key"
            )
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if self.server.alone and not is_loopback(host):
            # A web page whose name its owner points at this machine must not use it (DNS rebinding).
            raise ApiError(403, "this server is for programs of this machine: ask 127.0.0.1")

    def _get(self, path: str) -> None:
        if path != "/v1/models" and not path.startswith("/v1/models/"):
            raise ApiError(404, f"there is no GET {path[:256]}")
        name = self.server.session.model(self.gone)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "dsd"}
        if path == "/v1/models":
            self.send(200, {"object": "list", "data": [model]})
        else:
            check_model(path.removeprefix("/v1/models/"), name)
            self.send(200, model)

    def _post(self, path: str) -> None:
        if path != "/v1/chat/completions":
            raise ApiError(404, f"there is no POST {path[:256]}")
        if self.headers.get_content_type() != "application/json":  # no web page may send it to another's address
            raise ApiError(415, "the body must be application/json")
        if "Content-Length" not in self.headers:
            raise ApiError(411, "the body must have a Content-Length")
        if self._unread > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has {self._unread} bytes; {MAX_BODY_BYTES} are possible")
        body, self._unread = self.rfile.read(self._unread), 0
        session = self.server.session
        request = read_request(body, session.settings)
        completion = _Completion(request, self.event if request.streams else None)
        finished = True
        try:
            reply = session.decode(request, completion.grow, lambda: completion.stopped or self.gone())
            finished = reply.finished or completion.stopped
            _log.info(reply.summary())
        except DecodeCancelled:
            if not completion.stopped:
                raise
        whole = completion.end(finished, session.prompt_tokens(request))
        if whole is not None:
            self.send(200, whole)

    def _fail(self, error: ApiError) -> None:
        """Tell what went wrong, in a stream that has begun as its last event."""
        if self._streams:
            self.event(error.body)
            return
        self.close_connection = True
        left = min(self._unread, MAX_BODY_BYTES)
        while left > 0 and (read := self.rfile.read(min(left, 1 << 16))):  # else the client might not see the answer
            left -= len(read)
        self.send(error.status, error.body)

    def _begin(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Cache-Control": "no-store"} | more
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def check_model(asked: str, served: str) -> None:
    """ApiError for a model that is not the target."""
    if asked != served:
        raise ApiError(404, f"the model {asked[:256]!r} does not exist; this is {served!r}", "model", "model_not_found")


class _Completion:
    """A reply as OpenAI's API gives it: the text as far as no stop has come, and what it took.

    ``stopped``: whether one has come, so that nothing more need be decoded.
    """

    def __init__(self, request: ChatRequest, send: Callable[[Any], None] | None) -> None:
        """``send``: takes the parts of a stream; None: the reply is wanted in whole."""
        self.stopped = False
        self._request, self._send = request, send
        self._text, self._sent = "", 0  # characters
        self._tokens = self._drafted = self._accepted = 0
        self._about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": request.model}

    def grow(self, text: str, tokens: int, record: RoundRecord) -> None:
        """Take a pass or round of the target, as a session's ``on_progress``."""
        if self.stopped:
            return
        self._tokens, self._drafted, self._accepted = (
            tokens, self._drafted + record.drafted, self._accepted + record.accepted,
        )  # fmt: skip
        ends = [at for stop in self._request.stops if (at := text.find(stop)) >= 0]
        self.stopped, self._text = bool(ends), text[: min(ends)] if ends else text
        self._stream(self._held_back)

    def end(self, finished: bool, prompt_tokens: int) -> dict[str, Any] | None:
        """The reply is over: the whole of it, unless it was streamed."""
        reason = "stop" if finished else "length"
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": prompt_tokens + self._tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._drafted - self._accepted,
            },
        }
        if self._send is None:
            message = {"role": "assistant", "content": self._text, "refusal": None}
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            return {**self._about, "object": "chat.completion", "choices": [choice], "usage": usage}
        self._stream(0)
        self._event([{"index": 0, "delta": {}, "finish_reason": reason}])
        if self._request.with_usage:
            self._event([], usage)
        self._send(None)
        return None

    @property
    def _held_back(self) -> int:
        """Characters at the text's end that may still change, or begin a stop."""
        if self.stopped:
            return 0
        begun = [
            length
            for stop in self._request.stops
            for length in range(1, len(stop))
            if self._text.endswith(stop[:length])
        ]
        return max([len(self._text) - len(self._text.rstrip(_INCOMPLETE)), *begun])

    def _stream(self, held_back: int) -> None:
        """Send what is new of the text but its last characters."""
        until = len(self._text) - held_back
        if self._send is None or until <= self._sent:
            return
        role = {} if self._sent else {"role": "assistant"}
        self._event([{"index": 0, "delta": {**role, "content": self._text[self._sent : until]}, "finish_reason": None}])
        self._sent = until

    def _event(self, choices: list[Any], usage: dict[str, Any] | None = None) -> None:
        assert self._send is not None
        more = {"usage": usage} if self._request.with_usage else {}
        self._send({**self._about, "object": "chat.completion.chunk", "choices": choices, **more})


def _told(error: Exception) -> ApiError:
    """What a client is told of an error."""
    sentence = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(400, sentence, "messages", "context_length_exceeded")
    if isinstance(error, VerifierRefused) and error.code == RefusalCode.BAD_OBSERVATION:
        return ApiError(400, sentence, "messages")
    if isinstance(error, LinkError):
        return ApiError(503, sentence, None, "verifier_unavailable")
    if isinstance(error, ValueError):
        return ApiError(400, sentence)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why")
