# SPDX-License-Identifier: Apache-2.0
"""Shared randomness: both sides derive the same Gumbel noise, so nothing but token ids travels (see ``coupling``).

The target emits argmax(log p + G), its own sample whatever was drafted; the robot drafts argmax(log q + G).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose, scores
from dsd_ros.decoding.methods.base import DraftVerdict, Drawn, RoundContext, as_it_is, no_evidence, read_nothing
from dsd_ros.decoding.rejection import follow_tree
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.tree import TokenTree

evidence = no_evidence
read = read_nothing
finish = as_it_is


def draw_from(logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn:
    """Robot: log q + G (n, V) of the reply's ``positions``, whose largest entries are drafted."""
    q = transform(logits, context.sampling)
    noise = [context.noise(position, q.shape[-1]) for position in positions]
    return torch.from_numpy(scores(q, np.stack(noise))), []


def verify(tree: TokenTree, evidence: None, logits: torch.Tensor, context: RoundContext) -> DraftVerdict:
    """Cloud: accept while a child is argmax(log p + G), then emit argmax(log p + G)."""
    p = context.p(logits)
    depths = (0, *tree.depths)

    def emitted(node: int) -> int:
        position = context.start + depths[node + 1]
        return choose(p[node + 1], context.noise(position, p.shape[-1]))

    found = follow_tree(tree, emitted)
    return DraftVerdict(found.last + 1, found.next_token)
