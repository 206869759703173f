"""What a token tree costs a round of the verifier beside its model: reading it, mask and positions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from dsd_ros.decoding.tree import MAX_NODES, ROOT, TokenTree
from dsd_ros.vlm.trees import TreeLayout

PAST = 1024  # tokens in front of the tree
_HEAD = 64
_WARM_UP = 20  # passes that are not counted


def _shapes(nodes: int) -> dict[str, tuple[int, ...]]:
    """Parents of trees of ``nodes`` nodes: the deepest, the widest and what is in between."""
    return {
        "chain": tuple(range(-1, nodes - 1)),
        "binary": tuple((node - 2) // 2 for node in range(nodes)),
        "star": (ROOT,) * nodes,
    }


def tree_costs(passes: int = 400, nodes: int = MAX_NODES) -> list[dict[str, Any]]:
    """Milliseconds of CPU for one pass over a tree of ``nodes`` nodes behind PAST tokens, by its shape.

    What is timed is all that a tree needs and a sequence does not: checking it as it comes from the
    wire, the ancestor mask, each node's position and the rotations gathered for them.
    """
    cos, sin = torch.rand(2, 1, PAST + nodes + 1, _HEAD)
    rows = []
    for name, parents in _shapes(nodes).items():
        sent = TokenTree(tuple(range(nodes)), parents).parents_bytes()
        seconds = []
        for _ in range(_WARM_UP + passes):
            began = time.thread_time()
            tree = TokenTree.from_bytes(range(nodes), sent)
            layout = TreeLayout.of(tree.parents, 0, PAST, 1)
            _ = torch.from_numpy(layout.mask)[None, None]
            positions = torch.from_numpy(layout.positions)
            _ = cos[:, positions], sin[:, positions]
            seconds.append(time.thread_time() - began)
        median, p95 = 1e3 * np.percentile(seconds[_WARM_UP:], [50, 95])
        rows.append(
            {"tree": name, "nodes": nodes, "median_ms": round(float(median), 3), "p95_ms": round(float(p95), 3)}
        )
    return rows
