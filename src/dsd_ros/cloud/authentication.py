# SPDX-License-Identifier: Apache-2.0
"""The verifier's end of the proof that both sides hold the same token (``wire.authentication``)."""

from __future__ import annotations

import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from dsd_ros.cloud.credentials import TokenHolder, Tokens
from dsd_ros.wire.authentication import Dropped, SessionKey, name_of
from dsd_ros.wire.messages import (
    NONCE_BYTES,
    TAG_BYTES,
    Draft,
    DraftTokens,
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
from dsd_ros.wire.turns import RobotLink

Answer = Callable[[Message], object]
_NONCES = 4096  # openings remembered, so that a copy of one opens or resumes nothing
_DENIALS = 8  # of one message, where it may be of any robot: a topic does not say whose it is
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
    holder: TokenHolder
    ticket: bytes = b""


class Authenticator:
    """In front of an engine: passes on what holders of a token sent, each message once, and tags the answers.

    ``submit`` as ``VerifierEngine.submit``. A session's key changes whenever it is resumed. What a robot of the tokens
    file sends over a topic reaches the engine as of a link of that robot, so that its share and its limits are its own.
    """

    def __init__(self, engine: Any, tokens: Tokens, max_sessions: int) -> None:
        """``engine``: what answers messages, with ``metrics``; it stays the caller's."""
        self._engine = engine
        self._tokens = tokens
        self.name_robots()
        self._links: dict[tuple[Hashable, str], RobotLink] = {}  # of the robots that speak over a topic
        self._limit = max(_KNOWN, 2 * max_sessions)
        self._served: OrderedDict[Hashable, _Served] = OrderedDict()  # used last, last
        self._nonces: OrderedDict[bytes, Message | None] = OrderedDict()  # of openings -> the answer, once it is known
        self._lock = threading.Lock()  # guards these two
        self.dropped = Dropped()

    def name_robots(self) -> None:
        """Have the metrics count every robot that has a token by now."""
        self._engine.metrics.name_robots(self._tokens.names)

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when the engine is closed."""
        if isinstance(message, SessionRequest | Question):
            return self._begin(message, reply, peer)
        name = name_of(message)
        served = self._served.get(name)
        if served is None or served.holder not in self._tokens:
            self._deny(message, reply, served.holder if served is not None else None)
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
        link = self._link(served.holder, peer)
        return bool(self._engine.submit(message, lambda answer: reply(self._signed(answer)), link))

    def disconnect(self, peer: Hashable) -> None:
        self._engine.disconnect(peer)
        for known in [known for known in self._links if known[0] == peer]:
            self._engine.disconnect(self._links.pop(known))

    def _begin(self, message: SessionRequest | Question, reply: Answer, peer: Hashable) -> bool:
        holder = self._tokens.proven_by(message)
        if holder is None:
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
        link = self._link(holder, peer)
        if isinstance(message, Question):
            self._keep(name_of(message), _Served([holder.proof.question_key(message, robot=False)], holder))
            return bool(self._engine.submit(message, lambda answer: reply(self._signed(answer)), link))
        request = msgspec.structs.replace(message, resume=self._engines_ticket(message.resume))
        return bool(self._engine.submit(request, lambda answer: reply(self._answered(message, holder, answer)), link))

    def _link(self, holder: TokenHolder, peer: Hashable) -> Hashable:
        """Whose a message is: its connection's, or over a topic, which names nobody, its robot's."""
        if isinstance(peer, RobotLink) or not holder.name:
            return peer
        link = self._links.setdefault((peer, holder.name), RobotLink("", sys.maxsize, sys.maxsize, holder.name))
        link.max_sessions_of_account = holder.sessions or sys.maxsize
        return link

    def _answered(self, request: SessionRequest, holder: TokenHolder, answer: Message) -> Message:
        """An answer to the session that ``request`` opened or resumed, tagged."""
        if not isinstance(answer, SessionReply):
            if isinstance(answer, Refusal) and not answer.session:
                with self._lock:
                    self._nonces.pop(request.nonce, None)  # too many requests wait: it may be sent again
            return self._signed(answer)
        fresh = msgspec.structs.replace(answer, nonce=secrets.token_bytes(NONCE_BYTES), ticket=b"")
        key = holder.proof.session_key(request.nonce, fresh, robot=False)
        if answer.session:
            before = self._served.get(answer.session)
            shown = [k for k in before.keys if k.ticket == request.resume] if before is not None else []
            self._keep(answer.session, _Served([key, *shown], holder, answer.ticket))
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

    def _deny(self, message: Any, reply: Answer, holder: TokenHolder | None) -> None:
        """Tell the sender of a message that the verifier does not know what it belongs to: perhaps it was restarted.

        Only a robot whose token made the answer takes it: without its ``holder`` each of a few tokens makes one.
        """
        if len(message.tag) != TAG_BYTES:
            self._drop(message, "missing")
        elif isinstance(message, Observation | Draft | DraftTokens):
            numbers = {Draft: "round", DraftTokens: "stream"}
            number = getattr(message, numbers.get(type(message), ""), 0)
            code = RefusalCode.UNKNOWN_SESSION
            refusal = Refusal(message.session, message.reply, number, code, _UNKNOWN)
            self._engine.metrics.sending(refusal)
            self._send_denial(refusal, message.tag, reply, holder)
        elif isinstance(message, Proposal | Verdict | Reveal):
            end = QuestionEnd(message.ask, message.attempt, EndCode.UNKNOWN, _UNKNOWN_QUESTION)
            self._send_denial(end, message.tag, reply, holder)

    def _send_denial(self, denial: Message, about: bytes, reply: Answer, holder: TokenHolder | None) -> None:
        holders = [holder] if holder is not None else islice(self._tokens, _DENIALS)
        for each in holders:
            reply(each.proof.deny(denial, about))

    def _drop(self, message: Message, fault: str) -> None:
        self._engine.metrics.dropped[fault].inc()
        self.dropped.add(message, fault)


def _refused(message: SessionRequest | Question, sentence: str) -> Message:
    if isinstance(message, Question):
        return QuestionReply(message.ask, message.attempt, sentence, "", "", 0)
    return SessionReply(message.request, 0, sentence, "", "", 0)
