# SPDX-License-Identifier: Apache-2.0
"""Pre-drafting: worker threads make the next round's draft while this round is being verified.

These are the N workers of FSD's Algorithm 1, with guessed outcomes and rounds sent ahead. Work is handed out level by
level, so a worker turns to something more likely after one forward pass. A worker never touches a sequence that others
may see: it forks (0.03 ms) and grows the fork. Rankings run outside the lock.

The round itself goes first. Workers begin passes between sending and the verdict only, and a pass that the verdict
makes useless ends after the layer it is in. Where there are too few processors for all workers, one of them does the
work of all, in batches. Where pre-drafting makes rounds slower all the same, it rests.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.modes import MAX_EXITS, Proof
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.draft_model import DraftModel, DraftStep, ModelDraft, advance
from dsd_ros.edge.estimates import Mean
from dsd_ros.edge.outcome_predictor import Guess, Guesser, Trust
from dsd_ros.edge.outcomes import GUESS, OutcomeQueue, Predraft
from dsd_ros.edge.proposer import Origin, RoundDraft
from dsd_ros.edge.strategies import Strategy
from dsd_ros.edge.tuner import Tuner
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import Outcome

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_PASS_S = 30.0  # a forward pass that takes longer is not waited for
_LIKELY = 0.5  # what is likelier is worth a pass that the verdict may interrupt
_FORGET = 0.99  # per pass without a batch, of what a further draft in a pass takes
_SWITCH_S = 2e-4  # the longest that a worker keeps the interpreter while another thread waits for it
_TRIAL = 6  # rounds of each kind that tell whether drafting ahead pays
_CLEAR = 2.0  # a gain or loss of 1 + _CLEAR / rounds ends a trial of so many rounds of each kind
_WORTH = 1.05  # drafting ahead has to make rounds so many times as fast, since it takes energy
_PAUSE, _PAUSE_GROWS, _LONGEST_PAUSE = 64, 4, 4096  # rounds between two trials


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Useless(Exception):
    """The verdict is known, and what the pass would give is not needed."""


class _QuickSwitches:
    """Lets threads wait for the interpreter ``_SWITCH_S`` at most; process-wide, as long as any pool has workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    def begin(self) -> None:
        """A pool starts."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH_S))

    def end(self) -> None:
        """A pool has ended; the last one leaves the interval as the first one found it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                sys.setswitchinterval(self._before)


_quick_switches = _QuickSwitches()


class _Trials:
    """Whether drafting ahead pays in rounds of one sort, by what they take with it and without it, by turns.

    What a trial finds holds until the next one, which comes the later the more often the same was found.
    """

    def __init__(self, run: int) -> None:
        """``run``: rounds of a kind that stand together; the last one counts."""
        self.rests = True  # what the last trial found; nothing is known to pay before the first
        self.gain: float | None = None  # times as fast as rounds were in it with drafting ahead
        self._run = run
        self._trial, self._left, self._pause = True, 0, _PAUSE
        self._turn = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of a trial's rounds, by whether they rested

    def next(self) -> bool:
        """Whether the next round rests."""
        return self._turn // self._run % 2 == 0 if self._trial else self.rests

    def learn(self, seconds: float) -> None:
        """That round took ``seconds``."""
        if not self._trial:
            self._left -= 1
            self._trial = self._left <= 0
            return
        rested = self.next()
        self._turn += 1
        if self._turn % self._run == 0:
            self._seconds[rested].append(seconds)
        count = min(map(len, self._seconds.values()))
        if count < 2:
            return
        # Without the slowest round of each kind: machines have other things to do now and then.
        without, with_it = (sum(sorted(self._seconds[kind][:count])[:-1]) for kind in (True, False))
        gain = without / max(1e-9, with_it)
        if count >= _TRIAL or not 1.0 / (1.0 + _CLEAR / count) < gain < 1.0 + _CLEAR / count:
            self._conclude(gain)

    def _conclude(self, gain: float) -> None:
        rests = gain < _WORTH
        same = self.gain is not None and rests is self.rests
        self._pause = min(_LONGEST_PAUSE, self._pause * _PAUSE_GROWS) if same else _PAUSE
        self.rests, self.gain, self._trial, self._left = rests, gain, False, self._pause
        self._turn, self._seconds = 0, {True: [], False: []}


class Rest:
    """Rests drafting ahead while it does not pay: where draft and target share processors, it slows both of them.

    Rounds are compared from sending one to sending the next. A reply's first rounds, in which the target reads the
    prompt, are a sort of their own.
    """

    def __init__(self, in_flight: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        """``in_flight``: rounds in flight; so many of a kind stand together, so that those before do not count."""
        self._clock = clock
        self._first, self._others = _Trials(1), _Trials(in_flight)
        self._sent = 0.0

    def next(self, number: int) -> bool:
        """Whether round ``number`` of a reply, which is about to be sent, rests. Learns from the round before it."""
        now = self._clock()
        if number > 1:
            (self._first if number == 2 else self._others).learn(now - self._sent)
        self._sent = now
        return (self._first if number == 1 else self._others).next()

    def explain(self) -> str:
        """What was found, for a log; "" while drafting ahead does not rest."""
        found = self._others
        if not found.rests or found.gain is None:
            return ""
        return f"drafting ahead rests: rounds were {found.gain:.2f} times as fast with it as without"


class IdleTime:
    """The time from sending a round to its verdict, what passes of the draft model take, and what fits into it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._waits = {True: Mean(0.8), False: Mean(0.8)}  # by whether the target has to read the prompt first
        self._first = True
        self._sent: float | None = None
        self._single = Mean()  # seconds of a pass of one draft
        self._further: float | None = None  # and of each further draft in it

    def begin(self, first: bool) -> None:
        """A round is sent; ``first``: of its reply."""
        self._first, self._sent = first, self.clock()

    def end(self) -> None:
        """Its verdict is here."""
        if self._sent is not None:
            self._waits[self._first].add(self.clock() - self._sent)
            self._sent = None

    def learn(self, drafts: int, seconds: float) -> None:
        """A pass of so many drafts took so long."""
        if drafts == 1:
            self._single.add(seconds)
            self._further = None if self._further is None else self._further * _FORGET
        elif self._single.known:
            further = max(0.0, seconds - self._single.value_or(0.0)) / (drafts - 1)
            self._further = further if self._further is None else 0.8 * self._further + 0.2 * further

    def seconds(self, drafts: int) -> float:
        """What a pass of so many drafts takes; a further draft costs nothing as long as nothing is known."""
        return self._single.value_or(0.0) + (drafts - 1) * (self._further or 0.0)

    def pause(self, drafts: int) -> float:
        """How long to wait before a pass is begun, since it would not end before the verdict; 0: begin it.

        A verdict that is late may take as long again as it is late.
        """
        wait = self._waits[self._first]
        if self._sent is None or not wait.known:
            return 0.0
        late = self.clock() - self._sent - wait.value_or(0.0)
        needed = self.seconds(drafts)
        return needed - late if abs(late) < needed else 0.0

    def joins(self, score: float, scores: float, drafts: int) -> bool:
        """Whether a draft of this score makes a pass of ``drafts`` with these ``scores`` in all worth more a second."""
        return (scores + score) * self.seconds(drafts) >= scores * self.seconds(drafts + 1)


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

    @property
    def how(self) -> Strategy:
        return self.outcomes.round.plan.strategy


@dataclass(eq=False)
class _Job:
    """One level's work on a pre-draft, or one look past a draft."""

    level: _Level
    task: Predraft | _LookPast

    @property
    def forks(self) -> bool:
        """Whether ``begin`` forks the sequence of the round itself."""
        return isinstance(self.task, _LookPast) or self.task.draft is None

    @property
    def score(self) -> float:
        """The probability that the outcome needs it."""
        if isinstance(self.task, Predraft):
            return self.task.score
        tree, chances = self.level.round.tree, self.level.chances
        return max((math.prod(chances[x] for x in tree.path_to(leaf)) for leaf in self.task.leaves), default=0.0)

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

    def __init__(
        self,
        model: VisionLanguageModel,
        settings: DecodeSettings,
        tuner: Tuner | None,
        send_ahead: Callable[[RoundDraft], None],
        clock: Callable[[], float] = time.perf_counter,
        rest: Rest | None = None,
    ) -> None:
        """A worker calls ``send_ahead`` with each round that is sent before the previous outcome is known.

        ``rest``: that of an earlier session with the same settings, which knows whether drafting ahead pays.
        """
        super().__init__(model, settings, tuner)
        self._time = IdleTime(clock)
        # Mode auto chooses between strategies instead. A model with processors of its own shares none with a target.
        rests = settings.predraft_when == "pays" and not settings.adapts and model.processors is None
        self._rest = (rest or Rest(settings.pipeline_depth, clock)) if rests else None
        self._send_ahead = send_ahead
        coupled = settings.proven_by is Proof.COUPLED
        self._guesser = Guesser(settings.sampling, settings.seed, coupled)
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)  # by layer of an exit
        self._chance = random.Random(settings.seed)
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # a round is never sent before the one before it
        self._work = threading.Condition(self._lock)
        self._stepped = threading.Condition(self._lock)
        self._levels: list[_Level] = []
        self._slots = 1  # drafts that one pass advances
        self._open = False  # whether workers may begin passes: a round is being verified
        self._withheld: float | None = None  # seconds until there is work that is not worth a pass now
        self._taken: Predraft | None = None  # what the verdict needs
        self._forking = 0  # jobs that are about to fork the sequence of their round
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()  # of the threads there are now
        self._error = ""

    @property
    def error(self) -> str:
        """The first failure of a worker in this reply, one sentence; "" if none."""
        return self._error

    def explain(self) -> str:
        """See ``Proposer``: whether drafting ahead rests."""
        return "" if self._rest is None else self._rest.explain()

    def propose(self, tokens: list[int]) -> RoundDraft:
        """Draft what is not there yet of the next round, and decide whether drafting ahead rests meanwhile."""
        draft = super().propose(tokens)
        if self._rest is not None and isinstance(draft, ModelDraft):
            draft.rests = self._rest.next(draft.number)
        return draft

    def draft_ahead(self, draft: RoundDraft) -> None:
        """Let the workers draft after the outcomes that ``draft`` may have, until ``update``."""
        super().draft_ahead(draft)
        if not isinstance(draft, ModelDraft):
            return
        how = draft.plan.strategy
        with self._lock:
            level = self._levels[0] if self._levels else None
        if level is None or level.round is not draft:  # else it was sent ahead
            level = self._level(draft) if how.ahead and len(draft.tree) and not draft.rests else None
        with self._lock:
            if level is None or not (self._levels and self._levels[0] is level):
                self._levels = [] if level is None else [level]
            if level is None or draft.rests:  # rounds that are in flight are left to come back
                return
            self._note_acceptances(level)
            self._start_threads(how)
            self._taken, self._open = None, True
            self._time.begin(draft.number == 1)
            self._work.notify_all()
        self._extend()
        if not how.guesses:
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
            if not level.how.exits:
                return
            confidence = outcome.confidence
            if level.how.guesses:  # an exit too sure of itself must not drive out all guesses
                confidence = self._trust[outcome.layer].corrected(confidence)
            if len(level.forecasts) < MAX_EXITS:
                level.forecasts.append((outcome, confidence))
            level.outcomes.heed(outcome.accepted, outcome.next_token, confidence)
            self._work.notify_all()

    def update(self, draft: RoundDraft, result: Result) -> None:
        """Take the draft that was made ahead for this result, or begin one."""
        if not isinstance(draft, ModelDraft):
            return
        with self._lock:
            self._open = False
            self._time.end()
            taken = self._take(result.accepted, result.next_token)
            shared = self._forking > 0  # then the sequence stays as it is
        self._next = taken or draft.next_draft(result.accepted, result.next_token, fork=shared)

    def reset(self) -> None:
        """Drop all drafts made ahead, and give back the memory of the reply."""
        super().reset()
        with self._lock:
            self._levels, self._open, self._taken = [], False, None
            self._error = ""

    def close(self) -> None:
        """End the threads, each after the forward pass it is in."""
        with self._lock:
            self._levels, self._taken = [], None
            self._stop.set()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        if self._threads:
            _quick_switches.end()
        self._threads = []

    # ----------------------------------------------------------------------- outside the lock

    def _level(self, draft: ModelDraft) -> _Level:
        settings = self._settings
        outcomes = OutcomeQueue(
            draft, settings.predraft_policy, settings.predraft_budget, self._chance,
            paper=not draft.plan.strategy.guesses,
        )  # fmt: skip
        if not draft.plan.strategy.guesses and draft.plan.strategy.in_flight == 1:
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
            if level is None or level.followed or len(self._levels) >= level.how.in_flight:
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

    def _start_threads(self, how: Strategy) -> None:
        # Too few for all workers and the session itself.
        few = how.threads >= (self.model.processors or processors())
        count = 1 if few else how.threads
        self._slots = how.workers if few and how.batch == 1 else how.slots
        if not self._threads:
            self._stop = threading.Event()
            _quick_switches.begin()
        arguments = self._stop, max(1, torch.get_num_threads() // count)
        for number in range(len(self._threads), count):
            thread = threading.Thread(target=self._run, args=arguments, name=f"predraft-{number + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _note_acceptances(self, level: _Level) -> None:
        guesses = level.past.guesses
        if level.how.guesses and level is self._levels[0]:
            level.outcomes.guess(guesses)
        if level.how.in_flight > 1 and level.ahead is None and guesses:
            likeliest = guesses[0]
            level.ahead = level.outcomes.name(likeliest.accepted, likeliest.next_token, GUESS, likeliest.score)

    def _choose(self) -> list[_Job]:
        """What to do next: one pass' jobs, as many as make it worth most a second."""
        self._withheld = None
        jobs: list[_Job] = []
        scores = 0.0
        while self._open and len(jobs) < self._slots and (job := self._next_job()) is not None:
            score = job.score
            if jobs and not self._time.joins(score, scores, len(jobs)):
                break
            if not jobs and score < _LIKELY and (pause := self._time.pause(1)):
                self._withheld = pause
                break
            self._take_up(job)
            jobs.append(job)
            scores += score
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
        predraft = level.outcomes.peek(int(level.how.guesses and past.stepping))
        return None if predraft is None else _Job(level, predraft)

    def _take_up(self, job: _Job) -> None:
        self._forking += job.forks
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
                    self._work.wait(self._withheld)
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

        began = self._time.clock()
        forks = sum(job.forks for job in jobs)
        try:
            steps = [job.begin() for job in jobs]
        finally:
            with self._lock:
                self._forking -= forks
        look_up()
        rows = advance(steps, look_up)
        seconds = self._time.clock() - began
        for job, logits in zip(jobs, rows, strict=True):
            job.take(logits, seconds)
        with self._lock:
            self._time.learn(len(jobs), seconds)

    def _note(self, failure: Exception) -> None:
        with self._lock:
            first = not self._error
            if first:
                self._error = f"a pre-draft failed: {type(failure).__name__}: {failure}"
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
