"""The proofs compared by formula: speed-up by uplink rate, and what shared randomness keeps of acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.papers.acceptance import coupled_acceptance, coupled_bound, total_variation
from dsd_lab.papers.proofs import predict_proof
from dsd_lab.papers.theory import TheoryError

_RATES = np.geomspace(1e5, 1e8, 121)  # bit/s
_COLOURS = {"full": "C3", "split": "C0", "truncated": "C1", "coupled": "C2"}


def speedups_by_rate(proof: str, alpha: float, setting: Mapping[str, Any], down_over_up: float) -> np.ndarray:
    """Speed-up of one proof at each uplink rate of the plot, 0.1 to 100 Mbit/s."""
    return np.array(
        [
            predict_proof(proof, alpha=alpha, rate_up=rate, rate_down=down_over_up * rate, **setting).speedup
            for rate in _RATES
        ]
    )


def random_pairs(count: int, vocabulary: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """TV and exact coupled acceptance, (count,) each, of random softmax distributions near and far apart."""
    rng = np.random.default_rng(1)
    shared = rng.normal(size=(count, vocabulary)) * rng.uniform(0.3, 4, (count, 1))
    apart = rng.normal(size=(2, count, vocabulary)) * rng.uniform(0, 3, (count, 1))
    p, q = (_softmax(shared + noise) for noise in apart)
    return total_variation(p, q), coupled_acceptance(p, q)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def draw_proofs(
    path: Path, ranges: Mapping[str, tuple[float, float]], setting: Mapping[str, Any], down_over_up: float
) -> None:
    """Write the figure (PNG, or another kind by suffix).

    ranges: proof -> least and most acceptance; setting: what ``predict_proof`` takes but proof, alpha and the rates;
    down_over_up: how many times faster the downlink is at every rate. Raises TheoryError for a suffix that cannot be
    drawn, and ModuleNotFoundError with the remedy where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib; pip install -r requirements/train.txt") from error
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise TheoryError(f"a plot cannot be written as {path}; name it *.png, *.svg or *.pdf")
    left, right = figure.subplots(1, 2)
    for proof, (least, most) in ranges.items():
        name = f"{proof} to {setting['kept']}" if proof == "truncated" else proof
        label = f"{name}, acceptance {least:.2f}" + (f" to {most:.2f}" if most > least else "")
        low, high = (speedups_by_rate(proof, at, setting, down_over_up) for at in (least, most))
        left.semilogx(_RATES / 1e6, low, color=_COLOURS[proof], label=label)
        left.fill_between(_RATES / 1e6, low, high, color=_COLOURS[proof], alpha=0.15)
    left.axhline(1, color="0.4", linestyle=":", label="the target alone")
    link = f"uplink, Mbit/s; downlink {down_over_up:g} times that"
    left.set(xlabel=link, ylabel="speed-up over the target alone", ylim=(0, None))
    left.legend(fontsize=9)
    left.grid(alpha=0.3)

    tv = np.linspace(0, 1, 101)
    right.plot(tv, 1 - tv, color="black", label="1 - TV, the optimum")
    right.plot(
        tv,
        [coupled_bound(float(at)) for at in tv],
        color="C2",
        linestyle="--",
        label="(1 - TV) / (1 + TV), the coupling's bound",
    )
    distance, kept = random_pairs(400)
    right.plot(distance, kept, ".", color="C2", markersize=4, label="coupled, random pairs (exact)")
    right.set(xlabel="TV of draft and target", ylabel="acceptance", xlim=(0, 1), ylim=(0, 1))
    right.legend(fontsize=9)
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
