"""From the target's logits of a round to a verdict, by what proves the session's drafts.

A sequence is judged as a tree without branches: the rules of trees are then those of sequences.
"""

from __future__ import annotations

import torch

from dsd_ros.cloud.exits import Judge
from dsd_ros.cloud.sessions import Session
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.rejection import Verdict
from dsd_ros.decoding.sampling import SamplingError, generator_for, transform
from dsd_ros.decoding.tree import (
    TokenTree,
    TreeVerdict,
    check_tree,
    follow_tree,
    remaining_nodes,
    verify_split_tree,
    verify_tree,
    verify_tree_greedy,
)
from dsd_ros.decoding.truncation import restored
from dsd_ros.wire.codec import unpack_distributions
from dsd_ros.wire.messages import Draft
from dsd_ros.wire.packing import unpack_chances, unpack_kept


def judge_of(session: Session, draft: Draft, drafted: TokenTree, room: int) -> Judge:
    """What turns logits (nodes + 1, V) into a verdict on the nodes at most ``room`` deep of ``drafted``.

    SamplingError or WireError when what the draft brings does not prove all of ``drafted``.
    """
    tree = drafted.cut(room)
    sampling, seed = session.sampling, session.request.seed

    def by_argmax(logits: torch.Tensor) -> Verdict:
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise FloatingPointError("the target's logits are not finite")
        return _verdict(verify_tree_greedy(tree, logits.argmax(dim=-1).tolist()))

    def by_noise(logits: torch.Tensor) -> Verdict:
        p = transform(logits, sampling).cpu()
        depths = (0, *tree.depths)

        def emitted(node: int) -> int:
            position = draft.confirmed + depths[node + 1]
            return choose(p[node + 1], gumbel(seed, draft.reply, position, p.shape[-1]))

        return _verdict(follow_tree(tree, emitted))

    def by_chances(logits: torch.Tensor) -> Verdict:
        generator = generator_for("verifier", seed, draft.reply, draft.round)
        p = transform(logits, sampling).cpu()
        found = verify_split_tree(tree, chances, p, generator)
        if not found.owed:
            return _verdict(found)
        rows = [found.last, *remaining_nodes(tree, found.last)]
        return Verdict(found.last + 1, 0, p[[node + 1 for node in rows]])

    def by_distributions(logits: torch.Tensor) -> Verdict:
        generator = generator_for("verifier", seed, draft.reply, draft.round)
        return _verdict(verify_tree(tree, q, transform(logits, sampling).cpu(), generator))

    if sampling.greedy:
        return by_argmax
    if session.proof is Proof.COUPLED:
        return by_noise
    if session.proof is Proof.SPLIT:
        chances = unpack_chances(draft.evidence, len(drafted))[: len(tree)].tolist()
        return by_chances
    q = _distributions(session, draft, drafted)[: len(tree.inner)]
    return by_distributions


def most_owed(tree: TokenTree, node: int) -> int:
    """How many tokens a robot can add where the first child of ``node`` is rejected."""
    depths = (0, *tree.depths)
    here = depths[node + 1]
    return 1 + max((depths[left + 1] - here for left in remaining_nodes(tree, node)), default=0)


def _verdict(found: TreeVerdict) -> Verdict:
    return Verdict(found.last + 1, found.next_token)


def _distributions(session: Session, draft: Draft, drafted: TokenTree) -> torch.Tensor:
    """What each inner node's children were drawn from, (inner, V), checked."""
    rows, size = len(drafted.inner), session.request.vocab_size
    if not rows:
        return torch.empty(0, 0)
    if not draft.evidence:
        raise SamplingError("a sampled draft was sent without its distributions")
    if session.proof is Proof.TRUNCATED:
        kept = unpack_kept(draft.evidence, rows, size)
        q = torch.stack([restored(*row, size) for row in kept])
    else:
        q = unpack_distributions(draft.evidence, rows, size)
    check_tree(drafted, q)
    return q
