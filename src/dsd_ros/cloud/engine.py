# SPDX-License-Identifier: Apache-2.0
"""The verifier's engine: robots' messages in, the target's outcomes out, over any link.

A worker thread steps: it schedules, runs the target, sends. A turn is one message, or one round of a reply that
the target decodes alone, so that no robot waits for another's whole reply. A step takes one turn of every robot that
waits, and verifies their rounds in one pass. Nothing waits for a batch to fill. A target that batches itself gets each
turn as it comes, from as many threads as there may be rounds at once; a session's turns stay in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Self

import msgspec

from dsd_ros.cloud.exits import ExitRules
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.sessions import Answer, ReplyState, Session, SessionTable, check_request
from dsd_ros.cloud.settings import PICTURE_BYTES_OF_A_MB, WAITING_BYTES_OF_A_MB, EngineSettings
from dsd_ros.cloud.target import LocalTarget, Target, TargetModel
from dsd_ros.cloud.verification import PendingRound, RoundRefused, check_in_step, end_reply, open_reply
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import (
    Draft,
    Message,
    Observation,
    Outcome,
    Question,
    QuestionReply,
    Refusal,
    RefusalCode,
    SessionClose,
    SessionReply,
    SessionRequest,
)
from dsd_ros.wire.pictures import UnknownPicture
from dsd_ros.wire.turns import TurnQueue, accounts_of

_log = logging.getLogger(__name__)

# An observation and a draft wait at most, or the few drafts that a robot sends ahead; duplicates are dropped.
MAX_WAITING_PER_SESSION = 20

NO_DOCUMENTS = (
    "this verifier was started without documents and answers no questions; start it with --documents FOLDER "
    "(the node: documents)"
)
_TOO_MANY = "the verifier has too many messages waiting; send again later"


class _Turn(NamedTuple):
    """``schedule`` does what needs no verification, and returns the round that does, if any."""

    owner: Hashable
    schedule: Callable[[], PendingRound | None]
    since: float | None = None  # time.perf_counter() when it was queued; None: its wait is not measured


class VerifierEngine:
    """Serves the sessions of many peers with one target.

    ``submit`` and ``disconnect`` may be called from any thread and do not wait for the target. A round is named by
    (session, reply, round) and is idempotent: its outcome is kept and sent again for a duplicate; a duplicate of what
    the robot must have received is ignored. Early outcomes leave during a round's pass.
    """

    def __init__(
        self,
        target: Target | VisionLanguageModel,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A plain model is served by a ``LocalTarget``."""
        self.target: Target = target if isinstance(target, Target) else LocalTarget(target)
        self.settings = settings or EngineSettings()
        self._clock = clock
        self.metrics = Metrics(self)
        self._sessions = SessionTable(self.settings, self.metrics.ended, self.metrics.over_limit)
        self._queue: TurnQueue[_Turn] = TurnQueue(
            MAX_WAITING_PER_SESSION, self.settings.memory_mb * WAITING_BYTES_OF_A_MB
        )
        self._nap = min(1.0, self.settings.session_expiry_s / 2)
        self._next_expiry = 0.0
        count = self.settings.max_batch if self.target.concurrent else 1
        self._threads = [
            threading.Thread(target=self._run, name=f"verifier-engine-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def model(self) -> TargetModel:
        """The target's description of its model."""
        return self.target.model

    @property
    def sessions(self) -> int:
        """How many sessions are held."""
        return len(self._sessions)

    @property
    def alive(self) -> bool:
        """Whether every worker runs; without one not everything is answered any more."""
        return all(thread.is_alive() for thread in self._threads)

    def has_room(self, account: str) -> bool:
        """Whether a robot of this account (``RobotLink.account``) can open or resume a session now."""
        return self._sessions.has_room(account)

    def held_sessions(self) -> tuple[int, int]:
        """How many sessions are held whose robot's link is up, and whose is down."""
        return self._sessions.by_link()

    def held_tokens(self) -> dict[str, int]:
        """How many tokens sessions hold, by ``sessions.STATES``."""
        return self._sessions.tokens_by_state(self.model.eos_token_ids)

    def queue(self) -> tuple[int, int]:
        """How many turns wait, and how many bytes they hold."""
        return len(self._queue), self._queue.bytes

    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when the engine is closed.

        ``reply`` is called with each message for that peer, from the worker thread or from this one, and
        must not block; it replaces the one given before when the message opens or resumes a session.
        """
        if self._queue.closed:
            return False
        refusal: Message | None = None
        match message:
            case SessionRequest():
                refusal = self._queue_request(message, reply, peer)
            case SessionClose():
                if self._sessions.find(message.session, peer) is not None:
                    self._sessions.close(message.session)
            case Observation() | Draft():
                refusal = self._queue_message(message, peer)
            case Question():
                name, fingerprint = self.model.name[:256], self.model.fingerprint[:256]
                refusal = QuestionReply(
                    message.ask, message.attempt, NO_DOCUMENTS, name, fingerprint, self.model.vocab_size
                )
            case _:
                sentence = f"a verifier does not take messages of type {type(message).__name__}"
                refusal = Refusal(0, 0, 0, RefusalCode.UNSUPPORTED, sentence)
        if refusal is not None:
            self.metrics.sending(refusal)
            reply(refusal)
        return True

    def disconnect(self, peer: Hashable) -> None:
        """The peer's link is down. Work for it stops; its sessions can be resumed until they expire."""
        self._sessions.detach(peer)

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the step in progress; False if that is still running after ``timeout`` seconds."""
        self._queue.close()
        until = time.monotonic() + timeout
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------- any thread

    def _queue_request(self, request: SessionRequest, reply: Answer, peer: Hashable) -> Message | None:
        turn = _Turn(peer, partial(self._open, request, self.metrics.counting(reply), peer))
        of = accounts_of(peer)
        queued = self._queue.put(peer, turn, of=of[:-1], kind="open", urgent=True)
        return None if queued else Refusal(0, 0, 0, RefusalCode.OVERLOADED, _TOO_MANY)

    def _queue_message(self, message: Observation | Draft, peer: Hashable) -> Message | None:
        number = message.round if isinstance(message, Draft) else 0
        if self._sessions.find(message.session, peer) is None:
            sentence = "the verifier does not know this session (any more); open a new one"
            return Refusal(message.session, message.reply, number, RefusalCode.UNKNOWN_SESSION, sentence)
        turn = _Turn(message.session, partial(self._receive, message, peer), time.perf_counter())
        # An observation's picture takes long to read, and a pass over several rounds would wait for it.
        tokens, alone = (len(message.tokens), False) if isinstance(message, Draft) else (0, True)
        if self._queue.put(
            message.session,
            turn,
            of=accounts_of(peer),
            kind=type(message).__name__,
            key=_key(message),
            size=_size(message),
            weight=tokens + 1,
            alone=alone,
        ):
            return None
        return Refusal(message.session, message.reply, number, RefusalCode.OVERLOADED, _TOO_MANY)

    # ------------------------------------------------------------------ worker: schedule, run, send

    def _run(self) -> None:
        while not self._queue.closed:
            with self._surviving("a step"):
                self._step()
        self._sessions.clear()

    def _step(self) -> None:
        apart, tokens = self.target.concurrent, self.settings.max_batch_tokens
        limit = 1 if apart else self.settings.max_batch
        turns = self._queue.ready(limit, self._nap, tokens, hold=apart)  # 1. the next turn of every robot that waits
        try:
            self._take(turns)
        finally:
            if apart:
                for turn in turns:
                    self._queue.release(turn.owner)

    def _take(self, turns: list[_Turn]) -> None:
        rounds = self._rounds(turns)
        if not rounds:
            return
        self.metrics.passing(self._queue.taken or len(rounds))
        began = time.perf_counter()
        for round, result in self.target.verify(rounds, _send_early):  # 2. their rounds; exits speak on the way
            with self._surviving("a round"):
                self._finish(round, result, time.perf_counter() - began)  # 3. each result to its robot
        self.metrics.passed(time.perf_counter() - began)

    def _rounds(self, turns: list[_Turn]) -> list[PendingRound]:
        """What the target has to verify; everything else about the turns is done here."""
        now = self._clock()
        if now >= self._next_expiry:
            self._sessions.expire(now)
            self._next_expiry = now + self._nap
        rounds = []
        for turn in turns:
            if turn.since is not None:
                self.metrics.waited(time.perf_counter() - turn.since)
            with self._surviving("a turn"):
                round = turn.schedule()
                if round is not None:
                    rounds.append(round)
        return rounds

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """One robot's failure ends neither the verifier nor the others' rounds. Expected errors are answered."""
        try:
            yield
        except Exception:
            self.metrics.failed()
            _log.exception("%s failed", what)

    def _finish(self, round: PendingRound, result: Outcome | RoundRefused, seconds: float) -> None:
        session, reply, draft = round.session, round.reply, round.draft
        if isinstance(result, RoundRefused):
            session.send(result.message(draft))
            return
        if reply.outcomes and reply.outcomes[-1].distribution:
            # The robot has drawn with it and will not ask for it again.
            reply.outcomes[-1] = msgspec.structs.replace(reply.outcomes[-1], distribution=b"")
        reply.outcomes.append(result)
        session.send(result)
        self.metrics.verified(round, result, seconds)
        if not (round.alone or draft.assumed):
            reply.received = draft.round - 1  # the robot drafted after the outcome before
        if draft.autonomous_rounds:
            reply.last_autonomous_round = draft.round + draft.autonomous_rounds - 1
        self._queue_alone(session, reply)

    # -------------------------------------------------------------------------- worker: the turns

    def _open(self, request: SessionRequest, answer: Answer, peer: Hashable) -> None:
        try:
            sampling = check_request(self.model, request)
            self.target.check(request, sampling)
            session, new = self._sessions.open(request, sampling, peer, answer, self._clock())
        except ValueError as error:
            answer(self._session_reply(request.request, str(error)[:1024], None))
            return
        # After a rejection the robot draws: no exit can name that token.
        exits = ExitRules.of(session.request, self.target.exit_layers, self.settings.exit_share)
        session.exits = None if session.splits else exits
        answer(self._session_reply(request.request, "", session))
        if new or request.resume:  # otherwise it is a duplicate
            self.metrics.opened(session, resumed=not new)

    def _session_reply(self, request: int, error: str, session: Session | None) -> SessionReply:
        model, exits = self.model, session.exits if session is not None else None
        return SessionReply(
            request, session.id if session is not None else 0, error, model.name[:256],
            model.fingerprint[:256], model.vocab_size, sorted(model.eos_token_ids)[:16],
            list(exits.layers) if exits is not None else [],
            session.ticket if session is not None else b"",
        )  # fmt: skip

    def _receive(self, message: Observation | Draft, peer: Hashable) -> PendingRound | None:
        session = self._sessions.find(message.session, peer)
        if session is None:
            return None  # closed, or its link went down, while this waited
        session.last_used = self._clock()
        if isinstance(message, Draft):
            return self._receive_draft(session, message)
        self._observe(session, message)
        return None

    def _observe(self, session: Session, message: Observation) -> None:
        newest = session.lacks - 1 if session.reply is None else session.reply.number
        if message.reply <= newest:
            return  # a duplicate, or older than the reply in progress
        session.reply = None  # gives back the memory of the reply before
        try:
            session.reply = open_reply(self.target, message, session.pictures)
        except UnknownPicture as error:
            code, session.lacks = RefusalCode.UNKNOWN_PICTURE, message.reply
            session.send(Refusal(session.id, message.reply, 0, code, str(error)))
            return
        self._sessions.release_pictures(self.settings.memory_mb * PICTURE_BYTES_OF_A_MB)
        if session.reply.refusal is not None:
            session.send(session.reply.refusal)
        else:
            self.metrics.read(session, session.reply)

    def _receive_draft(self, session: Session, draft: Draft) -> PendingRound | None:
        reply = session.reply
        try:
            if reply is None or draft.reply > reply.number:
                if draft.reply != session.lacks:  # otherwise the robot knows, and sends it again after its observation
                    sentence = f"the observation of reply {draft.reply} has not arrived; send it before the draft"
                    raise RoundRefused(RefusalCode.NO_OBSERVATION, sentence)
            elif draft.reply < reply.number:
                pass  # of a reply that is over
            elif reply.refusal is not None:
                session.send(reply.refusal)
            elif reply.owed and draft.round == reply.rounds and draft.resampled and not draft.tokens:
                self._complete(session, reply, draft)
            elif 1 <= draft.round <= reply.rounds:
                self._resend(session, reply, draft)
            else:
                check_in_step(reply, draft)
                return PendingRound(session, reply, draft)
        except RoundRefused as error:
            session.send(error.message(draft))
        return None

    def _resend(self, session: Session, reply: ReplyState, draft: Draft) -> None:
        """Answer a duplicate: the outcome got lost, or is about to arrive."""
        since = reply.since(draft.round)
        if not draft.autonomous_rounds:
            since = since[:1] if draft.round > max(reply.received, reply.begun_at) else []
        for outcome in since:
            session.send(outcome)
        self.metrics.resent(len(since))
        if since or draft.autonomous_rounds:
            self._queue_alone(session, reply)

    def _complete(self, session: Session, reply: ReplyState, draft: Draft) -> None:
        """End a reply with tokens that the robot drew itself; no answer is expected. RoundRefused."""
        end_reply(reply, draft, self.model.vocab_size)
        reply.received = draft.round
        self.metrics.completed(session, draft)

    def _queue_alone(self, session: Session, reply: ReplyState) -> None:
        """Let the target go on alone, if rounds were asked for and the reply has not ended."""
        if reply.turn_queued or reply.rounds >= reply.last_autonomous_round:
            return
        if reply.outcomes and reply.outcomes[-1].next_token in self.model.eos_token_ids:
            return
        reply.turn_queued = True
        turn = _Turn(session.id, partial(self._go_on_alone, session, reply), time.perf_counter())
        # There is one at most.
        self._queue.put(session.id, turn, of=accounts_of(session.peer), kind="alone", bounded=False)

    def _go_on_alone(self, session: Session, reply: ReplyState) -> PendingRound | None:
        """One more round without a draft, unless the robot has gone on to something else."""
        reply.turn_queued = False
        if session.reply is not reply or session.peer is None:
            return None
        if self._sessions.find(session.id, session.peer) is not session:
            return None
        session.last_used = self._clock()
        draft = Draft(session.id, reply.number, reply.rounds + 1, len(reply.tokens), [])
        try:
            check_in_step(reply, draft)
        except RoundRefused as error:
            session.send(error.message(draft))
            return None
        return PendingRound(session, reply, draft, alone=True)


def in_process_channel(model: ModelSettings | str, settings: EngineSettings | None = None) -> LocalChannel:
    """Load the target and return a channel to an engine of this process that serves it; closing it ends both.

    For trials and tests on one machine. Raises ModelError when the model cannot be used.
    """
    if isinstance(model, str):
        model = ModelSettings(model)
    engine = VerifierEngine(load_model(model), settings)
    return LocalChannel(engine, on_close=engine.close)


def _send_early(round: PendingRound, outcome: Outcome) -> None:
    round.session.send(outcome)


def _key(message: Observation | Draft) -> Hashable:
    """Equal for duplicates of a message."""
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
