# SPDX-License-Identifier: Apache-2.0
"""DSSD: split verification. One probability per drafted token goes up; after a rejection one distribution comes down.

The cloud accepts by the drafted tokens' own probabilities; where it rejects, it sends p, and the robot, which still has
q, draws what follows. The probabilities travel rounded up to 12 bits (r >= q), which the residual accounts for, so the
result is exact. For trees the same holds level by level: what is left of the tree is decided on the robot.

A sequence's recovered token is drawn with noise that both sides know. So the cloud, which lacks q, can still forecast
it (``forecast``), and early exits can name outcomes; the token itself does not depend on the forecast.
Source: DSSD, Algorithms 1 and 2 (their acceptance ratio is printed upside down); trees: TSLT, MCVeri.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.methods.base import Drafted, DraftVerdict, Drawn, Result, ResultError, RoundContext
from dsd_ros.decoding.packing import (
    PackingError,
    count_rows,
    pack_chances,
    pack_distribution,
    pack_rows,
    unpack_chances,
    unpack_distribution,
    unpack_rows,
)
from dsd_ros.decoding.rejection import TreeVerdict, WalkState, probability_of, walk
from dsd_ros.decoding.sampling import sample, transform
from dsd_ros.decoding.settings import SamplingError, TreeError
from dsd_ros.decoding.tree import ROOT, TokenTree

LEAST_CHANCE = 2.0**-31  # the smallest probability that travels


def draw_from(logits: torch.Tensor, positions: Sequence[int], context: RoundContext) -> Drawn:
    """Robot: q (n, V) by the sampling transform that the target's logits get."""
    return transform(logits, context.sampling), []


def evidence(draft: Drafted) -> bytes:
    """Robot: q(x) of each drafted token, in 12 bits, rounded up."""
    if not draft.q:
        return b""
    tree = draft.tree
    row_of = dict(zip(tree.inner, draft.q, strict=True))
    chances = [row_of[parent][x] for x, parent in zip(tree.tokens, tree.parents, strict=True)]
    return pack_chances(rounded_up(torch.stack(chances)).numpy())


def read(data: bytes, tree: TokenTree, vocab_size: int) -> list[float]:
    """Cloud: r(x) of each drafted token; PackingError for another size."""
    chances: list[float] = unpack_chances(data, len(tree)).tolist()
    return chances


def verify(tree: TokenTree, evidence: list[float], logits: torch.Tensor, context: RoundContext) -> DraftVerdict:
    """Cloud: accept x with min(1, p(x) / r(x)); at the first rejection p comes down."""
    p = context.p(logits)
    found = verify_split_tree(tree, evidence[: len(tree)], p, context.generator("verifier"))
    if not found.owed:
        return DraftVerdict(found.last + 1, found.next_token)
    rows = [found.last, *remaining_nodes(tree, found.last)]
    return DraftVerdict(found.last + 1, 0, p[[node + 1 for node in rows]])


def pack_target(target: torch.Tensor, branches: bool) -> bytes:
    """Cloud: the rows p (n, V) of a rejection as bytes; ``branches``: of a tree."""
    rows = target.numpy()
    return pack_rows(list(rows)) if branches else pack_distribution(rows[0])


def finish(draft: Drafted, result: Result) -> Result:
    """Robot: after a rejection a token from norm(max(0, p - q min(1, p / r))); for a tree, verify what is left of it.

    ResultError for rows that the verifier cannot mean.
    """
    if not result.target:
        return result
    tree, node = draft.tree, result.accepted - 1
    if not (node < len(tree) and tree.children(node)):
        raise ResultError(
            "the verifier sent a distribution where none was rejected; it does not follow the protocol", "out-of-step"
        )
    try:
        p = _rows(result, tree, node)
        if not tree.branches:
            residual = split_residual(p[0], draft.q[tree.inner.index(node)])
            token = _drawn(residual, draft.context, result.accepted)
            return Result(result.accepted, token, recovered=(token,))
        found = finish_split_tree(tree, node, torch.stack(list(draft.q)), p, draft.context.generator("resample"))
    except (PackingError, SamplingError) as error:
        raise ResultError(f"the verifier's distribution cannot be used: {error}") from error
    added = found.path[len(tree.path_to(node)) :]
    return Result(found.last + 1, found.next_token, recovered=(*tree.tokens_of(added), found.next_token))


def forecast(verdict: DraftVerdict, tree: TokenTree, context: RoundContext) -> DraftVerdict:
    """Cloud: ``verdict`` with the token that the robot will probably draw, where that is the robot's; for early exits.

    The residual differs from p by q, of which the cloud knows the rejected token's share alone. With the same noise
    the two mostly draw the same token.
    """
    if verdict.target is None:
        return verdict
    p, x = verdict.target[0].clone(), tree.tokens[tree.children(verdict.accepted - 1)[0]]
    if x < len(p):
        p[x] = 0.0
    weights = p if float(p.sum()) > 0.0 else verdict.target[0]
    return DraftVerdict(verdict.accepted, _drawn(weights, context, verdict.accepted))


def _drawn(weights: torch.Tensor, context: RoundContext, accepted: int) -> int:
    """The token that the shared noise selects of weights (V,), after ``accepted`` tokens of the round's draft."""
    return choose(weights / weights.sum(), context.noise(context.start + accepted, len(weights)))


def _rows(result: Result, tree: TokenTree, node: int) -> torch.Tensor:
    """p (n, V) of ``node``, whose first child is rejected, and of the nodes that are left."""
    if not tree.branches:
        return torch.from_numpy(unpack_distribution(result.target, result.vocab_size)[None])
    # Fewer rows if the verifier cut the tree to fit its context.
    count = count_rows(result.target, 1 + len(remaining_nodes(tree, node)))
    return torch.from_numpy(np.stack(unpack_rows(result.target, count, result.vocab_size)))


def most_recovered(tree: TokenTree, node: int) -> int:
    """How many tokens a robot can add where the first child of ``node`` is rejected."""
    depths = (0, *tree.depths)
    here = depths[node + 1]
    return 1 + max((depths[left + 1] - here for left in remaining_nodes(tree, node)), default=0)


def rounded_up(q: torch.Tensor) -> torch.Tensor:
    """The smallest number not below q, 0..1, among those that the 12 bits on the wire can hold; float32.

    They are 2^-31..1 with seven bits after the leading one, so at most a relative 2^-7 is added.
    """
    bits = q.float().clamp(LEAST_CHANCE, 1.0).contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def split_residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the recovered token is drawn from where x was accepted with min(1, p(x) / r(x)), (V_p,), unnormalised.

    r is ``rounded_up`` q. Acceptance emits x with probability q(x) min(1, p(x) / r(x)); this is the rest of p. It is
    exact for any r >= q, which max(0, p - q) is not. p where nothing is left.
    """
    shared = min(len(p), len(q))
    q = q[:shared].float()
    rest = p.to(torch.float64, copy=True)
    rest[:shared] -= q * (rest[:shared] / rounded_up(q)).clamp(max=1.0)
    rest = rest.clamp(min=0.0).float()
    return rest if float(rest.sum()) > 0.0 else p


def remaining_nodes(tree: TokenTree, node: int) -> tuple[int, ...]:
    """What is left of a tree after ``node``'s first child is rejected: its other children's subtrees, in node order.

    Those of the same tree cut at a depth are therefore the first ones.
    """
    inside = set(tree.children(node)[1:])
    for candidate in range(node + 1, len(tree)):
        if tree.parents[candidate] in inside:
            inside.add(candidate)
    return tuple(sorted(inside))


def verify_split_tree(
    tree: TokenTree, r: Sequence[float], p: torch.Tensor, generator: np.random.Generator
) -> TreeVerdict:
    """The cloud's half of split verification of a tree: first children alone, as it does not know q.

    r: each node's q(x) or a little more (``rounded_up``); p: (len(tree) + 1, V) as for ``verify_tree``. An ``owed``
    verdict says where the first child is rejected: the robot goes on with ``finish_split_tree``. For a tree
    without branches this is DSSD. SamplingError for r that are no probabilities.
    """
    if len(r) != len(tree) or not all(0.0 < r_x <= 1.0 for r_x in r):
        raise SamplingError(f"{len(tree)} nodes need as many probabilities above 0 and up to 1")
    if len(p) != len(tree) + 1:
        raise SamplingError(f"a tree of {len(tree)} nodes needs {len(tree) + 1} rows of p, not {len(p)}")
    node = ROOT
    while children := tree.children(node):
        child = children[0]
        if generator.random() * r[child] >= probability_of(tree.tokens[child], p[node + 1]):
            return TreeVerdict(tree.path_to(node), 0, owed=True)
        node = child
    return TreeVerdict(tree.path_to(node), sample(p[node + 1], generator))


def finish_split_tree(
    tree: TokenTree, node: int, q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator
) -> TreeVerdict:
    """The robot's half: go on where the cloud rejected the first child of ``node``.

    Both halves together give tokens distributed as the target's alone. q: as for ``verify_tree``. p:
    (1 + len(remaining_nodes(tree, node)), V), the target's after ``node`` and after those; fewer rows if the cloud
    cut the tree at a depth to make it fit its context. The verdict's path begins at the root. SamplingError when
    shapes do not fit, TreeError for a node without children.
    """
    if not tree.children(node):
        raise TreeError(f"node {node} of a tree of {len(tree)} has no child to be rejected")
    left = remaining_nodes(tree, node)
    if len(q) == len(tree.inner) and 1 < len(p) <= len(left):
        tree = tree.cut(tree.depths[left[len(p) - 2]])
        q, left = q[: len(tree.inner)], remaining_nodes(tree, node)
    if len(q) != len(tree.inner) or len(p) != len(left) + 1:
        raise SamplingError(
            f"what is left of the tree after node {node} needs {len(tree.inner)} rows of q and "
            f"{len(left) + 1} of p, not {len(q)} and {len(p)}"
        )
    p_row = {other: row for row, other in enumerate(left, 1)}
    weights = split_residual(p[0], q[tree.inner.index(node)])
    here = WalkState(node, tree.children(node)[1:], weights, float(weights.sum()))
    return walk(tree, here, q, lambda other: p[p_row[other]], generator)
