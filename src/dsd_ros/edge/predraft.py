"""Pre-drafting: the next round's draft made by worker threads while this one is being verified.

FSD Algorithm 1's N workers, with guessed outcomes and rounds sent ahead. Work is handed out token by
token, so that a worker stops, or turns to something more likely, after one forward pass at the latest.
A worker never touches a sequence that others may see: it forks (0.03 ms) and grows the fork.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.settings import MAX_EXITS, DecodeSettings
from dsd_ros.edge.drafter import DraftedRound, GrowingDraft
from dsd_ros.edge.guesses import Guesser, Trust
from dsd_ros.edge.outcomes import GUESS, Outcomes, Predraft
from dsd_ros.vlm.batch import next_logits_together
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.messages import Outcome

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0


@dataclass(eq=False)
class _LookBehind:
    """One pass behind a round's whole draft: what follows if all of it is accepted."""

    begun: bool = False
    stepping: bool = False
    failed: bool = False
    row: torch.Tensor | None = None  # what ranks the tokens there, (V,)


@dataclass(eq=False)
class _Level:
    """A round on its way: the one whose outcome is awaited, or one sent ahead."""

    outcomes: Outcomes
    chances: list[float]
    behind: _LookBehind = field(default_factory=_LookBehind)
    ahead: Predraft | None = None  # behind the likeliest outcome, to be sent ahead
    said: list[tuple[Outcome, float]] = field(
        default_factory=list
    )  # by exits, and how far believed

    @property
    def round(self) -> DraftedRound:
        return self.outcomes.round


@dataclass(eq=False)
class _Job:
    """One token's work on a pre-draft, or one look behind a draft."""

    level: _Level
    task: Predraft | _LookBehind
    sequence: Sequence | None = None

    def begin(self) -> Sequence:
        task, of = self.task, self.level.round
        if isinstance(task, _LookBehind):
            self.sequence = of.draft.sequence.fork()
        else:
            if task.draft is None:
                task.draft = of.next_draft(task.accepted, task.next_token, fork=True)
            self.sequence = task.draft.sequence
        return self.sequence

    def take(self, logits: torch.Tensor | None, seconds: float) -> None:
        """``logits`` None: the context is full."""
        of = self.level.round
        if isinstance(self.task, _LookBehind):
            self.task.failed = logits is None
            if logits is not None:
                self.task.row = of.drafting.ranking(logits, len(of.prefix) + len(of.draft.tokens))
            return
        draft = self.task.draft
        assert draft is not None
        draft.seconds += seconds
        if logits is None:
            draft.able = False
        else:
            draft.take(logits)


@dataclass(frozen=True)
class Taken:
    """What had been made ahead for an outcome, and the figures of the round that ended with it.

    source: "exit", "guess", "flight" (``sent``: that round is already on its way), or "".
    """

    draft: GrowingDraft | None = None
    source: str = ""
    complete: bool = False
    sent: DraftedRound | None = None
    begun: int = 0


class PredraftPool:
    """Worker threads of one edge session. They start with the first round and end at ``close``.

    ``begin``, ``offer``, ``take`` and ``reset`` are for the session's thread. ``send_ahead`` is called by
    a worker with each round to be sent before the outcome in front of it is known.
    """

    def __init__(
        self, settings: DecodeSettings, send_ahead: Callable[[DraftedRound], None]
    ) -> None:
        self._settings = settings
        self._send_ahead = send_ahead
        coupled = settings.proven_by is Proof.COUPLED
        self._guesser = Guesser(settings.sampling, settings.seed, coupled)
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)  # by layer of an exit
        self._chance = random.Random(settings.seed)
        self._guessing = settings.predraft_source != "exits"
        self._ahead = settings.pipeline_depth > 1
        self._heeding = settings.predraft_source != "guesses"
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stepped = threading.Condition(self._lock)
        self._levels: list[_Level] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()  # of the threads there are now
        self._error = ""

    @property
    def error(self) -> str:
        """The first failure of a worker since ``reset``, one sentence; "" when none failed."""
        return self._error

    def begin(self, of: DraftedRound) -> None:
        """A round is on its way: draft behind the outcomes it may have, until ``take``."""
        with self._lock:
            if not (self._levels and self._levels[0].round is of):  # else it was sent ahead
                self._levels = [self._level(of)] if of.draft.tokens else []
            if not self._levels:
                return
            level = self._levels[0]
            following = self._extend()
            self._start_threads()
            self._work.notify_all()
        if following is not None:
            self._send_ahead(following)
        if not self._guessing:
            return
        # The session only waits from here on: ranking does not hold it up.
        guesses = self._guesser.rejections(
            of.draft.tokens, of.draft.rows, level.chances, self._settings.predraft_budget
        )
        with self._lock:
            level.outcomes.guess(guesses)
            self._guess_acceptances(level)
            self._work.notify_all()

    def offer(self, outcome: Outcome) -> None:
        """An early exit has spoken."""
        if not self._heeding:
            return
        with self._lock:
            level = self._levels[0] if self._levels else None
            if level is None or outcome.round != level.round.number:
                return
            if outcome.accepted > len(level.round.draft.tokens):
                return
            confidence = outcome.confidence
            if self._guessing:  # an exit too sure of itself must not drive out all guesses
                confidence = self._trust[outcome.layer].corrected(confidence)
            if len(level.said) < MAX_EXITS:
                level.said.append((outcome, confidence))
            level.outcomes.heed(outcome.accepted, outcome.next_token, confidence)
            self._work.notify_all()

    def take(self, accepted: int, next_token: int) -> Taken:
        """The round's outcome is final: end its pre-drafts and give the one that fits, if there is one.

        Waits at most for the forward pass that works on the fitting one, and for no other.
        """
        with self._lock:
            if not self._levels:
                return Taken()
            level, *ahead = self._levels
            self._guesser.learn(level.chances, accepted)
            for outcome, confidence in level.said:
                held = (outcome.accepted, outcome.next_token) == (accepted, next_token)
                self._trust[outcome.layer].learn(confidence, held)
            begun = level.outcomes.begun
            fitting = level.outcomes.find(accepted, next_token)
            if fitting is not None and ahead and fitting is level.ahead:
                self._levels = ahead
                return Taken(fitting.draft, "flight", True, ahead[0].round, begun)
            self._levels = []
            if fitting is None or not fitting.begun:
                return Taken(begun=begun)
            complete = fitting.complete
            while fitting.stepping:
                self._stepped.wait()
            if fitting.failed or fitting.draft is None:
                return Taken(begun=begun)
            return Taken(fitting.draft, fitting.source, complete, None, begun)

    def reset(self) -> None:
        """Drop all work; a reply begins, or begins anew, or is over."""
        with self._lock:
            self._levels = []
            self._error = ""

    def close(self) -> None:
        """End the threads, each after the forward pass it is in; ``begin`` starts them again."""
        with self._lock:
            self._levels = []
            self._stop.set()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._threads = []

    # ------------------------------------------------------------------------- under the lock

    def _start_threads(self) -> None:
        if self._threads:
            return
        self._stop = threading.Event()
        count = 1 if self._settings.predraft_batch > 1 else self._settings.predraft_workers
        for number in range(count):
            thread = threading.Thread(
                target=self._run, args=(self._stop,), name=f"predraft-{number + 1}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _level(self, of: DraftedRound) -> _Level:
        settings = self._settings
        outcomes = Outcomes(
            of, settings.predraft_policy, settings.predraft_budget, self._chance,
            paper=not self._guessing,
        )  # fmt: skip
        chances: list[float] = []
        if self._guessing or self._ahead:
            chances = self._guesser.chances(
                of.drafting.reply, of.number, of.draft.tokens, of.draft.rows
            )
        return _Level(outcomes, chances)

    def _guess_acceptances(self, level: _Level) -> None:
        """Once the pass behind the whole draft is done: the outcomes that accept all of it."""
        row, of = level.behind.row, level.round
        if row is None:
            return
        guesses = self._guesser.acceptances(
            of.drafting.reply, of.number, len(of.draft.tokens), row, level.chances,
            self._settings.predraft_budget,
        )  # fmt: skip
        if self._guessing and level is self._levels[0]:
            level.outcomes.guess(guesses)
        if self._ahead and level.ahead is None and guesses:
            likeliest = guesses[0]
            level.ahead = level.outcomes.name(
                likeliest.accepted, likeliest.next_token, GUESS, likeliest.score
            )

    def _choose(self) -> list[_Job]:
        """What to do next: as many as one pass takes."""
        settings = self._settings
        slots = min(settings.predraft_batch, settings.predraft_workers)
        jobs: list[_Job] = []
        # 1. What goes on behind all that is accepted, which the most likely outcomes wait for.
        for level in self._levels:
            behind, ahead = level.behind, level.ahead
            if len(jobs) == slots:
                break
            if not behind.begun and level.round.goes_on and (self._guessing or self._ahead):
                behind.begun = True
                jobs.append(_Job(level, behind))
            elif ahead is not None and not (ahead.stepping or ahead.complete or ahead.failed):
                level.outcomes.take_out(ahead)
                jobs.append(_Job(level, ahead))
        # 2. The outcomes of the round that is awaited.
        while self._levels and len(jobs) < slots:
            predraft = self._levels[0].outcomes.pop()
            if predraft is None:
                break
            jobs.append(_Job(self._levels[0], predraft))
        for job in jobs:
            job.task.stepping = True
        return jobs

    def _settle(self, job: _Job) -> None:
        """After a job's pass: what was learned, and back into the queue with what is not complete."""
        task, level = job.task, job.level
        if level not in self._levels or task.failed:
            return
        if isinstance(task, _LookBehind):
            self._guess_acceptances(level)
        elif not task.complete:
            level.outcomes.put_back(task)

    def _extend(self) -> DraftedRound | None:
        """The next round to be sent ahead, when its draft is there and there is room for it."""
        level = self._levels[-1] if self._levels else None
        if level is None or len(self._levels) >= self._settings.pipeline_depth:
            return None
        ahead = level.ahead
        if ahead is None or not ahead.complete or ahead.draft is None or not ahead.draft.tokens:
            return None
        following = level.round.followed_by(ahead.accepted, ahead.next_token, ahead.draft)
        self._levels.append(self._level(following))
        return following

    # -------------------------------------------------------------------------- worker threads

    def _run(self, stop: threading.Event) -> None:
        while True:
            with self._lock:
                while not stop.is_set() and not (jobs := self._choose()):
                    self._work.wait()
                if stop.is_set():
                    return
            self._step(jobs)
            del jobs  # idle, a worker holds no memory of a reply

    def _step(self, jobs: list[_Job]) -> None:
        """One pass for all jobs, and what follows from it. Never raises."""
        following: DraftedRound | None = None
        failure: Exception | None = None
        try:
            _forward(jobs)
        except Exception as error:
            failure = error
        with self._lock:
            for job in jobs:
                job.task.stepping = False
                job.task.failed = job.task.failed or failure is not None
                self._settle(job)
            following = self._extend()
            self._stepped.notify_all()
            if following is not None or any(isinstance(job.task, _LookBehind) for job in jobs):
                self._work.notify_all()
        if following is not None:
            try:
                self._send_ahead(following)
            except Exception as error:
                failure = error
        if failure is not None:
            self._note(failure)

    def _note(self, failure: Exception) -> None:
        with self._lock:
            first, self._error = (
                not self._error,
                self._error or (f"a pre-draft failed: {type(failure).__name__}: {failure}"),
            )
        if first:
            _log.error("a pre-draft failed; the reply goes on without it", exc_info=failure)


def _forward(jobs: list[_Job]) -> None:
    began = time.perf_counter()
    sequences = [job.begin() for job in jobs]
    rows: list[torch.Tensor | None] = []
    try:
        rows += next_logits_together(sequences)
    except ContextError:  # of one of them
        rows = []
        for sequence in sequences:
            try:
                rows.append(sequence.next_logits())
            except ContextError:
                rows.append(None)
    seconds = time.perf_counter() - began
    for job, row in zip(jobs, rows, strict=True):
        job.take(row, seconds)
