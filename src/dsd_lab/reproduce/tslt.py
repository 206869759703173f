# SPDX-License-Identifier: Apache-2.0
"""TSLT: "Fast Collaborative Inference via Distributed Speculative Decoding", its table and figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsd_lab.papers import proofs, theory
from dsd_lab.reproduce.table import Estimate, Measured, Reports, Row, Table, Values, estimate, labelled, printed_table

_V, _BITS = 32_000, 16
_TREE = (2, 2, 2)
_KEPT = ("K 10 %", "K 1 %", "K 0.1 %", "rho 0.99", "rho 0.9", "rho 0.8")
_PAIR_KEPT = {  # by the labels of the report of the pair's proofs
    "all of V": "dsd", "K 10 %": "tslt:top_k_proof=51", "K 1 %": "tslt:top_k_proof=5", "K 0.4 %": "tslt:top_k_proof=2"
}  # fmt: skip
_DROP = 0.02  # of acceptance; less is within chance
_MACHINE = next(setup for setup in theory.SETUPS if setup.name == "Vicuna 68m/7B, Jetson")  # the paper names none
_T_P, _T_Q = _MACHINE.draft_round / 4, _MACHINE.t_q  # its drafts are of four
_RATES = (1e6, 10e6, 100e6)  # bit/s, of the uplink


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's table and figures, in its order."""
    yield from (_table_1(), _figure_3(reports), _figure_4(reports), _figure_5(reports), _figure_6(reports))


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
            counted=reports.figures("papers-text", lambda r, k=kept: _mean(r, k, "mass")),
            form=".3f",
        )
        for kept, paper in (("K 10 %", "almost 1"), ("K 1 %", 0.85), ("K 0.1 %", "less"))
    ]
    return Table("Figure 3: kept mass", rows)


def _figure_4(reports: Reports) -> Table:
    rows = []
    for kept in ("all of V", *_KEPT):
        found = reports.figures("papers-text", lambda r, kept=kept: _text_figures(r, kept))
        rows.append(Row(f"{kept}, SmolLM2", counted=found, form=".3g"))
    for shape in ("draft_length=3", "shape=expansion"):
        for kept, label in _PAIR_KEPT.items():
            found = reports.figures("wire", lambda r, label=label, shape=shape: _pair_figures(r, label, shape))
            tree = " <2,2,2>" if shape == "shape=expansion" else ""
            rows.append(Row(f"{kept}{tree}, shipped pair", counted=found, form=".3g"))
    text = (
        "The paper draws curves: a minor decline to K 10 %, little more at 1 %, a drop at 0.1 %, trees above "
        "sequences. Counted at temperature 1, three tokens or levels: SmolLM2-135M and its draft by their "
        "distributions (V = 49 152: K 4 915, 492, 49), and the shipped pair, two models trained apart (V = 512: K 51, "
        "5, 2). Acceptance is of what is judged. rho is the mass of a nucleus, which takes as many ids as it "
        f"needs. {_drop(reports)}"
    )
    return Table(
        "Figure 4: acceptance by K and rho", rows, text, "acceptance / tau / bytes of evidence a drafted token"
    )


def _drop(reports: Reports) -> str:
    """Whether acceptance drops where few ids are kept, as the paper's curves do."""

    def text(report: Any) -> Values:
        return [_row(report, kept)["acceptance"] for kept in ("all of V", "K 0.1 %")]

    def pair(report: Any) -> Values:
        return [_pair(report, _PAIR_KEPT[kept])["position_acceptance"] for kept in ("all of V", "K 0.4 %")]

    said = []
    for name, report, pick in (("SmolLM2", "papers-text", text), ("the shipped pair", "wire", pair)):
        found = reports.figures(report, pick).values
        if isinstance(found, list):
            drops = found[1] < found[0] - _DROP
            said.append(f"{name} {'drops' if drops else 'does not'} ({found[0]:.3f}, then {found[1]:.3f})")
    return f"The paper's drop where the fewest are kept: {', '.join(said)}." if said else ""


def _mean(report: Any, kept: str, name: str) -> Estimate:
    row = _row(report, kept)
    return estimate(row[name], report["replies"], row[f"{name}_standard_error"])


def _text_figures(report: Any, kept: str) -> Values:
    row = _row(report, kept)
    found, replies = row["gammas"]["3"], report["replies"]
    tau = estimate(row["tokens"] / found["rounds"], replies, found["tau_standard_error"])
    return _mean(report, kept, "acceptance"), tau, row["evidence_bytes"]


def _pair(report: Any, label: str, shape: str = "draft_length=3") -> Any:
    """The row of the report of the pair's proofs, a sequence of three or a tree."""
    return labelled(report, f"{label}{'+' if ':' in label else ':'}{shape}")


def _pair_figures(report: Any, label: str, shape: str) -> Values:
    row = _pair(report, label, shape)
    drafted = row["drafted_per_round"] / row["tau"]  # for each token gained
    figures = row["position_acceptance"], row["tau"], row["payload_up_per_token"] / drafted
    return [estimate(figure, row["replies"]) for figure in figures]


def _figure_5(reports: Reports) -> Table:
    rows = []
    for kept in ("all of V", *_KEPT):
        found = reports.figures("papers-text", lambda r, kept=kept: _speeds(r, kept))
        rows.append(Row(kept, counted=found))
    text = (
        "The paper draws curves and gives no times of its models. Here: equation 5 with SmolLM2's rounds and message "
        f"sizes, gamma 3, and the times of FSD's text models, {1e3 * _T_P:.1f} ms a drafted token and {1e3 * _T_Q:.0f} "
        "ms a pass, no other delay."
    )
    return Table("Figure 5: speed-up by uplink", rows, text, "speed-up at 1 / 10 / 100 Mbit/s")


def _speeds(report: Any, kept: str) -> Values:
    row = _row(report, kept)
    tokens, error = row["tokens"] / row["gammas"]["3"]["rounds"], row["gammas"]["3"]["tau_standard_error"]
    up = 8 * (report["tslt"]["header_up_bytes"]["3"] + 3 * row["evidence_bytes"])
    times = [proofs.round_seconds(gamma=3, t_p=_T_P, t_q=_T_Q, t_comm=up / rate) for rate in _RATES]
    speeds = [proofs.speedup(tokens=tokens, seconds=seconds, t_q=_T_Q) for seconds in times]
    return [estimate(speed, report["replies"], speed * error / tokens) for speed in speeds]


def _figure_6(reports: Reports) -> Table:
    def found(label: str, shape: str) -> Measured:
        return reports.figures("wire-text", lambda r: _by_rate(r, label, shape))

    rows = []
    for name, label in (("all of V", "dsd"), ("K 1 %", "tslt:top_k_proof=492")):
        rows += [Row(f"{name}, {shape}", counted=found(label, shape)) for shape in ("a sequence of 3", "<2,2,2>")]
    return Table("Figure 6: trees by uplink", rows, cells="speed-up at 1 / 10 / 100 Mbit/s")


def _by_rate(report: Any, label: str, shape: str) -> Values:
    tree = f"{label}{'+' if ':' in label else ':'}shape=expansion"
    row = labelled(report, tree if shape.startswith("<") else label)  # its drafts are three tokens
    found = []
    for rate in (f"{rate / 1e6:g}" for rate in _RATES):
        low, high = row["speedup_95"][rate]
        found.append({"value": row["speedup"][rate], "low": low, "high": high, "of": row["replies"]})
    return found
