# SPDX-License-Identifier: Apache-2.0
"""Strategies: the ways to spend a round, between which mode ``auto`` chooses; every other mode has one."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.decoding.modes import Proof, Shape
from dsd_ros.decoding.settings import DecodeSettings

_BATCH = 8  # drafts that one pass of the draft model advances ahead of time, in mode auto
_IN_FLIGHT = 3  # rounds sent ahead, in mode auto


@dataclass(frozen=True)
class Strategy:
    """What is drafted for a round, and what is drafted ahead while the target verifies it.

    ``drafts`` False: the target decodes alone. ``guesses`` and ``exits``: the outcomes to draft ahead for; neither:
    robot and target take turns. ``workers`` drafts are made ahead at a time, ``batch`` of them by one pass; ``batch``
    1: each has a thread. ``in_flight``: rounds in flight at most.
    """

    name: str
    drafts: bool = True
    tree: bool = False
    guesses: bool = False
    exits: bool = False
    workers: int = 1
    batch: int = 1
    in_flight: int = 1

    @property
    def ahead(self) -> bool:
        """Whether the next round is drafted while this one is verified."""
        return self.guesses or self.exits

    @property
    def resting(self) -> Strategy:
        """The same without drafting ahead."""
        return TREE if self.tree else IN_TURN

    @property
    def slots(self) -> int:
        """Drafts that one pass advances."""
        return min(self.batch, self.workers)

    @property
    def threads(self) -> int:
        """Worker threads."""
        return 1 if self.batch > 1 else self.workers


ALONE = Strategy("alone", drafts=False)
IN_TURN = Strategy("in turn")
TREE = Strategy("tree", tree=True)
AHEAD = Strategy("ahead", guesses=True)
BATCH = Strategy("ahead in a batch", guesses=True, workers=_BATCH, batch=_BATCH)
TREE_AHEAD = Strategy("tree ahead", tree=True, guesses=True)
IN_FLIGHT = Strategy("in flight", guesses=True, workers=_BATCH, batch=_BATCH, in_flight=_IN_FLIGHT)
TREE_IN_FLIGHT = Strategy("tree in flight", tree=True, guesses=True, workers=_BATCH, batch=_BATCH, in_flight=_IN_FLIGHT)


def strategy_of(settings: DecodeSettings) -> Strategy:
    """The one strategy of a mode other than ``auto``."""
    if not settings.needs_draft:
        return ALONE
    tree = settings.shaped_by is Shape.BUDGET
    if not settings.predrafts:
        return TREE if tree else IN_TURN
    return Strategy(
        settings.mode,
        tree=tree,
        guesses=settings.predraft_source != "exits",
        exits=settings.predraft_source != "guesses",
        workers=settings.predraft_workers,
        batch=settings.predraft_batch,
        in_flight=settings.pipeline_depth,
    )


def strategies_of(settings: DecodeSettings, translates: bool = False) -> tuple[Strategy, ...]:
    """All strategies that the settings allow; ``translates``: the draft model has another tokenizer than the target.

    Mode ``auto`` uses no early exits: a session that asks for them has them in all its rounds.
    """
    if not settings.adapts:
        return (strategy_of(settings),)
    drawn = not (settings.sampling.greedy or settings.proven_by is Proof.COUPLED)
    if translates:  # probabilities over one vocabulary prove nothing about tokens of another
        return (ALONE,) if drawn else (IN_TURN, ALONE)
    trees = () if drawn or settings.shape == Shape.SEQUENCE else (TREE, TREE_AHEAD, TREE_IN_FLIGHT)
    sequences = () if settings.shape == Shape.BUDGET else (IN_TURN, AHEAD, BATCH, IN_FLIGHT)
    return (*sequences, *trees, ALONE)
