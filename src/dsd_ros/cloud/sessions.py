"""What the verifier remembers of each robot, and for how long."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from dsd_ros.cloud.exits import ExitRules
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.modes import Proof, mode
from dsd_ros.decoding.sampling import SamplingSettings
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.messages import TICKET_BYTES, Message, Outcome, Refusal, SessionRequest
from dsd_ros.wire.pictures import LastPictures, kept_pictures

Answer = Callable[[Message], object]


@dataclass
class Reply:
    """The reply a session is at. ``outcomes`` answered its last rounds and are kept for retransmission.

    ``begun_at`` rounds were verified before, by a verifier that has forgotten them: the robot told of them.
    """

    number: int
    sequence: Sequence | None
    prefill_us: int = 0
    refusal: Refusal | None = None  # the observation could not be used: the answer to all its rounds
    outcomes: list[Outcome] = field(default_factory=list)
    begun_at: int = 0
    last_autonomous_round: int = 0
    received: int = 0  # rounds whose outcomes the robot has for certain
    turn_queued: bool = False
    # How many tokens at most the robot itself finds behind the last round's rejection; 0: that is not its part.
    owed: int = 0

    @property
    def rounds(self) -> int:
        """How many rounds are verified."""
        return self.begun_at + len(self.outcomes)

    def since(self, number: int) -> list[Outcome]:
        """The outcomes of round ``number`` and those behind it; the robot has those from before ``begun_at``."""
        return self.outcomes[max(0, number - 1 - self.begun_at) :]


@dataclass
class Session:
    """One robot's state. ``peer`` is who may use it; None while its link is down."""

    id: int
    ticket: bytes  # shown to resume it
    request: SessionRequest
    sampling: SamplingSettings
    opener: tuple[Hashable, int]  # peer and request number: a doubled request opens nothing twice
    peer: Hashable | None
    answer: Answer | None
    last_used: float
    exits: ExitRules | None = None  # None: no early outcomes
    reply: Reply | None = None
    pictures: LastPictures[np.ndarray] = field(default_factory=kept_pictures)  # the last, by digest
    lacks: int = -1  # the newest reply whose observation named a picture that is not among them

    @property
    def splits(self) -> bool:
        """Whether the robot draws what follows a rejection."""
        return self.proof is Proof.SPLIT and not self.sampling.greedy

    @property
    def proof(self) -> Proof:
        """What the robot's drafts are verified by."""
        return Proof(self.request.proof) if self.request.proof else mode(self.request.mode).proof

    def send(self, message: Message) -> None:
        """To the peer that holds the session now; dropped while there is none."""
        answer = self.answer
        if answer is not None:
            answer(message)


class SessionsFull(Exception):
    """As many sessions as may be are in use."""


class SessionTable:
    """The sessions by id, bounded in number and in idle time. Thread-safe; times are monotonic seconds."""

    def __init__(self, settings: EngineSettings, on_end: Callable[[int, str], object] = lambda *_: None) -> None:
        """``on_end(session, "closed" | "expired" | "evicted")`` is told of each that ends."""
        self._settings = settings
        self._on_end = on_end
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def by_link(self) -> tuple[int, int]:
        """How many sessions have a peer, and how many have lost theirs."""
        with self._lock:
            up = sum(session.peer is not None for session in self._sessions.values())
            return up, len(self._sessions) - up

    def find(self, session: int, peer: Hashable) -> Session | None:
        """The session of that id, if it is this peer's."""
        found = self._sessions.get(session)
        return found if found is not None and found.peer == peer else None

    def open(
        self, request: SessionRequest, sampling: SamplingSettings, peer: Hashable, answer: Answer, now: float
    ) -> tuple[Session, bool]:
        """Resume the session the request names, or open one (then True); SessionsFull when there is no room."""
        with self._lock:
            opener = (peer, request.request)
            known = next((s for s in self._sessions.values() if _is_of(s, request.resume, opener)), None)
            if known is not None:
                known.peer, known.answer, known.last_used = peer, answer, now
                return known, False
            self._make_room(now)
            session = Session(
                self._unused_id(), secrets.token_bytes(TICKET_BYTES), request, sampling, opener, peer, answer, now
            )
            self._sessions[session.id] = session
            return session, True

    def close(self, session: int) -> None:
        with self._lock:
            if self._sessions.pop(session, None) is not None:
                self._on_end(session, "closed")

    def detach(self, peer: Hashable) -> None:
        """The peer's link is down: its sessions stay until they are resumed or expire."""
        with self._lock:
            for session in self._sessions.values():
                if session.peer == peer:
                    session.peer, session.answer = None, None

    def expire(self, now: float) -> None:
        """Drop what has not been used for session_expiry_s."""
        with self._lock:
            oldest = now - self._settings.session_expiry_s
            for id_ in [i for i, s in self._sessions.items() if s.last_used < oldest]:
                del self._sessions[id_]
                self._on_end(id_, "expired")

    def clear(self) -> None:
        with self._lock:
            self._sessions.clear()

    def _unused_id(self) -> int:
        while True:
            # Random: a verifier that was restarted should not take an old session's name for a new one's.
            id_ = secrets.randbelow((1 << 32) - 1) + 1
            if id_ not in self._sessions:
                return id_

    def _make_room(self, now: float) -> None:
        if len(self._sessions) < self._settings.max_sessions:
            return
        # A robot whose link is down may have gone for good; one that is connected has not.
        detached = [s for s in self._sessions.values() if s.peer is None]
        if not detached:
            raise SessionsFull
        oldest = min(detached, key=lambda s: s.last_used).id
        del self._sessions[oldest]
        self._on_end(oldest, "evicted")


def _is_of(session: Session, ticket: bytes, opener: tuple[Hashable, int]) -> bool:
    """Whether a request resumes a session, or is a double of the one that opened it."""
    return (bool(ticket) and secrets.compare_digest(session.ticket, ticket)) or (session.opener == opener)
