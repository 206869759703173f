"""Drafting: a few tokens ahead of what is verified, from the robot's own small model.

What a round's draft is depends on the tokens in front of it and on the number of its round alone, so it
may be made by whoever, at any time: before its outcome is known, or after. A draft is a tree of tokens,
mostly one without branches. It grows level by level: a ``Step`` says what the draft model is to be fed,
and many of them make one pass (``advance``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.coupling import gumbel, scores
from dsd_ros.decoding.modes import Proof, Shape
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, highest_of, transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import ROOT, TokenTree
from dsd_ros.decoding.tree_growth import BudgetTree, ExpansionTree, Grower, GrownTree
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.edge.draft_length import Plan, Tuner
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence, grow_trees_together, next_logits_together


@dataclass(frozen=True)
class Drafting:
    """What holds for all drafts of one reply.

    ``depth``: how many tokens one draft can add to the reply. ``eos_token_ids`` are the target's:
    nothing is drafted behind the end of a reply. ``expansion`` and ``budget`` are of the shapes of
    those names. With a ``tuner`` depth and budget are what it plans.
    """

    depth: int
    max_tokens: int
    sampling: SamplingSettings
    eos_token_ids: frozenset[int]
    seed: int
    reply: int
    proof: Proof = Proof.FULL
    top_k_proof: int = 0
    top_rho_proof: float = 0.0
    top_float_proof: str = DecodeSettings.top_float_proof
    shape: Shape = Shape.SEQUENCE
    expansion: tuple[int, ...] = ()
    budget: int = 0
    tuner: Tuner | None = None

    @classmethod
    def of(
        cls, settings: DecodeSettings, eos_token_ids: frozenset[int], reply: int, tuner: Tuner | None = None
    ) -> Drafting:
        """As a decode's settings say."""
        return cls(
            settings.depth, settings.max_tokens, settings.sampling, eos_token_ids, settings.seed,
            reply, settings.proven_by, settings.top_k_proof, settings.top_rho_proof,
            settings.top_float_proof, settings.shaped_by, settings.expansion, settings.tree_budget,
            tuner,
        )  # fmt: skip

    def plan(self, number: int) -> Plan:
        """The shape of a round's draft, whoever makes it and whenever."""
        if self.tuner is not None:
            return self.tuner.plan(self.reply, number)
        return Plan(self.depth, self.budget if self.shape is Shape.BUDGET else 0)

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the noise that the verifier shares."""
        return self.proof is Proof.COUPLED and not self.sampling.greedy

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn from distributions that the verifier has to know."""
        return not (self.sampling.greedy or self.proof is Proof.COUPLED)

    def grower(self, depth: int, number: int) -> Grower:
        """What grows the draft of round ``number``, at most ``depth`` tokens deep."""
        if self.shape is Shape.BUDGET:
            return BudgetTree(self.plan(number).nodes, depth, self.eos_token_ids)
        expansion = self.expansion[:depth] if self.shape is Shape.EXPANSION else (1,) * depth
        generator = None
        if self.draws:
            generator = generator_for("draft", self.seed, self.reply, number)
        return ExpansionTree(expansion, self.eos_token_ids, generator)

    def ranking(self, logits: torch.Tensor, positions: Tokens[int]) -> torch.Tensor:
        """What ranks the tokens at positions of the reply (from 0), both (n, V): the logits themselves,
        or log q + G when coupled, whose draft is the argmax of these as if it were greedy.

        SamplingError for logits that are not finite.
        """
        if not self.coupled:
            highest_of(logits)
            return logits
        q = transform(logits, self.sampling)
        noise = [gumbel(self.seed, self.reply, position, q.shape[-1]) for position in positions]
        return torch.from_numpy(scores(q, np.stack(noise)))


class Step(NamedTuple):
    """What a draft brings to a pass of the model: nodes to hang behind ``sequence``, as of its ``grow_tree``.

    Without any, what is wanted is the one row behind its text.
    """

    sequence: Sequence
    tokens: list[int]
    parents: list[int]


def advance(steps: list[Step]) -> list[torch.Tensor | None]:
    """Logits (nodes, or 1, V) of each step, in one pass; None where the context is full."""
    try:
        if len(steps) == 1 and not steps[0].tokens:
            return [steps[0].sequence.next_logits().unsqueeze(0)]
        if not any(step.tokens for step in steps):
            rows = next_logits_together([step.sequence for step in steps])
            return [row.unsqueeze(0) for row in rows]
        grown = grow_trees_together(steps)
        return [
            logits if step.tokens else step.sequence.next_logits().unsqueeze(0)
            for step, logits in zip(steps, grown, strict=True)
        ]
    except ContextError:  # of one of them
        return [None] if len(steps) == 1 else [advance([step])[0] for step in steps]


class GrowingDraft:
    """One round's draft, grown on ``sequence``; for one thread at a time.

    ``able`` is False once the draft model cannot go on: its context is full, or it lacks a token.
    """

    def __init__(self, sequence: Sequence, depth: int, drafting: Drafting, number: int, able: bool = True) -> None:
        self.sequence = sequence
        self.able = able
        self.seconds = 0.0  # in the draft model
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # of proof TRUNCATED: ids and weights
        self._drafting = drafting
        self._grower = drafting.grower(depth, number)
        self._before = len(sequence.tokens)
        # ``Drafting.ranking``, level by level, behind the root and behind the nodes that were fed.
        self._rankings: list[torch.Tensor] = []
        self._grown: GrownTree | None = None  # set last: others may look for it at any time
        if self._grower.complete or not able:
            self._grown = self._grower.grown()

    @property
    def complete(self) -> bool:
        """Whether nothing is to be added."""
        return self._grown is not None

    @property
    def grown(self) -> GrownTree:
        """The draft as it now is."""
        return self._grower.grown() if self._grown is None else self._grown

    @property
    def tree(self) -> TokenTree:
        """The drafted tokens, and how they hang together."""
        return self.grown.tree

    @property
    def tokens(self) -> list[int]:
        """Those of all nodes."""
        return list(self.tree.tokens)

    @property
    def q(self) -> list[torch.Tensor]:
        """The distributions (V,) float32 that the children of each of the tree's inner nodes were drawn
        from; none when greedy or coupled.
        """
        q = self._grower.q
        return [] if q is None else list(q)

    @property
    def rows(self) -> list[torch.Tensor]:
        """The ``Drafting.ranking`` (V,) that the children of each inner node were chosen by."""
        rows, fed = self._rows, self.grown.fed
        return [rows[0 if node == ROOT else fed[node] + 1] for node in self.tree.inner]

    @property
    def rows_behind(self) -> dict[int, torch.Tensor]:
        """The same of leaves, where they are known: a tree by budget was to go on there, and did not."""
        rows, inner, fed = self._rows, frozenset(self.tree.inner), self.grown.fed
        return {node: rows[number + 1] for node, number in enumerate(fed) if number >= 0 and node not in inner}

    def ranks(self, accepted: int, next_token: int) -> list[int]:
        """How many tokens the draft preferred to each of an outcome's, as far as its rows are known."""
        tree = self.tree
        rows = dict(zip(tree.inner, self.rows, strict=True)) | self.rows_behind
        path = tree.path_to(accepted - 1)
        ranks = []
        for node, token in zip((ROOT, *path), (*tree.tokens_of(path), next_token), strict=True):
            row = rows.get(node)
            if row is not None:
                beyond = token >= len(row)
                ranks.append(len(row) if beyond else int((row > row[token]).sum()))
        return ranks

    @property
    def _rows(self) -> list[torch.Tensor]:
        """The ``Drafting.ranking`` (V,) behind the root, and behind the nodes in the order they were fed."""
        return [row for level in self._rankings for row in level]

    @property
    def is_sequence(self) -> bool:
        """Whether the shape has no branches: plain passes, without a mask, take less time then."""
        return self._drafting.shape is Shape.SEQUENCE

    def finish(self) -> None:
        """Add all that is missing."""
        began = time.perf_counter()
        while not self.complete:
            self.take(*advance([self.step()]))
        self.seconds += time.perf_counter() - began

    def step(self) -> Step:
        """What the next level needs; ``take`` is to be given what comes of it."""
        return self._step(self.sequence, *self._grower.level)

    def take(self, logits: torch.Tensor | None) -> None:
        """Add the level that the step's ``logits`` (nodes, V) give; None: the context is full."""
        if logits is None:
            self.able = False  # the target may hold more: it goes on without drafts
            self._grown = self._grower.grown()
            return
        drafting = self._drafting
        position = self._before + len(self._rankings)
        rows = drafting.ranking(logits, [position] * len(logits))
        self._rankings.append(rows)
        if drafting.draws:
            rows = self._distributions(logits)
        elif drafting.shape is Shape.BUDGET:
            rows = torch.softmax(rows, dim=-1)
        self._grower.take(rows)
        if self._grower.complete:
            self._grown = self._grower.grown()

    def look_behind(self, nodes: Tokens[int]) -> Step:
        """What a pass behind leaves that were not fed takes; the draft stays as it is."""
        fed, tree = self.grown.fed, self.tree
        parents = [tree.parents[node] for node in nodes]
        return self._step(
            self.sequence.fork(),
            list(tree.tokens_of(nodes)),
            [ROOT if parent == ROOT else fed[parent] for parent in parents],
        )

    def behind(self, accepted: int, next_token: int, fork: bool) -> Sequence:
        """The sequence behind an outcome: this draft's own, or a fork, which leaves the draft as it is."""
        sequence = self.sequence.fork() if fork else self.sequence
        held, missing = self.grown.split(self.tree.path_to(accepted - 1))
        if self.is_sequence:
            sequence.rollback(self._before + len(held))
        else:
            sequence.keep_path(held)
        sequence.append([*missing, next_token])
        return sequence

    def _step(self, sequence: Sequence, tokens: list[int], parents: list[int]) -> Step:
        if not self.is_sequence:
            return Step(sequence, tokens, parents)
        if tokens:
            sequence.append(tokens)
        return Step(sequence, [], [])

    def _distributions(self, logits: torch.Tensor) -> torch.Tensor:
        q = transform(logits, self._drafting.sampling)
        if self._drafting.proof is not Proof.TRUNCATED:
            return q
        # Before anything is drawn: what is verified has to be what it was drawn from.
        drafting = self._drafting
        kept = [truncate(row, drafting.top_k_proof, drafting.top_rho_proof, drafting.top_float_proof) for row in q]
        self.kept += kept
        return torch.stack([restored(*row, q.shape[-1]) for row in kept])


@dataclass(frozen=True, eq=False)
class DraftedRound:
    """A round with its draft behind ``prefix``, all tokens of the reply in front of it.

    Outcomes are given as they travel: ``accepted`` is the accepted path's last node plus one, 0 for
    none, which for a sequence is its length. While others may fork the draft's sequence it is not to
    be changed.
    """

    drafting: Drafting
    number: int
    prefix: list[int]
    draft: GrowingDraft

    @classmethod
    def first(cls, drafting: Drafting, sequence: Sequence) -> DraftedRound:
        """Round 1, its draft yet to be grown."""
        depth = min(drafting.plan(1).length, drafting.max_tokens - 1)
        return cls(drafting, 1, [], GrowingDraft(sequence, depth, drafting, 1))

    @property
    def open_leaves(self) -> list[int]:
        """The draft's leaves that a further draft can follow when they are accepted."""
        drafting, tree = self.drafting, self.draft.tree
        if not self.draft.able:
            return []
        room = drafting.max_tokens - len(self.prefix) - 2
        inner = frozenset(tree.inner)
        return [
            node
            for node, token in enumerate(tree.tokens)
            if node not in inner and token not in drafting.eos_token_ids and tree.depths[node] < room
        ]

    def tokens_of(self, accepted: int, next_token: int) -> tuple[int, ...]:
        """What an outcome adds to the reply."""
        tree = self.draft.tree
        return (*tree.tokens_of(tree.path_to(accepted - 1)), next_token)

    def drafts_behind(self, accepted: int, next_token: int) -> bool:
        """Whether there is anything to draft behind an outcome."""
        if not (
            self.draft.able
            and 0 <= accepted <= len(self.draft.tree)
            and next_token < self.draft.sequence.model.vocab_size
        ):
            return False
        gained = self.tokens_of(accepted, next_token)
        return (
            not self.drafting.eos_token_ids.intersection(gained)
            and len(self.prefix) + len(gained) < self.drafting.max_tokens - 1
        )

    def next_draft(self, accepted: int, next_token: int, fork: bool) -> GrowingDraft:
        """The draft of the next round behind an outcome, to be grown; ``fork`` leaves this round as it is."""
        drafting, draft = self.drafting, self.draft
        depth = self.depth_behind(len(self.tokens_of(accepted, next_token)))
        # A token only the target has: nothing can be drafted behind it.
        able = draft.able and next_token < draft.sequence.model.vocab_size
        sequence = draft.behind(accepted, next_token, fork) if able else draft.sequence
        return GrowingDraft(sequence, depth, drafting, self.number + 1, able)

    def depth_behind(self, gained: int) -> int:
        """How deep the next draft may be behind an outcome that adds ``gained`` tokens."""
        # One token of the round is always the target's own.
        left = self.drafting.max_tokens - len(self.prefix) - gained
        return max(0, min(self.drafting.plan(self.number + 1).length, left - 1))

    def followed_by(self, accepted: int, next_token: int, draft: GrowingDraft) -> DraftedRound:
        """The next round, with its draft."""
        prefix = [*self.prefix, *self.tokens_of(accepted, next_token)]
        return replace(self, number=self.number + 1, prefix=prefix, draft=draft)
