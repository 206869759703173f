# SPDX-License-Identifier: Apache-2.0
"""TSLT: "Fast Collaborative Inference via Distributed Speculative Decoding", its table and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsd_lab.papers import acceptance, proofs
from dsd_lab.reproduce.table import Measured, Reports, Row, Table, labelled

_V, _BITS = 32_000, 16
_TREE = (2, 2, 2)
_KEPT = ("K 10 %", "K 1 %", "K 0.1 %", "rho 0.99", "rho 0.9", "rho 0.8")
_RATES = (1e6, 10e6, 100e6)  # bit/s, of the uplink
_T_P, _T_Q = 0.002, 0.030  # T_SLM, T_LLM that ``dsd-lab theory tslt`` takes; the paper gives none


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's table and figures, in its order."""
    yield from (_table_1(), _theorems(), _figure_3(reports))
    yield from (_figure_4(reports, models) for models in ("text", "pair"))
    yield _figures_5_and_6(reports)


def _table_1() -> Table:
    whole, with_ids = (_V * (_BITS + b) for b in (0, proofs.index_bits(_V)))
    rows = [
        Row(
            "D_V, Mbit",
            0.5,
            whole / 1e6,
            with_ids / 1e6,
            why="equation 3 without its ids; ours has them, though whole distributions need none",
        ),
        Row("kB a token, section 1", 500, whole / 8e3, form=".0f", why="500 kB is 8 times D_V; bits taken for bytes"),
        Row("distributions of <2,2,2>", 7, proofs.distributions(_TREE), form=".0f", why="equation 27"),
        Row("bits of an id", None, proofs.index_bits(_V), form=".0f"),
    ]
    return Table("Table 1: settings", rows)


def _random_pairs(count: int, size: int = 64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    for _ in range(count):
        rows = np.exp(rng.normal(size=(2, size)) * rng.uniform(0.3, 3.0))
        p, q = rows / rows.sum(1, keepdims=True)
        yield p, q


def _holds(most: float) -> str:
    return "holds" if most <= 1 + 1e-9 else "does not hold"


def _theorems() -> Table:
    one, several = [], []
    for p, q in _random_pairs(300):
        q_hat, sigma = acceptance.truncate(q, top_k=8)
        moved = abs(float(acceptance.acceptance(p, q_hat) - acceptance.acceptance(p, q)))
        one.append(moved / float(sigma))
        rates = acceptance.candidate_acceptance(p, q, 3)
        cut = acceptance.candidate_acceptance(p, q_hat, 3)
        several.append(float(np.max(np.abs(cut - rates) / acceptance.candidate_bounds(rates, float(sigma)))))
    rows = [
        Row("abs(beta_hat - beta) over sigma, at most (20)", 1.0, max(one), compare=False, why=_holds(max(one))),
        Row(
            "the same of 3 candidates over (35), at most",
            1.0,
            max(several),
            compare=False,
            why=f"{_holds(max(several))} ([theory.md](theory.md): with factor 1 in place of 2 as well)",
        ),
    ]
    return Table(
        "Theorems 3.2 and 4.12: truncation", rows, "On 300 random pairs of distributions, 8 of 64 tokens kept."
    )


def _figure_3(reports: Reports) -> Table:
    def mass(share: float) -> Measured:
        def pick(report: Any) -> float:
            kept = round(share * report["vocabulary"])
            points = {point["kept"]: point["mass"] for point in report["kept_curve"]}
            return float(np.interp(np.log(kept), np.log(sorted(points)), [points[k] for k in sorted(points)]))

        return reports.figures("wire-text", pick)

    rows = [
        Row("K 3 200 (10 %)", "almost 1", measured=mass(0.1), form=".3f"),
        Row("K 320 (1 %)", 0.85, measured=mass(0.01), form=".3f"),
        Row("K 32 (0.1 %)", "less", measured=mass(0.001), form=".3f"),
    ]
    text = (
        "Mass that K tokens hold; the paper's text gives .85 at 1 %. Measured: SmolLM2-135M, shares of its V = 49 152."
    )
    return Table("Figure 3: kept mass", rows, text)


def _figure_4(reports: Reports, models: str) -> Table:
    report, rows = f"papers-tslt-{models}", []
    for tree in ("", " <2,2,2>"):
        for kept in ("all of V", *_KEPT):
            label = f"{kept}{tree}"
            rows.append(
                Row(
                    f"{label}: acceptance of what is judged / tau / bytes up a token",
                    measured=reports.figures(report, lambda r, label=label: _accepted(labelled(r, label))),
                    form=".3g",
                )
            )
    said = {
        "text": "SmolLM2-135M and its int8 copy (V = 49 152: K 4 915, 492, 49)",
        "pair": "the shipped pair, two models trained apart (V = 512: K 51, 5, 1)",
    }[models]
    text = (
        "The paper draws curves: a minor decline to K 10 %, little more at 1 %, a drop at 0.1 %, trees above "
        f"sequences. Measured: {said}, temperature 1, three tokens or levels. rho is the mass of a nucleus, which "
        "takes as many ids as it needs and so adapts to each position."
    )
    return Table(f"Figure 4: acceptance by K ({models})", rows, text)


def _accepted(row: Any) -> Sequence[float]:
    return row["accepted"] / row["judged"], row["tokens"] / row["rounds"], row["bytes_up"] / row["tokens"]


def _figures_5_and_6(reports: Reports) -> Table:
    rows = []
    for tree in ("", " <2,2,2>"):
        for kept in ("all of V", "K 10 %", "K 1 %", "K 0.1 %", "rho 0.9"):
            label = f"{kept}{tree}"
            rows.append(
                Row(
                    f"{label}: speed-up at 1 / 10 / 100 Mbit/s",
                    measured=reports.figures("papers-tslt-text", lambda r, label=label: _speeds(labelled(r, label))),
                )
            )
    text = (
        "The paper draws curves and gives no times of its models. Here: equation 5 with the rounds and bytes "
        f"counted, T_SLM {1e3 * _T_P:g} ms, T_LLM {1e3 * _T_Q:g} ms, no other delay."
    )
    return Table("Figures 5 and 6: speed-up by uplink", rows, text)


def _speeds(row: Any) -> Sequence[float]:
    tokens, up = row["tokens"] / row["rounds"], 8 * row["bytes_up"] / row["rounds"]
    return [
        proofs.speedup(
            tokens=tokens, seconds=proofs.round_seconds(gamma=3, t_p=_T_P, t_q=_T_Q, t_comm=up / rate), t_q=_T_Q
        )
        for rate in _RATES
    ]
