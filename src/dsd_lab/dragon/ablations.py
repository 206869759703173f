# SPDX-License-Identifier: Apache-2.0
"""DRAGON as its paper has it, and with parts of it changed: what the product leaves out, over the product's own link.

Both sides are made with the same ``AblationSettings``; none of it travels. ``randomness`` independent: Algorithm 1,
each side with random numbers of its own. ``evidence`` full: all of a side's distribution travels; lossy-nucleus: a
nucleus of 0.8, as in the paper's code, which is not exact. ``schedule``: see ``papers.dragon_schedules``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from dsd_lab.dragon.algorithm_1 import IndependentDraws, decide_independently
from dsd_lab.dragon.settings import AblationSettings
from dsd_lab.papers.dragon_schedules import Schedule
from dsd_ros.decoding.aggregation import BoundedDistribution, Decision, Head, SideDraft, Undecided, head_of
from dsd_ros.decoding.packing import (
    pack_head,
    pack_kept,
    pack_probabilities,
    unpack_head,
    unpack_kept,
    unpack_probabilities,
)
from dsd_ros.decoding.sampling import sample
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.documents.retrieval import Retriever
from dsd_ros.dragon.server import DragonServer
from dsd_ros.dragon.settings import SIDES
from dsd_ros.dragon.side import AnswerSide
from dsd_ros.dragon.state import AggregationState
from dsd_ros.wire.channel import Channel
from dsd_ros.wire.messages import Proposal, Question

NUCLEUS = 0.8  # probability mass that "lossy-nucleus" evidence keeps, as in the paper's code


class AblationState(AggregationState):
    """A side's state by the settings' ``randomness`` and ``evidence``."""

    def __init__(self, settings: AblationSettings, question: Question, side: str, *args: Any) -> None:
        super().__init__(question, side, *args)
        self._settings = settings
        self._independent = question.temperature > 0.0 and settings.randomness == "independent"
        # Algorithm 1's randomness, different for each attempt, so that no draw is repeated.
        key = [question.seed, question.reply, question.attempt, SIDES.index(side) + 1]
        self._drafting, self._deciding = (np.random.default_rng([*key, stream]) for stream in (1, 2))
        self._draws: tuple[int, IndependentDraws] | None = None  # of a position: deciding again needs the same ones

    def _draw(self, p: torch.Tensor, position: int) -> int:
        return sample(p, self._drafting) if self._independent else super()._draw(p, position)

    def _decide_offers(self, device: SideDraft, cloud: SideDraft, noise: np.ndarray | None) -> Decision | Undecided:
        if not self._independent or noise is None:
            return super()._decide_offers(device, cloud, noise)
        if self._draws is None or self._draws[0] != len(self.tokens):
            self._draws = len(self.tokens), IndependentDraws(*self._deciding.random(2).tolist())
        return decide_independently(device, cloud, noise, self._draws[1])

    def _evidence(self, p: torch.Tensor, token: int, noise: np.ndarray | None) -> bytes:
        return pack_evidence(self._settings.evidence, self.question.head, p, token, noise)

    def _known_from(self, proposal: Proposal, noise: np.ndarray | None) -> BoundedDistribution:
        return unpack_evidence(self._settings.evidence, proposal.evidence, self._sizes[self.other], noise)


def pack_evidence(kind: str, head: int, p: torch.Tensor, token: int, noise: np.ndarray | None) -> bytes:
    """The evidence of a draft ``token`` from p (V,), of one of EVIDENCE; ``noise`` None: greedy."""
    if kind == "full":
        return pack_probabilities(p.numpy())
    if kind == "sparse":
        return pack_head(*head_of(p, noise, head, token), len(p))
    ids, weights = truncate(p, 0, NUCLEUS)
    if token not in ids:  # the evidence must cover the draft itself
        at = int(np.searchsorted(ids, token))
        least = np.float16(max(float(p[token] / p.max()), 1e-7))
        ids, weights = np.insert(ids, at, token), np.insert(weights, at, least)
    return pack_kept([(ids, weights)], len(p))


def unpack_evidence(kind: str, data: bytes, vocab_size: int, noise: np.ndarray | None) -> BoundedDistribution:
    """What evidence says of a distribution over ``vocab_size`` tokens; PackingError or SamplingError if invalid."""
    if kind == "full":
        return BoundedDistribution.whole(unpack_probabilities(data, vocab_size))
    if kind == "sparse":
        return BoundedDistribution.of_head(Head(*unpack_head(data, vocab_size)), vocab_size, noise)
    ((ids, weights),) = unpack_kept(data, 1, vocab_size)
    return BoundedDistribution.whole(restored(ids, weights, vocab_size))


class AblationSide(AnswerSide):
    """A side that aggregates by the settings' ``schedule``."""

    def __init__(self, settings: AblationSettings, question: Question, *args: Any) -> None:
        self._schedule = Schedule(settings.schedule, question.seed)
        self.state_class = partial(AblationState, settings)
        super().__init__(question, *args)

    def _switch(self, side: str, decision: Decision) -> bool:
        return self._schedule.switches(
            self.profile.estimates(), side, decision.device_accepted, decision.cloud_accepted, *self.state.ahead
        )


class AblationClient(DragonClient):
    """A ``DragonClient`` by ``AblationSettings``, for a cloud that was made with the same."""

    settings: AblationSettings

    def __init__(
        self,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AblationSettings | None = None,
        **options: Any,
    ) -> None:
        settings = settings or AblationSettings()
        self.side_class = partial(AblationSide, settings)
        super().__init__(channel, model, retriever, settings, **options)

    def _question(self, *args: Any) -> Question:
        return replace(super()._question(*args), head=self.settings.head, aggregator=self.settings.aggregator)


class AblationServer(DragonServer):
    """A ``DragonServer`` for an ``AblationClient``."""

    def __init__(self, ablation: AblationSettings, *args: Any, **options: Any) -> None:
        self.side_class = partial(AblationSide, ablation)
        super().__init__(*args, **options)
