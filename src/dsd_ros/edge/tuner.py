# SPDX-License-Identifier: Apache-2.0
"""Chooses what a session's rounds draft: the shape of a draft and, in mode ``auto``, the strategy.

A choice uses only rounds that are over, never the draft it is for or one in flight, and holds for every draft of its
round. The reply and its distribution therefore do not depend on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.draft_length import AcceptanceEstimate, Alone, LinkTimes, Shapes
from dsd_ros.edge.proposer import Plan, RoundDraft
from dsd_ros.edge.results import RoundRecord
from dsd_ros.edge.strategies import ALONE, IN_TURN, Strategy

_log = logging.getLogger(__name__)

_LOOK_AROUND = 4  # rounds; it takes a millisecond
_TRIAL = 5  # rounds of a strategy that is tried
_FIRST_PAUSE, _PAUSE_GROWS, _MOST_PAUSE = 8, 1.5, 256.0  # rounds before a trial of any strategy, after each failure
_HOPELESS = 0.6  # a trial ends at once where it gives less of the tokens a second
_DOUBT = 2.0  # how much faster models may be when nothing is drafted ahead
_WORTH = 1.1  # a trial needs the promise of so many times the tokens a second
_BETTER = 1.05  # a change of strategy needs so many times the tokens a second
_PATIENCE, _PATIENCE_GROWS, _MOST_PATIENCE = 32, 4, 2048  # rounds until a strategy is tried again, after each failure
_CHANGED = 1.5  # times that have grown or shrunk so much make an old trial worthless


@dataclass
class _Record:
    """What came of the last trial of a strategy."""

    patience: int = 0
    next_trial: int = 0
    figures: tuple[float, ...] = ()  # of that time


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
        self._records = {strategy: _Record() for strategy in strategies}
        self._choice = self._ways[strategies[0]].choice
        self._trial: Strategy | None = None
        self._trial_rounds = 0
        self._pause = float(_FIRST_PAUSE)
        self._next_trial = _FIRST_PAUSE
        self._rounds = 0
        self._planned = 0
        self._alone: int | None = None  # the reply that the target decodes alone to its end
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
        self._rounds += 1
        way = self._ways[plan.strategy]
        way.learn(plan, record)
        if record.drafted:
            self.acceptance.learn(plan, record.drafted, record.accepted, ranks)
        if isinstance(way, Shapes) and way.times.known:
            way.settle()
        choice, trial = self._choice, self._trial
        if plan.strategy is choice.strategy:
            choice = way.choice
        if len(self._ways) > 1:
            choice, trial = self._weigh(plan.strategy, choice, trial)
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
        self._last = None
        for way in self._ways.values():
            (way.begin_reply if isinstance(way, Alone) else way.times.begin_reply)()

    def explain(self) -> str:
        """What is chosen, its tokens a second, and those of what was tried."""
        choice, way = self._choice, self.way
        what = choice.strategy.name
        if choice.nodes:
            what += f", trees of {choice.nodes} tokens"
        elif choice.strategy.drafts:
            what += f", {choice.length} tokens"
        tried = {s.name: w.rate() for s, w in self._ways.items() if w.measured and s is not choice.strategy}
        said = [f"{way.rate():.0f} tokens/s" if way.measured else "not measured yet"]
        return f"{what}: " + "; ".join(said + [f"{name} {rate:.0f}" for name, rate in tried.items()])

    # ------------------------------------------------------------------------------- the strategy

    def _next_plan(self, reply: int) -> Plan:
        if self._alone == reply:
            return self._ways[ALONE].choice
        way = self._ways[self._trial or self._choice.strategy]
        if not way.strategy.drafts:
            self._alone = reply
        return way.varied(self._choice if way.strategy is self._choice.strategy else way.choice, self._planned)

    def _weigh(self, done: Strategy, choice: Plan, trial: Strategy | None) -> tuple[Plan, Strategy | None]:
        """The choice after a round of strategy ``done``, and the strategy to try, if any."""
        if trial is not None:
            self._trial_rounds += done is trial
            hopeless = (
                self._trial_rounds > 1 and self._ways[trial].rate() < _HOPELESS * self._ways[choice.strategy].rate()
            )
            if self._trial_rounds < _TRIAL and not hopeless:
                return choice, trial
            return self._conclude(choice, trial), None
        if not self._ways[choice.strategy].times.known and choice.strategy.drafts:
            return choice, None
        if self._rounds < self._next_trial or self._rounds % _LOOK_AROUND:
            return choice, None
        return choice, self._worth_trying(choice)

    def _conclude(self, choice: Plan, trial: Strategy) -> Plan:
        """The choice after a trial."""
        now, tried = self._ways[choice.strategy].rate(), self._ways[trial].rate()
        better = tried > _BETTER * now
        self._pause = float(_FIRST_PAUSE) if better else min(_MOST_PAUSE, self._pause * _PAUSE_GROWS)
        self._next_trial = self._rounds + int(self._pause)
        record = self._records[choice.strategy if better else trial]
        record.patience = min(_MOST_PATIENCE, max(_PATIENCE, record.patience * _PATIENCE_GROWS))
        record.next_trial = self._rounds + record.patience
        record.figures = self._figures()
        _log.debug("tried %s: %.1f tokens/s, %s %.1f", trial.name, tried, choice.strategy.name, now)
        return self._ways[trial].choice if better else choice

    def _worth_trying(self, choice: Plan) -> Strategy | None:
        """The strategy that promises most, if that is much and its last trial is long ago or worthless."""
        chosen = self._ways[choice.strategy]
        like = chosen.times if chosen.times.known else None
        rate = chosen.rate()
        best, most = None, 0.0
        for strategy, record in self._records.items():
            if strategy is choice.strategy:
                continue
            way = self._ways[strategy]
            if record.figures and self._changed(record.figures):
                way.forget()
                record.patience, record.figures = 0, ()
            elif self._rounds < record.next_trial:
                continue
            if like is not None:
                way.times.like = like
            # Times borrowed from a strategy that drafts ahead may be those of busy processors.
            doubt = choice.strategy.ahead and not strategy.ahead and not way.times.known
            promised = way.promise() * (_DOUBT if doubt else 1.0)
            if not choice.strategy.drafts and best is None:  # nothing tells what drafting would take by now
                promised = max(promised, _DOUBT * rate)
            if promised > max(most, _WORTH * rate):
                best, most = strategy, promised
        if best is not None:
            self._ways[best].begin_trial()
            self._trial_rounds = 0
        return best

    def _figures(self) -> tuple[float, ...]:
        times = self._ways[self._choice.strategy].times
        return self._link.round_trip.at(0.0, 0.0), times.verify_seconds(1.0), times.level_seconds(1.0)

    def _changed(self, then: tuple[float, ...]) -> bool:
        return any(max(a, b) > _CHANGED * min(a, b) + 1e-3 for a, b in zip(then, self._figures(), strict=True))
