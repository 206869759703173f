# SPDX-License-Identifier: Apache-2.0
"""Targets: what verifies rounds, be it a model in this process or another way to learn which tokens follow a prefix.

The engine, the sessions and the server know a target by the ``Target`` protocol alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.cloud.exits import ExitListener, Judge, Mask, RoundExits, confidence_of
from dsd_ros.cloud.rounds import OnEarly, PendingPrompt, PendingRound, ReplyState, RoundRefused, Work
from dsd_ros.cloud.verification import microseconds_since, take_recovered
from dsd_ros.decoding.generation import processed
from dsd_ros.decoding.methods import DraftVerdict, RoundContext, method_of, split
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import LayerHook, PromptChunk, Sequence as TokenSequence, TreeCheck, verify_trees_together
from dsd_ros.wire.messages import Outcome, SessionRequest

_log = logging.getLogger(__name__)


@dataclass
class _Check:
    """A round on its way through a pass."""

    round: PendingRound
    sequence: TokenSequence
    tree: TokenTree
    judge: Judge
    mask: Mask
    before: int  # tokens of the reply, for a pass that fails
    owed: int
    voice: RoundExits | None = None

    def undo(self) -> None:
        self.sequence.rollback(self.before)
        self.round.reply.owed = self.owed


class LocalTarget:
    """A model in this process: all methods, trees, early exits. One pass for all rounds and parts of prompts."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.model = model

    @property
    def exit_layers(self) -> tuple[int, ...]:
        adapters = getattr(self.model, "exits", None)
        return () if adapters is None else tuple(adapters.layers)

    def check(self, request: SessionRequest, sampling: SamplingSettings) -> None:
        """Every session can be served."""

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]
    ) -> TokenSequence:
        return self.model.open(image, instruction, history)

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        checks, prompts = [], []
        for item in work:
            if isinstance(item, PendingPrompt):
                prompts.append(item)
                continue
            try:
                checks.append(self._prepare(item, on_early))
            except Exception as error:
                yield item, RoundRefused.of(error)
        began = time.perf_counter()
        try:
            rows = self._pass(checks, prompts)
        except Exception as error:
            for check in checks:
                check.undo()
            failed: list[Work] = [*(check.round for check in checks), *prompts]
            if len(failed) == 1:
                yield failed[0], RoundRefused.of(error)
                return
            _log.warning("a pass over %d rounds failed; each is verified by itself now", len(failed), exc_info=error)
            for item in failed:
                yield from self.verify([item], on_early)
            return
        ran_us = microseconds_since(began)
        for check, logits in zip(checks, rows, strict=True):
            try:
                result: Outcome | RoundRefused = self._conclude(check, logits, ran_us)
            except Exception as error:
                check.undo()
                result = RoundRefused.of(error)
            yield check.round, result
        for prompt in prompts:
            yield prompt, None

    def _prepare(self, round: PendingRound, on_early: OnEarly) -> _Check:
        """Read the draft, and bring the reply to where the draft begins."""
        model, draft, sequence = self.model, round.draft, _sequence(round.reply)
        # What exceeds the context cannot be verified; a shorter draft is just as exact.
        room = max(0, model.max_length - sequence.prompt_length - draft.confirmed)
        drafted = TokenTree.from_bytes(draft.tokens, draft.parents)
        tree = drafted.cut(room)
        judge, mask = _judge(round, drafted, tree), _mask(round, sequence, tree)
        check = _Check(round, sequence, tree, judge, mask, len(sequence.tokens), round.reply.owed)
        take_recovered(round.reply, draft.resampled, model.vocab_size)
        began = time.perf_counter()

        def say(verdict: DraftVerdict, layer: int, confidence: float) -> None:
            on_early(round, round.outcome(verdict, layer, confidence, microseconds_since(began), final=False))

        # The token after the prompt is known: without a draft there is no pass to run ahead of.
        # Of a tree that the robot finishes itself, no exit can name the outcome.
        told = not (round.session.splits and drafted.branches)
        if round.exits is not None and told and (len(tree) or draft.confirmed):
            check.voice = RoundExits(round.exits, _forecaster(check), say, mask)
        return check

    def _pass(self, checks: list[_Check], prompts: list[PendingPrompt]) -> list[torch.Tensor]:
        """Each check's logits (nodes + 1, V) before its tree and after each node."""
        chunks = [PromptChunk(_sequence(prompt.reply), prompt.tokens) for prompt in prompts]
        if not checks:
            if len(chunks) == 1:
                chunks[0].sequence.read(chunks[0].length)
            elif chunks:
                verify_trees_together((), None, chunks)
            return []
        voices = [check.voice for check in checks if check.voice is not None]
        listener = ExitListener(self.model, voices) if voices else None
        if len(checks) == 1 and not chunks and not checks[0].sequence.unread:
            rows = [self._pass_alone(checks[0], listener)]
        else:
            trees = [
                TreeCheck(check.sequence, self._known(check.tree), check.tree.parents, check.voice is not None)
                for check in checks
            ]
            rows = verify_trees_together(trees, listener, chunks)
        if listener is not None:
            listener.harvest()
        if rows[0].is_cuda:
            torch.cuda.synchronize(rows[0].device)
        return rows

    def _pass_alone(self, check: _Check, listener: ExitListener | None) -> torch.Tensor:
        on_layer: LayerHook | None = None if listener is None else lambda layer, hidden: listener(layer, [hidden])
        if check.tree.branches:
            return check.sequence.verify_tree(self._known(check.tree), check.tree.parents, on_layer)
        return check.sequence.verify(self._known(check.tree), on_layer)

    def _known(self, tree: TokenTree) -> list[int]:
        """The tree's tokens. An id beyond the target's vocabulary is rejected anyway: any other can stand in for it."""
        return [token if token < self.model.vocab_size else 0 for token in tree.tokens]

    def _conclude(self, check: _Check, logits: torch.Tensor, ran_us: int) -> Outcome:
        """Judge the draft, and leave the reply at its verified tokens."""
        round, sequence, tree = check.round, check.sequence, check.tree
        logits = check.mask(logits)
        verdict = check.judge(logits)
        # When p itself travels, its confidence is not used.
        confidence = confidence_of(logits[verdict.accepted]) if verdict.target is None else 0.0
        if len(sequence.tokens) == round.draft.confirmed:  # the draft is attached as a tree
            sequence.keep_path(tree.path_to(verdict.accepted - 1))
        else:
            sequence.rollback(round.draft.confirmed + verdict.accepted)
        if verdict.target is None:
            sequence.append([verdict.next_token])
        else:
            round.reply.owed = split.most_recovered(tree, verdict.accepted - 1)
        return round.outcome(verdict, self.model.num_layers, confidence, ran_us, final=True)


def _forecaster(check: _Check) -> Judge:
    """``check.judge`` for an exit: it names the token after a rejection too, where that is the robot's to draw."""
    if not check.round.session.splits:
        return check.judge
    context = _context(check.round)
    return lambda logits: split.forecast(check.judge(logits), check.tree, context)


def _mask(round: PendingRound, sequence: TokenSequence, tree: TokenTree) -> Mask:
    """Makes of logits (nodes + 1, V) before ``tree`` and after each node what the target samples from.

    What the model's generation_config.json asks for is applied, and what may not come next is taken out.
    """
    constraint, before = round.session.constraint, round.draft.confirmed
    return lambda logits: processed(
        logits, sequence.processor, constraint, sequence.tokens[:before], tree.tokens, tree.parents
    )


def _context(round: PendingRound) -> RoundContext:
    session, draft = round.session, round.draft
    return RoundContext(session.sampling, session.request.seed, draft.reply, draft.round, draft.confirmed)


def _sequence(reply: ReplyState) -> TokenSequence:
    sequence = reply.sequence
    assert isinstance(sequence, TokenSequence), "this target has not read the reply's observation"
    return sequence


def _judge(round: PendingRound, drafted: TokenTree, tree: TokenTree) -> Judge:
    """Turns logits (nodes + 1, V) into a verdict on ``tree``, the part of ``drafted`` that fits the context.

    SamplingError or PackingError if what the draft brings does not prove all of ``drafted``.
    """
    session = round.session
    method = method_of(session.proof, session.sampling.greedy)
    evidence = method.read(round.draft.evidence, drafted, session.request.vocab_size)
    context = _context(round)
    return lambda logits: method.verify(tree, evidence, logits, context)
