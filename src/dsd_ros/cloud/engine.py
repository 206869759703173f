"""The verifier: robots' messages in, the target's outcomes out, whatever link they travel over.

One worker thread owns the model and takes turns: a turn is one message, or one round of a reply that
the target decodes alone, so that no robot waits for another's whole reply.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable

import msgspec

from dsd_ros.cloud.exits import ExitRules, exit_layers
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.requests import check_request, without_documents
from dsd_ros.cloud.sessions import Answer, Reply, Session, SessionsFull, SessionTable
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.cloud.verification import Refused, end_reply, open_reply, verify_round
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import (
    Draft,
    Message,
    Observation,
    Question,
    Refusal,
    RefusalCode,
    SessionClose,
    SessionReply,
    SessionRequest,
)
from dsd_ros.wire.pictures import UnknownPicture

_log = logging.getLogger(__name__)

# Whose turn it is, and since when it waits: a message of a peer's, or a reply that goes on alone.
_Turn = tuple[Observation | Draft, Hashable, float] | tuple[Session, Reply, float]

# An observation and a draft wait at most, or the few drafts that a robot sends ahead; doubles are dropped.
MAX_WAITING_PER_SESSION = 20
MAX_WAITING_BYTES = 512 << 20


class VerifierEngine:
    """Serves the sessions of many peers with one target model.

    ``submit`` and ``disconnect`` may be called from any thread and do not wait for the model. A round is
    named by (session, reply, round) and is idempotent: its outcome is kept and sent again on a duplicate;
    what the robot must have received is ignored. Early outcomes go out from within a round's pass.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.settings = settings or EngineSettings()
        self._clock = clock
        self.metrics = Metrics(self)
        self._sessions = SessionTable(self.settings, self.metrics.ended)
        self._wake = threading.Condition()
        # Opening and closing overtakes the model's work.
        self._requests: deque[tuple[Message, Answer, Hashable]] = deque()
        self._turns: deque[_Turn] = deque()
        self._waiting: Counter[object] = Counter()
        self._waiting_keys: set[object] = set()
        self._waiting_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="verifier-engine", daemon=True)
        self._thread.start()

    @property
    def sessions(self) -> int:
        """How many sessions are held."""
        return len(self._sessions)

    def held_sessions(self) -> tuple[int, int]:
        """How many sessions are held whose robot's link is up, and whose is down."""
        return self._sessions.by_link()

    def queue(self) -> tuple[int, int]:
        """How many turns wait, and how many bytes they hold."""
        return len(self._turns) + len(self._requests), self._waiting_bytes

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Hand over a message of ``peer``; False when the engine is closed.

        ``reply`` is called with each message for that peer, from the worker thread or from this one, and
        must not block; it replaces the one given before when the message opens or resumes a session.
        """
        refusal: Message | None = None
        with self._wake:
            if self._closing:
                return False
            match message:
                case SessionRequest():
                    refusal = self._enqueue_request(message, reply, peer)
                case SessionClose():
                    if self._sessions.find(message.session, peer) is not None:
                        self._sessions.close(message.session)
                case Observation() | Draft():
                    refusal = self._enqueue_turn(message, peer)
                case Question():
                    refusal = without_documents(self.model, message)
                case _:
                    refusal = Refusal(
                        0, 0, 0, RefusalCode.UNSUPPORTED,
                        f"a verifier does not take messages of type {type(message).__name__}",
                    )  # fmt: skip
            self._wake.notify()
        if refusal is not None:
            self.metrics.told(refusal)
            reply(refusal)
        return True

    def disconnect(self, peer: Hashable) -> None:
        """The peer's link is down. Work for it stops; its sessions can be resumed until they expire."""
        self._sessions.detach(peer)

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the turn in progress; False if that is still running after ``timeout`` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> VerifierEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ queueing, under self._wake

    def _enqueue_request(self, message: SessionRequest, reply: Answer, peer: Hashable) -> Message | None:
        if self._waiting[peer] >= MAX_WAITING_PER_SESSION:
            return _overloaded(0, 0, 0)
        self._waiting[peer] += 1
        self._requests.append((message, self.metrics.watching(reply), peer))
        return None

    def _enqueue_turn(self, message: Observation | Draft, peer: Hashable) -> Message | None:
        number = message.round if isinstance(message, Draft) else 0
        if self._sessions.find(message.session, peer) is None:
            return Refusal(
                message.session, message.reply, number, RefusalCode.UNKNOWN_SESSION,
                "the verifier does not know this session (any more); open a new one",
            )  # fmt: skip
        key = _key(message)
        if key in self._waiting_keys:
            return None  # the one that waits will be answered
        size = _size(message)
        if self._waiting[message.session] >= MAX_WAITING_PER_SESSION or self._waiting_bytes + size > MAX_WAITING_BYTES:
            return _overloaded(message.session, message.reply, number)
        self._waiting_keys.add(key)
        self._waiting[message.session] += 1
        self._waiting_bytes += size
        self._turns.append((message, peer, time.perf_counter()))
        return None

    def _release(self, owner: object) -> None:
        self._waiting[owner] -= 1
        if self._waiting[owner] <= 0:
            del self._waiting[owner]

    # ----------------------------------------------------------------------------- worker thread

    def _run(self) -> None:
        nap = min(1.0, self.settings.session_expiry_s / 2)
        next_expiry = 0.0
        while True:
            with self._wake:
                if not (self._requests or self._turns or self._closing):
                    self._wake.wait(nap)
                if self._closing:
                    break
                request = self._requests.popleft() if self._requests else None
                turn = None
                if request is not None:
                    self._release(request[2])
                elif self._turns:
                    turn = self._turns.popleft()
                    if isinstance(turn[0], (Observation, Draft)):
                        self._waiting_keys.discard(_key(turn[0]))
                        self._waiting_bytes -= _size(turn[0])
                        self._release(turn[0].session)
            now = self._clock()
            if now >= next_expiry:
                self._sessions.expire(now)
                next_expiry = now + nap
            try:
                if request is not None:
                    self._open(*request)
                elif turn is not None:
                    self._take_turn(turn)
            except Exception:
                # One robot's trouble must not end the verifier; what is expected is answered below.
                self.metrics.failed()
                _log.exception("a turn failed")
        self._sessions.clear()

    def _open(self, message: Message, answer: Answer, peer: Hashable) -> None:
        assert isinstance(message, SessionRequest)
        try:
            sampling = check_request(self.model, message)
            session, new = self._sessions.open(message, sampling, peer, answer, self._clock())
            # Behind a rejection the robot draws: no exit can name that token.
            session.exits = None if session.splits else self._exits(session.request)
        except (ValueError, SessionsFull) as error:
            sentence = str(error) or (
                f"the verifier already holds its {self.settings.max_sessions} sessions; try again "
                "later, or raise its max_sessions"
            )
            answer(self._session_reply(message.request, sentence[:1024], None))
            return
        answer(self._session_reply(message.request, "", session))
        if new or message.resume:  # else a doubled request
            self.metrics.opened(session, resumed=not new)

    def _session_reply(self, request: int, error: str, session: Session | None) -> SessionReply:
        model, exits = self.model, session.exits if session is not None else None
        return SessionReply(
            request, session.id if session is not None else 0, error, model.name[:256],
            model.fingerprint[:256], model.vocab_size, sorted(model.eos_token_ids)[:16],
            list(exits.layers) if exits is not None else [],
            session.ticket if session is not None else b"",
        )  # fmt: skip

    def _exits(self, request: SessionRequest) -> ExitRules | None:
        share = self.settings.exit_share
        layers = exit_layers(self.model, request.exits, request.exit_layers, share)
        return ExitRules(layers, request.min_exit_confidence, share) if layers else None

    def _take_turn(self, turn: _Turn) -> None:
        subject, other, since = turn
        self.metrics.waited(time.perf_counter() - since)
        if isinstance(subject, Session):
            assert isinstance(other, Reply)
            other.turn_queued = False
            self._go_on_alone(subject, other)
            return
        session = self._sessions.find(subject.session, other)
        if session is None:
            return  # closed, or its link went down, while this waited
        session.last_used = self._clock()
        if isinstance(subject, Observation):
            self._observe(session, subject)
        else:
            self._answer_draft(session, subject)

    def _observe(self, session: Session, message: Observation) -> None:
        newest = session.lacks - 1 if session.reply is None else session.reply.number
        if message.reply <= newest:
            return  # doubled, or older than the reply under way
        session.reply = None  # gives back the memory of the reply before
        try:
            session.reply = open_reply(self.model, message, session.pictures)
        except UnknownPicture as error:
            code, session.lacks = RefusalCode.UNKNOWN_PICTURE, message.reply
            session.send(Refusal(session.id, message.reply, 0, code, str(error)))
            return
        if session.reply.refusal is not None:
            session.send(session.reply.refusal)
        else:
            self.metrics.read(session, session.reply)

    def _answer_draft(self, session: Session, draft: Draft) -> None:
        reply = session.reply
        if reply is None or draft.reply > reply.number:
            if draft.reply == session.lacks:
                return  # has been told, and is sent again behind its observation
            session.send(
                Refusal(
                    session.id,
                    draft.reply,
                    draft.round,
                    RefusalCode.NO_OBSERVATION,
                    f"the observation of reply {draft.reply} has not arrived; send it before the draft",
                )  # fmt: skip
            )
            return
        if draft.reply < reply.number:
            return  # of a reply that is over
        if reply.refusal is not None:
            session.send(reply.refusal)
            return
        done = reply.rounds
        if reply.owed and draft.round == done and draft.resampled and not draft.tokens:
            self._complete(session, reply, draft)
            return
        if 1 <= draft.round <= done:
            # A duplicate: the outcome got lost, or is about to arrive.
            since = reply.since(draft.round)
            if not draft.autonomous_rounds:
                since = since[:1] if draft.round > max(reply.received, reply.begun_at) else []
            for outcome in since:
                session.send(outcome)
            self.metrics.resent(len(since))
            if since or draft.autonomous_rounds:
                self._queue_turn(session, reply)
            return
        if self._round(session, reply, draft, session.send) and not draft.assumed:
            reply.received = draft.round - 1  # it was drafted behind the outcome before
        if draft.autonomous_rounds and reply.rounds == draft.round:
            reply.last_autonomous_round = draft.round + draft.autonomous_rounds - 1
            self._queue_turn(session, reply)

    def _complete(self, session: Session, reply: Reply, draft: Draft) -> None:
        """A reply ended with tokens that the robot found itself; nobody waits for an answer."""
        try:
            end_reply(self.model, reply, draft)
        except Refused as error:
            session.send(_refusal(session, draft, error))
            return
        reply.received = draft.round
        self.metrics.completed(session, draft)

    def _go_on_alone(self, session: Session, reply: Reply) -> None:
        """One more round without a draft, unless the robot has gone on to something else."""
        if session.reply is not reply or session.peer is None:
            return
        if self._sessions.find(session.id, session.peer) is not session:
            return
        session.last_used = self._clock()
        confirmed = len(reply.sequence.tokens) if reply.sequence is not None else 0
        draft = Draft(session.id, reply.number, reply.rounds + 1, confirmed, [])
        if self._round(session, reply, draft):
            self._queue_turn(session, reply)

    def _queue_turn(self, session: Session, reply: Reply) -> None:
        """Let the target go on alone, if rounds were asked for and the reply has not ended."""
        if reply.turn_queued or reply.rounds >= reply.last_autonomous_round:
            return
        if reply.outcomes and reply.outcomes[-1].next_token in self.model.eos_token_ids:
            return
        reply.turn_queued = True
        with self._wake:
            self._turns.append((session, reply, time.perf_counter()))

    def _round(self, session: Session, reply: Reply, draft: Draft, early: Answer | None = None) -> bool:
        began = time.perf_counter()
        try:
            outcome = verify_round(self.model, session, reply, draft, early)
        except Refused as error:
            session.send(_refusal(session, draft, error))
            return False
        if reply.outcomes and reply.outcomes[-1].distribution:
            # The robot has drawn with it and will not ask for it again.
            reply.outcomes[-1] = msgspec.structs.replace(reply.outcomes[-1], distribution=b"")
        reply.outcomes.append(outcome)
        seconds = time.perf_counter() - began
        session.send(outcome)
        self.metrics.verified(session, reply, draft, outcome, seconds)
        return True


def _key(message: Observation | Draft) -> object:
    if isinstance(message, Draft):
        return (
            message.session, message.reply, message.round, message.autonomous_rounds, message.assumed,
            bool(message.tokens),
        )  # fmt: skip
    return message.session, message.reply


def _size(message: Observation | Draft) -> int:
    if isinstance(message, Draft):
        return len(message.evidence)
    return len(message.image) + sum(len(past.image) for past in message.history)


def _refusal(session: Session, draft: Draft, error: Refused) -> Refusal:
    return Refusal(session.id, draft.reply, draft.round, error.code, str(error)[:1024])


def _overloaded(session: int, reply: int, number: int) -> Refusal:
    return Refusal(
        session, reply, number, RefusalCode.OVERLOADED,
        "the verifier has too many messages waiting; send again later",
    )  # fmt: skip
