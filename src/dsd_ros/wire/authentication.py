# SPDX-License-Identifier: Apache-2.0
"""Proof, over DDS, that both ends of a session hold the same token.

Any process of a DDS domain can publish. So each message carries a tag that only a holder of the token can make:
HMAC-SHA256 over direction, sequence number and content, under a key agreed with fresh random bytes of both ends
(docs/protocol.md, "Proof of the token"). A message whose tag does not hold is dropped and ends nothing. Nothing is
encrypted. A websocket needs none of this: TLS and its bearer token say who is there.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dsd_ros.logs import LogLimit
from dsd_ros.wire.channel import Channel, LinkClosed, LinkTimeout, TokenSource, token_now
from dsd_ros.wire.messages import (
    NONCE_BYTES,
    TAG_BYTES,
    TICKET_BYTES,
    EndCode,
    Message,
    Outcome,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    RefusalCode,
    SessionReply,
    SessionRequest,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Opening = TypeVar("Opening", SessionRequest, Question)
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)

REMEMBERED = 1024  # a message that comes after this many later ones counts as replayed
NUMBER_BYTES = 4
_FIRST = bytes(NUMBER_BYTES)
_WINDOW = (1 << REMEMBERED) - 1
_DENIED_S = 0.3  # a verifier that does know the session answers meanwhile
UNPROVEN = (
    "what answers as the verifier does not prove that it holds this robot's token; give both sides the same token file "
    "(token_file), and the same release"
)


class Mac:
    """HMAC-SHA256 under one key, of a label and what follows it; a call gives 32 bytes."""

    def __init__(self, key: bytes, label: bytes) -> None:
        self._begun = hmac.new(key, b"dsd_ros " + label + b"\0", hashlib.sha256)

    def __call__(self, data: bytes) -> bytes:
        mac = self._begun.copy()
        mac.update(data)
        return mac.digest()

    def tag(self, number: bytes, message: Message, before: bytes = b"") -> bytes:
        """``number`` and the proof of ``before``, of ``number`` and of the message, whose own tag must be empty."""
        return number + self(before + number + _pack(message))[: TAG_BYTES - NUMBER_BYTES]


def _pack(message: Message) -> bytes:
    """All fields in their order, which takes less time than a frame; what follows a request's tag only if it is set."""
    if isinstance(message, SessionRequest) and not message.grammar:
        return _encode((message.__struct_config__.tag, *msgspec.structs.astuple(message)[:-1]))
    return _encode(message)


def bare(message: Message) -> Message:
    """The message without its tag."""
    return msgspec.structs.replace(message, tag=b"")


def name_of(message: Any) -> Hashable:
    """What a message belongs to: a question and its attempt, or the number of a session."""
    session = getattr(message, "session", None)
    return (message.ask, message.attempt) if session is None else session


class Token:
    """The secret that both sides read from their token files."""

    def __init__(self, token: str) -> None:
        labels = b"open", b"session", b"question", b"unknown"
        self._open, self._session, self._question, self._unknown = (Mac(token.encode(), label) for label in labels)

    def sign(self, message: Opening) -> Opening:
        """An opening message with a fresh nonce and its tag."""
        message = msgspec.structs.replace(message, nonce=secrets.token_bytes(NONCE_BYTES), tag=b"")
        return msgspec.structs.replace(message, tag=self._open.tag(_FIRST, message))

    def holds(self, message: SessionRequest | Question) -> bool:
        """Whether an opening message comes from a holder of the token."""
        fresh = len(message.nonce) == NONCE_BYTES
        return fresh and hmac.compare_digest(message.tag, self._open.tag(_FIRST, bare(message)))

    def session_key(self, nonce: bytes, reply: SessionReply, robot: bool) -> SessionKey:
        """The key of the session that ``reply`` opens; ``nonce`` is the request's, ``robot``: at the robot's end."""
        return SessionKey(self._session(nonce + reply.nonce + reply.session.to_bytes(4, "little")), robot)

    def question_key(self, question: Question, robot: bool) -> SessionKey:
        """The key of a question's attempt: the cloud adds no random bytes, since the device drafts at once."""
        return SessionKey(self._question(question.nonce), robot)

    def deny(self, message: Message, about: bytes) -> Message:
        """``message`` says that the verifier does not know what the message with the tag ``about`` belongs to.

        Without a session there is no session key: whoever sent that message recognises its tag in this one's.
        """
        return msgspec.structs.replace(message, tag=self._unknown.tag(about[:NUMBER_BYTES], bare(message), about))

    def denies(self, message: Message, about: bytes) -> bool:
        """Whether a message of ``deny`` is about the one that was sent with the tag ``about``."""
        return hmac.compare_digest(message.tag, self.deny(message, about).tag)


class SessionKey:
    """One end's half of a session's key: tags what it sends, and takes what the other end sent, each message once.

    Messages may be sent from several threads, and are received in one.
    """

    def __init__(self, key: bytes, robot: bool) -> None:
        up, down = Mac(key, b"up"), Mac(key, b"down")
        self._sends, self._hears = (up, down) if robot else (down, up)
        self._numbers = itertools.count(1)
        self._newest, self._seen = 0, 0  # sequence number received, and a bit for each before it
        self.ticket = Mac(key, b"ticket")(b"")[:TICKET_BYTES]  # resumes the session; never sent before it is shown

    def sign(self, message: Message) -> Message:
        """The message with its tag."""
        if type(message) is Outcome:  # as a websocket carries it
            message = msgspec.structs.replace(message, confidence=round(message.confidence * 65535) / 65535)
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
        return msgspec.structs.replace(message, tag=self._sends.tag(number, message))

    def fault(self, message: Message) -> str:
        """What is wrong with a received message: "forged", "replayed", or nothing. One without fault is noted."""
        head = message.tag[:NUMBER_BYTES]
        if not hmac.compare_digest(message.tag, self._hears.tag(head, bare(message))):
            return "forged"
        number = int.from_bytes(head, "little")
        late = self._newest - number
        if late < 0:
            self._newest, self._seen = number, (self._seen << -late | 1) if -late < REMEMBERED else 1
            self._seen &= _WINDOW
        elif late >= REMEMBERED or self._seen >> late & 1:
            return "replayed"
        else:
            self._seen |= 1 << late
        return ""


class Dropped:
    """Counts dropped messages, and logs one sentence a minute. Thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self._lines = LogLimit()
        self._lock = threading.Lock()

    def add(self, message: Message, fault: str) -> None:
        with self._lock:
            self.count += 1
            if not self._lines.due():
                return
        _log.warning(
            "a %s whose tag is %s was dropped, %d messages in all: another process sends on this link, or the two "
            "sides' token files differ",
            type(message).__name__, fault, self.count,
        )  # fmt: skip


def _slot(tag: bytes) -> int:
    return int.from_bytes(tag[:NUMBER_BYTES], "little") % REMEMBERED


class AuthenticatedChannel:
    """A ``DdsChannel`` on which nothing counts that a holder of the token did not send."""

    def __init__(self, channel: Channel, token: TokenSource) -> None:
        """``channel`` is closed with this one; ``token``: the token, or a function that reads it for each opening."""
        self._channel = channel
        self._source = token
        self._read_token()
        self._opening: SessionRequest | None = None  # as sent; until its answer has come
        self._keys: dict[Hashable, SessionKey] = {}  # of the present session and the present question
        self._sent: dict[int, bytes] = {}  # sequence number modulo REMEMBERED -> the newest tag sent
        self._denial: tuple[float, Message] | None = None  # when it is due
        self.dropped = Dropped()
        self.doubt = ""  # a sentence when something answers that does not hold the token

    @property
    def bytes_up(self) -> int:
        return self._channel.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._channel.bytes_down

    def send(self, message: Message) -> None:
        self._channel.send(self._signed(message))

    def receive(self, timeout: float) -> Message:
        until = time.monotonic() + timeout
        while True:
            due = min(until, self._denial[0]) if self._denial is not None else until
            try:
                message = self._accepted(self._channel.receive(max(0.0, due - time.monotonic())))
            except LinkTimeout:
                if self._denial is None:
                    raise
                message = None
            if message is not None:
                return message
            now = time.monotonic()
            if self._denial is not None and now >= self._denial[0]:
                (_, message), self._denial = self._denial, None
                return message
            if now >= until:
                raise LinkTimeout(f"the verifier sent nothing for {timeout:.1f} s")

    def reconnect(self) -> None:
        self._denial = None
        self._channel.reconnect()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signed(self, message: Message) -> Message:
        if isinstance(message, SessionRequest):
            if self._opening is None or self._opening.request != message.request:
                self._read_token()
                self._opening = self._token.sign(message)
            return self._opening  # a repeated request repeats its nonce
        if isinstance(message, Question):
            self._read_token()
            message = self._token.sign(message)
            self._keep(name_of(message), self._token.question_key(message, robot=True))
            return message
        key = self._keys.get(name_of(message))
        if key is None:
            return message  # of a session that is gone: the verifier drops it
        message = key.sign(message)
        self._sent[_slot(message.tag)] = message.tag
        return message

    def _read_token(self) -> None:
        try:
            token = token_now(self._source)
        except ValueError as error:  # the file may be put right
            raise LinkClosed(error) from error
        assert token, "this channel is for links with a token"
        self._token = Token(token)

    def _keep(self, name: Hashable, key: SessionKey) -> None:
        """Add the key of a session or a question, and forget that of the one before it."""
        kept = {other: known for other, known in self._keys.items() if type(other) is not type(name)}
        self._keys = {**kept, name: key}

    def _accepted(self, message: Message) -> Message | None:
        """The message if it may count. What belongs to another robot of this namespace is left to that one."""
        if isinstance(message, SessionReply):
            return self._opened(message)
        key = self._keys.get(name_of(message))
        if key is None and name_of(message) != 0:
            return None
        fault = key.fault(message) if key is not None else "missing"
        if fault and self._denied(message):
            # Another verifier with this token says so too, if a stranger asks it.
            self._denial = self._denial or (time.monotonic() + _DENIED_S, message)
            return None
        if fault:
            self.dropped.add(message, fault)
            if isinstance(message, QuestionReply):
                self.doubt = UNPROVEN
            return None
        self.doubt, self._denial = "", None
        return message

    def _denied(self, message: Message) -> bool:
        """Whether the verifier does not know, or no longer, what a message of ours belongs to."""
        if not isinstance(message, Refusal | QuestionEnd):
            return False
        if message.code not in (RefusalCode.UNKNOWN_SESSION, EndCode.UNKNOWN):
            return False
        sent = self._sent.get(_slot(message.tag))
        return sent is not None and self._token.denies(message, sent)

    def _opened(self, reply: SessionReply) -> SessionReply | None:
        opening = self._opening
        if opening is None or reply.request != opening.request:
            return None  # another robot's, or a copy
        key = self._token.session_key(opening.nonce, reply, robot=True)
        if len(reply.nonce) != NONCE_BYTES or key.fault(reply):
            self.dropped.add(reply, "forged" if reply.tag else "missing")
            self.doubt = UNPROVEN
            return None
        self._opening, self._denial, self.doubt = None, None, ""
        if not reply.session:
            return reply
        self._keep(reply.session, key)
        return msgspec.structs.replace(reply, ticket=key.ticket)
