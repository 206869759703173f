"""A round as it is sent."""

from __future__ import annotations

import torch

from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.rejection import rounded_up
from dsd_ros.edge.draft_model import DraftedRound
from dsd_ros.wire.codec import pack_distributions
from dsd_ros.wire.messages import Draft, prefix_digest
from dsd_ros.wire.packing import pack_chances, pack_kept


def draft_message(
    session: int, drafted: DraftedRound, resampled: list[int] | None = None, ahead: bool = False
) -> Draft:
    """The message of a round. ``resampled``: what the robot determined behind the rejection in front of it.

    ``ahead``: the tokens in front of it are assumed, and named by their digest.
    """
    draft, proof = drafted.draft, drafted.drafting.proof
    tree, q = draft.tree, draft.q
    evidence = b""
    if q and proof is Proof.FULL:
        evidence = pack_distributions(torch.stack(q))
    elif q and proof is Proof.SPLIT:
        row_of = dict(zip(tree.inner, q, strict=True))
        chances = [row_of[parent][x] for x, parent in zip(tree.tokens, tree.parents, strict=True)]
        evidence = pack_chances(rounded_up(torch.stack(chances)).numpy())
    elif q and proof is Proof.TRUNCATED:
        evidence = pack_kept(draft.kept, draft.sequence.model.vocab_size)
    return Draft(
        session=session,
        reply=drafted.drafting.reply,
        round=drafted.number,
        confirmed=len(drafted.prefix),
        tokens=draft.tokens,
        evidence=evidence,
        parents=tree.parents_bytes() if tree.branches else b"",
        assumed=prefix_digest(drafted.prefix) if ahead else b"",
        resampled=resampled or [],
    )
