# SPDX-License-Identifier: Apache-2.0
"""Temperature 0: the target's most likely tokens, whatever was drafted. Token ids alone travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsd_ros.decoding.methods.base import DraftVerdict, Drawn, RoundContext, as_it_is, no_evidence, read_nothing
from dsd_ros.decoding.rejection import verify_tree_greedy
from dsd_ros.decoding.sampling import highest_of
from dsd_ros.decoding.tree import TokenTree

evidence = no_evidence
read = read_nothing
finish = as_it_is


def draw_from(logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn:
    """Robot: the logits (n, V) themselves, of which the most likely are drafted. SamplingError if not finite."""
    highest_of(logits)
    return logits, []


def verify(tree: TokenTree, evidence: None, logits: torch.Tensor, context: RoundContext) -> DraftVerdict:
    """Cloud: accept while a child is the target's argmax, then emit the target's argmax."""
    highest, tokens = logits.max(dim=-1)
    if not all(map(math.isfinite, highest.tolist())):
        raise FloatingPointError("the target's logits are not finite")
    found = verify_tree_greedy(tree, tokens.tolist())
    return DraftVerdict(found.last + 1, found.next_token)
