# SPDX-License-Identifier: Apache-2.0
"""Chooses what a session's rounds draft: the shape of a draft and, in mode ``auto``, the strategy.

A choice uses only rounds that are over, never the draft it is for or one in flight, and holds for every draft of its
round. The reply and its distribution therefore do not depend on it.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.draft_length import AcceptanceEstimate, Alone, LinkTimes, Shapes
from dsd_ros.edge.estimates import Estimate, Mean
from dsd_ros.edge.proposer import Plan, RoundDraft
from dsd_ros.edge.results import RoundRecord
from dsd_ros.edge.strategies import ALONE, IN_TURN, Strategy

_log = logging.getLogger(__name__)

_LOOK_AROUND = 4  # rounds; it takes a millisecond
_TRIAL = 4  # rounds of a trial that are to be expected
_LONG, _LONGEST = 6, 16  # rounds of a trial that shows no gain, and of any
_SURE = 1.5  # standard errors that a gain is to exceed before a trial is over
_LONG_REPLY = 24  # rounds: a trial does not wait for the end of a reply that is so long
_REST = 6  # rounds between two trials
_WORTH = 1.04  # a trial needs the promise of so many times the speed
_UNTRIED = 1.15  # times as fast as it then proves looks a strategy that was not tried lately
_MUCH = 1.5  # a promise of so many times the speed does not wait for the next reply
_BETTER = 1.02  # a change of strategy needs so many times the speed
_SHARE, _MUCH_SHARE = 0.02, 0.1  # of all seconds that trials may lose: where they promise a little, and much
_GRACE = 0.4  # replies: what trials may lose besides
_LOSS = 0.1  # of a trial's seconds: what it loses at least
_RISK = 0.5  # of a trial's seconds: what it may lose
_PATIENCE, _PATIENCE_GROWS, _MOST_PATIENCE = 1024, 4, 1 << 16  # tokens until a strategy is tried again
_DOUBT = 0.5  # share of their times that models may take when nothing is drafted ahead
_FIGURES = 3  # what tells of a change
_CHANGED = 2.0  # times that have grown or shrunk so much make an old trial worthless
_PROBE = 10  # rounds that the target decodes alone, to measure what one takes
_HOPE = 2.0  # times as fast as a small draft's verification may be a pass for one token, before any was measured
_ACQUAINTED = 24  # rounds with drafts, before the target decodes alone for a small gain
_FEW = 1.0  # replies for which a strategy's first rounds are taken to be as those of all
_FIRST_TOKENS = 40.0  # of a reply, before any was decoded


@dataclass
class _Record:
    """What came of the last trial of a strategy."""

    patience: int = 0
    next_trial: int = 0  # in tokens of the session
    figures: tuple[float, ...] = ()  # of the choice, at that time; empty: it was not tried yet
    own: tuple[float, ...] = ()


class Tuner:
    """Chooses the strategy and the shape of one session's drafts, round by round; the same records, the same choices.

    ``plan`` may be called from any thread, the rest from the session's thread.
    """

    def __init__(
        self, strategies: Sequence[Strategy] = (IN_TURN,), longest: int = MAX_DRAFT_LENGTH, shortest: int = 1
    ) -> None:
        """``strategies``: to choose from, the first one to begin with. ``shortest``, ``longest``: limits, tokens."""
        self.acceptance = AcceptanceEstimate()
        self._link = LinkTimes()
        limits = shortest, max(1, min(longest, MAX_DRAFT_LENGTH))
        self._ways: dict[Strategy, Shapes | Alone] = {
            strategy: Shapes(strategy, limits, self.acceptance, self._link) if strategy.drafts else Alone(self._link)
            for strategy in strategies
        }
        self._shared: dict[str, Estimate] = {"acceptance": self.acceptance, "link": self._link}
        self._records = {strategy: _Record() for strategy in strategies}
        self._choice = self._ways[strategies[0]].choice
        self._trial: Strategy | None = None
        self._resting = False  # the trial goes on in the next reply
        self._next: Strategy | None = None  # to be tried from the next reply on
        self._trial_rounds, self._trial_seconds = 0, 0.0
        self._next_trial = 0
        self._rounds = self._tokens = 0
        self._reply_tokens = self._reply_rounds = 0
        self._length = Mean()  # tokens of a reply
        self._first = Mean()  # seconds until a reply's first outcome, whatever the strategy
        self._shared |= {"length": self._length, "first": self._first}
        self._before: Strategy | None = None  # of the round before; None: this is the reply's first
        self._outcome_at = 0.0  # of the last round, seconds from the start of the reply
        self._seconds = self._lost = 0.0  # of all rounds; of these, by trials
        self._planned = 0
        self._alone: int | None = None  # the reply that the target decodes alone to its end
        self._probe = 0  # rounds that the target is yet to decode alone before drafts go on
        self._lock = threading.Lock()
        self._plans: dict[tuple[int, int], Plan] = {}
        self._last: tuple[RoundDraft, Result, RoundRecord] | None = None  # yet to be learned from

    @property
    def choice(self) -> Plan:
        """The best strategy and shape so far."""
        return self._choice

    @property
    def way(self) -> Shapes | Alone:
        """The chosen strategy's estimates."""
        return self._ways[self._choice.strategy]

    def plan(self, reply: int, number: int) -> Plan:
        """What a round drafts; fixed by the first call.

        Call it before the previous round's outcome is known, so that the choice cannot depend on that outcome.
        """
        with self._lock:
            if (reply, number) not in self._plans:
                if any(known < reply for known, _ in self._plans):
                    self._plans.clear()
                self._planned += 1
                self._plans[reply, number] = self._next_plan(reply)
            return self._plans[reply, number]

    def learn(self, plan: Plan, record: RoundRecord, ranks: Sequence[int] = ()) -> None:
        """Learn from a finished round that was drafted by ``plan``. ranks: see ``AcceptanceEstimate.learn``."""
        way = self._ways[plan.strategy]
        seconds = self._count(plan.strategy, record)
        way.learn(plan, record, seconds)
        if record.drafted:
            self.acceptance.learn(plan, record.drafted, record.accepted, ranks)
        if way.times.known:
            way.settle()
        choice, trial = self._choice, self._trial
        if plan.strategy is choice.strategy:
            choice = way.choice
        if len(self._ways) > 1:
            choice, trial = self._weigh(plan.strategy, seconds, choice, trial)
        with self._lock:
            self._choice, self._trial = choice, trial

    def remember(self, draft: RoundDraft, result: Result, record: RoundRecord) -> None:
        """Note a finished round; ``catch_up`` learns from it once the next round is sent."""
        self._last = draft, result, record

    def catch_up(self) -> None:
        """Learn from the noted round."""
        if self._last is None:
            return
        (draft, result, record), self._last = self._last, None
        ranked = any(strategy.tree for strategy in self._ways)
        self.learn(draft.plan, record, draft.ranks(result.accepted, result.next_token) if ranked else ())

    def begin_session(self) -> None:
        """Forget plans: a new session numbers its replies from 1 again."""
        with self._lock:
            self._plans.clear()
            self._alone = None

    def begin_reply(self) -> None:
        """The next round is a reply's first, whose wait includes reading the prompt."""
        self._last = self._before = None
        self._outcome_at = 0.0
        if self._reply_tokens:
            self._length.add(self._reply_tokens)
        self._reply_tokens = self._reply_rounds = 0
        for way in self._ways.values():
            way.times.begin_reply()
        with self._lock:
            self._probe = 0
            # By turns with the choice: how busy the machines are changes from reply to reply.
            self._resting = self._trial is not None and not self._resting
        if self._trial is None and self._next is not None and self._next is not self._choice.strategy:
            self._begin_trial(self._next)
        self._next = None

    def state(self) -> dict[str, Any]:
        """What was learned, in plain JSON values; from the session's thread."""
        return {
            "shared": {name: estimate.state() for name, estimate in self._shared.items()},
            "choice": self._choice.strategy.name,
            "trials": [float(f"{seconds:.6g}") for seconds in (self._seconds, self._lost)],
            "ways": {
                strategy.name: way.state()
                | {"trial": [record.patience, max(0, record.next_trial - self._tokens), record.figures, record.own]}
                for (strategy, way), record in zip(self._ways.items(), self._records.values(), strict=True)
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take on what an earlier tuner's ``state`` gave; else ValueError, TypeError or KeyError, and nothing learned.

        Strategies that only one of both knows are left out.
        """
        before = self.state()
        try:
            self._take_on(state)
        except BaseException:
            self._take_on(before)
            raise

    def _take_on(self, state: dict[str, Any]) -> None:
        for name, estimate in self._shared.items():
            estimate.restore(state["shared"][name])
        seconds, lost = map(float, state["trials"])
        if not 0.0 <= lost <= seconds < math.inf:
            raise ValueError("no seconds")
        self._seconds, self._lost = seconds, lost
        for strategy, way in self._ways.items():
            if strategy.name not in state["ways"]:
                continue
            known = state["ways"][strategy.name]
            way.restore(known)
            patience, left, figures, own = known["trial"]
            if len(figures) != len(own) or len(own) not in (0, _FIGURES):
                raise ValueError("no figures of a trial")
            record = _Record(
                int(patience), self._tokens + int(left), tuple(map(float, figures)), tuple(map(float, own))
            )
            self._records[strategy] = record
            if way.times.known:
                way.settle()
            if strategy.name == state["choice"]:
                with self._lock:
                    self._choice = way.choice

    def explain(self) -> str:
        """What is chosen, its tokens a second, and those of what was tried."""
        choice, way = self._choice, self.way
        what = choice.strategy.name
        if choice.nodes:
            what += f", trees of {choice.nodes} tokens"
        elif choice.strategy.drafts:
            what += f", {choice.length} tokens"
        tried = {s.name: w.rate() for s, w in self._ways.items() if w.measured and s is not choice.strategy}
        rate = f"{way.rate():.0f} tokens/s" if way.measured else "not measured yet"
        others = ", ".join(f"{name} {rate:.0f}" for name, rate in tried.items())
        return f"{what}: {rate}" + (f"; tried: {others}" if others else "")

    # ------------------------------------------------------------------------------- the strategy

    def _next_plan(self, reply: int) -> Plan:
        if self._alone == reply:
            return self._ways[ALONE].choice
        if self._probe:
            self._probe -= 1
            return Plan(0, strategy=ALONE, rounds=self._probe + 1)
        way = self._ways[self._choice.strategy if self._trial is None or self._resting else self._trial]
        if not way.strategy.drafts:
            self._alone = reply
        return way.varied(self._choice if way.strategy is self._choice.strategy else way.choice, self._planned)

    def _count(self, strategy: Strategy, record: RoundRecord) -> float:
        """Note a round of ``strategy`` before the strategy learns from it; its seconds from outcome to outcome."""
        outcome_at = record.began_seconds + record.draft_seconds + record.wait_seconds
        seconds = max(record.draft_seconds + record.wait_seconds, outcome_at - self._outcome_at)
        self._outcome_at = outcome_at
        self._rounds += 1
        self._tokens += record.accepted + 1
        self._reply_tokens += record.accepted + 1
        self._reply_rounds += 1
        self._seconds += seconds
        if self._before is None:
            for mean in (self._first, self._ways[strategy].first):
                mean.add(record.began_seconds + record.wait_seconds)
        elif self._before is not strategy:
            self._ways[strategy].times.begin_reply()  # it was drafted under another strategy
        self._before = strategy
        return seconds

    def _weigh(
        self, done: Strategy, seconds: float, choice: Plan, trial: Strategy | None
    ) -> tuple[Plan, Strategy | None]:
        """The choice after a round of strategy ``done`` that took ``seconds``, and the strategy to try, if any."""
        if trial is not None:
            if done is trial:
                self._trial_rounds += self._ways[trial].measured
                self._trial_seconds += seconds
            gain = self._gain(choice.strategy, trial)
            error = self._error(self._ways[choice.strategy], self._ways[trial])
            if self._undecided(gain, error):
                return choice, trial
            return self._conclude(choice, trial, gain, gain > _BETTER + 0.5 * error), None
        known = self._ways[choice.strategy].measured
        if (
            not known
            or self._rounds < self._next_trial
            or (self._rounds > _LOOK_AROUND and self._rounds % _LOOK_AROUND)
        ):
            return choice, None
        if done.drafts and not self._probe and self._may_pay_alone(choice):
            record = self._records[ALONE]
            record.figures = record.own = ()  # to be noted again
            with self._lock:
                self._probe = _PROBE
            return choice, None
        self._next, gain = self._most_promising(choice)
        # Whole replies compare best, but neither a fast change nor a long reply waits for the next one.
        if self._next is None or (gain < _MUCH and self._reply_rounds < _LONG_REPLY):
            return choice, None
        self._begin_trial(self._next)
        return choice, self._trial

    def _error(self, chosen: Shapes | Alone, tried: Shapes | Alone) -> float:
        """The standard error of the gain that a trial shows."""
        rounds = 1.0 / max(1, self._trial_rounds) + 1.0 / max(1.0, chosen.rounds)
        return max(chosen.noise, tried.noise) * math.sqrt(rounds)

    def _undecided(self, gain: float, error: float) -> bool:
        """Whether a trial that shows ``gain`` times the speed so far, give or take ``error``, is to go on."""
        rounds = self._trial_rounds
        if rounds < 2:
            return True
        if gain < 1.0 - error or (rounds >= _LONG and gain < _BETTER) or rounds >= _LONGEST:
            return False
        return gain < _BETTER + _SURE * error

    def _conclude(self, choice: Plan, trial: Strategy, gain: float, better: bool) -> Plan:
        """The choice after a trial that showed ``gain`` times the speed."""
        self._lost += self._trial_seconds * max(_LOSS, 1.0 - gain)
        self._next_trial = self._rounds + _REST
        winner, loser = (trial, choice.strategy) if better else (choice.strategy, trial)
        figures = self._note_loser(loser, winner)
        if better:  # drafting ahead slows both models: figures of one strategy are not those of another
            for record in self._records.values():
                record.figures = figures if record.figures else ()
            if not trial.drafts:  # it is to know what drafting took
                self._ways[trial].times.like = copy.copy(self._ways[choice.strategy].times)
        log, says = (_log.info, "mode auto changes") if better else (_log.debug, "mode auto tried")
        log("%s: %s instead of %s, %.2f times the speed", says, trial.name, choice.strategy.name, gain)
        return self._ways[trial].choice if better else choice

    def _note_loser(self, loser: Strategy, winner: Strategy) -> tuple[float, ...]:
        """Note when ``loser`` is to be measured again, and the figures, which are returned, that it lost at."""
        record, figures = self._records[loser], self._figures(winner)
        record.patience = min(_MOST_PATIENCE, max(_PATIENCE, record.patience * _PATIENCE_GROWS))
        record.next_trial = self._tokens + record.patience
        record.figures, record.own = figures, self._figures(loser)
        return figures

    def _may_pay_alone(self, choice: Plan) -> bool:
        """Whether a few rounds without drafts are to show what a pass for one token takes.

        Verifying drafts does not tell: a pass for one token may take half as long as one for two. A target that is sure
        to be much faster alone needs no probe, nor does one that cannot be faster.
        """
        way = self._ways.get(ALONE)
        if way is None or way.measured or not choice.strategy.drafts:
            return False
        self._lend_times(ALONE)
        now = self._reply_seconds(choice.strategy)
        return self._reply_seconds(ALONE, _HOPE) * _WORTH < now < _MUCH * self._reply_seconds(ALONE)

    def _reply_seconds(self, strategy: Strategy, hope: float = 1.0) -> float:
        """Expected seconds of a whole reply under ``strategy``, at ``hope`` times its rate.

        The first outcome takes as long as a reply's first outcomes do; the other rounds follow at the strategy's rate.
        """
        way = self._ways[strategy]
        first, own = self._first.value_or(0.0), way.first
        first = (own.weight * own.value_or(0.0) + _FEW * first) / (own.weight + _FEW)
        return first + max(0.0, self._length.value_or(_FIRST_TOKENS) / (hope * way.rate()) - way.wait)

    def _gain(self, strategy: Strategy, other: Strategy) -> float:
        """How many times as fast replies are under the ``other`` strategy."""
        return self._reply_seconds(strategy) / max(1e-9, self._reply_seconds(other))

    def _begin_trial(self, strategy: Strategy) -> None:
        self._ways[strategy].begin_trial()
        self._trial_rounds, self._trial_seconds = 0, 0.0
        with self._lock:
            self._trial, self._next, self._resting = strategy, None, False

    def _most_promising(self, choice: Plan) -> tuple[Strategy | None, float]:
        """The strategy worth a trial, if any, and the gain that it promises."""
        best, most = None, _WORTH
        for strategy, record in self._records.items():
            way = self._ways[strategy]
            if strategy is choice.strategy:
                continue
            if way.measured and not record.figures:  # by a probe
                self._note_loser(strategy, choice.strategy)
            elif way.measured:
                if self._changed(record.figures):
                    record.patience = 0
                    way.forget()
                elif self._tokens >= record.next_trial:
                    way.forget()
            if not way.measured:
                self._lend_times(strategy)
            gain = self._gain(choice.strategy, strategy) / (1.0 if way.measured else _UNTRIED)
            if gain < _MUCH and not strategy.drafts and self.acceptance.rounds < _ACQUAINTED:
                continue  # rounds without drafts would teach nothing more about drafts
            if gain > most and self._affordable(strategy, _MUCH_SHARE if gain > _MUCH else _SHARE):
                best, most = strategy, gain
        return best, most

    def _affordable(self, strategy: Strategy, share: float) -> bool:
        """Whether a trial of ``strategy`` would keep within what trials may lose: a share, and part of a reply."""
        way = self._ways[strategy]
        rounds = _TRIAL if strategy.drafts else self._length.value_or(_FIRST_TOKENS)
        risk = _RISK * rounds * way.wait
        return self._lost + risk < share * self._seconds + _GRACE * self._reply_seconds(self._choice.strategy)

    def _lend_times(self, strategy: Strategy) -> None:
        """Let others' times stand in for those of a strategy that has none.

        They are the choice's, as far as both strategies' times were known together, or those of one that works alike.
        """
        way, record, of = self._ways[strategy], self._records[strategy], self._choice.strategy
        factors = 1.0, 1.0
        if record.figures:
            # Drafting ahead slows both models down where they share processors: without it they may be faster.
            most = _DOUBT if of.ahead and not strategy.ahead else 1.0
            target, draft = (
                min(most, max(0.25, own / then)) for own, then in zip(record.own[1:], record.figures[1:], strict=True)
            )
            factors = target, draft
        else:
            known = [s for s, way in self._ways.items() if s.drafts and way.measured]
            alike = [s for s in known if s.ahead == strategy.ahead] or known
            of = of if of in alike or not alike else alike[0]
        like = self._ways[of]
        way.times.like, way.times.factors = copy.copy(like.times), factors  # a copy: it never leads back to its user
        if isinstance(way, Shapes) and isinstance(like, Shapes):
            way.lent_overrun = like.overrun if like.measured else 1.0

    def _figures(self, strategy: Strategy) -> tuple[float, ...]:
        """What tells whether link or models have changed: seconds over the link, in the target, of a level."""
        times = self._ways[strategy].times
        return (
            max(2e-3, self._link.round_trip.typical),
            max(1e-4, times.verify_seconds(8.0)),
            max(1e-4, times.level_seconds(1.0)),
        )

    def _changed(self, then: tuple[float, ...]) -> bool:
        now = self._figures(self._choice.strategy)
        return any(max(a, b) > _CHANGED * min(a, b) for a, b in zip(then, now, strict=True))
