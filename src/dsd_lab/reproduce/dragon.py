# SPDX-License-Identifier: Apache-2.0
"""DRAGON: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from dsd_lab.papers import dragon_simulator as simulator
from dsd_lab.papers.dragon_schedules import latency
from dsd_lab.reproduce.table import Measured, Reports, Row, Table, printed_table
from dsd_ros.dragon.scheduler import delta_z

_TRIP_MS = 300.0
_A_TOKEN = ("decode_ms", "per_token_ms")  # of the tokens after the first, and of all
_PIPELINES = {  # Figures 10 to 13: c_trans^l, c_trans^r, c_dec^l, c_dec^r; whether x^l and x^r are accepted
    "10: x^l rejected, x^r accepted": (1.2, 1.8, 1.0, 1.5, (False, True)),
    "11: x^l accepted, x^r rejected": (1.5, 1.0, 2.0, 2.0, (True, False)),
    "12: both accepted": (1.5, 1.8, 1.0, 1.5, (True, True)),
    "13: both rejected (its delays are those of 10)": (1.2, 1.8, 1.0, 1.5, (False, False)),
}


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's tables and figures, in its order."""
    yield from (
        _pipelines(),
        _figure_3(),
        _figure_4(),
        _figure_5(reports),
        _figure_6(reports),
        _figure_7(reports),
        _sizes(),
        _figure_8(reports),
    )
    yield _figure_9()


def _pipelines() -> Table:
    rows = []
    for name, (trans_l, trans_r, dec_l, dec_r, held) in _PIPELINES.items():
        trip = trans_l + trans_r
        formula = max(dec_l, dec_r) if held[1] else max(dec_l, dec_r + trip)
        run = simulator.simulate([held] * 200, dec_l, dec_r, simulator.steady_link(trip), strategy="device")
        times = [seconds for seconds, _ in run.decided]
        steady = (times[-1] - times[100]) / (len(times) - 101)
        rows.append(Row(f"Figure {name}", None, formula, steady, compare=False, why=_apart(formula, steady)))
    return Table("Table 1, Figures 10 to 13: waiting times", rows)


def _apart(formula: float, other: float) -> str:
    return "ours equal" if abs(other / formula - 1) < 5e-3 else f"ours {100 * (other / formula - 1):+.0f} %"


def _figure_3() -> Table:
    rtt, cloud, worst, rows = 0.3, 0.05, 0.0, []
    for a_device in np.linspace(0, 1, 11):
        for a_cloud in np.linspace(0, 1, 11):
            for device in np.linspace(0.0, 0.6, 61):
                by_7 = latency(device, cloud, rtt, a_cloud) - latency(cloud, device, rtt, a_device)
                worst = max(worst, abs(by_7 - delta_z(device, cloud, rtt, a_device, a_cloud)))
    for rates in ((0.8, 0.5), (0.8, 0.8), (0.5, 0.8)):
        values = [1e3 * delta_z(device, cloud, rtt, *rates) for device in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)]
        rows.append(Row(f"alpha^l {rates[0]:g}, alpha^r {rates[1]:g}", None, values, form=".0f"))
    text = (
        "dZ in ms over c^l = 0 / 50 / 100 / 200 / 350 / 500 ms, c^r = 50 ms, rtt = 300 ms: above 0 the other side "
        "should aggregate. Equation 8 equals the difference of equation 7 on a grid of 7 381 points to "
        f"{max(worst, 1e-16):.0e} s. A higher acceptance of one side favours the other as aggregator, and the slow "
        "side aggregates, as the paper says."
    )
    return Table("Figure 3: equation 8", rows, text)


def _figure_4() -> Table:
    rows = []
    for device in (0.01, 0.5, 1.0, 2.0, 4.0, 8.0):
        values = [simulator.speedup(device, 1.0, 4.0, a) for a in (0.5, 0.8, 0.95)]
        own = [_simulated(device, 1.0, 4.0, a) for a in (0.5, 0.8, 0.95)]
        rows.append(
            Row(
                f"c^l = {device:g} c^r, rtt = 4 c^r",
                None,
                values,
                own,
                compare=False,
                why=", ".join(dict.fromkeys(_apart(v, o) for v, o in zip(values, own, strict=True))),
            )
        )
    return Table("Figure 4, Theorem 6.2: equation 9", rows)


def _simulated(device: float, cloud: float, trip: float, a_cloud: float) -> float:
    """The speed-up of 400 simulated tokens over token-wise synchronisation."""
    held = simulator.sample_acceptances(400, a_cloud, a_cloud, 0)
    link = simulator.steady_link(trip)
    runs = [simulator.simulate(held, device, cloud, link, strategy="device", window=w).seconds for w in (1, 32)]
    return runs[0] / runs[1]


def _figure_5(reports: Reports) -> Table:
    def of(pick: Callable[[Any], Any], report: str = "dragon-lm") -> Measured:
        return reports.figures(report, pick, models=False)

    def perplexities(method: str) -> Measured:
        return of(lambda r: [row["perplexity"] for row in r["rows"] if row["method"] == method])

    def with_two(report: Any) -> Sequence[float]:
        found = {row["method"]: row["perplexity"] for row in report["rows"] if row["documents"] == 2}
        return [found[method] for method in ("none", "crcg", "drcg", "dragon")]

    return printed_table(
        "Figure 5: perplexity",
        {"measured": of(lambda r: r["gain_to_drcg"])},
        {"measured": of(lambda r: r["gain_to_crcg"])},
        *({"measured": perplexities(method)} for method in ("none", "crcg", "drcg", "dragon")),
        {"measured": of(with_two, "dragon-lm-all")},
        {"measured": of(lambda r: r["gain_to_drcg"], "dragon-lm-all")},
    )


def _mean(report: Any, variant: str, key: str, trip: float = _TRIP_MS, mbps: float = 40.0) -> float:
    """A variant's figure at a round trip, over its questions."""
    return fmean(
        row[key]
        for row in report["rows"]
        if row["variant"] == variant and row["trip_ms"] == trip and row["mbps"] == mbps
    )


def _over(
    reports: Reports,
    variant: str,
    base: str,
    keys: Sequence[str] = _A_TOKEN,
    shown: Callable[[float], float] = float,
    report: str = "dragon-latency",
) -> Measured:
    """How many times the base's figures a variant's are, or what ``shown`` makes of that."""
    return reports.figures(
        report, lambda r: [shown(_mean(r, variant, key) / _mean(r, base, key)) for key in keys], models=False
    )


def _figure_6(reports: Reports) -> Table:
    def below(other: str) -> Measured:
        return _over(reports, "dragon", other, shown=lambda times: 100 * (1 - times))

    def per_token(variant: str) -> Measured:
        return reports.figures("dragon-latency", lambda r: [_mean(r, variant, key) for key in _A_TOKEN], models=False)

    variants = ("dragon", "dragon, sampled", "dragon, full", "drdg-tw", "drdg-sw", "device")
    own_noise = _over(reports, "dragon, independent", "dragon, sampled", report="dragon-independent")
    return printed_table(
        "Figure 6: latency a token",
        {"measured": below("drdg-tw, full")},
        {"measured": below("drdg-sw, full")},
        {"measured": _over(reports, "dragon", "device", shown=lambda times: 100 * (times - 1))},
        *({"measured": per_token(variant)} for variant in variants),
        {"measured": own_noise},
    )


def _figure_7(reports: Reports) -> Table:
    def times(variant: str, base: str, report: str = "dragon-latency") -> Measured:
        return _over(reports, variant, base, ("first_token_ms",), report=report)

    return printed_table(
        "Figure 7: time to the first token",
        {"measured": times("dragon", "device")},
        {"measured": times("dragon", "device", "dragon-first")},
        {"measured": times("drcg-text", "dragon")},
        {"measured": times("drcg-kv", "dragon")},
    )


def _sizes() -> Table:
    def megabytes(layers: int, width: int, tokens: int, size: int) -> float:
        return 2 * layers * width * tokens * size / 1e6

    opt, qwen = megabytes(24, 2048, 128, 4), megabytes(28, 256, 128, 4)
    why = f"float32; the printed sizes are {114 / opt:.1f} and {16 / qwen:.1f} times that, as if about 290 tokens "
    why += "travelled"
    return printed_table("Sections 7.1 and 7.3: sizes", {"formula": (opt, qwen), "why": why}, {})


def _figure_8(reports: Reports) -> Table:
    def seconds(extra: float) -> Measured:
        def pick(report: Any) -> Sequence[float]:
            row = next(row for row in report["rows"] if abs(row["extra"] - extra) < 1e-9)
            return [row["seconds"][name] for name in ("auto", "delta-z", "device", "cloud", "random")]

        return reports.figures("dragon-scheduling", pick, models=False)

    rows = [
        Row(
            f"{1e3 * extra:.0f} ms more: auto / delta-z / device / cloud / random",
            None,
            measured=seconds(extra),
            form=".1f",
        )
        for extra in (0.0, 0.1, 0.3, 0.5, 1.0)
    ]
    return Table("Figure 8: scheduling", rows)


def _figure_9() -> Table:
    link = simulator.steady_link(0.02, 0.5)
    held = simulator.sample_acceptances(15, 0.8, 0.8, 0)
    run = simulator.simulate(held, 0.1, 0.05, link, strategy="delta-z")
    return printed_table("Figure 9: a pipeline", {"ours": run.switches}, {"ours": run.decided[0][0]})
