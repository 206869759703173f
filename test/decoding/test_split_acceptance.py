# SPDX-License-Identifier: Apache-2.0
"""Split verification with rounded-up probabilities is exact; the plain residual would not be."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from law import joint_law

from dsd_ros.decoding import rejection
from dsd_ros.decoding.methods import DraftVerdict, Result, RoundContext, split
from dsd_ros.decoding.methods.split import LEAST_CHANCE, rounded_up, split_residual
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import ROOT, TokenTree


def test_a_forecast_of_the_recovered_token_mostly_comes_true():
    """The cloud lacks q, the robot has it, and both draw with the noise of the position."""
    sampling, tree, held = SamplingSettings(temperature=1.0), TokenTree.chain([3, 5]), 0
    rng = np.random.default_rng(4)
    for seed in range(300):
        logits = rng.normal(size=(2, 40)) * 2
        q, p = (torch.softmax(torch.tensor(x, dtype=torch.float32), 0) for x in (logits[0], logits.mean(0)))
        context = RoundContext(sampling, seed, 1, 2, 7)
        verdict = DraftVerdict(1, 0, p[None])
        said = split.forecast(verdict, tree, context)
        assert said.accepted == 1 and said.target is None and said.next_token != 5
        draft = SimpleNamespace(tree=tree, q=[q, q], context=context)
        result = split.finish(draft, Result(1, 0, split.pack_target(p[None], False), 40))
        assert result.recovered == (result.next_token,)
        held += result.next_token == said.next_token
    assert held > 150
    known = DraftVerdict(2, 9)
    assert split.forecast(known, tree, context) is known


class Uniform:
    """A random number that is decided when it is compared with something, so that ``law`` can enumerate both ways."""

    def __init__(self, rng, scale: float = 1.0) -> None:
        self.rng, self.scale = rng, scale

    def __mul__(self, factor: float) -> Uniform:
        return Uniform(self.rng, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        return bool(self.rng.binomial(1, min(1.0, bound / self.scale)))

    def __ge__(self, bound: float) -> bool:
        return not self < bound


def drawn(weights: torch.Tensor, rng) -> int:
    chances = weights.double().numpy()
    return rng.choice(len(chances), chances / chances.sum())


@pytest.mark.parametrize(("expansion", "size"), [((1,), 3), ((1, 1), 3), ((2,), 3), ((2, 2), 2)])
def test_what_cloud_and_robot_emit_together_is_the_target(monkeypatch, expansion, size):
    """By enumeration of all draws, with coarse chances, whose residual is another than max(0, p - q)."""
    monkeypatch.setattr(split, "rounded_up", coarse)
    monkeypatch.setattr(split, "choose", drawn)  # by the noise
    for module in (split, rejection):
        monkeypatch.setattr(module, "sample", lambda weights, generator: drawn(weights, generator.random().rng))

    def after(seed: int, tokens: list[int]) -> torch.Tensor:
        return row(int("".join(map(str, (seed, *tokens)))), size)

    def round_(before: list[int], rng) -> tuple[int, ...]:
        paths, tree = [before], TokenTree((), ())
        for level in range(len(expansion)):
            for node in [ROOT] if level == 0 else [n for n, depth in enumerate(tree.depths) if depth == level]:
                for _ in range(expansion[level]):
                    x = drawn(after(2, paths[node + 1]), rng)
                    tree = TokenTree((*tree.tokens, x), (*tree.parents, node))
                    paths.append([*paths[node + 1], x])
        context = SimpleNamespace(
            p=lambda rows: rows, generator=lambda _: SimpleNamespace(random=lambda: Uniform(rng)),
            noise=lambda *_: rng, start=0,
        )  # fmt: skip
        draft = SimpleNamespace(tree=tree, q=[after(2, paths[node + 1]) for node in tree.inner], context=context)
        r = [float(coarse(after(2, path[:-1]))[path[-1]]) for path in paths[1:]]
        p = torch.stack([after(1, path) for path in paths])
        verdict = split.verify(tree, r, p, context)
        target = b"" if verdict.target is None else split.pack_target(verdict.target, tree.branches)
        result = split.finish(draft, Result(verdict.accepted, verdict.next_token, target, size))
        return (*tree.tokens_of(tree.path_to(result.accepted - 1)), result.next_token)

    joint = joint_law(round_, size, 2)
    alone = [[float(after(1, [])[x] * after(1, [x])[y]) for y in range(size)] for x in range(size)]
    assert joint == pytest.approx(np.array(alone), abs=1e-5)


def row(seed: int, size: int) -> torch.Tensor:
    values = np.random.default_rng(seed).dirichlet(np.full(size, 0.5))
    return torch.from_numpy(values.astype(np.float32))


def coarse(q: torch.Tensor) -> torch.Tensor:
    """Up to the next power of two: as exact, and what it takes to see a wrong residual in few samples."""
    return torch.exp2(torch.ceil(torch.log2(q.float().clamp(min=LEAST_CHANCE)))).clamp(max=1.0)


@given(st.floats(0, 1, width=32))
def test_a_chance_is_rounded_to_the_next_of_those_that_travel(value):
    q = torch.tensor([value], dtype=torch.float32)
    r = rounded_up(q)
    bits = int(r.view(torch.int32))
    assert bits & 0xFFFF == 0 and LEAST_CHANCE <= float(r) <= 1 and float(r) >= float(q)
    below = torch.tensor([bits - 0x10000], dtype=torch.int32).view(torch.float32)
    assert float(q) <= LEAST_CHANCE or float(below) < float(q)
    assert rounded_up(r).tolist() == r.tolist()


@given(st.integers(0, 1 << 30), st.integers(2, 9), st.integers(-3, 3), st.booleans())
def test_what_is_emitted_is_the_target(seed, size, difference, rough):
    p, q = row(seed, size), row(seed + 1, max(2, size + difference))
    with pytest.MonkeyPatch.context() as patch:
        if rough:
            patch.setattr(split, "rounded_up", coarse)
        before = p.clone(), q.clone()
        rest = split_residual(p, q).double().numpy()
        assert torch.equal(p, before[0]) and torch.equal(q, before[1])
        r = split.rounded_up(q).double().numpy()
    emitted = np.zeros(size)
    for x, q_x in enumerate(q.double().tolist()):
        if x < size and q_x > 0:
            emitted[x] += q_x * min(1, float(p[x]) / r[x])
    rejected = float(q.double().sum()) - emitted.sum()
    emitted += rejected * rest / rest.sum()
    assert emitted == pytest.approx(p.double().numpy(), abs=1e-6)


def test_the_target_is_drawn_from_where_nothing_is_left():
    p = torch.tensor([0.5, 0.5])
    assert split_residual(p, p).tolist() == [0.5, 0.5]
