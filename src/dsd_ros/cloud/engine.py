# SPDX-License-Identifier: Apache-2.0
"""The verifier's engine: robots' messages in, the target's tokens out, over any link.

A worker thread steps: it schedules, runs the target, sends. A reply of mode stream takes part in each step until it
ends, with what its robot's draft says comes next, maybe nothing. A round of the other modes takes part in the step
after it arrives, and a long prompt is read a part in a step. One pass serves all of them, within a budget of tokens.
Nothing waits for a draft, nor for a batch to fill. Pictures are decoded, resized and seen on threads of their own, one
of a session at a time, so that only their session waits for them; sessions are opened on another. A target that decodes
replies itself makes the steps; the worker then only passes them on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dsd_ros.cloud.drafts import MOST_DRAFTED
from dsd_ros.cloud.exits import ExitRules
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.rounds import (
    Answer,
    GeneratingTarget,
    Generation,
    PendingPrompt,
    PendingRound,
    ReplyState,
    RoundRefused,
    Session,
    Target,
    TargetModel,
    VerifyingTarget,
    Work,
)
from dsd_ros.cloud.sessions import SessionTable, check_request, constraint_of
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.cloud.verification import check_in_step, end_reply, open_reply
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import (
    MAX_FRAME_BYTES,
    Draft,
    DraftTokens,
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
    VerifiedTokens,
)
from dsd_ros.wire.pictures import UnknownPicture
from dsd_ros.wire.turns import TurnQueue, account_of

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

# An observation and a draft wait at most, or the few drafts that a robot sends ahead; duplicates are dropped.
MAX_WAITING_PER_SESSION = 20

NO_DOCUMENTS = (
    "this verifier was started without documents and answers no questions; start it with --documents FOLDER "
    "(the node: documents)"
)
_PICTURE_THREADS = 2
_UNKNOWN = "the verifier does not know this session (any more); open a new one"
_TOO_MANY = "the verifier has too many messages waiting; send again later"


@dataclass
class _Arrival:
    """An observation that waits, and the reply that it begins, once its pictures have been seen."""

    observation: Observation
    peer: Hashable
    came: float  # time.perf_counter()
    begun: ReplyState | UnknownPicture | None = None
    seconds: float = 0.0  # that its pictures took


class _Turn(NamedTuple):
    """``schedule`` does what needs no pass, and returns what does, if anything."""

    owner: Hashable
    schedule: Callable[[], Work | None]
    since: float | None = None  # time.perf_counter(): it waits since then; None: its wait is not measured
    drafted: Callable[[], bool] = bool  # whether it brings drafted tokens, so that its pass gives more than one token


class VerifierEngine:
    """Serves the sessions of many peers with one target.

    ``submit`` and ``disconnect`` may be called from any thread and do not wait for the target. In mode stream tokens go
    by their position in the reply, so what is sent again changes nothing. A round is named by (session, reply, round)
    and is idempotent: its outcome is kept and sent again for a duplicate; a duplicate of what the robot must have
    received is ignored. Early outcomes leave during a round's pass.
    """

    def __init__(
        self,
        target: VerifyingTarget | GeneratingTarget | VisionLanguageModel,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A plain model is served by a ``LocalTarget``."""
        served = target if isinstance(target, (VerifyingTarget, GeneratingTarget)) else LocalTarget(target)
        self.target: Target = served
        self._verifying = served if isinstance(served, VerifyingTarget) else None
        self._generating = served if isinstance(served, GeneratingTarget) else None
        self.settings = settings or EngineSettings()
        self._clock = clock
        self._generation_lock = threading.Lock()  # of each reply's ``generation``
        self.metrics = Metrics(self)
        self._sessions = SessionTable(self.settings, self.metrics.ended, self.metrics.over_limit)
        self._queue: TurnQueue[_Turn] = TurnQueue(MAX_WAITING_PER_SESSION, MAX_FRAME_BYTES)
        self._pictures: TurnQueue[_Arrival] = TurnQueue(MAX_WAITING_PER_SESSION, MAX_FRAME_BYTES)
        self._openings: TurnQueue[Callable[[], None]] = TurnQueue(MAX_WAITING_PER_SESSION)
        self._nap = min(1.0, self.settings.session_expiry_s / 2)
        self._next_expiry = 0.0
        self._threads = [threading.Thread(target=self._run, name="verifier-engine", daemon=True)]
        self._threads += [
            threading.Thread(target=self._see, name=f"verifier-pictures-{number}", daemon=True)
            for number in range(_PICTURE_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._open_sessions, name="verifier-openings", daemon=True))
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

    def has_room(self) -> bool:
        """Whether a new robot can open a session now."""
        return self._sessions.has_room()

    def held_sessions(self) -> tuple[int, int]:
        """How many sessions are held whose robot's link is up, and whose is down."""
        return self._sessions.by_link()

    def cache_bytes(self) -> int:
        """Bytes of the sessions' KV caches."""
        return self._sessions.cache_bytes()

    def held_tokens(self) -> int:
        """Tokens of prompts and replies that sessions hold."""
        return self._sessions.tokens()

    def queue(self) -> tuple[int, int]:
        """How many turns wait, those whose pictures are being seen too, and how many bytes they hold."""
        turns = len(self._queue) + len(self._openings) + len(self._pictures) + self._pictures.taken
        return turns, self._queue.bytes + self._pictures.bytes

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
            case DraftTokens() | Observation() | Draft():
                try:
                    self._take_message(message, peer)
                except RoundRefused as error:
                    number = {Draft: "round", DraftTokens: "stream"}.get(type(message), "")
                    where = message.session, message.reply, getattr(message, number, 0)
                    refusal = Refusal(*where, error.code, str(error))
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
        self._openings.discard(peer)
        self._sessions.detach(peer)

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the step in progress; False if that is still running after ``timeout`` seconds."""
        self._queue.close()
        self._pictures.close()
        self._openings.close()
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
        turn = partial(self._open, request, self.metrics.counting(reply), peer)
        taken = self._openings.put(peer, turn, of=account_of(peer))
        return None if taken else Refusal(0, 0, 0, RefusalCode.OVERLOADED, _TOO_MANY)

    def _take_message(self, message: Observation | Draft | DraftTokens, peer: Hashable) -> None:
        """Queue what a message brings, or note drafted tokens for the reply's next step. RoundRefused."""
        session = self._sessions.find(message.session, peer)
        if session is None:
            raise RoundRefused(RefusalCode.UNKNOWN_SESSION, _UNKNOWN)
        if not isinstance(message, Observation) and session.streams is not isinstance(message, DraftTokens):
            way = "without rounds; send DraftTokens" if session.streams else "in rounds; send Drafts"
            raise RoundRefused(RefusalCode.OUT_OF_STEP, f"mode {session.request.mode} decodes {way}")
        if isinstance(message, DraftTokens) and message.tokens:
            session.draft.take(message)
            if self._generating is not None:
                self._generating.draft(message)
            return
        kind, now = type(message).__name__, time.perf_counter()
        put = partial(self._queue.put, session.id, of=account_of(peer), kind=kind, key=_key(message, peer))
        if isinstance(message, DraftTokens):
            taken = put(_Turn(session.id, partial(self._send_again, message, peer)))
        elif isinstance(message, Draft):
            turn = _Turn(session.id, partial(self._verify, message, peer), now, drafted=lambda: True)
            taken = put(turn, size=len(message.evidence), weight=_weight(message))
        else:
            taken = self._queue_picture(session, _Arrival(message, peer, now))
        if not taken:
            raise RoundRefused(RefusalCode.OVERLOADED, _TOO_MANY)

    def _queue_picture(self, session: Session, arrival: _Arrival) -> bool:
        """Let the pictures be seen; what follows them waits. False when there is no room."""
        message, peer = arrival.observation, arrival.peer
        key = _key(message, peer)
        if key in self._pictures:
            return True
        self._queue.hold(session.id)
        if self._pictures.put(session.id, arrival, of=account_of(peer), key=key, size=_size(message)):
            return True
        self._queue.release(session.id)
        return False

    # ----------------------------------------------------------------------- thread for openings

    def _open_sessions(self) -> None:
        while not self._openings.closed:
            for turn in self._openings.ready():
                try:
                    turn()
                except Exception:
                    self._failed("an opening")

    def _open(self, request: SessionRequest, answer: Answer, peer: Hashable) -> None:
        try:
            sampling = check_request(self.model, request)
            self.target.check(request, sampling)
            constraint = constraint_of(self.model, request)
            session, new = self._sessions.open(request, sampling, peer, answer, self._clock())
        except ValueError as error:
            answer(self._session_reply(request.request, str(error)[:1024], None))
            return
        if new:
            session.constraint = constraint
            session.exits = ExitRules.of(request, self.target.exit_layers, self.settings.exit_share)
        answer(self._session_reply(request.request, "", session))
        if new or request.resume:  # otherwise it is a duplicate
            self.metrics.opened(session, resumed=not new)

    def _session_reply(self, request: int, error: str, session: Session | None) -> SessionReply:
        model, exits = self.model, session.exits if session is not None else None
        images = getattr(model, "images", None) if getattr(model, "reads_pictures", True) else None
        return SessionReply(
            request, session.id if session is not None else 0, error, model.name[:256],
            model.fingerprint[:256], model.vocab_size, sorted(model.eos_token_ids)[:16],
            list(exits.layers) if exits is not None else [],
            session.ticket if session is not None else b"",
            side_factor=images.side_factor if images else 0,
            min_pixels=images.min_pixels if images else 0,
            max_pixels=images.max_pixels if images else 0,
        )  # fmt: skip

    # --------------------------------------------------------------------- threads for pictures

    def _see(self) -> None:
        while not self._pictures.closed:
            self._see_next()

    def _see_next(self) -> None:
        # A function of its own, so that no reply is kept while the next picture is waited for.
        for arrival in self._pictures.ready(hold=True):
            try:
                self._prepare(arrival)
            except Exception:
                self._failed("a picture")
            # Now the observation may take part in a step, with its first round if that has come.
            session = arrival.observation.session
            turn = _Turn(session, partial(self._observe, arrival), arrival.came + arrival.seconds)
            of, joins = account_of(arrival.peer), Draft.__name__
            self._queue.put(session, turn, of=of, joins=joins, first=True, bounded=False)
            self._pictures.release(session)
            self._queue.release(session)

    def _prepare(self, arrival: _Arrival) -> None:
        message = arrival.observation
        session = self._sessions.find(message.session, arrival.peer)
        if session is not None and not session.has_had(message):
            began = time.perf_counter()
            arrival.begun = self._begin(session, message)
            arrival.seconds = time.perf_counter() - began

    def _begin(self, session: Session, message: Observation) -> ReplyState | UnknownPicture:
        try:
            return open_reply(self.target, message, session.pictures)
        except UnknownPicture as error:
            return error

    # ------------------------------------------------------------------ worker: schedule, run, send

    def _run(self) -> None:
        while not self._queue.closed:
            try:
                self._step()
            except Exception:
                self._failed("a step")
        self._sessions.clear()

    def _step(self) -> None:
        limit, tokens = self.settings.max_batch, self.settings.max_batch_tokens
        # 1. The next turn of every robot that waits; where a pass has no room for all, those with drafts go first.
        work = self._schedule(self._queue.ready(limit, self._nap, tokens, eager=lambda turn: turn.drafted()))
        if not work:
            return
        assert self._verifying is not None
        if rounds := sum(isinstance(item, PendingRound) for item in work):
            self.metrics.passing(rounds)
        began = time.perf_counter()
        for item, result in self._verifying.verify(work, _send_early):  # 2. one pass; exits speak on the way
            try:
                self._finish(item, result, time.perf_counter() - began)  # 3. each result to its robot
            except Exception:
                self._failed("a round")
        if rounds:
            self.metrics.passed(time.perf_counter() - began)

    def _schedule(self, turns: list[_Turn]) -> list[Work]:
        """What the target has to do in one pass; everything else about the turns is done here."""
        now = self._clock()
        if now >= self._next_expiry:
            self._sessions.expire(now)
            self._next_expiry = now + self._nap
        work: list[Work | None] = []
        for turn in turns:
            if turn.since is not None:
                self.metrics.waited(max(0.0, time.perf_counter() - turn.since))
            try:
                work.append(turn.schedule())
            except Exception:
                self._failed("a turn")
                work.append(None)
        return self._within_budget([item for item in work if item is not None])

    def _within_budget(self, work: list[Work]) -> list[Work]:
        """Let prompts have the tokens that the rounds leave, a quarter of all at least; the rest of them waits.

        A prompt that ends is read in the pass of its own first round, if that is here.
        """
        most = self.settings.max_batch_tokens
        rounds = [item for item in work if isinstance(item, PendingRound)]
        left = max(most - sum(len(item.draft.tokens) + 1 for item in rounds), most // 4, 1)
        begun = {id(item.reply) for item in rounds}
        fitted: list[Work] = []
        for item in work:
            session, reply, unread = item.session, item.reply, item.reply.unread
            if not unread:
                fitted.append(item)
                continue
            if isinstance(item, PendingPrompt) and id(reply) in begun:
                continue
            # A pass of its own is the same whatever else waits.
            count = unread if self.settings.max_batch == 1 else min(unread, left)
            left -= count
            if count == unread:
                fitted.append(item if isinstance(item, PendingRound) else PendingPrompt(session, reply, count))
                continue
            if count:
                fitted.append(PendingPrompt(session, reply, count))
            self._queue_again(item)
        return fitted

    def _failed(self, what: str) -> None:
        """One robot's failure ends neither the verifier nor the others' rounds. Expected errors are answered."""
        self.metrics.failed()
        _log.exception("%s failed", what)

    def _finish(self, item: Work, result: Outcome | RoundRefused | None, seconds: float) -> None:
        session, reply = item.session, item.reply
        if reply.reading:
            reply.prefill_us += int(seconds * 1e6)
            self._note_read(session, reply)
        if isinstance(item, PendingPrompt):
            if isinstance(result, RoundRefused):
                session.send(item.refuse(result))
            return
        draft = item.draft
        if isinstance(result, RoundRefused):
            session.send(result.message(draft))
            return
        assert isinstance(result, Outcome)
        self.metrics.verified(item, result, seconds)
        if session.streams:
            self._send_verified(item, result)
            return
        if reply.outcomes and reply.outcomes[-1].distribution:
            # The robot has drawn with it and will not ask for it again.
            reply.outcomes[-1] = msgspec.structs.replace(reply.outcomes[-1], distribution=b"")
        reply.outcomes.append(result)
        session.send(result)
        if not draft.assumed:
            reply.received = draft.round - 1  # the robot drafted after the outcome before

    # -------------------------------------------------------------------------- worker: the turns

    def _using(self, id_: int, peer: Hashable) -> Session | None:
        """The session of a turn; None if it was closed, or its link went down, while the turn waited."""
        session = self._sessions.find(id_, peer)
        if session is not None:
            session.last_used, session.used = self._clock(), True
        return session

    def _observe(self, arrival: _Arrival) -> Work | None:
        message = arrival.observation
        session = self._using(message.session, arrival.peer)
        if session is None or session.has_had(message):
            return None
        session.reply = None  # gives back the memory of the reply before
        begun = arrival.begun or self._begin(session, message)
        if isinstance(begun, UnknownPicture):
            code, session.lacks = RefusalCode.UNKNOWN_PICTURE, message.reply
            session.send(Refusal(session.id, message.reply, 0, code, str(begun)))
            return None
        session.reply = begun
        if session.reply.refusal is not None:
            session.send(session.reply.refusal)
        session.reply.reading = session.reply.held
        if session.streams:
            self._note_read(session, session.reply)  # by a target that reads prompts at once
            return self._next_step(session, session.reply)
        return self._read_on(session, session.reply)

    def _read_on(self, session: Session, reply: ReplyState) -> PendingPrompt | None:
        """The rest of a prompt, unless all is read or the robot has gone on to something else."""
        self._note_read(session, reply)  # by a target that reads prompts at once
        if not reply.unread or session.reply is not reply or session.peer is None:
            return None
        return PendingPrompt(session, reply, reply.unread)

    def _note_read(self, session: Session, reply: ReplyState) -> None:
        if reply.reading and reply.sequence is not None and not reply.unread:
            tokens, reply.reading = reply.reading, 0
            self.metrics.read(session, reply, tokens)

    def _queue_again(self, item: Work) -> None:
        """Let the rest of a prompt, and the reply's first round or step, wait for a later pass."""
        session = item.session
        if isinstance(item, PendingRound) and session.streams:
            self._queue_step(session, item.reply)
            return
        put = partial(self._queue.put, session.id, of=account_of(session.peer), first=True, bounded=False)
        if isinstance(item, PendingPrompt):
            turn = _Turn(session.id, partial(self._read_on, session, item.reply))
            put(turn, kind="prompt", joins=Draft.__name__)
        else:
            draft = item.draft
            turn = _Turn(session.id, partial(self._verify, draft, session.peer))
            put(turn, kind=Draft.__name__, key=_key(draft, session.peer), weight=_weight(draft))

    # -------------------------------------------------------------------------- worker: mode stream

    def _queue_step(self, session: Session, reply: ReplyState | None) -> None:
        """Let a reply take part in the next step. There is one such turn of a reply at most."""
        if reply is None or reply.ended or reply.sequence is None:
            return
        step = partial(self._next_step, session, reply)
        turn = _Turn(session.id, step, time.perf_counter(), drafted=session.draft.waits)
        weight = 1 + (MOST_DRAFTED if session.draft.waits() else 0)
        key = id(reply), "step"  # any thread may queue it, and the turn keeps the reply
        self._queue.put(session.id, turn, of=account_of(session.peer), key=key, weight=weight, bounded=False)

    def _next_step(self, session: Session, reply: ReplyState) -> PendingRound | None:
        """A reply's part of this step; None for one that is over, or whose robot is gone: that one pauses."""
        if session.reply is not reply or session.peer is None or reply.sequence is None or reply.ended:
            return None
        session.last_used = self._clock()
        ends, verified, longest = self.model.eos_token_ids, reply.tokens, session.request.max_tokens
        if len(verified) >= longest or (verified and verified[-1] in ends):  # as another verifier has left it
            reply.ended = True
            session.send(VerifiedTokens(session.id, reply.number, len(verified), [], ended=True))
            return None
        if self._generating is None:
            return self._with_draft(session, reply)
        with self._generation_lock:
            if reply.generation is not None:
                return None
            reply.generation = Generation(session, reply, self._take_generated)
        self._generating.generate(reply.generation)
        return None

    def _with_draft(self, session: Session, reply: ReplyState) -> PendingRound:
        """A step of a reply, with what its robot has drafted by now."""
        verified = reply.tokens
        most = min(MOST_DRAFTED, session.request.max_tokens - len(verified) - 1)
        hint = session.draft.after(reply.number, verified, most, self.model.eos_token_ids, self.model.vocab_size)
        return PendingRound(session, reply, Draft(session.id, reply.number, 1, len(verified), hint))

    def _take_generated(self, generation: Generation, result: list[int] | RoundRefused, seconds: float) -> None:
        """Send what a target has generated; or stop it: the reply is over, or its robot is gone and it pauses.

        From the target's thread: a hop to the worker would cost each token about as much as all the rest here.
        """
        session, reply = generation.session, generation.reply
        with self._generation_lock:
            current = reply.generation is generation
            generation.stopped = not current or session.reply is not reply or session.peer is None
            if generation.stopped:
                reply.generation = None if current else reply.generation
                return
        session.last_used = self._clock()
        item = self._with_draft(session, reply)
        if isinstance(result, RoundRefused):
            reply.generation = None
            self._finish(item, result, seconds)
            return
        # The target does not say what it verified. A step gives a token of its own; several may be told of at once.
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(item.draft.tokens, result, strict=False))
        accepted = min(sum(1 for _ in equal), len(result) - 1)
        assert reply.sequence is not None
        reply.sequence.append(result)
        outcome = item.outcome(DraftVerdict(accepted, result[-1]), 0, 0.0, int(seconds * 1e6), final=True)
        self._finish(item, outcome, seconds)
        if reply.ended:
            reply.generation = None

    def _send_verified(self, item: PendingRound, result: Outcome) -> None:
        """What a step has decided of a reply: as far as the draft is what the target says, and one token more."""
        session, reply, at = item.session, item.reply, item.draft.confirmed
        tokens = reply.tokens[at:]
        reply.ended = tokens[-1] in self.model.eos_token_ids or at + len(tokens) >= session.request.max_tokens
        reply.prefill_us = 0  # it was a part of the first step
        drafted = len(item.draft.tokens)
        message = VerifiedTokens(
            session.id, reply.number, at, tokens, result.accepted, drafted, result.compute_us, reply.ended
        )
        if session.send(message) and self._generating is None:
            self._queue_step(session, reply)

    def _send_again(self, message: DraftTokens, peer: Hashable) -> None:
        """Answer a robot that says how far it is, and go on from there if the reply had paused."""
        session = self._using(message.session, peer)
        reply = session.reply if session is not None else None
        if session is None or (reply is not None and message.reply < reply.number):
            return
        if reply is None or message.reply > reply.number or message.start > len(reply.tokens):
            sentence = f"the verifier does not know reply {message.reply} as far as token {message.start}"
            code = RefusalCode.NO_OBSERVATION
            session.send(Refusal(session.id, message.reply, message.stream, code, f"{sentence}; send its observation"))
        elif reply.refusal is not None:
            session.send(reply.refusal)
        else:
            missing = reply.tokens[message.start :]
            if missing or reply.ended:
                session.send(VerifiedTokens(session.id, reply.number, message.start, missing, ended=reply.ended))
                self.metrics.resent(1)
            self._queue_step(session, reply)

    # -------------------------------------------------------------------------- worker: rounds

    def _verify(self, draft: Draft, peer: Hashable) -> PendingRound | None:
        session = self._using(draft.session, peer)
        if session is None:
            return None
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
        if draft.round > max(reply.received, reply.begun_at):
            session.send(reply.outcomes[draft.round - 1 - reply.begun_at])
            self.metrics.resent(1)

    def _complete(self, session: Session, reply: ReplyState, draft: Draft) -> None:
        """End a reply with tokens that the robot drew itself; no answer is expected. RoundRefused."""
        end_reply(reply, draft, self.model.vocab_size)
        reply.received = draft.round
        self.metrics.completed(session, draft)


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


def _weight(draft: Draft) -> int:
    """Tokens that a draft adds to a pass."""
    return len(draft.tokens) + 1


def _key(message: Observation | Draft | DraftTokens, peer: Hashable) -> Hashable:
    """Equal for duplicates of a message over one link. Over a new link it is another: only that one can be answered."""
    where = type(message), peer, message.session, message.reply
    if isinstance(message, Draft):
        return *where, message.round, message.assumed, bool(message.tokens)
    return *where, len(message.verified) if isinstance(message, Observation) else 0


def _size(observation: Observation) -> int:
    return len(observation.image) + sum(len(past.image) for past in observation.history)
