# SPDX-License-Identifier: Apache-2.0
"""TSLT: sparsify, then sample. The draft is drawn from truncated distributions, and only what is kept of them travels.

The target verifies against exactly what the tokens were drawn from, so this is as exact as ``full``. Cutting a
distribution after drawing from it would not be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsd_ros.decoding.methods import full
from dsd_ros.decoding.methods.base import Drafted, Drawn, RoundContext, as_it_is
from dsd_ros.decoding.packing import pack_kept, unpack_kept
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.decoding.truncation import restored, truncate

verify = full.verify
finish = as_it_is


def draw_from(logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn:
    """Robot: q_hat (n, V), the K most likely tokens (or the smallest nucleus of mass rho) of q, renormalised."""
    q = transform(logits, context.sampling)
    kept = [truncate(row, context.top_k, context.top_rho, context.weights) for row in q]
    # Before anything is drawn: verification must use what the tokens were drawn from.
    return torch.stack([restored(*row, q.shape[-1]) for row in kept]), kept


def evidence(draft: Drafted) -> bytes:
    """Robot: ids and weights of what is kept of q_hat, for every node with children."""
    return pack_kept(draft.kept, draft.vocab_size) if draft.q else b""


def read(data: bytes, tree: TokenTree, vocab_size: int) -> torch.Tensor:
    """Cloud: q_hat (inner nodes, V), bit for bit the robot's. Errors as of ``full.read``."""

    def rows() -> torch.Tensor:
        return torch.stack([restored(*row, vocab_size) for row in unpack_kept(data, len(tree.inner), vocab_size)])

    return full.checked_rows(data, tree, rows)
