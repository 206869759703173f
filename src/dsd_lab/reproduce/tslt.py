# SPDX-License-Identifier: Apache-2.0
"""TSLT: "Fast Collaborative Inference via Distributed Speculative Decoding", its table and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsd_lab.papers import proofs
from dsd_lab.reproduce.table import Reports, Row, Table, labelled, printed_table

_V, _BITS = 32_000, 16
_TREE = (2, 2, 2)
_KEPT = ("K 10 %", "K 1 %", "K 0.1 %", "rho 0.99", "rho 0.9", "rho 0.8")
_RATES = (1e6, 10e6, 100e6)  # bit/s, of the uplink
_T_P, _T_Q = 0.002, 0.030  # T_SLM, T_LLM; the paper gives none


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's table and figures, in its order."""
    yield from (_table_1(), _figure_3(reports), _figure_4(reports), _figures_5_and_6(reports))


def _table_1() -> Table:
    whole, with_ids = (_V * (_BITS + b) for b in (0, proofs.index_bits(_V)))
    return printed_table(
        "Table 1: settings",
        {"formula": whole / 1e6, "ours": with_ids / 1e6},
        {"formula": whole / 8e3},
        {"formula": proofs.distributions(_TREE)},
        {"formula": proofs.index_bits(_V)},
    )


def _row(report: Any, label: str) -> Any:
    """A row of the report of SmolLM2's distributions."""
    return next(row for row in report["tslt"]["rows"] if row["label"] == label)


def _figure_3(reports: Reports) -> Table:
    rows = [
        Row(
            f"{kept} of V",
            paper,
            measured=reports.figures("papers-text", lambda r, kept=kept: _row(r, kept)["mass"]),
            form=".3f",
        )
        for kept, paper in (("K 10 %", "almost 1"), ("K 1 %", 0.85), ("K 0.1 %", "less"))
    ]
    return Table("Figure 3: kept mass", rows)


def _figure_4(reports: Reports) -> Table:
    rows = []
    for kept in ("all of V", *_KEPT):
        name = f"{kept}, SmolLM2: acceptance / tau / evidence, bytes a drafted token"
        rows.append(
            Row(name, measured=reports.figures("papers-text", lambda r, k=kept: _known(_row(r, k))), form=".3g")
        )
    for tree in ("", " <2,2,2>"):
        for kept in ("all of V", *_KEPT):
            label = f"{kept}{tree}"
            name = f"{label}, shipped pair: acceptance of what is judged / tau / bytes up a token"
            found = reports.figures("papers-tslt", lambda r, label=label: _accepted(labelled(r, label)))
            rows.append(Row(name, measured=found, form=".3g"))
    return Table("Figure 4: acceptance by K and rho", rows)


def _known(row: Any) -> Sequence[float]:
    return row["acceptance"], row["tokens"] / row["gammas"]["3"]["rounds"], row["evidence_bytes"]


def _accepted(row: Any) -> Sequence[float]:
    return row["accepted"] / row["judged"], row["tokens"] / row["rounds"], row["bytes_up"] / row["tokens"]


def _figures_5_and_6(reports: Reports) -> Table:
    rows = []
    for kept in ("all of V", *_KEPT):
        found = reports.figures("papers-text", lambda r, kept=kept: _speeds(r, kept))
        rows.append(Row(f"{kept}: speed-up at 1 / 10 / 100 Mbit/s", measured=found))
    text = (
        "The paper draws curves and gives no times of its models. Here: equation 5 with SmolLM2's rounds and message "
        f"sizes, gamma 3, T_SLM {1e3 * _T_P:g} ms, T_LLM {1e3 * _T_Q:g} ms, no other delay. What trees gain is in "
        "Figure 4."
    )
    return Table("Figures 5 and 6: speed-up by uplink", rows, text)


def _speeds(report: Any, kept: str) -> Sequence[float]:
    row = _row(report, kept)
    tokens = row["tokens"] / row["gammas"]["3"]["rounds"]
    up = 8 * (report["tslt"]["header_up_bytes"]["3"] + 3 * row["evidence_bytes"])
    times = [proofs.round_seconds(gamma=3, t_p=_T_P, t_q=_T_Q, t_comm=up / rate) for rate in _RATES]
    return [proofs.speedup(tokens=tokens, seconds=seconds, t_q=_T_Q) for seconds in times]
