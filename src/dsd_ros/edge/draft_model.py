# SPDX-License-Identifier: Apache-2.0
"""Drafting in rounds with the robot's own small model: one round's draft, and what makes one round after another.

A round's draft depends only on the tokens before it and on the round's number, so it may be made by any thread, at any
time: before the outcome of the round before is known, or after. A draft is a tree of tokens, mostly one without
branches. It grows level by level: a ``DraftStep`` says what the draft model is to be fed, and many steps make one pass
(``advance``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from dsd_ros.decoding.methods import Result, RoundContext, method_of
from dsd_ros.decoding.methods.base import Drafted, Kept
from dsd_ros.decoding.modes import Shape
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import ROOT, TokenTree
from dsd_ros.decoding.tree_growth import BudgetTree, ExpansionTree, Grower, GrownTree
from dsd_ros.edge.engine import DraftEngine, failure_of
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import LayerHook, Sequence, grow_trees_together, next_logits_together
from dsd_ros.wire.messages import Outcome

if TYPE_CHECKING:
    from typing_extensions import Self


class Drafting:
    """What holds for all drafts of one reply. ``eos_token_ids`` are the target's; nothing is drafted after them.

    draws: whether tokens are drawn from distributions that the verifier has to know. depth: gamma, or a tree's levels.
    """

    def __init__(self, settings: DecodeSettings, eos_token_ids: frozenset[int], reply: int) -> None:
        self.settings, self.eos_token_ids, self.reply = settings, eos_token_ids, reply
        self.sampling, self.shape, self.depth = settings.sampling, settings.shaped_by, settings.depth
        self.method = method_of(settings.proven_by, self.sampling.greedy)
        self.draws = settings.draws

    def context(self, number: int, start: int) -> RoundContext:
        """Round ``number``, which follows ``start`` tokens of the reply."""
        given = self.settings
        return RoundContext(
            self.sampling, given.seed, self.reply, number, start,
            given.top_k_proof, given.top_rho_proof, given.top_float_proof,
        )  # fmt: skip

    def grower(self, depth: int, number: int) -> Grower:
        """What grows the draft of round ``number``, at most ``depth`` tokens deep."""
        if self.shape is Shape.BUDGET:
            return BudgetTree(self.settings.tree_budget, depth, self.eos_token_ids)
        expansion = self.settings.expansion[:depth] if self.shape is Shape.EXPANSION else (1,) * depth
        generator = self.context(number, 0).generator("draft") if self.draws else None
        return ExpansionTree(expansion, self.eos_token_ids, generator)


class DraftStep(NamedTuple):
    """What a draft brings to a pass of the model: nodes to add to ``sequence``, as for its ``grow_tree``.

    Without nodes, what is wanted is the one row after its text.
    """

    sequence: Sequence
    tokens: list[int]
    parents: list[int]


def advance(steps: list[DraftStep], on_layer: LayerHook | None = None) -> list[torch.Tensor | None]:
    """Logits (nodes, or 1, V) of each step, all in one pass; None for a step whose context is full.

    ``on_layer`` is called after each layer of the pass. What it raises ends the pass and leaves the sequences as they
    were. What a sequence's constraint does not allow has minus infinity.
    """
    return [
        None if rows is None else step.sequence.constrained(rows, len(step.tokens))
        for step, rows in zip(steps, _passed(steps, on_layer), strict=True)
    ]


def _passed(steps: list[DraftStep], on_layer: LayerHook | None) -> list[torch.Tensor | None]:
    try:
        if len(steps) == 1 and not steps[0].tokens:
            return [steps[0].sequence.next_logits(on_layer).unsqueeze(0)]
        if not any(step.tokens for step in steps):
            rows = next_logits_together([step.sequence for step in steps], on_layer)
            return [row.unsqueeze(0) for row in rows]
        grown = grow_trees_together(steps, on_layer)
        return [
            logits if step.tokens else step.sequence.next_logits(on_layer).unsqueeze(0)
            for step, logits in zip(steps, grown, strict=True)
        ]
    except ContextError:  # of one of them
        return [None] if len(steps) == 1 else [_passed([step], on_layer)[0] for step in steps]


class ModelDraft:
    """One round's draft, which follows ``prefix``, all earlier tokens of the reply; grown on ``sequence``.

    For one thread at a time; once complete, any thread may fork its sequence. Outcomes are given as they travel:
    ``accepted`` is 1 + the index of the last accepted node, 0 for none. ``able`` is False once the draft model cannot
    go on: its context is full, or it lacks a token.
    """

    def __init__(
        self, drafting: Drafting, number: int, prefix: list[int], sequence: Sequence, able: bool = True
    ) -> None:
        self.drafting, self.number, self.prefix = drafting, number, prefix
        self.sequence = sequence
        self.able = able
        self.seconds = 0.0  # in the draft model
        self.kept: list[Kept] = []
        self.context = drafting.context(number, len(prefix))
        # One token of the round is always the target's own.
        self.depth = max(0, min(drafting.depth, drafting.settings.max_tokens - len(prefix) - 1))
        self._grower = drafting.grower(self.depth, number)
        # What tokens were drawn from (``Method.draw_from``), level by level: at the root and at the fed nodes.
        self._levels: list[torch.Tensor] = []
        self._grown: GrownTree | None = None  # set last: others may look for it at any time
        if self._grower.complete or not able:
            self._grown = self._grower.grown()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to add."""
        return self._grown is not None

    @property
    def grown(self) -> GrownTree:
        """The draft as it now is."""
        return self._grower.grown() if self._grown is None else self._grown

    @property
    def tree(self) -> TokenTree:
        """The drafted tokens."""
        return self.grown.tree

    @property
    def vocab_size(self) -> int:
        """V of the draft model."""
        return self.sequence.model.vocab_size

    @property
    def q(self) -> list[torch.Tensor]:
        """q (V,) float32, which the children of each inner node were drawn from; none when greedy or coupled."""
        q = self._grower.q
        return [] if q is None else list(q)

    @property
    def rows(self) -> list[torch.Tensor]:
        """What the children of each inner node were drawn from (V,), by ``Method.draw_from``."""
        rows, fed = self._rows, self.grown.fed
        return [rows[0 if node == ROOT else fed[node] + 1] for node in self.tree.inner]

    @property
    def leaf_rows(self) -> dict[int, torch.Tensor]:
        """The same for leaves, where known: a tree by budget may look past a node and add no child."""
        rows, inner, fed = self._rows, frozenset(self.tree.inner), self.grown.fed
        return {node: rows[number + 1] for node, number in enumerate(fed) if number >= 0 and node not in inner}

    @property
    def _rows(self) -> list[torch.Tensor]:
        """Rows (V,) at the root and at the fed nodes, in the order in which they were fed."""
        return [row for level in self._levels for row in level]

    @property
    def open_leaves(self) -> list[int]:
        """The leaves that another draft could follow if they were accepted."""
        tree = self.tree
        if not self.able:
            return []
        room = self.drafting.settings.max_tokens - len(self.prefix) - 2
        inner = frozenset(tree.inner)
        return [
            node
            for node, token in enumerate(tree.tokens)
            if node not in inner and token not in self.drafting.eos_token_ids and tree.depths[node] < room
        ]

    def finish(self) -> None:
        """Grow what is missing."""
        began = time.perf_counter()
        while not self.complete:
            self.take(*advance([self.step()]))
        self.seconds += time.perf_counter() - began

    def step(self) -> DraftStep:
        """What the next level needs; its logits go to ``take``."""
        return self._step(self.sequence, *self._grower.level)

    def take(self, logits: torch.Tensor | None) -> None:
        """Add the level that the step's ``logits`` (nodes, V) give; None: the context is full."""
        if logits is None:
            self.able = False  # the target may hold more: it goes on without drafts
            self._grown = self._grower.grown()
            return
        position = self.context.start + len(self._levels)
        rows, kept = self.drafting.method.draw_from(logits, [position] * len(logits), self.context)
        self._levels.append(rows)
        self.kept += kept
        if self.drafting.shape is Shape.BUDGET:
            rows = torch.softmax(rows, dim=-1)
        self._grower.take(rows)
        if self._grower.complete:
            self._grown = self._grower.grown()

    def look_past(self, leaves: Tokens[int]) -> DraftStep:
        """The pass that says what follows ``leaves`` that were not fed; the draft stays as it is."""
        fed, tree = self.grown.fed, self.tree
        parents = [tree.parents[node] for node in leaves]
        return self._step(
            self.sequence.fork(),
            list(tree.tokens_of(leaves)),
            [ROOT if parent == ROOT else fed[parent] for parent in parents],
        )

    def tokens_of(self, accepted: int, next_token: int) -> tuple[int, ...]:
        """What an outcome adds to the reply."""
        tree = self.tree
        return (*tree.tokens_of(tree.path_to(accepted - 1)), next_token)

    def can_follow(self, accepted: int, next_token: int) -> bool:
        """Whether there is anything to draft after an outcome."""
        drafting = self.drafting
        if not (self.able and 0 <= accepted <= len(self.tree) and next_token < self.vocab_size):
            return False
        gained = self.tokens_of(accepted, next_token)
        ended = drafting.eos_token_ids.intersection(gained)
        return not ended and len(self.prefix) + len(gained) < drafting.settings.max_tokens - 1

    def next_draft(self, accepted: int, next_token: int, fork: bool) -> Self:
        """The next round's draft after an outcome, yet to be grown; ``fork`` leaves this one as it is."""
        # Nothing can be drafted after a token that only the target has.
        able = self.able and next_token < self.vocab_size
        sequence = self._sequence_after(accepted, next_token, fork) if able else self.sequence
        prefix = [*self.prefix, *self.tokens_of(accepted, next_token)]
        return type(self)(self.drafting, self.number + 1, prefix, sequence, able)

    def _sequence_after(self, accepted: int, next_token: int, fork: bool) -> Sequence:
        sequence = self.sequence.fork() if fork else self.sequence
        held, missing = self.grown.split(self.tree.path_to(accepted - 1))
        if self._is_sequence:
            sequence.rollback(len(self.prefix) + len(held))
        else:
            sequence.keep_path(held)
        sequence.append([*missing, next_token])
        return sequence

    @property
    def _is_sequence(self) -> bool:
        """Whether the shape has no branches: plain passes, without a mask, take less time then."""
        return self.drafting.shape is Shape.SEQUENCE

    def _step(self, sequence: Sequence, tokens: list[int], parents: list[int]) -> DraftStep:
        if not self._is_sequence:
            return DraftStep(sequence, tokens, parents)
        if tokens:
            sequence.append(tokens)
        return DraftStep(sequence, [], [])


@dataclass(frozen=True)
class Origin:
    """Where the next round's draft comes from.

    source: "exit" or "guess" (pre-drafted), "flight" (already sent), "" (drafted in turn). ``complete``: all of it was
    there. ``begun``: pre-drafts begun in this round, for this outcome and others.
    """

    source: str = ""
    complete: bool = False
    begun: int = 0


class RoundDraft(Drafted, Protocol):
    """One round's draft as the loop sees it: it follows ``prefix``, and took ``seconds`` to make."""

    @property
    def number(self) -> int: ...

    @property
    def prefix(self) -> list[int]: ...

    @property
    def seconds(self) -> float: ...


class Proposer(Protocol):
    """Proposes each round's draft: ``DraftModel``, or ``Ahead``."""

    @property
    def origin(self) -> Origin: ...

    @property
    def error(self) -> str: ...

    @property
    def device(self) -> torch.device | None: ...

    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None: ...

    def propose(self) -> RoundDraft: ...

    def draft_ahead(self, draft: Any) -> None: ...

    def on_early(self, outcome: Outcome) -> None: ...

    def update(self, draft: Any, result: Result) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class DraftModel:
    """Proposes each round's draft, after the outcome of the round before. All calls come from the session's thread."""

    origin = Origin()
    error = ""  # the first failure of a worker or an engine in this reply, one sentence; "" if none

    def __init__(self, model: VisionLanguageModel | DraftEngine, settings: DecodeSettings) -> None:
        self.model = model
        self.device = model.device
        self._settings = settings
        self._next: ModelDraft | None = None

    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None:
        """Start a reply: read its prompt. ``eos_token_ids`` are the target's."""
        self._next = None
        sequence = request.prefill(self.model, eos_token_ids, wait=True)
        self._next = ModelDraft(Drafting(self._settings, eos_token_ids, request.number), 1, [], sequence)

    def propose(self) -> ModelDraft:
        """The next round's draft: draft what is not there yet of it."""
        assert self._next is not None, "begin comes first"
        self._next.finish()
        self.error = failure_of(self._next.sequence) or self.error
        return self._next

    def draft_ahead(self, draft: ModelDraft) -> None:
        """``draft`` is being verified: use the time."""

    def on_early(self, outcome: Outcome) -> None:
        """An early exit forecasts the round's outcome."""

    def update(self, draft: ModelDraft, result: Result) -> None:
        """The round is over, with this result."""
        self._next = draft.next_draft(result.accepted, result.next_token, fork=False)

    def reset(self) -> None:
        """Give back the memory of the reply: it is over, or begins again."""
        self._next, self.error = None, ""

    def close(self) -> None:
        """End worker threads; the next reply may start them again."""
