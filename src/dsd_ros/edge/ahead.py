# SPDX-License-Identifier: Apache-2.0
"""Pre-drafting: worker threads make the next round's draft while this round is being verified.

These are the N workers of FSD's Algorithm 1, with guessed outcomes and rounds sent ahead. Work is handed out level by
level, so a worker turns to something more likely after one forward pass. A worker never touches a sequence that others
may see: it forks (0.03 ms) and grows the fork. Rankings run outside the lock.

The round itself goes first. Workers begin passes between sending and the verdict only, and a pass that the verdict
makes useless ends after the layer it is in. Where there are too few processors for all workers, one thread does the
work of all, in passes over a batch of their drafts, which takes hardly longer than one (FSD, Table 9).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.modes import MAX_EXITS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.draft_model import DraftModel, DraftStep, ModelDraft, Origin, advance
from dsd_ros.edge.outcome_predictor import Guess, Guesser, Trust
from dsd_ros.edge.outcomes import GUESS, OutcomeQueue, Predraft
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import Outcome

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_PASS_S = 30.0  # a forward pass that takes longer is not waited for


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Useless(Exception):
    """The verdict is known, and what the pass would give is not needed."""


@dataclass(eq=False)
class _LookPast:
    """One pass over the leaves of a round's draft: what follows if a whole path is accepted."""

    leaves: list[int]  # those that the draft did not feed itself
    rows: dict[int, torch.Tensor]  # what ranks the tokens after a leaf, (V,)
    begun: bool = False
    stepping: bool = False
    failed: bool = False
    guesses: list[Guess] = field(default_factory=list)


@dataclass(eq=False)
class _Level:
    """A round in flight: the one whose outcome is awaited, or one sent ahead."""

    outcomes: OutcomeQueue
    chances: list[float]
    past: _LookPast
    ahead: Predraft | None = None  # after the likeliest outcome, to be sent ahead
    followed: bool = False  # that one is being sent
    forecasts: list[tuple[Outcome, float]] = field(default_factory=list)  # of exits, and the trust in each

    @property
    def round(self) -> ModelDraft:
        return self.outcomes.round


@dataclass(eq=False)
class _Job:
    """One level's work on a pre-draft, or one look past a draft."""

    level: _Level
    task: Predraft | _LookPast

    def begin(self) -> DraftStep:
        task, of = self.task, self.level.round
        if isinstance(task, _LookPast):
            return of.look_past(task.leaves)
        if task.draft is None:
            task.draft = of.next_draft(task.accepted, task.next_token, fork=True)
        return task.draft.step()

    def take(self, logits: torch.Tensor | None, seconds: float) -> None:
        """``logits`` None: the context is full."""
        of, task = self.level.round, self.task
        if isinstance(task, Predraft):
            assert task.draft is not None
            task.draft.seconds += seconds
            task.draft.take(logits)
        elif logits is None:
            task.failed = True
        else:
            depths = of.tree.depths
            positions = [len(of.prefix) + depths[leaf] for leaf in task.leaves]
            rows, _ = of.drafting.method.draw_from(logits, positions, of.context)
            task.rows.update(zip(task.leaves, rows, strict=True))


class Ahead(DraftModel):
    """Drafts the next round while this one is verified: after early exits' forecasts and guessed outcomes (FSD).

    The worker threads start with the first round and end at ``close``; the next reply starts them again.
    """

    queue = OutcomeQueue  # the laboratory compares others

    def __init__(
        self, model: VisionLanguageModel, settings: DecodeSettings, send_ahead: Callable[[ModelDraft], None]
    ) -> None:
        """A worker calls ``send_ahead`` with each round that is sent before the previous outcome is known."""
        super().__init__(model, settings)
        self._send_ahead = send_ahead
        self._guesses = settings.predraft_source != "exits"
        self._exits = settings.predraft_source != "guesses"
        self._guesser = Guesser(settings.sampling, settings.seed, settings.proven_by.declared.draws_alike)
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)  # by layer of an exit
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # a round is never sent before the one before it
        self._work = threading.Condition(self._lock)
        self._stepped = threading.Condition(self._lock)
        self._levels: list[_Level] = []
        # Too few processors for all workers and the session itself.
        few = model.batches and settings.predraft_workers >= (model.processors or processors())
        self._workers = 1 if few else settings.predraft_workers
        self._slots = settings.predraft_workers if few else 1  # drafts that one pass advances
        self._open = False  # whether workers may begin passes: a round is being verified
        self._taken: Predraft | None = None  # what the verdict needs
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()  # of the threads there are now

    def draft_ahead(self, draft: ModelDraft) -> None:
        """Let the workers draft after the outcomes that ``draft`` may have, until ``update``."""
        with self._lock:
            level = self._levels[0] if self._levels else None
        if level is None or level.round is not draft:  # else it was sent ahead
            level = self._level(draft) if len(draft.tree) else None
        with self._lock:
            if level is None or not (self._levels and self._levels[0] is level):
                self._levels = [] if level is None else [level]
            if level is None:
                return
            self._note_acceptances(level)
            self._start_threads()
            self._taken, self._open = None, True
            self._work.notify_all()
        self._extend()
        if not self._guesses:
            return
        # The session only waits from here on: ranking does not hold it up.
        guesses = self._guesser.rejections(draft.tree, draft.rows, level.chances, self._settings.predraft_budget)
        with self._lock:
            level.outcomes.guess(guesses)
            self._work.notify_all()

    def on_early(self, outcome: Outcome) -> None:
        """Let the workers turn to what an early exit forecasts."""
        with self._lock:
            level = self._levels[0] if self._levels else None
            if level is None or outcome.round != level.round.number or outcome.accepted > len(level.round.tree):
                return
            if not self._exits:
                return
            confidence = outcome.confidence
            if self._guesses:  # an exit too sure of itself must not drive out all guesses
                confidence = self._trust[outcome.layer].corrected(confidence)
            if len(level.forecasts) < MAX_EXITS:
                level.forecasts.append((outcome, confidence))
            level.outcomes.forecast(outcome.accepted, outcome.next_token, confidence)
            self._work.notify_all()

    def update(self, draft: ModelDraft, result: Result) -> None:
        """Take the draft that was made ahead for this result, or begin one."""
        with self._lock:
            self._open = False
            taken = self._take(result.accepted, result.next_token)
        # A worker may be about to fork the sequence, too, so it stays as it is.
        self._next = taken or draft.next_draft(result.accepted, result.next_token, fork=True)

    def reset(self) -> None:
        """Drop all drafts made ahead, and give back the memory of the reply."""
        super().reset()
        with self._lock:
            self._levels, self._open, self._taken = [], False, None

    def close(self) -> None:
        """End the threads, each after the forward pass it is in."""
        with self._lock:
            self._levels, self._taken = [], None
            self._stop.set()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._threads = []

    # ----------------------------------------------------------------------- outside the lock

    def _level(self, draft: ModelDraft) -> _Level:
        outcomes = self.queue(draft, self._settings.predraft_budget, paper=not self._guesses)
        if not self._guesses and self._settings.pipeline_depth == 1:
            return _Level(outcomes, [], _LookPast([], {}, begun=True))
        chances = self._guesser.chances(draft.context.reply, draft.number, draft.tree, draft.rows)
        leaves, known = draft.open_leaves, draft.leaf_rows
        unknown = [leaf for leaf in leaves if leaf not in known]
        rows = {leaf: known[leaf] for leaf in leaves if leaf in known}
        level = _Level(outcomes, chances, _LookPast(unknown, rows, begun=not unknown))
        if rows and not unknown:
            self._guess_acceptances(level)
        return level

    def _guess_acceptances(self, level: _Level) -> None:
        """Name the outcomes that accept a whole path, once the leaves' rows are known."""
        of, past = level.round, level.past
        past.guesses = self._guesser.acceptances(
            of.context.reply, of.number, of.tree, past.rows, level.chances,
            self._settings.predraft_budget,
        )  # fmt: skip

    def _extend(self) -> None:
        """Send the next round ahead, if its draft is complete and there is room for it."""
        with self._lock:
            level = self._levels[-1] if self._levels else None
            if level is None or level.followed or len(self._levels) >= self._settings.pipeline_depth:
                return
            ahead = level.ahead
            if ahead is None or not ahead.complete or ahead.draft is None or not len(ahead.draft.tree):
                return
            level.followed = True
        further = self._level(ahead.draft)
        with self._sending:
            with self._lock:
                if not (self._levels and self._levels[-1] is level):
                    return  # its outcome has come meanwhile
                self._levels.append(further)
                self._note_acceptances(further)
                self._work.notify_all()
            self._send_ahead(ahead.draft)

    # ------------------------------------------------------------------------- under the lock

    def _take(self, accepted: int, next_token: int) -> ModelDraft | None:
        """The round's outcome is final: end its pre-drafts, return the one that fits, if any, and note its origin.

        Waits for the forward pass that works on that one, and for no other.
        """
        self.origin = Origin()
        if not self._levels:
            return None
        level, *ahead = self._levels
        if level.chances:
            self._guesser.learn(level.round.tree, level.chances, accepted)
        for outcome, confidence in level.forecasts:
            held = (outcome.accepted, outcome.next_token) == (accepted, next_token)
            self._trust[outcome.layer].learn(confidence, held)
        begun = level.outcomes.begun
        fitting = self._taken = level.outcomes.find(accepted, next_token)
        if fitting is not None and ahead and fitting is level.ahead:
            self._levels = ahead
            self.origin = Origin("flight", True, begun)
            return ahead[0].round
        self._levels = []
        self.origin = Origin(begun=begun)
        if fitting is None or not fitting.begun:
            return None
        complete = fitting.complete
        while fitting.stepping:
            if not self._stepped.wait(_PASS_S):
                return None
        if fitting.failed or fitting.draft is None:
            return None
        self.origin = Origin(fitting.source, complete, begun)
        return fitting.draft

    def _start_threads(self) -> None:
        if not self._threads:
            self._stop = threading.Event()
        arguments = self._stop, max(1, torch.get_num_threads() // self._workers)
        for number in range(len(self._threads), self._workers):
            thread = threading.Thread(target=self._run, args=arguments, name=f"predraft-{number + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _note_acceptances(self, level: _Level) -> None:
        guesses = level.past.guesses
        if self._guesses and level is self._levels[0]:
            level.outcomes.guess(guesses)
        if self._settings.pipeline_depth > 1 and level.ahead is None and guesses:
            likeliest = guesses[0]
            level.ahead = level.outcomes.name(likeliest.accepted, likeliest.next_token, GUESS, likeliest.score)

    def _choose(self) -> list[_Job]:
        """What to do next: one pass' jobs."""
        jobs: list[_Job] = []
        while self._open and len(jobs) < self._slots and (job := self._next_job()) is not None:
            self._take_up(job)
            jobs.append(job)
        return jobs

    def _next_job(self) -> _Job | None:
        # 1. What follows if the whole draft is accepted: the most likely outcomes wait for it.
        for level in self._levels:
            past, ahead = level.past, level.ahead
            if not past.begun:
                return _Job(level, past)
            if ahead is not None and not (ahead.stepping or ahead.complete or ahead.failed):
                return _Job(level, ahead)
        if not self._levels:
            return None
        # 2. The outcomes of the round that is awaited.
        level, past = self._levels[0], self._levels[0].past
        # Often the likeliest outcome accepts all, and is known last: keep a place for it.
        predraft = level.outcomes.peek(int(self._guesses and past.stepping))
        return None if predraft is None else _Job(level, predraft)

    def _take_up(self, job: _Job) -> None:
        if isinstance(job.task, Predraft):
            job.level.outcomes.take_out(job.task)
        else:
            job.task.begun = True
        job.task.stepping = True

    def _settle(self, job: _Job) -> None:
        """After a job's pass: note what it says, and queue again what is not complete."""
        task, level = job.task, job.level
        if level not in self._levels or task.failed:
            return
        if isinstance(task, _LookPast):
            self._note_acceptances(level)
        elif not task.complete:
            level.outcomes.put_back(task)

    # -------------------------------------------------------------------------- worker threads

    def _run(self, stop: threading.Event, threads: int) -> None:
        _use_threads(threads)
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
        failure: Exception | None = None
        useless = False
        try:
            self._forward(jobs)
            for job in jobs:
                if isinstance(job.task, _LookPast) and not job.task.failed:
                    self._guess_acceptances(job.level)
        except _Useless:
            useless = True
        except Exception as error:
            failure = error
        with self._lock:
            for job in jobs:
                job.task.stepping = False
                job.task.failed = job.task.failed or failure is not None
                self._settle(job)
            self._stepped.notify_all()
            if any(isinstance(job.task, _LookPast) for job in jobs):
                self._work.notify_all()
        try:
            if not useless:
                self._extend()
        except Exception as error:
            failure = error
        if failure is not None:
            self._note(failure)

    def _forward(self, jobs: list[_Job]) -> None:
        """One pass for all jobs; ``_Useless`` once none of them is needed any more."""

        def look_up(*_: object) -> None:
            if not any(job.level in self._levels or job.task is self._taken for job in jobs):
                raise _Useless

        began = time.perf_counter()
        steps = [job.begin() for job in jobs]
        look_up()
        rows = advance(steps, look_up)
        seconds = time.perf_counter() - began
        for job, logits in zip(jobs, rows, strict=True):
            job.take(logits, seconds)

    def _note(self, failure: Exception) -> None:
        with self._lock:
            first = not self.error
            if first:
                self.error = f"a pre-draft failed: {type(failure).__name__}: {failure}"
        if first:
            _log.error("a pre-draft failed; the reply goes on without it", exc_info=failure)


def _use_threads(count: int) -> None:
    """Let passes of this thread use ``count`` processors at most."""
    before = torch.get_num_threads()
    if count < before:
        torch.set_num_threads(count)
        # PyTorch makes that the default of threads yet to start, too, such as those of a target in this process.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()
