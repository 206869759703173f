# SPDX-License-Identifier: Apache-2.0
"""How a draft is proved: one module per method, all with the same functions.

    draw_from(logits, positions, context)   robot: what the draft's tokens are drawn from
    evidence(draft)                         robot: what travels with the tokens
    read(data, tree, vocab_size)            cloud: that evidence, checked
    verify(tree, evidence, logits, context) cloud: how much of the draft is accepted, and what follows
    finish(draft, result)                   robot: draw the recovered token after a rejection (DSSD alone)

Both sides derive everything random from the round's name (``RoundContext``), so a round that is sent again is decided
the same way. A sequence is a tree without branches: the rules of trees (TSLT, MCVeri) are then those of sequences.
"""

from __future__ import annotations

from dsd_ros.decoding.methods import coupled, full, greedy, split, truncated
from dsd_ros.decoding.methods.base import Drafted, DraftVerdict, Method, Result, ResultError, RoundContext
from dsd_ros.decoding.modes import Proof

__all__ = ["DraftVerdict", "Drafted", "Method", "Result", "ResultError", "RoundContext", "method_of"]

_BY_PROOF: dict[Proof, Method] = {
    Proof.FULL: full,
    Proof.SPLIT: split,
    Proof.TRUNCATED: truncated,
    Proof.COUPLED: coupled,
}


def method_of(proof: Proof, greedy_sampling: bool) -> Method:
    """The method for a proof; at temperature 0 token ids alone are enough."""
    return greedy if greedy_sampling else _BY_PROOF[proof]
