# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1, and evidence "lossy-nucleus" against its definition, computed by hand.

Whoever aggregates knows of the other side's p a nucleus of 0.8 (the likeliest tokens up to the one that reaches it) in
float16, renormalised, with the draft's own token put in where it lies outside. So the token is not exactly of p.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from joint import chi_squared
from two_sides import Sides, Tables, question

from dsd_lab.dragon.ablations import pack_evidence
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.aggregation import mixture
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.packing import kept_bytes

SIZE, LENGTH = 5, 2
LOSSY = AblationSettings(evidence="lossy-nucleus")


def nucleus(p: np.ndarray, token: int) -> np.ndarray:
    """What is known of p, of which ``token`` was drawn."""
    kept, mass = [], 0.0
    for place in sorted(range(len(p)), key=lambda place: -p[place]):
        if mass >= 0.8:
            break
        kept.append(place)
        mass += p[place]
    cut = np.zeros(len(p))
    for place in {*kept, token}:
        cut[place] = np.float16(max(p[place] / p.max(), 1e-7 if place not in kept else 0.0))
    return cut / cut.sum()


def shares_of(device, cloud) -> tuple[float, float]:
    weights = np.exp([device.log_weight, cloud.log_weight])
    return tuple(weights / weights.sum())


def algorithm_1(device, cloud) -> np.ndarray:
    """The next token's distribution (V,) where the device aggregates and knows the cloud's nucleus alone."""
    p, q = device.p.double().numpy(), cloud.p.double().numpy()
    ours, theirs = shares_of(device, cloud)
    found = np.zeros(len(p))
    for drawn, chance in enumerate(q):
        known = nucleus(q, drawn)
        keep = np.minimum(1.0, ours + theirs * known / p)
        rest = np.maximum(0.0, known - p)
        by_device = p * keep + (p * (1.0 - keep)).sum() * rest / rest.sum()
        keep = min(1.0, theirs + ours * p[drawn] / known[drawn])
        rest = np.maximum(0.0, p - known)
        by_cloud = (1.0 - keep) * rest / rest.sum()
        by_cloud[drawn] += keep
        found += chance * (by_device + by_cloud) / 2.0
    return found


def joint(models: Tables, step) -> np.ndarray:
    expected = np.zeros((SIZE,) * LENGTH)
    for path in itertools.product(range(SIZE), repeat=LENGTH):
        expected[path] = 1.0
        for place in range(LENGTH):
            sides = (models.local(side, list(path[:place])) for side in ("device", "cloud"))
            expected[path] *= step(*sides)[path[place]]
    return expected


def exact(device, cloud) -> np.ndarray:
    return mixture(device.p, cloud.p, device.log_weight, cloud.log_weight).double().numpy()


def asked(**changes):
    return question(max_tokens=LENGTH, window=2, vocab_size=SIZE, head=1, **changes)


@pytest.mark.parametrize("evidence", ["sparse", "full", "lossy-nucleus"])
@pytest.mark.parametrize("samples", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_independent_draws_have_the_distribution_that_their_evidence_allows(evidence, samples):
    """The joint distribution of all tokens, whatever the timing and whoever aggregates."""
    models, order = Tables(5, size=SIZE, noise=1.2), random.Random(2)
    settings = AblationSettings(evidence=evidence, randomness="independent", temperature=1.0)
    lossy = evidence == "lossy-nucleus"
    counts = np.zeros((SIZE,) * LENGTH)
    for reply in range(samples):
        # The definition of the lossy one is for a device that aggregates.
        sides = Sides(asked(reply=reply), models, switch=lambda *_: not lossy, settings=settings)
        counts[tuple(sides.run(order.randrange))] += 1
    assert chi_squared(counts, joint(models, algorithm_1 if lossy else exact)) > 1e-3


def test_what_it_draws_from_is_not_the_mixture():
    models = Tables(5, size=SIZE, noise=1.2)
    own, whole = joint(models, algorithm_1), joint(models, exact)
    assert own.sum() == pytest.approx(1.0) and whole.sum() == pytest.approx(1.0)
    assert 0.5 * np.abs(own - whole).sum() > 0.05


@pytest.mark.parametrize("aggregator", ["device", "cloud"])
def test_shared_draws_are_those_of_the_mixture_with_a_nucleus(aggregator):
    """argmax(log p + G), in which p of the side that does not aggregate is its nucleus."""
    models, order, differ = Tables(5, size=SIZE, noise=1.2), random.Random(4), 0
    for reply in range(60):
        one = asked(reply=reply, aggregator=aggregator)
        tokens = Sides(one, models, settings=LOSSY).run(order.randrange)
        for place, token in enumerate(tokens):
            noise = gumbel(one.seed, reply, place, SIZE)
            device, cloud = (models.local(side, tokens[:place]) for side in ("device", "cloud"))
            ours, theirs = shares_of(device, cloud)
            known = {"device": device.p.double().numpy(), "cloud": cloud.p.double().numpy()}
            whole = ours * known["device"] + theirs * known["cloud"]
            other = "cloud" if aggregator == "device" else "device"
            drawn = int((np.log(known[other]) + noise).argmax())
            known[other] = nucleus(known[other], drawn)
            with np.errstate(divide="ignore"):
                p = np.log(ours * known["device"] + theirs * known["cloud"])
            assert token == int((p + noise).argmax())
            differ += token != int((np.log(whole) + noise).argmax())
    assert differ > 0  # not always the token that full distributions would give


@pytest.mark.parametrize(("vocab_size", "bits"), [(49_152, 16), (151_936, 18)])
def test_its_bytes_are_ids_and_half_floats_of_the_nucleus(vocab_size, bits):
    p = 1.0 / np.arange(1, vocab_size + 1) ** 1.5
    p = torch.from_numpy(np.random.default_rng(0).permutation(p / p.sum())).float()
    inside = int((nucleus(p.double().numpy(), int(p.argmax())) > 0).sum())
    for token, count in ((int(p.argmax()), inside), (int(p.argmin()), inside + 1)):
        data = pack_evidence("lossy-nucleus", 1, p, token, None)
        assert len(data) == 1 + kept_bytes(count, vocab_size)
        assert abs(len(data) - count * (2 + bits / 8)) < 4
    assert len(data) < 0.001 * 4 * vocab_size
