# SPDX-License-Identifier: Apache-2.0
"""The verifier's end of the proof, over DDS, that both sides hold the same token (``wire.authentication``)."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from dsd_ros.cloud.metrics import Metrics

Answer = Callable[[Message], object]
Serve = Callable[[Message, Answer, Hashable], bool]
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
    """Between topics that any process can write and what answers robots: the verifier's end of the proof.

    It passes on what holders of a token sent, each message once, and tags the answers. A session's key changes
    whenever it is resumed. A robot of the tokens file gets a link of its own, so that its share and its limits are its.
    """

    def __init__(
        self, serve: Serve, tokens: Tokens, metrics: Metrics | None = None, sessions: int = 0, per_robot: int = 8
    ) -> None:
        """``serve``: what answers, as ``VerifierEngine.submit``; it holds up to ``sessions``.

        ``per_robot``: of one robot of a tokens file that says no more.
        """
        self._serve = serve
        self._tokens = tokens
        self._metrics = metrics
        self._per_robot = per_robot
        self._links: dict[str, RobotLink] = {}
        self._limit = max(_KNOWN, 2 * sessions)
        self._served: OrderedDict[Hashable, _Served] = OrderedDict()  # used last, last
        self._nonces: OrderedDict[bytes, Message | None] = OrderedDict()  # of openings -> the answer, once it is known
        self._lock = threading.Lock()  # guards these two
        self.dropped = Dropped()
        if metrics is not None:
            metrics.name_robots(tokens.names)

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when what answers is closed."""
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
        return self._serve(message, lambda answer: reply(self.sign(answer)), self._link(served.holder, peer))

    def sign(self, answer: Message) -> Message:
        """An answer with its tag, if it is about a session or a question that is served."""
        served = self._served.get(name_of(answer))
        return answer if served is None else served.keys[0].sign(answer)

    def _begin(self, message: SessionRequest | Question, reply: Answer, peer: Hashable) -> bool:
        holder = self._tokens.proven_by(message)
        if holder is None:
            self._drop(message, "forged" if message.tag else "missing")
            reply(_refused(message, _ASK_FOR_PROOF))
            return True
        with self._lock:
            copy, before = message.nonce in self._nonces, self._nonces.setdefault(message.nonce, None)
            if len(self._nonces) > _NONCES:
                self._nonces.popitem(last=False)
        link = self._link(holder, peer)
        if isinstance(message, Question):
            if copy:
                return True
            self._keep(name_of(message), _Served([holder.proof.question_key(message, robot=False)], holder))
            return self._serve(message, lambda answer: reply(self.sign(answer)), link)
        if before is not None:  # the robot's own copy, or a stranger's: it changes nothing
            reply(before)
            return True
        request = msgspec.structs.replace(message, resume=self._engines_ticket(message.resume))
        return self._serve(request, lambda answer: self._answer(message, holder, answer, reply), link)

    def _link(self, holder: TokenHolder, peer: Hashable) -> Hashable:
        """Who sent a message: the robot that the token names, since all robots share the topic; else ``peer``."""
        if not holder.name:
            return peer
        return self._links.setdefault(holder.name, RobotLink(holder.name, holder.sessions or self._per_robot))

    def _answer(self, request: SessionRequest, holder: TokenHolder, answer: Message, reply: Answer) -> object:
        """Send the answer to a request, tagged; those to its copies change nothing."""
        if not isinstance(answer, SessionReply):
            return reply(self.sign(answer))
        with self._lock:
            if self._nonces.get(request.nonce) is not None:
                return None
            fresh = msgspec.structs.replace(answer, nonce=secrets.token_bytes(NONCE_BYTES), ticket=b"")
            key = holder.proof.session_key(request.nonce, fresh, robot=False)
            if answer.session:
                before = self._served.get(answer.session)
                shown = [k for k in before.keys if k.ticket == request.resume] if before is not None else []
                self._note(answer.session, _Served([key, *shown], holder, answer.ticket))
            signed = key.sign(fresh)
            if request.nonce in self._nonces:
                self._nonces[request.nonce] = signed
        return reply(signed)

    def _keep(self, name: Hashable, served: _Served) -> None:
        with self._lock:
            self._note(name, served)

    def _note(self, name: Hashable, served: _Served) -> None:
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
        """Tell the sender of a message that nothing is known of what it belongs to: perhaps this was restarted.

        Only a robot whose token made the answer takes it, so each of a few tokens makes one.
        """
        if len(message.tag) != TAG_BYTES:
            self._drop(message, "missing")
            return
        denial: Message
        if isinstance(message, Observation | Draft | DraftTokens):
            numbers = {Draft: "round", DraftTokens: "stream"}
            number = getattr(message, numbers.get(type(message), ""), 0)
            denial = Refusal(message.session, message.reply, number, RefusalCode.UNKNOWN_SESSION, _UNKNOWN)
        elif isinstance(message, Proposal | Verdict | Reveal):
            denial = QuestionEnd(message.ask, message.attempt, EndCode.UNKNOWN, _UNKNOWN_QUESTION)
        else:
            return
        for holder in islice(self._tokens, _DENIALS):
            reply(holder.proof.deny(denial, message.tag))

    def _drop(self, message: Message, fault: str) -> None:
        if self._metrics is not None:
            self._metrics.dropped[fault].inc()
        self.dropped.add(message, fault)


def _refused(message: SessionRequest | Question, sentence: str) -> Message:
    if isinstance(message, Question):
        return QuestionReply(message.ask, message.attempt, sentence, "", "", 0)
    return SessionReply(message.request, 0, sentence, "", "", 0)
