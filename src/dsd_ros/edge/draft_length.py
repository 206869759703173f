# SPDX-License-Identifier: Apache-2.0
"""Automatic draft lengths: chooses the shape of the next drafts from what earlier rounds cost and gained.

Each round shows how much of its draft was accepted and where its time went. From that follow the expected tokens and
seconds of a round of any other shape, and the shape with the most tokens a second. Rounds older than a few dozen are
forgotten, so the choice follows the link, the machines and the task.

A choice uses only rounds that are over, never the draft it is for or one in flight, and holds for every draft of its
round. The reply and its distribution therefore do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.estimates import Estimate, Floats, LineFit, Mean, Numbers, Share
from dsd_ros.edge.proposer import Plan
from dsd_ros.edge.results import RoundRecord
from dsd_ros.edge.strategies import ALONE, Strategy

_FIRST_LENGTH = 4
_FIRST_NODES = 8
_FIRST_RATE = 0.7  # acceptance rate before any token was verified
_FIRST_DOUBT = 3.0  # its weight, in tokens
_LONG_AGO = 16  # rounds
_TREES_HOLD = 4  # rounds until expected trees are computed again, which takes a millisecond or two
_FIRST_HIT = 0.9  # share of pre-drafts that fit, before any was made: what is hoped for is tried
_NODE_COST = 0.0007  # share of a round that a tree's node costs other robots, which is not measured here
_BETTER = 1.03  # a change needs so many times the tokens a second
_EXPLORE_EVERY = 8  # rounds
_FURTHER = 3  # times the largest draft that was tried: what lies beyond is not known
_RESTRAINT = 2.0  # rounds for which a strategy's seconds are taken to be as predicted
_FIT = 0.95  # weight of a round's seconds, against the next one's
_UNLIKE = 1.5  # a link whose round trips differ by so much is another one
_OUTLIER = 5.0  # a round that takes longer than so many times the prediction counts as that
_MEMORY = 0.98  # weight of the acceptance counts, per round
_DOUBT = 8.0  # weight, in tokens, of the previous position's rate in a position's rate
_MAX_LEVELS = 24
_RANKS = 8
_NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


class AcceptanceEstimate(Estimate):
    """How much of a draft is accepted: rates by position, ranks of the target's tokens, how often drafts end early."""

    kept = ("_held", "_tried", "_ranks", "_ended", "_went_on", "_fit", "longest")

    def __init__(self) -> None:
        self._held = np.zeros(MAX_DRAFT_LENGTH)
        self._tried = np.zeros(MAX_DRAFT_LENGTH)
        self._ranks = np.zeros(_RANKS + 1)  # the last: all lower ranks
        self._ended = self._went_on = 0.0
        self._fit = Mean(_MEMORY)  # accepted tokens of trees over what the ranks predict
        self.longest = 0  # draft that was tried, tokens
        self._trees: tuple[Floats, NDArray[np.int64]] | None = None
        self._age = 0  # of these, rounds
        self.rounds = 0

    def learn(self, plan: Plan, drafted: int, accepted: int, ranks: Sequence[int]) -> None:
        """Learn from one round; ``ranks`` (from 0) of the target's tokens in the draft's rows, as far as known."""
        self._age += 1
        self.rounds += 1
        for counts in (self._held, self._tried, self._ranks):
            counts *= _MEMORY
        self._ended *= _MEMORY
        self._went_on *= _MEMORY
        self._went_on += min(drafted, plan.length)
        self.longest = max(self.longest, plan.length)
        for rank in ranks:
            self._ranks[min(rank, _RANKS)] += 1.0
        if plan.nodes:
            for position, rank in enumerate(ranks[:MAX_DRAFT_LENGTH]):  # as far as a sequence would have been accepted
                self._tried[position] += 1.0
                self._held[position] += rank == 0
                if rank:
                    break
            if drafted:
                promised = float(accepted_by_tree(self.ranks, plan.nodes, plan.length)[0][-1, -1])
                self._fit.add((accepted + 0.1) / (promised + 0.1))
            return
        self._held[:accepted] += 1.0
        self._tried[: min(accepted + 1, drafted)] += 1.0
        self._ended += drafted < plan.length  # the draft reached the reply's end

    @property
    def rates(self) -> Floats:
        """Each position's acceptance rate if those before it are accepted, (MAX_DRAFT_LENGTH,)."""
        rate = float((self._held.sum() + _FIRST_RATE * _FIRST_DOUBT) / (self._tried.sum() + _FIRST_DOUBT))
        rates = np.empty(len(self._tried))
        counts = zip(self._held.tolist(), self._tried.tolist(), strict=True)
        for position, (held, tried) in enumerate(counts):
            # Late positions are rarely tried: assume the previous position's rate until there is evidence.
            rate = (held + rate * _DOUBT) / (tried + _DOUBT)
            rates[position] = rate
        return rates

    @property
    def going_on(self) -> float:
        """The probability that a draft does not end before its next token."""
        return (self._went_on + 16.0) / (self._went_on + 16.0 + self._ended)

    @property
    def ranks(self) -> Floats:
        """The probability of each rank of the target's token in the draft's row, (ranks,)."""
        first = np.append(_FIRST_RATE * (1 - _FIRST_RATE) ** np.arange(_RANKS), (1 - _FIRST_RATE) ** _RANKS)
        counts = self._ranks + _DOUBT * first
        return counts[:_RANKS] / float(counts.sum())

    def trees(self) -> tuple[Floats, NDArray[np.int64]]:
        """Expected accepted tokens of trees, and their levels, as in ``accepted_by_tree``.

        A draft grows its tree by its own probabilities, which say more than ranks; how much more is measured.
        """
        if self._trees is None or self._age >= _TREES_HOLD:
            self._age = 0
            gains, levels = accepted_by_tree(self.ranks, MAX_DRAFT_LENGTH, _MAX_LEVELS)
            self._trees = np.minimum(gains * self._fit.value_or(1.0), levels), levels
        return self._trees


class LinkTimes(Estimate):
    """What a link's messages take, whatever the strategy."""

    kept = ("round_trip", "bytes_up", "down_held", "down_rejected")

    def __init__(self) -> None:
        self.round_trip = LineFit()  # seconds, by bytes up and down
        self.bytes_up = LineFit()  # by the draft's tokens
        self.down_held, self.down_rejected = Mean(), Mean()  # bytes after a whole acceptance, after a rejection

    def bound(self, seconds: float, record: RoundRecord) -> None:
        """A round trip took at most ``seconds``: the picture may have been on its way, too."""
        known = self.round_trip.typical
        if seconds < known / _UNLIKE:
            self.round_trip = LineFit()  # that was another link
        if seconds < known * _UNLIKE:
            self.round_trip.add(seconds, record.bytes_up, record.bytes_down)

    def seconds(self, size: np.ndarray, whole: Floats) -> tuple[Floats, Floats]:
        """Of rounds of ``size`` tokens that are accepted as a whole with probability ``whole``: all, and for bytes."""
        rejected = self.down_rejected.value_or(self.down_held.value_or(0.0))
        down = rejected + whole * (self.down_held.value_or(rejected) - rejected)
        seconds: Floats = self.round_trip.at(self.bytes_up.at(size), down)
        return seconds, seconds - self.round_trip.at(0.0, 0.0)


class Times(Estimate):
    """Where a round's time goes under one strategy: drafting, link, target, and how much of the drafting is hidden.

    Until it has figures of its own, those of ``like``, another strategy, stand in for them, times ``factors``.
    """

    kept = ("draft", "_ahead", "_hits", "verify", "fitted", "_speed", "in_flight", "largest")

    def __init__(self, link: LinkTimes | None = None, ahead: bool = False) -> None:
        """``ahead``: the strategy drafts ahead."""
        self._ahead_of_time = ahead
        self.like: Times | None = None
        self.factors = 1.0, 1.0  # times that the target, and the draft, take as long as in ``like``
        self.draft = LineFit()  # one level of a draft, by its nodes
        self._ahead = LineFit()  # the same, of drafts made ahead: used where others are missing, or long ago
        self._hits = 0  # rounds since
        self.verify = LineFit()  # by the draft's tokens
        self.link = link or LinkTimes()
        self.fitted = Share()  # hit rate of pre-drafts
        self._speed = Mean()  # seconds of drafting done per second of waiting
        self.in_flight = Mean(0.95)  # share of rounds sent ahead, among those after a whole acceptance
        self.largest = 0  # draft, tokens
        self._before: tuple[float, bool] | None = None  # the previous round: its wait, and whether all was accepted

    @property
    def later(self) -> bool:
        """Whether the next round is not a reply's first."""
        return self._before is not None

    @property
    def known(self) -> int:
        """How many rounds are measured."""
        return min(len(self.verify), max(len(self.draft), len(self._ahead)))

    def begin_reply(self) -> None:
        """The next round is a reply's first, whose wait includes reading the prompt, or the first of a strategy."""
        self._before = None

    def begin_alone(self) -> None:
        """The next round is a later one, without a draft."""
        self._before = 0.0, False

    def learn(self, record: RoundRecord) -> None:
        """Learn from one round."""
        levels, whole = record.depth, record.accepted >= record.depth
        before, self._before = self._before, (record.wait_seconds, whole)
        if not record.drafted:
            return
        breadth = record.drafted / levels
        self.largest = max(self.largest, record.drafted)
        self._hits += 1
        if not record.source:
            self.draft.add(record.draft_seconds / levels, breadth)
            self._hits = 0
        else:
            self._ahead.add(record.model_seconds / levels, breadth)
        self.link.bytes_up.add(record.bytes_up, record.drafted)
        (self.link.down_held if whole else self.link.down_rejected).add(record.bytes_down)
        if before is None:
            return
        waited, held = before
        self.verify.add(record.verify_seconds, record.drafted)
        flight = record.source == "flight"
        if held:
            self.in_flight.add(flight)
        if flight:
            return  # it was sent before the previous outcome arrived
        link = max(0.0, record.wait_seconds - record.verify_seconds)
        self.link.round_trip.add(link, record.bytes_up, record.bytes_down)
        if self._ahead_of_time:
            self.fitted.add(bool(record.source))
        if record.source and waited > 0.0:
            done = levels * self.level_seconds(breadth) - record.draft_seconds
            speed = max(0.0, done) / waited
            # A draft that was ready gives only a lower bound.
            if not record.ready or speed > self._speed.value_or(1.0):
                self._speed.add(speed)

    @property
    def hit_rate(self) -> float:
        """The share of pre-drafts that fit."""
        if self.fitted.known:
            return self.fitted.value
        return _FIRST_HIT if self.like is None else self.like.hit_rate

    def level_seconds(self, breadth: Numbers) -> Numbers:
        """One level of ``breadth`` nodes in the draft model."""
        known = self.draft if len(self.draft) and self._hits < _LONG_AGO else self._ahead
        if len(known) or self.like is None:
            return known.at(breadth)
        return self.factors[1] * self.like.level_seconds(breadth)

    def verify_seconds(self, size: Numbers) -> Numbers:
        """``size`` tokens in the target; fewer than were ever verified take no less."""
        known = self.verify
        if len(known) or self.like is None:
            return known.at(cast("Numbers", np.maximum(size, known.least)))
        return self.factors[0] * self.like.verify_seconds(size)

    def round_seconds(self, levels: np.ndarray, size: np.ndarray, whole: Floats, strategy: Strategy) -> Floats:
        """Expected seconds from one outcome to the next, for drafts accepted as a whole with probability ``whole``.

        L T_p + T_q + 2 T_c + bytes / rate; with pre-drafting, L T_p counts only as far as the wait does not hide it.
        All (n,), for n shapes of so many levels and tokens.
        """
        draft: Floats = levels * self.level_seconds(size / levels)
        verify, (link, crossing) = self.verify_seconds(size), self.link.seconds(size, whole)
        wait = verify + link
        if not strategy.ahead:
            return draft + wait
        hit = self.hit_rate
        hidden = min(1.0, self._speed.value_or(1.0)) * wait
        seconds: Floats = wait + (1 - hit) * draft + hit * np.maximum(0.0, draft - hidden)
        ahead = self.in_flight.value_or(_FIRST_HIT if strategy.in_flight > 1 else 0.0) * whole
        # With so many rounds in flight, none is shorter than its share of a wait.
        shortest = np.maximum(np.maximum(verify, draft), np.maximum(crossing, wait / strategy.in_flight))
        seconds = (1 - ahead) * seconds + ahead * shortest
        return seconds


class Shapes(Estimate):
    """Chooses the length, or the tree, of the drafts of one strategy.

    ``choice`` is the best shape so far. A choice stays until another promises ``_BETTER`` times its tokens a second.
    """

    kept = ("times", "first", "_overruns", "_squares")

    def __init__(
        self, strategy: Strategy, lengths: tuple[int, int], acceptance: AcceptanceEstimate, link: LinkTimes
    ) -> None:
        """``lengths``: the shortest and the longest draft, tokens. ``acceptance`` and ``link`` are shared."""
        self.strategy = strategy
        self.times = Times(link, strategy.ahead)
        self.first = Mean()  # seconds until the first outcome of a reply, without the drafting
        self._overruns, self._squares = Mean(_FIT), Mean(_FIT)  # seconds of a round over the prediction; their squares
        self.lent_overrun = 1.0  # stands in for this strategy's own until it is measured
        self._acceptance = acceptance
        self._shortest, self._longest = lengths
        self._computed: tuple[Any, Floats] = (None, np.zeros(0))  # the rates, and what they follow from
        self._candidates = self._possible()
        self._lengths: NDArray[np.int64] = np.array([plan.length for plan in self._candidates])
        self._nodes: NDArray[np.int64] = np.array([plan.nodes for plan in self._candidates])
        first = min(max(_FIRST_LENGTH, self._shortest), self._longest)
        self.choice = self._plan(first, min(_FIRST_NODES, self._longest) if strategy.tree else 0)

    @property
    def longest(self) -> int:
        """The longest draft, tokens."""
        return self._longest

    def learn(self, plan: Plan, record: RoundRecord, seconds: float) -> None:
        """Learn from a finished round of this strategy, drafted by ``plan``; ``seconds``: since the outcome before."""
        later = self.times.later
        self.times.learn(record)
        if self.times.known:
            self.times.like = None
        if not (later and record.drafted):  # a reply's first round waits for the prompt, too
            return
        predicted = float(self._seconds(np.array([record.depth]), np.array([record.drafted]), self._whole(record))[0])
        overrun = min(_OUTLIER, seconds / max(1e-9, predicted))
        self._overruns.add(overrun)
        self._squares.add(overrun**2)

    def settle(self) -> None:
        """Take the best shape."""
        rates = self._rates()
        best = int(rates.argmax())
        if rates[best] > _BETTER * rates[self._candidates.index(self.choice)]:
            self.choice = self._candidates[best]

    def forget(self) -> None:
        """Forget what rounds took: that was long ago, or with another link or other models."""
        times = Times(self.times.link, self.strategy.ahead)
        times.fitted, times.in_flight = self.times.fitted, self.times.in_flight  # these are no times
        self.times = times
        self._overruns, self._squares = Mean(_FIT), Mean(_FIT)

    def begin_trial(self) -> None:
        """Measure the rate afresh, from the best shape on, or from a small tree: what nodes cost must be seen first."""
        self._overruns, self._squares = Mean(_FIT), Mean(_FIT)
        if not (self.strategy.tree and not self.times.known):
            self.settle()

    @property
    def measured(self) -> bool:
        """Whether rounds of this strategy were timed."""
        return self._overruns.known

    def rate(self) -> float:
        """Tokens a second of the best shape, by what its parts take and by how far rounds kept to that."""
        return self.promise() / self.overrun

    def promise(self) -> float:
        """Tokens a second of the best shape, by what its parts take."""
        return float(self._rates().max())

    @property
    def wait(self) -> float:
        """Seconds that a round of the chosen shape waits for its outcome."""
        size = np.array([self.choice.size])
        return float((self.times.verify_seconds(size) + self.times.link.seconds(size, np.array([0.5]))[0])[0])

    @property
    def overrun(self) -> float:
        """What rounds take, over what is predicted of them."""
        if not self.measured:
            return self.lent_overrun
        rounds = self._overruns.weight
        return (rounds * self._overruns.value_or(1.0) + _RESTRAINT) / (rounds + _RESTRAINT)

    @property
    def noise(self) -> float:
        """The standard deviation of one round's overrun."""
        return float(max(0.0, self._squares.value_or(0.0) - self._overruns.value_or(0.0) ** 2) ** 0.5)

    @property
    def rounds(self) -> float:
        """How many rounds the estimate rests on."""
        return self._overruns.weight

    def _whole(self, record: RoundRecord) -> Floats:
        """The probability that a draft like that of ``record`` is accepted as a whole, (1,)."""
        known = self._acceptance
        if self.strategy.tree:
            gains = known.trees()[0][min(record.depth, _MAX_LEVELS) - 1, record.drafted - 1]
            return np.array([gains / record.depth])
        return np.array([np.prod(known.rates[: record.depth])])

    def varied(self, choice: Plan, planned: int) -> Plan:
        """``choice``; every few rounds a little more or less, to measure what that costs and gains."""
        if planned % _EXPLORE_EVERY:
            return choice
        longer = planned // _EXPLORE_EVERY % 2 == 1
        step = max(1, choice.size // 4) * (1 if longer else -1)
        if not choice.nodes:
            return self._plan(max(self._shortest, min(self._longest, choice.length + step)))
        nodes = max(1, min(self._longest, choice.nodes + step))
        levels = choice.length + (1 if longer else -1)
        return self._plan(max(1, min(levels, nodes, _MAX_LEVELS)), nodes)

    def _plan(self, length: int, nodes: int = 0) -> Plan:
        return Plan(length, nodes, self.strategy)

    def _possible(self) -> list[Plan]:
        if not self.strategy.tree:
            return [self._plan(length) for length in range(self._shortest, self._longest + 1)]
        return [
            self._plan(levels, nodes)
            for nodes in _NODES
            if nodes <= self._longest
            for levels in range(1, min(nodes, _MAX_LEVELS) + 1)
        ]

    def _seconds(self, levels: np.ndarray, size: np.ndarray, whole: Floats) -> Floats:
        return self.times.round_seconds(levels, size, whole, self.strategy)

    def _rates(self) -> Floats:
        """Expected tokens a second, (candidates,); 0 for drafts much larger than any that was tried."""
        known = self._acceptance
        state = known.rounds, self.times, self.times.known, self.times.like
        if self._computed[0] != state:
            self._computed = state, self._compute_rates()
        return self._computed[1]

    def _compute_rates(self) -> Floats:
        known = self._acceptance
        lengths, nodes = self._lengths, self._nodes
        if self.strategy.tree:
            gains, levels = (table[lengths - 1, nodes - 1] for table in known.trees())
            rates: Floats = (1 + gains) / self._seconds(levels, nodes, gains / levels) / (1 + _NODE_COST * nodes)
            rates[nodes > max(_FIRST_NODES, 1.5 * self.times.largest)] = 0.0  # what so many nodes cost is not known
            return rates
        # A draft that ends early costs less and gains less.
        reached = known.going_on ** np.arange(MAX_DRAFT_LENGTH)
        chances = np.cumprod(known.rates)
        gains = np.cumsum(chances * reached)[lengths - 1]
        drafted = np.cumsum(reached)[lengths - 1]
        whole = chances[lengths - 1]
        rates = (1 + gains) / self._seconds(drafted, drafted, whole)
        rates[lengths > max(_FIRST_LENGTH, self._shortest, _FURTHER * known.longest)] = 0.0
        return rates


class Alone(Estimate):
    """The strategy without drafts: each token takes a pass of the target, and the link is crossed once a reply."""

    strategy = ALONE
    choice = Plan(0, strategy=ALONE)
    longest = 0

    kept = ("times", "first", "_round")

    def __init__(self, link: LinkTimes) -> None:
        self.times = Times(link)
        self.first = Mean()
        self._round = Mean(0.95)

    def learn(self, plan: Plan, record: RoundRecord, seconds: float) -> None:
        """See ``Shapes.learn``."""
        link = max(0.0, record.wait_seconds - record.verify_seconds)
        if self.times.later:
            self._round.add(seconds)
            self.times.verify.add(record.verify_seconds, 0.0)
        else:
            self.times.link.bound(link, record)
        self.times.begin_alone()

    def settle(self) -> None:
        """There is one shape."""

    def forget(self) -> None:
        """Forget what rounds took."""
        self.times = Times(self.times.link)
        self._round = Mean(0.95)

    def begin_trial(self) -> None:
        """Measure the rate afresh."""
        self._round = Mean(0.95)

    @property
    def measured(self) -> bool:
        """Whether rounds of this strategy were timed."""
        return self._round.known

    def rate(self) -> float:
        """Tokens a second."""
        return 1.0 / max(1e-6, self._round.value_or(self.times.verify_seconds(0.0)))

    def promise(self) -> float:
        """Tokens a second, if the link keeps up."""
        return 1.0 / max(1e-6, self.times.verify_seconds(0.0))

    @property
    def wait(self) -> float:
        """Seconds that a round waits for its outcome."""
        return 1.0 / self.rate()

    @property
    def noise(self) -> float:
        """Unknown."""
        return 0.0

    @property
    def rounds(self) -> float:
        """How many rounds the estimate rests on."""
        return self._round.weight

    def varied(self, choice: Plan, planned: int) -> Plan:
        """``choice``."""
        return choice


def accepted_by_tree(ranks: Sequence[float] | Floats, nodes: int, levels: int) -> tuple[Floats, NDArray[np.int64]]:
    """Expected accepted tokens of the best tree of n nodes and at most l levels, and how many levels it has.

    Both (levels, nodes), at [l - 1, n - 1].

    As in "Sequoia" (arXiv 2402.12374), a token's acceptance depends on its rank alone, independently at each position.
    ranks: the probabilities that the target's token is the draft's likeliest, second, ...; their sum is at most 1. A
    node is accepted with the product of its and its ancestors' probabilities, which never grows on the way down. So
    the n best of all nodes form a tree, and it is the best one.
    """
    chances = np.sort(np.asarray(ranks, dtype=np.float64))[::-1]
    gains, depths = np.empty((levels, nodes)), np.empty((levels, nodes), dtype=np.int64)
    deepest = np.cumprod(np.full(levels, chances[0]))  # the best node of each level
    best = np.zeros(0)  # nodes of all levels so far, descending
    level = np.ones(1)
    for depth in range(levels):
        # No level holds more than `nodes` of the best nodes.
        level = np.sort(np.outer(level, chances), axis=None)[::-1][:nodes]
        best = np.sort(np.concatenate((best, level)))[::-1][:nodes]
        missing = (0, nodes - len(best))
        gains[depth] = np.cumsum(np.pad(best, missing))
        least = np.pad(best, missing, mode="edge")
        depths[depth] = (deepest[: depth + 1, None] >= least).sum(axis=0)
    return gains, depths
