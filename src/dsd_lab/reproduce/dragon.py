# SPDX-License-Identifier: Apache-2.0
"""DRAGON: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dsd_lab.papers import dragon_simulator as simulator
from dsd_lab.papers.dragon_schedules import latency
from dsd_lab.reproduce.table import Measured, Reports, Row, Table, Values, estimate, labelled, printed_table
from dsd_ros.dragon.scheduler import delta_z

_TRIP_MS = 300.0
_SMOLLM2_V = 49_152
_REMOTE_MS = (107.2, 745.2)  # section 7.3: retrieval of text from the cloud, at 0 and 300 ms more
_A_TOKEN = ("decode_ms", "per_token_ms")  # of the tokens after the first, and of all
PIPELINES = {  # Appendix A.3: c_trans^l, c_trans^r, c_dec^l, c_dec^r; whether x^l and x^r are accepted
    "10: x^l rejected, x^r accepted": (1.2, 1.8, 1.0, 1.5, (False, True)),
    "11: x^l accepted, x^r rejected": (1.5, 1.0, 2.0, 2.0, (True, False)),
    "12: both accepted": (1.5, 1.8, 1.0, 1.5, (True, True)),
    "13: both rejected": (1.5, 1.8, 2.0, 1.0, (False, False)),
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
        _sizes(reports),
        _figure_8(reports),
    )
    yield _figure_9()


def _pipelines() -> Table:
    rows = []
    for name, (trans_l, trans_r, dec_l, dec_r, held) in PIPELINES.items():
        trip = trans_l + trans_r
        formula = max(dec_l, dec_r) if held[1] else max(dec_l, dec_r + trip)
        run = simulator.simulate([held] * 200, dec_l, dec_r, simulator.steady_link(trip), strategy="device")
        times = [seconds for seconds, _ in run.decided]
        steady = (times[-1] - times[100]) / (len(times) - 101)
        rows.append(
            Row(f"Figure {name}", formula=formula, simulated=steady, compare=False, why=_apart(formula, steady))
        )
    return Table("Table 1, Figures 10 to 13: waiting times", rows)


def _apart(formula: float, other: float) -> str:
    return "equal" if abs(other / formula - 1) < 5e-3 else f"{100 * (other / formula - 1):+.0f} %"


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
                formula=values,
                simulated=own,
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
    def of(pick: Callable[[Any], Values]) -> Measured:
        return reports.figures("dragon-lm", pick)

    def perplexities(method: str) -> Measured:
        return of(lambda r: [estimate(row["perplexity"], r["windows"]) for row in r["rows"] if row["method"] == method])

    return printed_table(
        "Figure 5: perplexity",
        {"counted": of(lambda r: r["gain_to_second"])},
        {"counted": of(lambda r: [r["gains"][method] for method in ("crcg", "drcg", "dragon")])},
        *({"counted": perplexities(method)} for method in ("none", "crcg", "drcg", "dragon")),
    )


def _row(report: Any, variant: str, trip: float = _TRIP_MS) -> Any:
    """A variant's row at a round trip."""
    return next(row for row in report["rows"] if (row["variant"], row["trip_ms"]) == (variant, trip))


def _over(
    reports: Reports,
    variant: str,
    base: str,
    keys: Sequence[str] = _A_TOKEN,
    shown: Callable[[float], float] = float,
    report: str = "dragon-latency",
) -> Measured:
    """How many times the base's figures a variant's are, or what ``shown`` makes of that."""

    def pick(r: Any) -> Values:
        one, other = _row(r, variant), _row(r, base)
        return [estimate(shown(one[key] / other[key]), r["setting"]["questions"]) for key in keys]

    return reports.figures(report, pick)


def _figure_6(reports: Reports) -> Table:
    def below(variant: str, other: str) -> Measured:
        return _over(reports, variant, other, shown=lambda times: 100 * (1 - times))

    def per_token(variant: str) -> Measured:
        def pick(r: Any) -> Values:
            return [estimate(_row(r, variant)[key], r["setting"]["questions"]) for key in _A_TOKEN]

        return reports.figures("dragon-latency", pick)

    def own_noise(report: Any) -> Values:
        one, other = (labelled(report, f"dragon, {name}") for name in ("independent", "sampled"))
        return estimate(one["token_ms"]["value"] / other["token_ms"]["value"], one["right"]["of"])

    variants = ("dragon", "dragon, full", "drdg-tw", "drdg-sw", "device")
    return printed_table(
        "Figure 6: latency a token",
        # Like beside like: heads of distributions on both sides of a comparison, or whole ones.
        {"held": below("dragon", "drdg-tw")},
        {"held": below("dragon, full", "drdg-tw, full")},
        {"held": below("dragon", "drdg-sw")},
        {"held": below("dragon, full", "drdg-sw, full")},
        {"held": _over(reports, "dragon", "device", shown=lambda times: 100 * (times - 1))},
        *({"held": per_token(variant)} for variant in variants),
        {"timed": reports.figures("questions-methods", own_noise)},
    )


def _figure_7(reports: Reports) -> Table:
    def times(variant: str, base: str, report: str = "dragon-latency") -> Measured:
        return _over(reports, variant, base, ("first_token_ms",), report=report)

    return printed_table(
        "Figure 7: time to the first token",
        {"held": times("dragon", "device")},
        {"held": times("dragon", "device", "dragon-first")},
        {"held": times("drcg-text", "dragon")},
        {"held": times("drcg-kv", "dragon")},
        {"ours": (_REMOTE_MS[1] - _REMOTE_MS[0]) / _TRIP_MS},
    )


def _sizes(reports: Reports) -> Table:
    def megabytes(layers: int, width: int, tokens: int, size: int) -> float:
        return 2 * layers * width * tokens * size / 1e6

    opt, qwen = megabytes(24, 2048, 128, 4), megabytes(28, 256, 128, 4)
    why = f"float32; the printed sizes are {114 / opt:.1f} and {16 / qwen:.1f} times that, as if about 290 tokens "
    why += "travelled"
    small = reports.figures("dragon-latency", _beside_a_row)
    return printed_table("Sections 7.1 and 7.3: sizes", {"formula": (opt, qwen), "why": why}, {"counted": small})


def _beside_a_row(report: Any) -> Values:
    """How many times longer than what a token sends, both ways, a row of SmolLM2's vocabulary is in float32."""
    row = _row(report, "dragon")
    sent = row["bytes_up_per_token"] + row["bytes_down_per_token"]
    return estimate(4 * _SMOLLM2_V / sent, report["setting"]["questions"])


def _figure_8(reports: Reports) -> Table:
    def seconds(extra: float) -> Measured:
        def pick(report: Any) -> Values:
            row = next(row for row in report["rows"] if abs(row["extra"] - extra) < 1e-9)
            names = ("auto", "delta-z", "device", "cloud", "random")
            return [estimate(row["seconds"][name], report["sequences"]) for name in names]

        return reports.figures("dragon-scheduling", pick)

    rows = [
        Row(f"{1e3 * extra:.0f} ms more", simulated=seconds(extra), form=".1f") for extra in (0.0, 0.1, 0.3, 0.5, 1.0)
    ]
    return Table("Figure 8: scheduling", rows, cells="auto / delta-z / device / cloud / random")


def _figure_9() -> Table:
    link = simulator.steady_link(0.02, 0.5)
    held = simulator.sample_acceptances(15, 0.8, 0.8, 0)
    run = simulator.simulate(held, 0.1, 0.05, link, strategy="delta-z")
    return printed_table("Figure 9: a pipeline", {"simulated": run.switches}, {"simulated": run.decided[0][0]})
