# SPDX-License-Identifier: Apache-2.0
"""The evidence of a draft: the part of a side's distribution that the aggregator needs, or all of it."""

from __future__ import annotations

import numpy as np
import torch

from dsd_ros.decoding.aggregation import Head, Known, head_of
from dsd_ros.decoding.packing import (
    ids_bytes,
    kept_bytes,
    pack_head,
    pack_kept,
    pack_probabilities,
    unpack_head,
    unpack_kept,
    unpack_probabilities,
)
from dsd_ros.decoding.settings import MAX_KEPT
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.dragon.settings import NUCLEUS
from dsd_ros.wire.messages import Proposal, Question


def pack_evidence(question: Question, p: torch.Tensor, token: int, noise: np.ndarray | None) -> bytes:
    """The evidence of a draft ``token`` from p (V,), encoded as the question says; ``noise`` None: greedy."""
    if question.evidence == "full":
        return pack_probabilities(p.numpy())
    if question.evidence == "sparse":
        return pack_head(*head_of(p, noise, question.head, token), len(p))
    ids, weights = truncate(p, 0, NUCLEUS)
    if token not in ids:  # the evidence must cover the draft itself
        at = int(np.searchsorted(ids, token))
        least = np.float16(max(float(p[token] / p.max()), 1e-7))
        ids, weights = np.insert(ids, at, token), np.insert(weights, at, least)
    return pack_kept([(ids, weights)], len(p))


def most_bytes(question: Question, vocab_size: int) -> int:
    """The most bytes that one draft's evidence can take."""
    if question.evidence == "full":
        return 4 * vocab_size
    if question.evidence == "sparse":
        count = min(question.head + 1, vocab_size)
        return len(pack_head(np.arange(0), np.zeros(0), 0.0, vocab_size)) + (ids_bytes(count, vocab_size) + 4 * count)
    return 1 + kept_bytes(min(vocab_size, MAX_KEPT), vocab_size)


def unpack_evidence(question: Question, proposal: Proposal, vocab_size: int, noise: np.ndarray | None) -> Known:
    """What a proposal says of a distribution over ``vocab_size`` tokens; PackingError or SamplingError if invalid."""
    data = proposal.evidence
    if question.evidence == "full":
        return Known.whole(unpack_probabilities(data, vocab_size))
    if question.evidence == "sparse":
        return Known.of_head(Head(*unpack_head(data, vocab_size)), vocab_size, noise)
    ((ids, weights),) = unpack_kept(data, 1, vocab_size)
    return Known.whole(restored(ids, weights, vocab_size))
