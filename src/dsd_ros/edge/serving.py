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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar

import msgspec

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
from dsd_ros.vlm.front import check_prompt_length
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import prompt_ids
from dsd_ros.wire.channel import Channel, LinkError, bearer
from dsd_ros.wire.client import DecodeCancelled
from dsd_ros.wire.messages import RefusalCode, SessionReply

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MOST_WAITING = 64  # requests, the one being answered included: each is a thread with a body of up to 32 MiB
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
        self._line = ThreadPoolExecutor(1, "chat")  # first come, first served
        self._room = threading.Semaphore(_MOST_WAITING)
        self._session = self._new(settings)
        self._verifier: SessionReply | None = None

    def model(self, cancelled: Callable[[], bool]) -> str:
        """The target's name; LinkError when no verifier answers."""
        if self._verifier is None:
            return self._in_turn(lambda: self._open(cancelled)).target_name
        return self._verifier.target_name

    def decode(self, request: ChatRequest, on_progress: Progress, cancelled: Callable[[], bool]) -> DecodedReply:
        """The target's reply; ApiError, or what ``EdgeSession.decode`` raises."""
        return self._in_turn(lambda: self._decode(request, on_progress, cancelled))

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
        """End the session at the verifier, after the replies on their way."""
        self._line.submit(self._session.close).result()

    def _in_turn(self, do: Callable[[], T]) -> T:
        if not self._room.acquire(blocking=False):
            raise ApiError(429, f"{_MOST_WAITING} requests are waiting already; try again later", None, "busy")
        try:
            return self._line.submit(do).result()
        finally:
            self._room.release()

    def _decode(self, request: ChatRequest, on_progress: Progress, cancelled: Callable[[], bool]) -> DecodedReply:
        if request.seeded or request.settings != self._session.settings:
            self._renew(request.settings)
        model = self._open(cancelled).target_name
        if request.model != model:
            sentence = f"the model {request.model[:256]!r} does not exist; this is {model!r}"
            raise ApiError(404, sentence, "model", "model_not_found")
        present, history = None, [(picture, "") for picture in request.pictures]
        if history:
            present, _ = history.pop()
        check_prompt_length(self._draft.name, self._draft.max_length, self.prompt_tokens(request), len(history))
        try:
            return self._session.decode(present, request.chat, on_progress, None, cancelled, history)
        except BaseException:
            self._renew(self.settings)  # the verifier ends the reply with its session
            raise

    def _open(self, cancelled: Callable[[], bool]) -> SessionReply:
        if cancelled():
            raise DecodeCancelled
        self._session.open(cancelled=cancelled)
        self._verifier = self._session.verifier
        assert self._verifier is not None
        return self._verifier

    def _renew(self, settings: DecodeSettings) -> None:
        self._session.close()
        self._session = self._new(settings)

    def _new(self, settings: DecodeSettings) -> EdgeSession:
        return EdgeSession(
            self._channel, self._draft, settings, self._link, vocabulary=self._vocabulary, worth=self._worth
        )


class ApiServer(ThreadingTCPServer):
    """Serves a session to other programs until it is closed; a thread for each of them."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, session: ChatSession, settings: ServeSettings) -> None:
        """OSError, one sentence, when it cannot listen; ValueError for the token file."""
        self.session, self.token, self.stopping = session, settings.token(), False
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            super().__init__((settings.host, settings.port), _Handler)
        except OSError as error:
            where = f"port {settings.port} on {settings.host}"
            raise OSError(f"{where} cannot be listened on ({error.strerror}); choose another, or 0 for any") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, args=(0.05,), name="api", daemon=True).start()

    def close(self) -> None:
        """End every reply and the session."""
        self.stopping = True
        self.shutdown()
        self.server_close()
        self.session.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client has gone, or sent what is no request."""


class _Handler(BaseHTTPRequestHandler):
    """One request of one client."""

    server: ApiServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds; a client that sends or takes nothing for so long is gone, and would hold up the others
    disable_nagle_algorithm = True
    _streams = False  # whether the answer has begun as a stream

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, DecodeCancelled):  # it has gone, or this server ends
            try:
                self._answer()
            except (ConnectionError, TimeoutError, DecodeCancelled):
                raise
            except Exception as error:
                told = _told(error)
                if self._streams:
                    self.event(told.body)
                else:
                    self.send(told.status, told.body)
            if self._streams:
                self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def do_POST(self) -> None:
        self.do_GET()

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
        if not self._streams:
            self._streams = True
            self._begin(200, "text/event-stream; charset=utf-8", "Transfer-Encoding", "chunked")
        text = b"data: " + (b"[DONE]" if value is None else msgspec.json.encode(value)) + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))

    def send(self, status: int, value: Any) -> None:
        """Send a whole answer."""
        body = msgspec.json.encode(value)
        self._begin(status, "application/json", "Content-Length", str(len(body)))
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: replies are logged as such."""

    def _answer(self) -> None:
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else 0
        body = self.rfile.read(min(size, MAX_BODY_BYTES + 1))
        token, shown = self.server.token, self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(shown.encode(), bearer(token).encode()):
            raise ApiError(
                401, "the API key is wrong or missing; give the token of this server", None, "invalid_api_key"
            )
        if "Origin" in self.headers:
            raise ApiError(403, "this server is for programs, and no web page may use it")
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has {size} bytes; {MAX_BODY_BYTES} are possible")
        match self.command, self.path.partition("?")[0]:
            case "GET", "/v1/models":
                model = {"id": self.server.session.model(self.gone), "object": "model", "created": 0, "owned_by": "dsd"}
                self.send(200, {"object": "list", "data": [model]})
            case "POST", "/v1/chat/completions":
                self._complete(read_request(body, self.server.session.settings))
            case method, path:
                raise ApiError(404, f"there is no {method} {path[:256]}")

    def _complete(self, request: ChatRequest) -> None:
        session, finished = self.server.session, True
        completion = _Completion(request, self.event if request.streams else None)
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

    def _begin(self, status: int, kind: str, name: str, value: str) -> None:
        self.send_response(status)
        for header, text in (("Content-Type", kind), (name, value), ("Connection", "close")):
            self.send_header(header, text)
        self.end_headers()


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
        self._tokens = tokens
        self._drafted += record.drafted
        self._accepted += record.accepted
        ends = [at for stop in self._request.stops if (at := text.find(stop)) >= 0]
        self.stopped, self._text = bool(ends), text[: min(ends)] if ends else text
        incomplete = len(self._text) - len(self._text.rstrip(_INCOMPLETE))  # the end may still change, or begin a stop
        self._stream(0 if self.stopped else max([incomplete, *(len(stop) - 1 for stop in self._request.stops)]))

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
