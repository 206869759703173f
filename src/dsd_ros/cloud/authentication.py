# SPDX-License-Identifier: Apache-2.0
"""The verifier's end of the proof that both sides hold the same token (``wire.authentication``)."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import msgspec

from dsd_ros.wire.authentication import Dropped, SessionKey, Token, name_of
from dsd_ros.wire.messages import (
    NONCE_BYTES,
    TAG_BYTES,
    Draft,
    EndCode,
    Message,
    Observation,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    RefusalCode,
    Reveal,
    SessionClose,
    SessionReply,
    SessionRequest,
    Verdict,
)

Answer = Callable[[Message], object]
_NONCES = 4096  # openings remembered, so that a copy of one opens or resumes nothing
_KNOWN = 4096  # sessions and questions whose keys are kept, or twice as many as the engine may hold
_ASK_FOR_PROOF = (
    "this verifier serves only robots that prove its token, and the request does not; give both sides the same token "
    "file (token_file)"
)
_UNKNOWN = "the verifier does not know this session (any more); open a new one"
_UNKNOWN_QUESTION = "the cloud does not know this question, or no longer; ask again with another attempt"


@dataclass
class _Served:
    """A session or a question. ``ticket`` is the engine's own and stays here."""

    keys: list[SessionKey]  # the newest, and the one before it until the robot has used the newest
    ticket: bytes = b""


class Authenticator:
    """In front of an engine: passes on what holders of the token sent, each message once, and tags the answers.

    ``submit`` as ``VerifierEngine.submit``. A session's key changes whenever it is resumed.
    """

    def __init__(self, engine: Any, token: str, max_sessions: int) -> None:
        """``engine``: what answers messages, with ``metrics``; it stays the caller's."""
        self._engine = engine
        self._token = Token(token)
        self._limit = max(_KNOWN, 2 * max_sessions)
        self._served: OrderedDict[Hashable, _Served] = OrderedDict()  # used last, last
        self._nonces: OrderedDict[bytes, Message | None] = OrderedDict()  # of openings -> the answer, once it is known
        self._lock = threading.Lock()  # guards these two
        self.dropped = Dropped()

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when the engine is closed."""
        if isinstance(message, SessionRequest | Question):
            return self._begin(message, reply, peer)
        name = name_of(message)
        served = self._served.get(name)
        if served is None:
            self._deny(message, reply)
            return True
        fault = ""
        for key in served.keys:
            fault = key.fault(message)
            if fault != "forged":
                break
        if fault:
            self._drop(message, fault)
            return True
        with self._lock:
            if name in self._served:
                self._served.move_to_end(name)
            if key is served.keys[0]:
                served.keys = [key]
            if isinstance(message, SessionClose | QuestionEnd):
                self._served.pop(name, None)
        return bool(self._engine.submit(message, lambda answer: reply(self._signed(answer)), peer))

    def disconnect(self, peer: Hashable) -> None:
        self._engine.disconnect(peer)

    def _begin(self, message: SessionRequest | Question, reply: Answer, peer: Hashable) -> bool:
        if not self._token.holds(message):
            self._drop(message, "forged" if message.tag else "missing")
            reply(_refused(message, _ASK_FOR_PROOF))
            return True
        nonce = message.nonce
        with self._lock:
            copy, before = nonce in self._nonces, self._nonces.setdefault(nonce, None)
            if len(self._nonces) > _NONCES:
                self._nonces.popitem(last=False)
        if copy:  # the robot's own, because no answer came yet, or a stranger's: it changes nothing
            self._engine.metrics.dropped["replayed"].inc()
            if before is not None:
                reply(before)
            return True
        if isinstance(message, Question):
            self._keep(name_of(message), _Served([self._token.question_key(message, robot=False)]))
            return bool(self._engine.submit(message, lambda answer: reply(self._signed(answer)), peer))
        request = msgspec.structs.replace(message, resume=self._engines_ticket(message.resume))
        return bool(self._engine.submit(request, lambda answer: reply(self._answered(message, answer)), peer))

    def _answered(self, request: SessionRequest, answer: Message) -> Message:
        """An answer to the session that ``request`` opened or resumed, tagged."""
        if not isinstance(answer, SessionReply):
            if isinstance(answer, Refusal) and not answer.session:
                with self._lock:
                    self._nonces.pop(request.nonce, None)  # too many requests wait: it may be sent again
            return self._signed(answer)
        fresh = msgspec.structs.replace(answer, nonce=secrets.token_bytes(NONCE_BYTES), ticket=b"")
        key = self._token.session_key(request.nonce, fresh, robot=False)
        if answer.session:
            before = self._served.get(answer.session)
            shown = [k for k in before.keys if k.ticket == request.resume] if before is not None else []
            self._keep(answer.session, _Served([key, *shown], answer.ticket))
        signed = key.sign(fresh)
        with self._lock:
            if request.nonce in self._nonces:
                self._nonces[request.nonce] = signed
        return signed

    def _signed(self, answer: Message) -> Message:
        served = self._served.get(name_of(answer))
        return answer if served is None else served.keys[0].sign(answer)

    def _keep(self, name: Hashable, served: _Served) -> None:
        with self._lock:
            self._served[name] = served
            self._served.move_to_end(name)
            if len(self._served) > self._limit:
                self._served.popitem(last=False)

    def _engines_ticket(self, ticket: bytes) -> bytes:
        """The engine's ticket of the session that a robot's ticket resumes; the robot's, which none has, otherwise."""
        with self._lock:
            for served in self._served.values():
                if any(key.ticket == ticket for key in served.keys):
                    return served.ticket
        return ticket

    def _deny(self, message: Any, reply: Answer) -> None:
        """Tell the sender of a message that the verifier does not know what it belongs to: perhaps it was restarted."""
        if len(message.tag) != TAG_BYTES:
            self._drop(message, "missing")
        elif isinstance(message, Observation | Draft):
            number = message.round if isinstance(message, Draft) else 0
            code = RefusalCode.UNKNOWN_SESSION
            refusal = Refusal(message.session, message.reply, number, code, _UNKNOWN)
            self._engine.metrics.sending(refusal)
            reply(self._token.deny(refusal, message.tag))
        elif isinstance(message, Proposal | Verdict | Reveal):
            end = QuestionEnd(message.ask, message.attempt, EndCode.UNKNOWN, _UNKNOWN_QUESTION)
            reply(self._token.deny(end, message.tag))

    def _drop(self, message: Message, fault: str) -> None:
        self._engine.metrics.dropped[fault].inc()
        self.dropped.add(message, fault)


def _refused(message: SessionRequest | Question, sentence: str) -> Message:
    if isinstance(message, Question):
        return QuestionReply(message.ask, message.attempt, sentence, "", "", 0)
    return SessionReply(message.request, 0, sentence, "", "", 0)
