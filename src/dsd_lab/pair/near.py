"""Whether a wrong action is a near miss: one that the expert takes, too, where it misjudges the picture a little.

The expert decides by sharp edges, so that two pictures that nobody tells apart may have different right actions. An
action that is wrong by so little costs the robot nothing; going round what is not in the way is another thing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsd_lab.worlds.expert import misjudged
from dsd_lab.worlds.guide import View, decide

VIEWS = 100  # in which everything is misjudged at random, as training.doubt does it
LEAST = 5  # of them in which the expert does the same


def near_miss(view: View, goal: str, action: str) -> bool:
    """Whether the expert takes `action` ("turn left 15 degrees") in LEAST of VIEWS misjudged views.

    The draws are a picture's own, the same each time.
    """
    found = 0
    for taken in _taken(view, goal):
        found += taken == action
        if found == LEAST:
            return True
    return False


def kept(view: View, goal: str) -> float:
    """The share of these views in which the expert does what it does where it sees things as they are."""
    own = decide(view, goal).action
    return sum(taken == own for taken in _taken(view, goal)) / VIEWS


def _taken(view: View, goal: str) -> Iterator[str]:
    rng = np.random.default_rng([view.world.seed, 62])
    for _ in range(VIEWS):
        yield decide(misjudged(view, rng), goal).action
