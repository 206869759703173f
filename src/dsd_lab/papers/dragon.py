"""What DRAGON's formulas say, and what its scheduling gains in simulated answers.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
sections 5.1 (latency), 6 (speed-up) and 7.4 (scheduling). Every function raises TheoryError for a value out of range.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsd_lab.dragon.simulator import Learnt, Link, sample_acceptances, sequence_wise, simulate, steady_link
from dsd_lab.papers.acceptance import check_shares
from dsd_lab.papers.theory import TheoryError, check_amounts, check_positive
from dsd_ros.dragon.scheduler import latency

STRATEGIES = ("auto", "delta-z", "device", "cloud", "random")
TOKEN_WISE, SEQUENCE_WISE = "token-wise", "sequence-wise"


def speedup(c_device: float, c_cloud: float, rtt: float, a_cloud: float) -> float:
    """Over token-wise synchronisation, the device aggregating: equation 9, as the ratio of two latencies."""
    check_amounts(c_device=c_device, c_cloud=c_cloud, rtt=rtt)
    check_shares(a_cloud=a_cloud)
    check_positive(latency=max(c_device, c_cloud))
    return latency(c_device, c_cloud, rtt, 0.0) / latency(c_device, c_cloud, rtt, a_cloud)


@dataclass(frozen=True)
class Setting:
    """Seconds a decoding step on either side, of the bare round trip, and how often drafts hold."""

    device: float
    cloud: float
    base: float
    acceptances: tuple[float, float]
    tokens: int = 100
    stretch: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """Mean seconds of an answer by strategy, until the device has its last token, at one extra latency."""

    extra: float
    seconds: dict[str, float]

    @property
    def over_static(self) -> float:
        """Auto's seconds over those of the better of both sides."""
        return self.seconds["auto"] / min(self.seconds["device"], self.seconds["cloud"])

    @property
    def over_random(self) -> float:
        return self.seconds["auto"] / self.seconds["random"]


def recorded_acceptances(path: Path, tokens: int) -> list[np.ndarray]:
    """Answers of ``tokens`` tokens, (tokens, 2) bool, from a CSV of lines ``device,cloud`` of 0 and 1."""
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if rows and not set(rows[0]) <= {"0", "1"}:
        rows = rows[1:]  # a heading
    if any(len(row) != 2 or not set(row) <= {"0", "1"} for row in rows):
        raise TheoryError(f"{path} must have lines of 0 or 1 for the device, a comma, the cloud's")
    found = [np.array(rows[i : i + tokens]) == "1" for i in range(0, len(rows), tokens)]
    found = [piece for piece in found if len(piece) == tokens]
    if not found:
        raise TheoryError(f"{path} has {len(rows)} tokens; give {tokens} or more, or ask for fewer")
    return found


def compare(
    setting: Setting,
    extras: Sequence[float],
    sequences: int = 50,
    *,
    answers: Sequence[np.ndarray] | None = None,
    link: Link | None = None,
    seed: int = 0,
    anew: bool = False,
) -> list[Comparison]:
    """Every strategy over the same answers, ``sequences`` sampled ones or those given, at each extra latency.

    ``link`` stands for the bare round trip and has its own jitter. Each answer begins in another phase of the jitter.
    What an answer tells is known to the next, as to a session's, unless each is to begin ``anew``. ``seed``: that of
    the first of the answers sampled.
    """
    check_shares(device=setting.acceptances[0], cloud=setting.acceptances[1])
    check_positive(tokens=setting.tokens, sequences=sequences)
    if answers is None:
        answers = [
            sample_acceptances(setting.tokens, *setting.acceptances, n, stretch=setting.stretch)
            for n in range(seed, seed + sequences)
        ]
    found = []
    for extra in extras:
        totals: dict[str, list[float]] = {}
        learnt = {strategy: None if anew else Learnt() for strategy in STRATEGIES}
        for number, rows in enumerate(answers):
            added = steady_link(0.0 if link else setting.base, extra, phase=float(number))

            def trip(now: float, added: Link = added) -> float:
                return added(now) + (link(now) if link else 0.0)

            for strategy in STRATEGIES:
                run = simulate(
                    rows, setting.device, setting.cloud, trip, strategy=strategy, seed=number, learnt=learnt[strategy]
                )
                totals.setdefault(strategy, []).append(run.delivered)
            in_step = simulate(rows, setting.device, setting.cloud, trip, strategy="device", window=1)
            totals.setdefault(TOKEN_WISE, []).append(in_step.delivered)
            totals.setdefault(SEQUENCE_WISE, []).append(sequence_wise(len(rows), setting.device, setting.cloud, trip))
        found.append(Comparison(extra, {k: float(np.mean(v)) for k, v in totals.items()}))
    return found


DELAYS = ((0.1, 0.02), (0.1, 0.05), (0.1, 0.1), (0.05, 0.1))  # of device and cloud
RATES = ((0.9, 0.9), (0.8, 0.6), (0.6, 0.8), (0.95, 0.5), (0.5, 0.95))


def grid(
    extras: Sequence[float], sequences: int, tokens: int = 100, base: float = 0.02, seed: int = 0, anew: bool = False
) -> dict:
    """``compare`` over delays and acceptances; a report for a file, worst cell first."""
    cells = []
    for delays in DELAYS:
        for rates in RATES:
            for one in compare(Setting(*delays, base, rates, tokens), extras, sequences, seed=seed, anew=anew):
                cells.append(
                    {
                        "device_seconds": delays[0],
                        "cloud_seconds": delays[1],
                        "acceptances": rates,
                        "extra_seconds": one.extra,
                        "auto_over_best_side": one.over_static,
                        "auto_over_random": one.over_random,
                        "delta_z_over_best_side": one.seconds["delta-z"]
                        / min(one.seconds["device"], one.seconds["cloud"]),
                        "seconds": one.seconds,
                    }
                )
    cells.sort(key=lambda cell: -cell["auto_over_best_side"])
    return {
        "tokens": tokens,
        "sequences": sequences,
        "base_seconds": base,
        "seed": seed,
        "each_anew": anew,
        **{
            f"{name}_{kind}": float(of([cell[name] for cell in cells]))
            for name in ("auto_over_best_side", "auto_over_random", "delta_z_over_best_side")
            for kind, of in (("worst", max), ("mean", np.mean), ("best", min))
        },
        "cells": len(cells),
        "auto_cells_above_3_percent": sum(c["auto_over_best_side"] > 1.03 for c in cells),
        "delta_z_cells_above_3_percent": sum(c["delta_z_over_best_side"] > 1.03 for c in cells),
        "auto_cells_slower_than_random": sum(c["auto_over_random"] > 1.0 for c in cells),
        "rows": cells,
    }
