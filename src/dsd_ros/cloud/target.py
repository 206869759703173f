"""Targets: what verifies rounds, be it a model in this process or another way to learn which tokens follow a prefix.

The engine, the sessions and the server know a target by the ``Target`` protocol alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from dsd_ros.cloud.exits import ExitListener, Judge, confidence_of
from dsd_ros.cloud.sessions import Prefix
from dsd_ros.cloud.verification import PendingRound, RoundRefused, microseconds_since, take_recovered
from dsd_ros.decoding.methods import DraftVerdict, RoundContext, method_of, split
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import LayerHook, Sequence as TokenSequence
from dsd_ros.wire.messages import Outcome

OnEarly = Callable[[PendingRound, Outcome], object]


class TargetModel(Protocol):
    """What a verifier reports about its model."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...


@runtime_checkable
class Target(Protocol):
    """Verifies rounds. Called by the engine's worker thread alone."""

    @property
    def model(self) -> TargetModel: ...

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The layers that can forecast a round's outcome; empty when there are none."""

    def prefill(self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]) -> Prefix:
        """Read an observation: RGB uint8 (H, W, 3) and, oldest first, earlier pictures with their actions.

        VlmError for what the model cannot read.
        """

    def verify(
        self, rounds: Sequence[PendingRound], on_early: OnEarly
    ) -> Iterator[tuple[PendingRound, Outcome | RoundRefused]]:
        """Verify at most one round of each reply, and leave each reply's prefix at its verified tokens.

        ``on_early`` gets the outcomes of early exits in the meantime. Each round is yielded once, in any order,
        as soon as its result is known. A refused round leaves its reply unchanged. Never raises for one round.
        """


class LocalTarget:
    """A model in this process: all methods, trees, early exits. One pass a round."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.model = model

    @property
    def exit_layers(self) -> tuple[int, ...]:
        adapters = getattr(self.model, "exits", None)
        return () if adapters is None else tuple(adapters.layers)

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]
    ) -> TokenSequence:
        return self.model.prefill(image, instruction, history)

    def verify(
        self, rounds: Sequence[PendingRound], on_early: OnEarly
    ) -> Iterator[tuple[PendingRound, Outcome | RoundRefused]]:
        for round in rounds:
            yield round, self._verify(round, on_early)

    def _verify(self, round: PendingRound, on_early: OnEarly) -> Outcome | RoundRefused:
        sequence, reply = _sequence(round), round.reply
        before, owed = len(sequence.tokens), reply.owed
        try:
            return self._run(round, sequence, on_early)
        except Exception as error:
            sequence.rollback(before)
            reply.owed = owed
            return RoundRefused.of(error)

    def _run(self, round: PendingRound, sequence: TokenSequence, on_early: OnEarly) -> Outcome:
        model, draft = self.model, round.draft
        # What exceeds the context cannot be verified; a shorter draft is just as exact.
        room = max(0, model.max_length - sequence.prompt_length - draft.confirmed)
        drafted = TokenTree.from_bytes(draft.tokens, draft.parents)
        tree = drafted.cut(room)
        judge = _judge(round, drafted, tree)
        take_recovered(round.reply, draft.resampled, model.vocab_size)
        began = time.perf_counter()

        def say(verdict: DraftVerdict, layer: int, confidence: float) -> None:
            on_early(round, round.outcome(verdict, layer, confidence, microseconds_since(began), final=False))

        listener = None
        # The token after the prompt is known: without a draft there is no pass to run ahead of.
        if round.exits is not None and (len(tree) or draft.confirmed):
            listener = ExitListener(model, round.exits, judge, say)
        logits = self._pass(sequence, tree, listener)
        if listener is not None:
            listener.harvest()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        ran_us = microseconds_since(began)
        verdict = judge(logits)
        # When p itself travels, its confidence is not used.
        confidence = confidence_of(logits[verdict.accepted]) if verdict.target is None else 0.0
        _keep(sequence, tree, draft.confirmed, verdict)
        if verdict.target is not None:
            round.reply.owed = split.most_recovered(tree, verdict.accepted - 1)
        return round.outcome(verdict, model.num_layers, confidence, ran_us, final=True)

    def _pass(self, sequence: TokenSequence, tree: TokenTree, on_layer: LayerHook | None) -> torch.Tensor:
        """Logits (nodes + 1, V) before the tree and after each node."""
        # An id beyond the target's vocabulary is rejected anyway, so any other can stand in for it.
        tokens = [token if token < self.model.vocab_size else 0 for token in tree.tokens]
        if tree.branches:
            return sequence.verify_tree(tokens, tree.parents, on_layer)
        return sequence.verify(tokens, on_layer)


def _sequence(round: PendingRound) -> TokenSequence:
    sequence = round.reply.sequence
    assert isinstance(sequence, TokenSequence), "this target has not read the reply's observation"
    return sequence


def _judge(round: PendingRound, drafted: TokenTree, tree: TokenTree) -> Judge:
    """Turns logits (nodes + 1, V) into a verdict on ``tree``, the part of ``drafted`` that fits the context.

    SamplingError or PackingError if what the draft brings does not prove all of ``drafted``.
    """
    session, draft = round.session, round.draft
    method = method_of(session.proof, session.sampling.greedy)
    evidence = method.read(draft.evidence, drafted, session.request.vocab_size)
    context = RoundContext(session.sampling, session.request.seed, draft.reply, draft.round, draft.confirmed)
    return lambda logits: method.verify(tree, evidence, logits, context)


def _keep(sequence: TokenSequence, tree: TokenTree, confirmed: int, verdict: DraftVerdict) -> None:
    """Leave the sequence at the accepted tokens and, if the target drew it, the token that follows."""
    if tree.branches:
        sequence.keep_path(tree.path_to(verdict.accepted - 1))
    else:
        sequence.rollback(confirmed + verdict.accepted)
    if verdict.target is None:
        sequence.append([verdict.next_token])
