# SPDX-License-Identifier: Apache-2.0
"""FSD: "Fast and Cost-effective Speculative Edge-Cloud Decoding with Early Exits", its tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dsd_lab.bench.profiles import TABLE_9_MS
from dsd_lab.papers import theory
from dsd_lab.papers.theory import acceptance_of, expected_tokens
from dsd_lab.reproduce.table import PRINTED, Measured, Reports, Row, Table, labelled, printed_table
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.exits import ExitAdapters, default_rank

_PRINTED = PRINTED["fsd"]
_N, _GAMMA = 200, 4  # of the paper's experiments


@dataclass(frozen=True)
class _Adapters:
    """A row of Table 2, and what the model's own configuration says."""

    name: str
    exits: int
    millions: float
    percent: float
    hidden: int
    layers: int
    billions: float  # parameters of the model


_TABLE_2 = (
    _Adapters("Vicuna-7B and Llama-2-7B", 31, 101, 1.48, 4096, 32, 6.738),
    _Adapters("Vicuna-13B", 39, 158, 1.20, 5120, 40, 13.016),
    _Adapters("Qwen2-VL-7B", 27, 88, 1.02, 3584, 28, 8.291),
)
_FLIGHT = "fsd, three rounds in flight"
_NARROW = 384  # the rank that fits both Llamas
_TABLE_6: dict[str, list[list[float]]] = _PRINTED["table_6"]
_BENCHMARKS = ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM", "NQ")


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's tables and figures, in its order."""
    yield _figure_1(reports)
    yield from (_table_1(reports), _bills(reports), _table_2(), _table_4(), _table_5(), _table_6())
    yield from (_averages(), _figure_4a(reports), _figure_4b(reports), _table_7(reports))
    yield from (_table_8(reports), _figure_5(reports), _figure_6(), _table_9(reports))


def _setup(name: str) -> theory.Setup:
    return next(setup for setup in theory.SETUPS if setup.name == name)


ROBOT = _setup("Qwen2-VL 2B/7B, Go2")


def _figure_1(reports: Reports) -> Table:
    says = ROBOT.predicted(_N, _GAMMA)
    t_p = ROBOT.draft_round / _GAMMA
    cloud = _N / ROBOT.tau * (_GAMMA * t_p + ROBOT.t_q) + 2 * ROBOT.t_c

    def speed(label: str) -> Measured:
        return reports.figures("modes-go2", lambda r: labelled(r, label)["speedup"])

    return printed_table(
        "Figure 1: where draft and target run",
        {"formula": says.ar_seconds, "measured": Measured(text="1, by definition")},
        {"ours": cloud},
        {"formula": says.sd_seconds, "measured": speed("dsd")},
        {"formula": says.fsd_seconds, "measured": speed("fsd")},
    )


def _table_1(reports: Reports) -> Table:
    rows = []
    for prices, paper in zip(theory.PRICES, _PRINTED["table_1_costs"], strict=True):
        cost = theory.api_cost(prices)
        rows.append(
            Row(
                f"{prices.name}: cloud AR / cloud SD / edge-cloud SD",
                paper,
                (cost.ar, cost.cloud_sd, cost.edge_cloud_sd),
                measured=reports.figures("papers-cost", lambda r, prices=prices: _billed(r, prices)),
                form=".0f",
            )
        )
    return Table("Table 1: API cost", rows)


def _billed(report: Any, prices: theory.Prices) -> Sequence[float]:
    """Dollars of Table 1's request, by the passes and drafted tokens that each token took."""
    ar, speculated = (labelled(report, label) for label in ("ar", "dsd"))
    target_in, draft_in = 100 * prices.target_in, 100 * prices.draft_in

    def out(row: Any) -> float:
        return 500 * row["rounds"] / row["tokens"] * prices.target_out

    drafted = 500 * speculated["drafted"] / speculated["tokens"] * prices.draft_out
    edge = target_in + out(speculated)
    return target_in + out(ar), edge + draft_in + drafted, edge


def _bills(reports: Reports) -> Table:
    tau, alpha = 2.5, acceptance_of(tau=2.5, gamma=_GAMMA)
    rows = [
        Row(
            f"`{label}`: passes / tokens read / rounds sent in vain, a token",
            None,
            (1 / tau, (_GAMMA + 1) / tau, None),
            measured=reports.figures("papers-cost", lambda r, counted=counted: _a_token(labelled(r, counted))),
        )
        # With the same draft and gamma, the cloud alone takes the rounds of `dsd`.
        for label, counted in (("cloud-sd", "dsd"), ("dsd", "dsd"), ("fsd", "fsd"), (_FLIGHT, _FLIGHT))
    ]
    text = (
        "What a token costs the target, by what can be billed. Table 1 bills a pass as one written token. A provider "
        f"that bills each token a pass reads would charge (gamma + 1)/tau = {(_GAMMA + 1) / tau:.2f} tokens for one "
        f"at the paper's tau (alpha {alpha:.2f}): more than `ar`. Only at gamma + 1 = tau, every draft accepted, do "
        "both agree. Rounds sent ahead on an assumption that fails are refused before the target's pass: they cost "
        "bytes, not passes."
    )
    return Table("Table 1, what is billed", rows, text)


def _a_token(row: Any) -> Sequence[float]:
    tokens = row["tokens"]
    wasted = max(0, row["rounds_sent"] - row["rounds"])
    return row["rounds"] / tokens, (row["rounds"] + row["drafted"]) / tokens, wasted / tokens


def _adapter_millions(hidden: int, count: int, rank: int) -> float:
    """Parameters of the product's adapters, counted on the real class of one exit."""
    one = ExitAdapters([1], hidden, 2, rank)
    return count * one.parameters_count / 1e6


def _adapters(model: _Adapters, name: str, count: int, rank: int, form: str, why: str) -> Row:
    """Adapters of that rank after so many layers, beside the paper's count and share."""
    own = _adapter_millions(model.hidden, count, rank)
    share = 100 * own / (1e3 * model.billions + own)
    mark = ":" if count == model.exits else ","
    return Row(f"{model.name}{mark} {name}", (model.millions, model.percent), None, (own, share), form=form, why=why)


def _table_2() -> Table:
    rows = []
    for model in _TABLE_2:
        rank = 1e6 * model.millions / model.exits / (2 * model.hidden)
        own = default_rank(model.hidden)
        why = f"the paper's count is that of a bottleneck of rank {rank:.0f}; ours is an eighth of the width, {own}"
        rows.append(_adapters(model, f"{model.exits} exits, M parameters / % of all", model.exits, own, ".4g", why))
    why = f"fits count and share; `dsd-lab train exits --rank {_NARROW}` makes such adapters"
    name = f"rank {_NARROW} after every layer, the last too"
    rows += [_adapters(model, name, model.layers, _NARROW, ".3g", why) for model in _TABLE_2[:2]]
    qwen = _TABLE_2[2]
    share = 100 * qwen.millions / (1e3 * qwen.billions + qwen.millions)
    rows.append(
        Row(
            "Qwen2-VL-7B: % by its own count",
            qwen.percent,
            share,
            why=f"the paper's two figures contradict each other: 1.02 % of the model is "
            f"{1e3 * qwen.billions * qwen.percent / (100 - qwen.percent):.0f} M, not 88 M",
        )
    )
    return Table("Table 2: early exits", rows)


def _table_4() -> Table:
    says = ROBOT.predicted(_N, _GAMMA)
    return printed_table(
        "Tables 3 and 4: notation and latency",
        {"formula": says.ar_seconds, "ours": says.ar_seconds},
        {"formula": says.sd_seconds},
        {"formula": says.fsd_seconds},
        {"ours": says.limit_seconds},
    )


def _table_5() -> Table:
    rows = []
    for setup, paper in zip(theory.SETUPS, _PRINTED["table_5_ratios"], strict=True):
        ratio = setup.draft_round / _GAMMA / setup.t_q
        times = f"{1e3 * setup.draft_round:.0f} / {1e3 * setup.t_q:.0f} / {1e3 * setup.t_c:.0f} ms"
        rows.append(Row(f"{setup.name} ({times}): c", paper, ratio))
    return Table("Table 5: system metrics (and the robot's, Table 8)", rows)


def _table_6() -> Table:
    rows = []
    for name, benchmarks in _TABLE_6.items():
        setup = _setup(name)
        for benchmark, (sd, fsd, tau, miss, _) in zip(_BENCHMARKS, benchmarks, strict=False):
            says = theory.predict(
                n=_N, tau=tau, gamma=_GAMMA, t_p=setup.draft_round / _GAMMA, t_q=setup.t_q, t_c=setup.t_c, r=miss / 100
            )
            rows.append(
                Row(
                    f"{name}, {benchmark}: SD over AR / FSD over SD",
                    (sd, fsd),
                    (says.sd_over_ar, says.fsd_over_sd),
                    f"+{1e3 * _unlisted(setup, sd, tau):.0f} ms",
                )
            )
    return Table("Table 6: speed-ups by benchmark", rows)


def _unlisted(setup: theory.Setup, sd_over_ar: float, tau: float) -> float:
    """Seconds a round beyond Table 4's, at which SD is as slow as reported."""
    ar = theory.ar_seconds(n=_N, t_q=setup.t_q, t_c=setup.t_c)
    return ar / sd_over_ar * tau / _N - (2 * setup.t_c + setup.draft_round + setup.t_q)


def _averages() -> Table:
    rows = []
    for name, benchmarks in _TABLE_6.items():
        printed, computed = benchmarks[-1], tuple(map(fmean, zip(*benchmarks[:-1], strict=True)))
        off = [
            label
            for label, a, b, width in zip(
                ("SD over AR", "FSD over SD", "tau", "miss rate", "exit"),
                printed,
                computed,
                (0.006, 0.006, 0.006, 0.06, 0.6),
                strict=True,
            )
            if abs(a - b) > width
        ]
        why = f"not the mean of its rows: {', '.join(off)}" if off else "the means of its rows"
        rows.append(Row(name, printed, computed, why=why))
    return Table("Table 6: averages", rows)


def _figure_4a(reports: Reports) -> Table:
    rows = [
        Row(
            f"{workers} workers, {title}: misses, %",
            measured=reports.figures(report, lambda r, workers=workers: _misses(r, workers)),
            form=".1f",
        )
        for report, title, counts in (
            ("modes-threads", "greedy, gamma 4", (1, 2, 3, 6, 10, 15, 30)),
            ("papers-queues", "T = 1, gamma 8, 4 kbit/s down", (1, 2, 3)),
        )
        for workers in counts
    ]
    return Table("Figure 4a: pre-draft threads", rows)


def _misses(report: Any, workers: int, client: str = "priority", server: str = "priority") -> float:
    """The miss rate, %, of exits alone."""
    for row in report["rows"]:
        found = row["settings"]
        if row["mode"] != "fsd" or found.get("predraft_source") != "exits":
            continue
        queues = found.get("client_queue", "priority"), found.get("server_queue", "priority")
        if found["predraft_workers"] == workers and queues == (client, server):
            return float(100 * row["miss_rate"])
    raise KeyError(workers)


def _figure_4b(reports: Reports) -> Table:
    setup, gsm8k = _setup("Vicuna 68m/7B, RTX"), _TABLE_6["Vicuna 68m/7B, RTX"][2]
    alpha, beside = acceptance_of(tau=gsm8k[2], gamma=_GAMMA), _unlisted(setup, gsm8k[0], gsm8k[2])
    rows, below, below_with = [], [], []
    for gamma in range(1, 11):
        tau, t_p = expected_tokens(alpha=alpha, gamma=gamma), setup.draft_round / _GAMMA
        ar = theory.ar_seconds(n=_N, t_q=setup.t_q, t_c=setup.t_c)
        formula = ar / theory.sd_seconds(n=_N, tau=tau, gamma=gamma, t_p=t_p, t_q=setup.t_q, t_c=setup.t_c)
        # What is not listed is taken to grow with the tokens drafted.
        ours = ar / theory.sd_seconds(
            n=_N, tau=tau, gamma=gamma, t_p=t_p + beside / _GAMMA, t_q=setup.t_q, t_c=setup.t_c
        )
        below += [gamma] if formula < 1 else []
        below_with += [gamma] if ours < 1 else []
        found = reports.figures("modes-gamma", lambda r, gamma=gamma: _by_gamma(r, gamma))
        rows.append(Row(f"gamma {gamma}: SD over AR", None, formula, ours, found, compare=False))
    text = (
        f"The paper says that SD falls below AR past gamma 5 (GSM8K, RTX). Formula: Table 4 with alpha {alpha:.2f}, "
        f"which gives this benchmark's tau at gamma 4; below 1 {_from(below)}. Ours adds the {1e3 * beside:.0f} ms a "
        f"round that Table 6 leaves open, as a cost of each drafted token; below 1 {_from(below_with)}. Measured: "
        "`dsd` with the robot's times, whose drafts are accepted more often."
    )
    return Table("Figure 4b: draft length", rows, text)


def _from(gammas: Sequence[int]) -> str:
    return f"from gamma {gammas[0]} on" if gammas else "at no gamma up to 10"


def _by_gamma(report: Any, gamma: int) -> float:
    rows = (row for row in report["rows"] if row["mode"] == "dsd" and row["settings"]["draft_length"] == gamma)
    return float(next(rows)["speedup"])


def _table_7(reports: Reports) -> Table:
    rows = []
    for report, threads, name in (
        ("modes-queues", (3, 5, 10), "misses, %, at 3 / 5 / 10 threads"),
        ("papers-queues", (1, 2, 3), "at 1 / 2 / 3 threads, gamma 8, T = 1, 4 kbit/s down"),
    ):
        for queues, paper in _PRINTED["table_7"].items():
            client, server = queues.split()
            rows.append(
                Row(
                    f"client {client}, server {server}: {name}",
                    paper if report == "modes-queues" else None,
                    form=".2f",
                    measured=reports.figures(
                        report, lambda r, n=threads, c=client, s=server: [_misses(r, count, c, s) for count in n]
                    ),
                )
            )
    return Table("Table 7: queues", rows)


def _table_8(reports: Reports) -> Table:
    says, t_p = ROBOT.predicted(_N, _GAMMA), ROBOT.draft_round / _GAMMA

    def of(label: str, key: str, scale: float = 1.0) -> Measured:
        return reports.figures("modes-go2", lambda r: scale * labelled(r, label)[key])

    exits = "fsd:predraft_source=exits"
    both = reports.figures("modes-go2", lambda r: labelled(r, exits)["speedup"] / labelled(r, "dsd")["speedup"])
    free = theory.fsd_speedup(gamma=_GAMMA, c=t_p / ROBOT.t_q, r=0.0)
    return printed_table(
        "Table 8: the robot",
        {"measured": of("dsd", "draft_round_ms")},
        {"measured": of("dsd", "verify_round_ms")},
        {"measured": of("dsd", "link_delay_ms")},
        {"formula": t_p / ROBOT.t_q},
        {"measured": Measured(text="no GPU here")},
        {"measured": Measured(DecodeSettings(mode="fsd").predraft_workers)},
        {"measured": of("dsd", "tau")},
        {"measured": of(exits, "miss_rate", 100)},
        {"measured": of(exits, "mean_exit")},
        {"formula": says.sd_over_ar, "measured": of("dsd", "speedup")},
        {
            "formula": says.fsd_over_sd,
            "measured": both,
            "why": f"1.34 is the formula's at no miss at all ({free:.2f}), not at 55.63 %",
        },
        {"formula": says.fsd_over_ar, "measured": of(exits, "speedup")},
        text="Measured: profile `go2-a100` with the shipped pair, exits alone.",
    )


def _figure_5(reports: Reports) -> Table:
    return printed_table("Figure 5: the task", {"measured": reports.shipped_demo()})


def _figure_6() -> Table:
    rows = []
    for gamma, paper in ((4, 10), (7, 25), (10, 35)):
        c = 0.3
        needed = ((gamma * c + 1) / 2 - 1) / (gamma * c)
        rows.append(Row(f"c 0.3, gamma {gamma}: r for 2x, %", paper, 100 * needed, form=".0f", why="the paper rounds"))
    for gamma in (4, 7, 10):
        best = theory.fsd_speedup(gamma=gamma, c=0.5, r=0.1)
        rows.append(
            Row(f"c 0.5, r 10 %, gamma {gamma}", 5.0, best, form=".1f", why='"over 5x" does not follow from (9)')
        )
    five = (10 * 0.5 + 1) / 5
    rows.append(Row("c 0.5, gamma 10: r for 5x, %", 10, 100 * (five - 1) / (10 * 0.5), form=".0f"))
    c = 3 * 6.6 / 67
    rows.append(Row("c of OPT-125M/66B on a Jetson (6.6 ms, 67 ms, 3 times slower)", 0.3, c, form=".1f"))
    return Table("Figure 6: equation 9", rows)


def _table_9(reports: Reports) -> Table:
    rows = []
    drafts = dict(zip(TABLE_9_MS, _PRINTED["table_9_draft_ms"], strict=False))
    for batch, target in TABLE_9_MS.items():
        draft = drafts.get(batch)
        paper = (target / TABLE_9_MS[1], None if draft is None else draft / drafts[1])
        found = reports.figures("papers-batch", lambda r, batch=batch: _growth(r, batch))
        printed = f"{target:g} ms / {'out of memory' if draft is None else f'{draft:g} ms'}"
        rows.append(Row(f"batch {batch} ({printed}): times one alone, target / draft", paper, measured=found))
    return Table("Table 9: batches", rows)


def _growth(report: Any, batch: int) -> Sequence[float]:
    curves = ({row["batch"]: row["median_ms"] for row in report[side]} for side in ("target", "draft"))
    return [curve[batch] / curve[1] for curve in curves]
