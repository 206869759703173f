# SPDX-License-Identifier: Apache-2.0
"""The exact distribution of a random function's result, by enumeration of its draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np


class _Script:
    """Stands in for a NumPy generator: makes the choices it is given, then the first possible ones."""

    def __init__(self, choices: list[list]) -> None:
        self.choices, self.position, self.chance = choices, 0, 1.0

    def choice(self, size: int, p: np.ndarray) -> int:
        if self.position == len(self.choices):
            self.choices.append([0, [x for x in range(size) if p[x] > 0.0]])
        index, possible = self.choices[self.position]
        self.position += 1
        self.chance *= float(p[possible[index]])
        return possible[index]

    def binomial(self, count: int, p: float) -> int:
        return self.choice(2, np.array([1.0 - p, p]))


def law(function: Callable) -> dict:
    """function(rng) -> anything hashable; the probability of each result."""
    found: dict = defaultdict(float)
    choices: list[list] = []
    while True:
        rng = _Script(choices)
        result = function(rng)
        found[result] += rng.chance
        while choices and choices[-1][0] == len(choices[-1][1]) - 1:
            choices.pop()
        if not choices:
            return dict(found)
        choices[-1][0] += 1


def joint_law(round_: Callable, size: int, length: int) -> np.ndarray:
    """P(first ``length`` tokens), (size,) * length, where round_(tokens so far, rng) returns what a round adds."""
    joint = np.zeros((size,) * length)
    open_: dict[tuple, float] = {(): 1.0}
    while open_:
        prefix, chance = open_.popitem()
        for added, share in law(lambda rng, prefix=prefix: tuple(round_(list(prefix), rng))).items():
            tokens = (prefix + added)[:length]
            if len(tokens) == length:
                joint[tokens] += chance * share
            else:
                open_[tokens] = open_.get(tokens, 0.0) + chance * share
    return joint
