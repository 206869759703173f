"""What DRAGON's formulas say, and what its scheduling gains in simulated answers.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
sections 5.1 (latency), 6 (speed-up) and 7.4 (scheduling). Every function raises TheoryError for a value out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsd_lab.papers.dragon_simulator import Learned, sample_acceptances, sequence_wise, simulate, steady_link
from dsd_lab.papers.theory import check_amounts, check_positive, check_shares
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
    """Seconds of a decoding step on either side and of the bare round trip, and how often drafts are accepted."""

    device: float
    cloud: float
    base: float
    acceptances: tuple[float, float]
    tokens: int = 100


@dataclass(frozen=True)
class Comparison:
    """Mean seconds of an answer by strategy, until the device has its last token, at one extra latency."""

    extra: float
    seconds: dict[str, float]

    def over_best_side(self, strategy: str = "auto") -> float:
        """The strategy's seconds over those of the better fixed side."""
        return self.seconds[strategy] / min(self.seconds["device"], self.seconds["cloud"])


def compare(setting: Setting, extras: Sequence[float], sequences: int = 50, *, seed: int = 0) -> list[Comparison]:
    """Every strategy over the same ``sequences`` sampled answers, at each extra latency.

    Each answer begins in another phase of the link's jitter. What an answer teaches is known to the next.
    """
    check_shares(device=setting.acceptances[0], cloud=setting.acceptances[1])
    check_positive(tokens=setting.tokens, sequences=sequences)
    delays = setting.device, setting.cloud
    answers = [sample_acceptances(setting.tokens, *setting.acceptances, n) for n in range(seed, seed + sequences)]
    found = []
    for extra in extras:
        totals: dict[str, list[float]] = {name: [] for name in (*STRATEGIES, TOKEN_WISE, SEQUENCE_WISE)}
        learned = {strategy: Learned() for strategy in STRATEGIES}
        for number, rows in enumerate(answers):
            link = steady_link(setting.base, extra, phase=float(number))
            for strategy in STRATEGIES:
                run = simulate(rows, *delays, link, strategy=strategy, seed=number, learned=learned[strategy])
                totals[strategy].append(run.delivered)
            totals[TOKEN_WISE].append(simulate(rows, *delays, link, strategy="device", window=1).delivered)
            totals[SEQUENCE_WISE].append(sequence_wise(len(rows), *delays, link))
        found.append(Comparison(extra, {name: float(np.mean(values)) for name, values in totals.items()}))
    return found
