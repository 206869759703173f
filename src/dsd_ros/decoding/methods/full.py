# SPDX-License-Identifier: Apache-2.0
"""DSD: the draft's whole distributions travel, and the target verifies by speculative sampling.

Leviathan et al. 2023 and Chen et al. 2023 for a sequence, TSLT's MCVeri for a tree (``rejection.verify_tree``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsd_ros.decoding.methods.base import Drafted, DraftVerdict, Drawn, RoundContext, as_it_is
from dsd_ros.decoding.packing import pack_distributions, unpack_distributions
from dsd_ros.decoding.rejection import check_tree, verify_tree
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import SamplingError
from dsd_ros.decoding.tree import TokenTree

finish = as_it_is


def draw_from(logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn:
    """Robot: q (n, V) by the sampling transform that the target's logits get."""
    return transform(logits, context.sampling), []


def evidence(draft: Drafted) -> bytes:
    """Robot: q of every node with children, as float32."""
    return pack_distributions(torch.stack(list(draft.q))) if draft.q else b""


def read(data: bytes, tree: TokenTree, vocab_size: int) -> torch.Tensor:
    """Cloud: q (inner nodes, V). PackingError for another size, SamplingError if the tokens cannot come from them."""
    return checked_rows(data, tree, lambda: unpack_distributions(data, len(tree.inner), vocab_size))


def checked_rows(data: bytes, tree: TokenTree, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The rows that ``unpack`` makes of ``data``, if the tree's tokens can come from them."""
    if not tree.inner:
        return torch.empty(0, 0)
    if not data:
        raise SamplingError("a sampled draft was sent without its distributions")
    q = unpack()
    check_tree(tree, q)
    return q


def verify(tree: TokenTree, evidence: torch.Tensor, logits: torch.Tensor, context: RoundContext) -> DraftVerdict:
    """Cloud: accept x with min(1, p(x) / q(x)); after a rejection emit a sample of norm(max(0, p - q))."""
    q = evidence[: len(tree.inner)]
    found = verify_tree(tree, q, context.p(logits), context.generator("verifier"))
    return DraftVerdict(found.last + 1, found.next_token)
