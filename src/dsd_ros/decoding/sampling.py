# SPDX-License-Identifier: Apache-2.0
"""From logits to the sampled distribution, and a draw from it.

What is sampled and what is verified must go through the same transform, so both sides of a session call
``transform`` with the settings agreed when it opened.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dsd_ros.decoding.settings import SamplingError, SamplingSettings

_COLDEST = 1e-12  # below, float32 would divide 0 by 0


def transform(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Probabilities (..., V) float32 of logits (..., V); one-hot at the argmax when greedy.

    A logit of minus infinity is a token that cannot occur. SamplingError for NaN, or when no token can occur.
    """
    logits = logits.float()
    highest = highest_of(logits)
    if settings.greedy:
        probabilities = torch.zeros_like(logits)
        return probabilities.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    # The likeliest token stays at 0; at low temperatures the others go to minus infinity at worst.
    scaled = (logits - highest) / max(settings.temperature, _COLDEST)
    if 0 < settings.top_k < scaled.shape[-1]:
        kept, ids = scaled.topk(settings.top_k, dim=-1)
        scaled = torch.full_like(scaled, -math.inf).scatter_(-1, ids, kept)
    probabilities = torch.softmax(scaled, dim=-1)
    if settings.top_p < 1.0:
        probabilities = _nucleus(probabilities, settings.top_p)
    return probabilities


def highest_of(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, (..., 1); SamplingError for NaN, or when no token can occur."""
    highest = logits.amax(dim=-1, keepdim=True)
    if not all(map(math.isfinite, highest.flatten().tolist())):
        raise SamplingError("the model's logits are not finite; its weights or precision are broken")
    return highest


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens with a mass of at least top_p, renormalized."""
    # A nucleus is usually small, and sorting a whole vocabulary takes tens of milliseconds.
    ordered, ids = probabilities.topk(min(1024, probabilities.shape[-1]), dim=-1)
    if bool((ordered.double().sum(dim=-1) < top_p).any()):
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.double().cumsum(dim=-1) - ordered
    kept = torch.where(mass_before < top_p, ordered, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, ids, kept)


def sample(probabilities: torch.Tensor, generator: np.random.Generator) -> int:
    """Draw an index from weights (V,), which need not sum to one; an index of weight 0 is never drawn."""
    cumulative = probabilities.double().cumsum(dim=0)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0.0):
        raise SamplingError("cannot draw from weights that are not probabilities")
    # The first index whose cumulative weight exceeds the draw, which never has weight 0.
    draw = torch.tensor(generator.random() * total, dtype=torch.float64, device=cumulative.device)
    index = int(torch.searchsorted(cumulative, draw, right=True))
    if index == len(cumulative):  # the product was rounded up to the total
        index = int(probabilities.nonzero()[-1])
    return index


def generator_for(side: str, seed: int, reply: int, round_number: int) -> np.random.Generator:
    """The random stream of one side in one round of one reply.

    side: "draft" or "verifier", or "resample" for the robot drawing a recovered token. The key names the round, so a
    retransmitted round draws the same. The sides never share a stream: acceptance must be independent of the draft.
    """
    stream = {"draft": 1, "verifier": 2, "resample": 3}[side]
    return np.random.default_rng([stream, seed, reply, round_number])
