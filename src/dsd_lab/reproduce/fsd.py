# SPDX-License-Identifier: Apache-2.0
"""FSD: "Fast and Cost-effective Speculative Edge-Cloud Decoding with Early Exits", its tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dsd_lab.bench.profiles import TABLE_9_MS
from dsd_lab.papers import theory
from dsd_lab.papers.theory import acceptance_of, expected_tokens
from dsd_lab.report import share
from dsd_lab.reproduce.table import (
    PRINTED,
    Estimate,
    Measured,
    Reports,
    Row,
    Table,
    Values,
    estimate,
    labelled,
    printed_table,
)
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
_EXITS = "fsd:predraft_source=exits"  # as in the paper, without guesses
_NARROW = 384  # the rank that fits both Llamas
_TABLE_6: dict[str, list[list[float]]] = _PRINTED["table_6"]
_PRETRAINED = "Table 6 with a pretrained pair"
_SPEC = {  # reports of `bench spec`: the column of their figures, whose speed it is, and the machine in Table 6
    "spec": ("timed", "this machine", ""),
    "spec-jetson": ("held", "Jetson and A100", "Vicuna 68m/7B, Jetson"),
    "spec-rtx": ("held", "RTX and A100", "Vicuna 68m/7B, RTX"),
}


def tables(reports: Reports) -> Iterator[Table]:
    """The paper's tables and figures, in its order."""
    yield from (_abstract(), _figure_1(reports), _table_1(reports), _bills(reports), _table_2(), _table_5())
    yield from (_table_6(), _table_6_pretrained(reports), _figure_4a(reports), _figure_4b(reports), _table_7())
    yield from (_table_8(reports), _figure_5(reports), _figure_6(), _table_9(reports))


def _setup(name: str) -> theory.Setup:
    return next(setup for setup in theory.SETUPS if setup.name == name)


ROBOT = _setup("Qwen2-VL 2B/7B, Go2")


def _abstract() -> Table:
    jetson = _TABLE_6["Vicuna 68m/Llama2 7B, Jetson"][-1]
    robot = PRINTED["rows"]["Table 8: the robot"]
    sd, fsd = (next(row["paper"] for row in robot if row["name"] == name) for name in ("AR to SD", "SD to FSD"))
    return printed_table(
        "Abstract",
        {"formula": 100 * (1 - 1 / jetson[0])},
        {"formula": 100 * (jetson[1] - 1)},
        {"formula": 100 * (sd * fsd - 1)},
    )


def _figure_1(reports: Reports) -> Table:
    says = ROBOT.predicted(_N, _GAMMA)
    t_p = ROBOT.draft_round / _GAMMA
    cloud = _N / ROBOT.tau * (_GAMMA * t_p + ROBOT.t_q) + 2 * ROBOT.t_c

    def faster(seconds: float) -> Sequence[float]:
        return seconds, says.ar_seconds / seconds

    def speed(label: str) -> Measured:
        return reports.figures("modes-go2", lambda r: [None, labelled(r, label)["speedup_interval"]])

    return printed_table(
        "Figure 1, Tables 3 and 4: where draft and target run",
        {"formula": faster(says.ar_seconds)},
        {"ours": faster(cloud)},
        {"formula": faster(says.sd_seconds), "held": speed("dsd")},
        {"formula": faster(says.fsd_seconds), "held": speed(_EXITS)},
        {"held": speed("fsd")},
        {"ours": faster(says.limit_seconds)},
    )


def _table_1(reports: Reports) -> Table:
    rows = []
    for prices, paper in zip(theory.PRICES, _PRINTED["table_1_costs"], strict=True):
        cost = theory.api_cost(prices)
        rows.append(
            Row(
                prices.name,
                paper,
                (cost.ar, cost.cloud_sd, cost.edge_cloud_sd),
                counted=reports.figures("papers-cost", lambda r, prices=prices: _billed(r, prices)),
                form=".0f",
            )
        )
    return Table("Table 1: API cost", rows, cells="cloud AR / cloud SD / edge-cloud SD")


def _billed(report: Any, prices: theory.Prices) -> Sequence[Estimate]:
    """Dollars of Table 1's request, by the passes and drafted tokens that each token took."""
    ar, speculated = (labelled(report, label) for label in ("ar", "dsd"))
    target_in, draft_in = 100 * prices.target_in, 100 * prices.draft_in

    def out(row: Any) -> float:
        return 500 * row["rounds"] / row["tokens"] * prices.target_out

    drafted = 500 * speculated["drafted"] / speculated["tokens"] * prices.draft_out
    edge = target_in + out(speculated)
    return [estimate(cost, speculated["replies"]) for cost in (target_in + out(ar), edge + draft_in + drafted, edge)]


def _bills(reports: Reports) -> Table:
    tau, alpha = 2.5, acceptance_of(tau=2.5, gamma=_GAMMA)
    rows = [
        Row(
            name,
            None,
            (1 / tau, (_GAMMA + 1) / tau, None),
            counted=reports.figures("papers-cost", lambda r, label=label: _a_token(labelled(r, label))),
        )
        # With the same draft and gamma, the cloud alone takes the rounds of `dsd`.
        for name, label in (("`dsd`, `fsd` and `cloud-sd`", "dsd"), (f"`{_FLIGHT}`", _FLIGHT))
    ]
    text = (
        "What a token costs the target, by what can be billed. Table 1 bills a pass as one written token. A provider "
        f"that bills each token a pass reads would charge (gamma + 1)/tau = {(_GAMMA + 1) / tau:.2f} tokens for one "
        f"at the paper's tau (alpha {alpha:.2f}): more than `ar`. Only at gamma + 1 = tau, every draft accepted, do "
        "both agree. Rounds sent ahead on an assumption that fails are refused before the target's pass: they cost "
        "bytes, not passes."
    )
    cells = "passes / tokens read / rounds sent in vain, a token"
    return Table("Table 1, what is billed", rows, text, cells)


def _a_token(row: Any) -> Sequence[Estimate]:
    wasted = max(0, row["rounds_sent"] - row["rounds"])
    counts = row["rounds"], row["rounds"] + row["drafted"], wasted
    return [estimate(count / row["tokens"], row["replies"]) for count in counts]


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


def _table_5() -> Table:
    rows = []
    printed = zip(theory.SETUPS, _PRINTED["table_5"], strict=True)
    for setup, (ratio, memory, threads) in printed:
        found = setup.draft_round / _GAMMA / setup.t_q
        times = f"{1e3 * setup.draft_round:.0f} / {1e3 * setup.t_q:.0f} / {1e3 * setup.t_c:.0f} ms"
        rows.append(Row(f"{setup.name} ({times})", (ratio, memory, threads), (found, None, None), form=".2g"))
    title = "Table 5: system metrics (and the robot's, Table 8)"
    return Table(title, rows, cells="(gamma T_p / T_q / T_c): c / GPU memory, GB / threads")


def _table_6() -> Table:
    rows = []
    for name, benchmarks in _TABLE_6.items():
        setup, printed = _setup(name), benchmarks[-1]
        says = [_predicted(setup, tau, miss) for _, _, tau, miss, _ in benchmarks[:-1]]
        formula = fmean(one.sd_over_ar for one in says), fmean(one.fsd_over_sd for one in says)
        beside = [1e3 * _unlisted(setup, sd, tau) for sd, _, tau, _, _ in benchmarks[:-1]]
        off = _not_the_means(benchmarks)
        rows.append(
            Row(
                name,
                printed,
                formula,
                f"+{min(beside):.0f} to +{max(beside):.0f} ms",
                why=f"the average printed is not the mean of its rows: {', '.join(off)}" if off else "",
            )
        )
    return Table("Table 6: speed-ups", rows, cells="SD over AR / FSD over SD / tau / misses, % / mean exit")


def _table_6_pretrained(reports: Reports) -> Table:
    rows = []
    for report, (column, machine, name) in _SPEC.items():
        paper: dict[str, Values] = {}
        if name:
            sd, fsd, tau, miss, exit_layer = _TABLE_6[name][-1]
            t_q = 1e3 * _setup(name).t_q
            paper = {"dsd": [sd, tau, None, None, t_q], "fsd": [sd * fsd, tau, miss, exit_layer, t_q]}
        for mode in ("stream", "dsd", "fsd"):
            found = {column: reports.figures(report, lambda r, mode=mode: _asked(r, mode))}
            why = reports.figures(report, _missed).values if mode == "fsd" else ""
            rows.append(Row(f"`{mode}`, {machine}", paper.get(mode), why=why if isinstance(why, str) else "", **found))
    return Table(_PRETRAINED, rows, cells="over `ar` / tau / misses, % / mean exit / T_q, ms")


def _asked(report: Any, mode: str) -> list[Any]:
    """A mode's figures over all questions of a report of `bench spec`."""
    found = next(row for row in report["rows"] if row["mode"] == mode)["tasks"]["Overall"]
    low, high = found["speedup_95"]
    speed = {"value": found["speedup"], "low": low, "high": high, "of": f"{found['questions']} questions"}
    misses = None if found["miss_rate"] is None else 100 * found["miss_rate"]
    return [speed, found["tau"], misses, found["mean_exit"], found["target_ms"]]


def _missed(report: Any) -> str:
    """Why `fsd` is slower than plain rounds, if it is."""
    (dsd, *_), (fsd, _, misses, *_) = (_asked(report, mode) for mode in ("dsd", "fsd"))
    slower = fsd["value"] < dsd["value"]
    return f"slower than plain rounds: {misses:.0f} % of its rounds find no pre-draft" if slower else ""


def _predicted(setup: theory.Setup, tau: float, miss: float) -> theory.Latency:
    """Table 4's formulas with a machine's times and a benchmark's tau and misses, %."""
    t_p = setup.draft_round / _GAMMA
    return theory.predict(n=_N, tau=tau, gamma=_GAMMA, t_p=t_p, t_q=setup.t_q, t_c=setup.t_c, r=miss / 100)


def _unlisted(setup: theory.Setup, sd_over_ar: float, tau: float) -> float:
    """Seconds a round beyond Table 4's, at which SD is as slow as reported."""
    ar = theory.ar_seconds(n=_N, t_q=setup.t_q, t_c=setup.t_c)
    return ar / sd_over_ar * tau / _N - (2 * setup.t_c + setup.draft_round + setup.t_q)


def _not_the_means(benchmarks: Sequence[Sequence[float]]) -> list[str]:
    """Which printed averages are not the means of the rows above them."""
    printed, computed = benchmarks[-1], tuple(map(fmean, zip(*benchmarks[:-1], strict=True)))
    names, widths = ("SD over AR", "FSD over SD", "tau", "misses", "exit"), (0.006, 0.006, 0.006, 0.06, 0.6)
    columns = zip(names, printed, computed, widths, strict=True)
    return [name for name, a, b, width in columns if abs(a - b) > width]


def _figure_4a(reports: Reports) -> Table:
    def of(workers: int) -> Measured:
        return reports.figures("modes-threads", lambda r: _by_workers(r, workers))

    rows = [Row(f"{workers} workers", held=of(workers), form=".3g") for workers in (1, 3, 15)]
    return Table("Figure 4a: pre-draft threads", rows, cells="misses, % / FSD over SD")


def _by_workers(report: Any, workers: int) -> Values:
    """Misses of exits alone, %, and how many times as fast as `dsd` they are."""
    rows = (row for row in report["rows"] if row["settings"].get("predraft_source") == "exits")
    row = next(row for row in rows if row["settings"]["predraft_workers"] == workers)
    return _misses(row, report["images"]), row["speedup"] / labelled(report, "dsd")["speedup"]


def _misses(row: Any, replies: int) -> Estimate:
    """Percent of the rounds after each reply's first whose pre-draft was not there, with Wilson's interval."""
    rounds = round((row["rounds_per_reply"] - 1) * replies)
    missed = round(row["miss_rate"] * rounds)
    found = share([True] * missed + [False] * (rounds - missed))
    return {key: 100 * found[key] for key in ("value", "low", "high")} | {"of": f"{rounds} rounds"}


def _figure_4b(reports: Reports) -> Table:
    setup, gsm8k = _setup("Vicuna 68m/7B, RTX"), _TABLE_6["Vicuna 68m/7B, RTX"][2]
    alpha, beside = acceptance_of(tau=gsm8k[2], gamma=_GAMMA), _unlisted(setup, gsm8k[0], gsm8k[2])

    def says(gamma: int, more: float = 0.0) -> theory.Latency:
        """With ``more`` seconds for each drafted token: what is not listed is taken to grow with them."""
        tau, t_p = expected_tokens(alpha=alpha, gamma=gamma), setup.draft_round / _GAMMA + more
        return theory.predict(n=_N, tau=tau, gamma=gamma, t_p=t_p, t_q=setup.t_q, t_c=setup.t_c, r=gsm8k[3] / 100)

    def both(found: theory.Latency) -> Sequence[float]:
        return found.sd_over_ar, found.fsd_over_sd

    rows, more = [], beside / _GAMMA
    for gamma in (1, 2, 4, 8):
        held = reports.figures("modes-gamma", lambda r, gamma=gamma: _by_gamma(r, gamma))
        rows.append(Row(f"gamma {gamma}", None, both(says(gamma)), both(says(gamma, more)), held=held))
    below = [[gamma for gamma in range(1, 11) if says(gamma, of).sd_over_ar < 1] for of in (0.0, more)]
    text = (
        "The paper draws curves and says that SD falls below AR past gamma 5 (GSM8K, RTX). Formula: Table 4 with alpha "
        f"{alpha:.2f}, which gives this benchmark's tau at gamma 4, and its misses; SD is below 1 {_from(below[0])}. "
        f"Ours adds the {1e3 * beside:.0f} ms a round that Table 6 leaves open, as a cost of each drafted token; SD is "
        f"below 1 {_from(below[1])}. Held: the robot's times, and drafts that are accepted more often."
    )
    return Table("Figure 4b: draft length", rows, text, "SD over AR / FSD over SD")


def _from(gammas: Sequence[int]) -> str:
    return f"from gamma {gammas[0]} on" if gammas else "at no gamma up to 10"


def _by_gamma(report: Any, gamma: int) -> Values:
    dsd, fsd = (
        next(row for row in report["rows"] if row["mode"] == mode and row["settings"]["draft_length"] == gamma)
        for mode in ("dsd", "fsd")
    )
    return dsd["speedup_interval"], fsd["speedup"] / dsd["speedup"]


def _table_7() -> Table:
    rows = []
    for queues, paper in _PRINTED["table_7"].items():
        client, server = queues.split()
        rows.append(Row(f"client {client}, server {server}", paper))
    return Table("Table 7: queues", rows, cells="misses, %, at 3 / 5 / 10 threads")


def _table_8(reports: Reports) -> Table:
    says, t_p = ROBOT.predicted(_N, _GAMMA), ROBOT.draft_round / _GAMMA

    def of(pick: Callable[[Any], Values]) -> Measured:
        return reports.figures("modes-go2", pick)

    times = ("draft_round_ms", "verify_round_ms", "link_delay_ms")
    free = theory.fsd_speedup(gamma=_GAMMA, c=t_p / ROBOT.t_q, r=0.0)
    return printed_table(
        "Table 8: the robot",
        {"held": of(lambda r: [labelled(r, "dsd")[key] for key in times])},
        {"held": of(lambda r: estimate(labelled(r, "dsd")["tau"], r["images"]))},
        {"held": of(lambda r: _misses(labelled(r, _EXITS), r["images"]))},
        {"held": of(lambda r: labelled(r, _EXITS)["mean_exit"])},
        {"formula": says.sd_over_ar, "held": of(lambda r: labelled(r, "dsd")["speedup_interval"])},
        {
            "formula": says.fsd_over_sd,
            "held": of(lambda r: labelled(r, _EXITS)["speedup"] / labelled(r, "dsd")["speedup"]),
            "why": f"1.34 is the formula's at no miss at all ({free:.2f}), not at 55.63 %",
        },
        {"formula": says.fsd_over_ar, "held": of(lambda r: labelled(r, _EXITS)["speedup_interval"])},
    )


def _figure_5(reports: Reports) -> Table:
    found = reports.figures("pair", lambda r: r["target"]["situations"]["demo"]["closed_loop"])
    return printed_table("Figure 5: the task", {"simulated": found})


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
        rows.append(Row(f"batch {batch} ({printed})", paper, timed=found))
    return Table("Table 9: batches", rows, cells="times one alone, target / draft")


def _growth(report: Any, batch: int) -> Values:
    curves = ({row["batch"]: row["median_ms"] for row in report[side]} for side in ("target", "draft"))
    return [estimate(curve[batch] / curve[1], report.get("repeats")) for curve in curves]
