# SPDX-License-Identifier: Apache-2.0
"""What the verifier remembers of each robot, for how long, and what it agrees to when a session is opened."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Iterable

from dsd_ros.cloud.rounds import Answer, Session, TargetModel
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.constraint import Constraint, ReplyForm
from dsd_ros.decoding.modes import ModeError, Proof, mode
from dsd_ros.decoding.settings import SamplingError, SamplingSettings
from dsd_ros.limits import largest_vocabulary
from dsd_ros.wire.messages import PROTOCOL_VERSION, TICKET_BYTES, SessionRequest
from dsd_ros.wire.turns import RobotLink


class SessionTable:
    """The sessions by id, bounded in number and in idle time. Thread-safe; times are monotonic seconds."""

    def __init__(
        self,
        settings: EngineSettings,
        on_end: Callable[[Session, str], object] = lambda *_: None,
        on_limit: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        """``on_end(session, "closed" | "expired" | "evicted")`` is called for each that ends, and
        ``on_limit("total" | "robot", robot's name)`` for each refused at a limit.
        """
        self._settings = settings
        self._on_end, self._on_limit = on_end, on_limit
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def has_room(self) -> bool:
        """Whether a new robot can open a session now."""
        with self._lock:
            sessions = self._sessions.values()
            return len(sessions) < self._settings.max_sessions or any(s.replaceable for s in sessions)

    def by_link(self) -> tuple[int, int]:
        """How many sessions have a peer, and how many have lost theirs."""
        with self._lock:
            up = sum(session.peer is not None for session in self._sessions.values())
            return up, len(self._sessions) - up

    def tokens(self) -> int:
        """Tokens of prompts and replies that sessions hold."""
        return sum(session.reply.held for session in list(self._sessions.values()) if session.reply is not None)

    def find(self, session: int, peer: Hashable) -> Session | None:
        """The session of that id, if it is this peer's."""
        found = self._sessions.get(session)
        return found if found is not None and found.peer == peer else None

    def open(
        self, request: SessionRequest, sampling: SamplingSettings, peer: Hashable, answer: Answer, now: float
    ) -> tuple[Session, bool]:
        """Resume the robot's session that the request names, or open one (then True); ValueError without room."""
        with self._lock:
            opener = (peer, request.request)
            robot = peer.robot if isinstance(peer, RobotLink) else ""
            mates = (session for session in self._sessions.values() if session.robot == robot)
            known = next((session for session in mates if _is_of(session, request.resume, opener)), None)
            if known is not None:
                known.peer, known.answer, known.last_used = peer, answer, now
                return known, False
            if isinstance(peer, RobotLink) and robot:
                self._check_share(peer)
            self._make_room(robot)
            session = Session(
                self._unused_id(), secrets.token_bytes(TICKET_BYTES), request, sampling, opener, peer, answer, now
            )
            session.robot, session.used = robot, not request.nonce
            self._sessions[session.id] = session
            return session, True

    def close(self, session: int) -> None:
        """End a session if it exists."""
        with self._lock:
            self._end(session, "closed")

    def detach(self, peer: Hashable) -> None:
        """The peer's link is down: its sessions stay until they are resumed or expire."""
        with self._lock:
            for session in self._sessions.values():
                if session.peer == peer:
                    session.peer, session.answer = None, None

    def expire(self, now: float) -> None:
        """Drop the sessions that have not been used for session_expiry_s."""
        with self._lock:
            oldest = now - self._settings.session_expiry_s
            for id_ in [i for i, s in self._sessions.items() if s.last_used < oldest]:
                self._end(id_, "expired")

    def cache_bytes(self) -> int:
        """Bytes of all sessions' KV caches."""
        return sum(session.cache_bytes for session in list(self._sessions.values()))

    def clear(self) -> None:
        """Forget all sessions."""
        with self._lock:
            self._sessions.clear()

    # ------------------------------------------------------------------------ under self._lock

    def _unused_id(self) -> int:
        while True:
            # Random: a verifier that was restarted should not reuse an old session's id for a new one.
            id_ = secrets.randbelow((1 << 32) - 1) + 1
            if id_ not in self._sessions:
                return id_

    def _make_room(self, robot: str) -> None:
        if len(self._sessions) < self._settings.max_sessions:
            return
        if not self._evict(self._sessions.values()):
            self._on_limit("total", robot)
            raise ValueError(full(self._settings))

    def _check_share(self, link: RobotLink) -> None:
        """ValueError when the link's robot holds its share of the sessions."""
        mates = [session for session in self._sessions.values() if session.robot == link.robot]
        if len(mates) < link.max_sessions or self._evict(mates):
            return
        self._on_limit("robot", link.robot)
        raise ValueError(
            f"the robot {link.robot} already holds its {len(mates)} sessions; close some, or raise its 'sessions' "
            "in the verifier's tokens file"
        )

    def _evict(self, sessions: Iterable[Session]) -> bool:
        """End that of the replaceable sessions which has been unused for longest; whether there is one.

        A robot whose link is down may have gone for good; one that is connected has not.
        """
        found = [session for session in sessions if session.replaceable]
        if found:
            self._end(min(found, key=lambda session: session.last_used).id, "evicted")
        return bool(found)

    def _end(self, session: int, reason: str) -> None:
        ended = self._sessions.pop(session, None)
        if ended is not None:
            self._on_end(ended, reason)
            ended.peer, ended.answer = None, None  # its reply in progress, too


def full(settings: EngineSettings) -> str:
    """Why a verifier that holds all its sessions opens no more."""
    return (
        f"the verifier already holds its {settings.max_sessions} sessions; try again later, or raise its max_sessions"
    )


def _is_of(session: Session, ticket: bytes, opener: tuple[Hashable, int]) -> bool:
    """Whether a request resumes this session or duplicates the request that opened it."""
    return (bool(ticket) and secrets.compare_digest(session.ticket, ticket)) or (session.opener == opener)


def check_request(model: TargetModel, request: SessionRequest) -> SamplingSettings:
    """How a session samples; ValueError, one sentence, for a request that a verifier of ``model`` cannot serve."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise ValueError(
            f"the robot speaks protocol version {request.protocol_version} and the verifier "
            f"{PROTOCOL_VERSION}; install the same release of dsd_ros on both sides"
        )
    try:
        preset = mode(request.mode)
        sampling = SamplingSettings(request.temperature, request.top_k, request.top_p)
    except (ModeError, SamplingError) as error:
        raise ValueError(f"the verifier cannot serve this: {error}") from error
    if request.proof not in ("", *Proof):
        raise ValueError(f"the verifier knows no proof {request.proof!r}; use one of {', '.join(Proof)}")
    if preset.streams and request.proof not in ("", preset.proof):
        raise ValueError(
            f"mode {request.mode} proves nothing by {request.proof!r}; leave proof empty, or {preset.proof}"
        )
    ours, theirs = model.tokenizer_fingerprint, request.tokenizer_fingerprint
    # Without drafts a robot may do without a tokenizer: only the target's token ids travel.
    if theirs != ours and (theirs or preset.drafts):
        raise ValueError(
            f"the robot's tokenizer ({theirs or 'none'}) is not that of the target "
            f"{model.name} ({ours}); use a draft that shares it, or give the robot the target's "
            "own (target_tokenizer) in mode stream"
        )
    most = largest_vocabulary(model.vocab_size)
    if request.vocab_size > most:
        raise ValueError(
            f"the robot's model has a vocabulary of {request.vocab_size} and the target {model.name} one of "
            f"{model.vocab_size}; use a draft with at most {most}, padding included"
        )
    return sampling


def constraint_of(model: TargetModel, request: SessionRequest) -> Constraint | None:
    """What a session's replies are held to, if anything; ValueError, one sentence, for what ``model`` cannot hold."""
    if not request.grammar:
        return None
    constrainer = getattr(model, "constrainer", None)
    if constrainer is None:
        raise ValueError(f"the verifier cannot constrain the replies of {model.name}; set constrain to none")
    constraint: Constraint = constrainer.of(ReplyForm.parse(request.grammar), model.eos_token_ids)
    return constraint
