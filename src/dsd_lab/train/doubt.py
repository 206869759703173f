"""How a learner takes the replies that the expert gives where it misjudges a picture: as shares of each word.

Label distribution learning: X. Geng, "Label Distribution Learning", 2016. Why it teaches numbers better than one class
does: E. Imani and M. White, "Improving Regression Performance with Distributional Losses", 2018.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from dsd_lab.worlds.expert import DRAWS

_MOST = 0.45  # share of all other tokens at a place: the expert's own stays the likeliest


def shares(
    ids: Sequence[int], others: Sequence[tuple[Sequence[int], int]], marks: tuple[int, int, int]
) -> list[tuple[int, int, float]]:
    """(place, token, share) of what else could follow in a reply, from its tokens and those of other replies.

    The shares at a place are of the replies that say the same up to there, this one counted once more; together at
    most _MOST. The clause on the other things, between the first `marks` (";") and the next of the second (","),
    bears on nothing behind it: what follows is compared as if it were not there.
    """
    parts = _clauses(ids, marks)
    begins = (0, len(parts[0]), len(parts[0]) + len(parts[1]))
    agreed = [DRAWS + 1] * len(parts)
    apart: list[tuple[int, int, int, int]] = []  # clause, place, token, how often
    for other, count in others:
        theirs = _clauses(other, marks)
        for k, (mine, their) in enumerate(zip(parts, theirs, strict=True)):
            place = _parting(mine, their)
            if place is None:
                continue
            apart.append((k, place, int(their[place]), count))
            if k == 0:
                agreed[1] -= count
                agreed[2] -= count
                break
    found: list[tuple[int, int, float]] = []
    for (k, place), group in groupby(sorted(apart), key=lambda one: one[:2]):
        tokens: Counter[int] = Counter()
        for _, _, token, count in group:
            tokens[token] += count
        scale = 1.0 / max(agreed[k], tokens.total() / _MOST)
        found += [(begins[k] + place, token, n * scale) for token, n in tokens.items()]
        agreed[k] -= tokens.total()
    return found


def _clauses(ids: Sequence[int], marks: tuple[int, int, int]) -> tuple[Sequence[int], ...]:
    """Where the goal is; what else there is; and the plan with its action."""
    semicolon, comma, _ = marks
    ids = list(ids)
    if semicolon not in ids:
        return ids, [], []
    first = ids.index(semicolon) + 1
    second = ids.index(comma, first) + 1 if comma in ids[first:] else first
    return ids[:first], ids[first:second], ids[second:]


def _parting(mine: Sequence[int], their: Sequence[int]) -> int | None:
    """The first place at which tokens differ; None where they do not."""
    for place, (one, other) in enumerate(zip(mine, their, strict=False)):
        if one != other:
            return place
    return None  # every clause ends in a mark of its own
