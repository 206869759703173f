# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab theory`: what the papers' formulas predict, FSD's, DSSD's and TSLT's, DRAGON's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cyclopts import App

from dsd_lab.papers.dragon_schedules import SCHEDULES
from dsd_lab.report import header, print_table
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, write_json

command = App(name="theory", help="What the papers' formulas predict.")


@arguments
class CostArguments:
    draft_price: tuple[float, float] | None = flag(
        None, "dollars for a million tokens the draft reads, and for a million it writes"
    )
    target_price: tuple[float, float] | None = flag(
        None, "dollars for a million tokens the target reads, and for a million it writes"
    )
    gamma: int = flag(4, "tokens drafted per round")
    tau: float = flag(2.5, "tokens gained per round")
    requests: float = flag(1e6, "requests billed")
    input_tokens: float = flag(100.0, "tokens of a request")
    output_tokens: float = flag(500.0, "tokens of a reply")
    json: Path | None = json_option()


@arguments
class LatencyArguments:
    draft_ms: float = flag(72.0, "T_p, one draft forward pass")
    target_ms: float = flag(620.0, "T_q, one target forward pass")
    link_ms: float = flag(120.0, "T_c, one way")
    sync_ms: float = flag(0.0, "T_r, picking up a pre-draft")
    gamma: int = flag(4, "tokens drafted per round")
    tau: float = flag(2.92, "tokens gained per round")
    miss_rate: float = flag(0.5563, "r, share of rounds without a pre-draft")
    tokens: float = flag(200.0, "n, tokens of a reply")
    plot: Path | None = file_option("draw equation 9 over r and c (Figure 6)")
    json: Path | None = json_option()


@command.command(name="fsd-cost")
def cost(args: CostArguments = CostArguments()) -> int:
    """API bill with and without a draft (Table 1).

    What cloud decoding alone, speculative decoding in the cloud, and the draft at the edge cost in dollars. Without
    prices: the paper's Table 1.
    """
    from dsd_lab.papers.theory import PRICES, Prices, TheoryError, api_cost

    if (args.draft_price is None) != (args.target_price is None):
        raise TheoryError("give both --draft-price and --target-price, or neither for Table 1")
    rows = list(PRICES)
    if args.draft_price is not None:
        rows = [Prices("given prices", *args.draft_price, *args.target_price)]
    shape = {name: getattr(args, name) for name in ("gamma", "tau", "requests", "input_tokens", "output_tokens")}
    costs = [(prices, api_cost(prices, **shape)) for prices in rows]
    print(
        f"{args.requests:,.0f} requests, {args.input_tokens:g} tokens in, {args.output_tokens:g} out, "
        f"gamma {args.gamma}, tau {args.tau:g}; prices in dollars for a million tokens\n"
    )
    shown = [["", "draft", "target", "cloud AR", "cloud SD", "edge-cloud SD"]]
    for prices, cost in costs:
        draft, target = f"{prices.draft_in:g}/{prices.draft_out:g}", f"{prices.target_in:g}/{prices.target_out:g}"
        savings = (_saving(cost.cloud_sd, cost.ar), _saving(cost.edge_cloud_sd, cost.ar))
        shown.append([prices.name, draft, target, _dollars(cost.ar), *savings])
    print_table(shown)
    report = {**shape, "rows": [asdict(prices) | asdict(cost) for prices, cost in costs]}
    write_json(args.json, report)
    return EXIT_DONE


@command.command(name="fsd-latency")
def latency(args: LatencyArguments = LatencyArguments()) -> int:
    """Seconds per reply and speed-ups (Table 4, equation 9).

    The seconds per reply of the paper's Table 4, and the speed-ups that follow. The defaults are its robot (Table 8);
    the systems it measured are listed below, formula beside report.
    """
    from dsd_lab.papers.theory import SETUPS, predict

    times = {"t_p": args.draft_ms, "t_q": args.target_ms, "t_c": args.link_ms, "t_r": args.sync_ms}
    timed = {name: ms / 1e3 for name, ms in times.items()}
    given = {"n": args.tokens, "tau": args.tau, "gamma": args.gamma, **timed, "r": args.miss_rate}
    predicted = predict(**given)
    print(
        f"{args.tokens:g} tokens, T_p {args.draft_ms:g} ms, T_q {args.target_ms:g} ms, c {predicted.cost_ratio:.3g}, "
        f"T_c {args.link_ms:g} ms, T_r {args.sync_ms:g} ms, gamma {args.gamma}, tau {args.tau:g}, "
        f"r {args.miss_rate:.2%}\n"
    )
    shown = [["", "seconds", "over AR"]]
    for name, seconds in (
        ("cloud AR    2Tc + nTq", predicted.ar_seconds),
        ("SD          n/tau (2Tc + gTp + Tq)", predicted.sd_seconds),
        ("FSD         n/tau (2Tc + rgTp + (1-r)Tr + Tq)", predicted.fsd_seconds),
        ("limit       n/tau Tq + 2Tc", predicted.limit_seconds),
    ):
        shown.append([name, f"{seconds:.3f}", f"{predicted.ar_seconds / seconds:.2f}x"])
    print_table(shown)
    print(f"\nFSD over SD {predicted.fsd_over_sd:.3f}x; link and hits free (equation 9) {predicted.equation_9:.3f}x")
    print("\nThe paper's systems, 200 tokens at gamma 4: formula | reported")
    shown = [["", "SD over AR", "FSD over SD", "FSD over AR"]]
    for setup in SETUPS:
        says = setup.predicted()
        formulas = says.sd_over_ar, says.fsd_over_sd, says.fsd_over_ar
        reported = setup.sd_over_ar, setup.fsd_over_sd, setup.sd_over_ar * setup.fsd_over_sd
        shown.append([setup.name, *(f"{ours:.2f} | {its:.2f}" for ours, its in zip(formulas, reported, strict=True))])
    print_table(shown)
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_speedups

        draw_speedups(args.plot, predicted.cost_ratio, args.miss_rate)
        print(f"\n{args.plot} shows equation 9; the star is the setting above")
    report = {
        **given,
        **asdict(predicted),
        "paper": [asdict(setup) | {"predicted": asdict(setup.predicted())} for setup in SETUPS],
    }
    write_json(args.json, report)
    return EXIT_DONE


def _dollars(value: float) -> str:
    return f"${value:,.2f}".removesuffix(".00")


def _saving(value: float, of: float) -> str:
    """Dollars, and by how many percent that is less, or more, than another sum."""
    if not of:
        return _dollars(value)
    change = round(100 * (value / of - 1))
    return f"{_dollars(value)} ({change:+d} %)"


@arguments
class DssdArguments:
    alpha: float = flag(0.61, "acceptance")
    gamma: int = flag(8, "tokens drafted per round")
    draft_ms: float = flag(2.0, "one draft forward pass")
    target_ms: float = flag(20.0, "one target forward pass")
    ntt_ms: float = flag(20.0, "T_NTT, there and back without sending")
    vocabulary: int = flag(50272, "V")
    bits: int = flag(32, "bits of one probability")
    up_mbit: float = flag(100.0, "uplink, Mbit/s")
    down_mbit: float = flag(100.0, "downlink, Mbit/s")
    json: Path | None = json_option()


@arguments
class TsltArguments:
    alpha: list[float] = flag(
        [0.6],
        "acceptance of the first, second, ... candidate once those before it are rejected; a layer of k candidates "
        "takes the first k",
        many=True,
    )
    tree: list[int] = flag(
        [1, 1, 1, 1], "children of every node, layer by layer; 1 1 1 1 is a sequence of four", many=True
    )
    top_k: int = flag(320, "ids kept, TSLT's K")
    sigma: float = flag(0.15, "mass that truncation drops")
    draft_ms: float = flag(2.0, "T_SLM, one draft forward pass")
    target_ms: float = flag(30.0, "T_LLM, one target forward pass")
    ntt_ms: float = flag(0.0, "there and back without sending; free in the paper")
    vocabulary: int = flag(32000, "V")
    bits: int = flag(16, "bits of one probability")
    up_mbit: float = flag(10.0, "uplink, Mbit/s")
    json: Path | None = json_option()


@arguments
class AcceptanceArguments:
    tv: float = flag(0.3, "total variation distance of draft and target")
    sigma: float = flag(0.0, "mass that truncation drops")
    candidates: list[float] = flag([], "acceptance of each candidate once those before it are rejected", many=True)
    json: Path | None = json_option()


@arguments
class ProofsArguments:
    tv: float = flag(0.3, "total variation distance of draft and target")
    sigma: float = flag(0.05, "mass that truncation drops")
    top_k: int = flag(1024, "ids kept by truncation")
    target_top_k: int = flag(0, "ids the target's own sampling settings keep; 0: all")
    gamma: int = flag(4, "tokens drafted per round")
    draft_ms: float = flag(72.0, "one draft forward pass")
    target_ms: float = flag(620.0, "one target forward pass")
    ntt_ms: float = flag(240.0, "there and back without sending")
    vocabulary: int = flag(152064, "V")
    bits: int = flag(16, "bits of one probability")
    up_mbit: float = flag(10.0, "uplink, Mbit/s")
    down_mbit: float = flag(50.0, "downlink, Mbit/s")
    plot: Path | None = file_option("draw speed-up by uplink, and acceptance by TV")
    json: Path | None = json_option()


def _given(args: object) -> dict[str, Any]:
    """The numbers a formula was called with."""
    return {name: value for name, value in vars(args).items() if isinstance(value, int | float | list)}


@command.command(name="dssd")
def dssd(args: DssdArguments = DssdArguments()) -> int:
    """DSD beside DSSD (DSSD, equations 5 to 15).

    Distributions up (DSD) beside one down where a draft is rejected (DSSD). The defaults are OPT-125M to 6.7B of the
    paper; its Table 2 is listed below, formula beside report.
    """
    from dsd_lab.papers import proofs as theory

    tokens = theory.expected_tokens(alpha=args.alpha, gamma=args.gamma)
    t_ntt, t_q = args.ntt_ms / 1e3, args.target_ms / 1e3
    t_up, t_down = (
        theory.distribution_seconds(entries=args.vocabulary, b_prob=args.bits, rate=rate * 1e6)
        for rate in (args.up_mbit, args.down_mbit)
    )
    comm = {
        "dsd": theory.dsd_comm_seconds(sent=args.gamma, t_v=t_up, t_ntt=t_ntt),
        "dssd": theory.dssd_comm_seconds(alpha=args.alpha, gamma=args.gamma, t_v=t_down, t_ntt=t_ntt),
    }
    print(
        f"alpha {args.alpha:g}, gamma {args.gamma}: {tokens:.3f} tokens a round; one distribution takes "
        f"{1e3 * t_up:.2f} ms up, {1e3 * t_down:.2f} ms down\n"
    )
    report: dict[str, Any] = {**_given(args), "tokens": tokens}
    shown = [["", "communication", "round", "speed-up"]]
    for name, seconds in comm.items():
        whole = theory.round_seconds(gamma=args.gamma, t_p=args.draft_ms / 1e3, t_q=t_q, t_comm=seconds)
        gain = theory.speedup(tokens=tokens, seconds=whole, t_q=t_q)
        shown.append([name.upper(), f"{1e3 * seconds:.2f} ms", f"{1e3 * whole:.2f} ms", f"{gain:.2f}x"])
        report[name] = {"comm_seconds": seconds, "round_seconds": whole, "speedup": gain}
    print_table(shown)
    print(f"\nDSSD's communication is between {1e3 * t_ntt:.2f} and {1e3 * (t_down + t_ntt):.2f} ms")
    print("\nThe paper's Table 2, seconds for 128 tokens: formula | reported")
    shown, report["paper"] = [["", "rounds", "DSD", "DSSD"]], []
    for row in theory.TABLE_2:
        says = {"dsd": row.predicted_dsd(), "dssd": row.predicted_dssd()}
        name = f"T_NTT {1e3 * row.t_ntt:g} ms, {row.rate / 1e6:g} Mbit/s, gamma {row.gamma}"
        pairs = (f"{says['dsd']:.2f} | {row.dsd:.2f}", f"{says['dssd']:.2f} | {row.dssd:.2f}")
        shown.append([name, str(row.rounds), *pairs])
        report["paper"].append(asdict(row) | {"rounds": row.rounds, "predicted": says})
    print_table(shown)
    write_json(args.json, report)
    return EXIT_DONE


@command.command(name="tslt")
def tslt(args: TsltArguments = TsltArguments()) -> int:
    """Full beside truncated distributions, and trees (TSLT, 1 to 28).

    The uplink of full and of truncated distributions, for a sequence or for a tree <k1 k2 ...>, and the speed-up over
    the target alone; truncated, at the least and the most acceptance that the bounds leave. As in the paper, the
    downlink is free, and the ids of full distributions are not counted, though equation 3 has them.
    """
    import numpy as np

    from dsd_lab.papers import proofs as theory
    from dsd_lab.papers.acceptance import candidate_bounds, total_acceptance
    from dsd_lab.papers.theory import TheoryError

    tree, rows, drafted = args.tree, theory.distributions(args.tree), theory.nodes(args.tree)
    if max(tree) > len(args.alpha):
        raise TheoryError(f"a node has {max(tree)} candidates; give --alpha for each of them, not {len(args.alpha)}")
    if not 1 <= args.top_k <= args.vocabulary:
        raise TheoryError(f"top-k is {args.top_k}; keep 1 to {args.vocabulary} ids")
    layers = [total_acceptance(args.alpha[:children]) for children in tree]
    t_q, index = args.target_ms / 1e3, theory.index_bits(args.vocabulary)
    shape = "sequence" if drafted == len(tree) else "tree"
    print(
        f"{shape} <{','.join(map(str, tree))}>: {drafted} tokens drafted from {rows} distributions, "
        f"acceptance by layer {' '.join(f'{rate:.3f}' for rate in layers)}\n"
    )
    shown = [["", "sent up", "communication", "tokens", "round", "speed-up"]]
    report: dict[str, Any] = {**_given(args), "distributions": rows, "nodes": drafted}
    moved = candidate_bounds(args.alpha, args.sigma, factor=1.0)
    cases: list[tuple[str, int, int, list[float]]] = [("full", args.vocabulary, 0, layers)]
    for name, sign in (("least", -1), ("most", 1)):
        rates = np.clip(np.array(args.alpha) + sign * moved, 0, 1)
        bound = [total_acceptance(rates[:children]) for children in tree]
        cases.append((f"top {args.top_k}, at {name} (20, 35)", args.top_k, index, bound))
    report["cases"] = []
    for name, entries, b_idx, rates in cases:
        t_v = theory.distribution_seconds(entries=entries, b_prob=args.bits, b_idx=b_idx, rate=args.up_mbit * 1e6)
        comm = theory.dsd_comm_seconds(sent=rows, t_v=t_v, t_ntt=args.ntt_ms / 1e3)
        tokens = 1 + theory.accepted_tokens(rates)
        whole = theory.round_seconds(gamma=len(tree), t_p=args.draft_ms / 1e3, t_q=t_q, t_comm=comm)
        gain = theory.speedup(tokens=tokens, seconds=whole, t_q=t_q)
        sent = rows * entries * (args.bits + b_idx) / 8
        figures = (f"{1e3 * comm:.2f} ms", f"{tokens:.3f}", f"{1e3 * whole:.2f} ms", f"{gain:.2f}x")
        shown.append([name, f"{sent / 1e3:,.1f} kB", *figures])
        case = {"name": name, "layers": rates, "up_bytes": sent, "comm_seconds": comm}
        report["cases"].append(case | {"tokens": tokens, "round_seconds": whole, "speedup": gain})
    print_table(shown)
    write_json(args.json, report)
    return EXIT_DONE


@command.command(name="acceptance")
def acceptance(args: AcceptanceArguments = AcceptanceArguments()) -> int:
    """Acceptance and its bounds from the distance of the two models' distributions."""
    from dsd_lab.papers.acceptance import coupled_bound, total_acceptance, truncation_bounds
    from dsd_lab.papers.theory import check_shares

    check_shares(tv=args.tv)
    low, high = truncation_bounds(1 - args.tv, args.sigma)
    report = {
        **_given(args),
        "optimal": 1 - args.tv,
        "truncated_least": low,
        "truncated_most": high,
        "coupled_least": coupled_bound(args.tv),
    }
    print(f"1 - TV, the most of any lossless rule        {1 - args.tv:.4f}")
    print(f"truncated, sigma {args.sigma:<6g} (TSLT 20)          {low:.4f} to {high:.4f}")
    print(f"coupled, at least (1 - TV) / (1 + TV)        {coupled_bound(args.tv):.4f}")
    if args.candidates:
        report["candidates_total"] = total_acceptance(args.candidates)
        print(f"{len(args.candidates)} candidates together (TSLT 39)             {report['candidates_total']:.4f}")
    write_json(args.json, report)
    return EXIT_DONE


@command.command(name="proofs")
def proofs(args: ProofsArguments = ProofsArguments()) -> int:
    """Bytes per token and speed-up of all four proofs.

    Full, split, truncated and coupled proofs on one link, ids included, message headers not. Truncated and coupled are
    shown at the least acceptance that their bounds leave. Times and link are the FSD paper's robot by default, the
    vocabulary is Qwen2-VL-7B's.
    """
    from dsd_lab.papers.acceptance import coupled_bound, truncation_bounds
    from dsd_lab.papers.proofs import PROOFS, check_gamma, predict_proof
    from dsd_lab.papers.theory import check_shares

    check_shares(tv=args.tv)
    check_gamma(args.gamma)
    optimal = 1 - args.tv
    ranges = {
        "full": (optimal, optimal),
        "split": (optimal, optimal),
        "truncated": truncation_bounds(optimal, args.sigma),
        "coupled": (coupled_bound(args.tv), optimal),
    }
    setting = {
        "config": [1] * args.gamma, "t_p": args.draft_ms / 1e3, "t_q": args.target_ms / 1e3,
        "t_ntt": args.ntt_ms / 1e3, "vocabulary": args.vocabulary, "b_prob": args.bits, "kept": args.top_k,
        "target_kept": args.target_top_k,
    }  # fmt: skip
    rates = {"rate_up": args.up_mbit * 1e6, "rate_down": args.down_mbit * 1e6}
    found = [predict_proof(proof, alpha=ranges[proof][0], **rates, **setting) for proof in PROOFS]
    print(
        f"gamma {args.gamma}, TV {args.tv:g}, V {args.vocabulary}, {args.up_mbit:g} Mbit/s up, "
        f"{args.down_mbit:g} down, {args.ntt_ms:g} ms there and back\n"
    )
    shown = [["", "acceptance", "tokens", "up B/token", "down B/token", "communication", "round", "speed-up"]]
    for says in found:
        least = ">= " if says.proof in ("truncated", "coupled") else ""
        sent = (f"{says.up_bytes:,.1f}", f"{says.down_bytes:,.1f}")
        times = (f"{1e3 * says.comm_seconds:,.1f} ms", f"{1e3 * says.round_seconds:,.1f} ms")
        row = (says.proof, f"{least}{says.acceptance:.3f}", f"{says.tokens:.2f}", *sent, *times, f"{says.speedup:.2f}x")
        shown.append([*row])
    print_table(shown)
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_proofs

        draw_proofs(args.plot, ranges, setting, args.down_mbit / args.up_mbit)
        print(f"\n{args.plot} shows the speed-ups by uplink rate, and acceptance by TV")
    write_json(args.json, {**_given(args), "proofs": [asdict(says) for says in found]})
    return EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class SidesArguments:
    """Both sides' speed."""

    device_ms: float = flag(100.0, "one decoding step of the device")
    cloud_ms: float = flag(50.0, "one decoding step of the cloud")


@dataclass(frozen=True, kw_only=True)
class AnswersArguments(SidesArguments):
    """What the simulated answers are like."""

    acceptance: tuple[float, float] = flag((0.8, 0.8), "how often drafts are accepted: the device's, the cloud's")
    base_ms: float = flag(20.0, "round trip without the extra latency")
    seed: int = flag(0, "of the acceptances")


@arguments
class SpeedupArguments(SidesArguments):
    rtt_ms: float = flag(300.0, "round trip")
    acceptance: float = flag(0.8, "how often the cloud's drafts are accepted")
    plot: Path | None = file_option("draw the speed-up over delays and round trips (Figure 4)")
    json: Path | None = json_option()


@arguments
class SchedulingArguments(AnswersArguments):
    tokens: int = flag(100, "tokens of an answer")
    extra_ms: list[float] = flag(
        [0.0, 100.0, 200.0, 300.0, 500.0, 700.0, 1000.0], "latencies added to the round trip", many=True
    )
    sequences: int = flag(50, "answers simulated")
    plot: Path | None = file_option("draw the seconds by extra latency (Figure 8)")
    json: Path | None = json_option()


@arguments
class PipelineArguments(AnswersArguments):
    tokens: int = flag(15, "tokens of the answer")
    extra_ms: float = flag(500.0, "latency added to the round trip")
    schedule: str = flag("auto", "which side aggregates", choices=SCHEDULES)
    plot: Path | None = file_option("draw both sides' pipelines (Figure 9)")
    json: Path | None = json_option()


@command.command(name="dragon-speedup")
def speedup(args: SpeedupArguments = SpeedupArguments()) -> int:
    """DRAGON over token-wise synchronisation (equation 9).

    Seconds per token where the device aggregates (equation 7), and the speed-up over token-wise synchronisation, by
    how often the cloud's drafts are accepted.
    """
    from dsd_lab.papers.dragon_schedules import latency
    from dsd_lab.papers.dragon_simulator import speedup as predicted

    device, cloud, rtt = args.device_ms / 1e3, args.cloud_ms / 1e3, args.rtt_ms / 1e3
    print(
        f"device {args.device_ms:g} ms, cloud {args.cloud_ms:g} ms, round trip {args.rtt_ms:g} ms; "
        "the device aggregates\n"
    )
    rows, shown = [], [["the cloud's acceptance", "ms a token", "speed-up"]]
    for acceptance in sorted({0.0, 0.25, 0.5, 0.75, 0.9, 1.0, args.acceptance}):
        gain = predicted(device, cloud, rtt, acceptance)
        seconds = latency(device, cloud, rtt, acceptance)
        rows.append({"acceptance": acceptance, "seconds_a_token": seconds, "speedup": gain})
        name = f"{acceptance:.0%}" + (" (token-wise)" if acceptance == 0.0 else "")
        shown.append([name, f"{1e3 * seconds:.1f}", f"{gain:.2f}x"])
    print_table(shown)
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_dragon_speedup

        draw_dragon_speedup(args.plot, device, cloud, rtt)
        print(f"\n{args.plot} shows equation 9; the star is the setting above")
    write_json(args.json, {"device_seconds": device, "cloud_seconds": cloud, "rtt_seconds": rtt, "rows": rows})
    return EXIT_DONE


def _setting(args: SchedulingArguments | PipelineArguments) -> Any:
    from dsd_lab.papers.dragon_simulator import Setting

    return Setting(args.device_ms / 1e3, args.cloud_ms / 1e3, args.base_ms / 1e3, tuple(args.acceptance), args.tokens)


def _described(args: AnswersArguments) -> str:
    return (
        f"device {args.device_ms:g} ms, cloud {args.cloud_ms:g} ms, acceptances {args.acceptance[0]:.0%} and "
        f"{args.acceptance[1]:.0%}, round trip {args.base_ms:g} ms and the extra latency"
    )


@command.command(name="dragon-scheduling")
def scheduling(args: SchedulingArguments = SchedulingArguments()) -> int:
    """Simulated answers by who aggregates (Figure 8).

    Mean seconds of simulated answers, until the device has the last token, by which side aggregates: auto, the paper's
    rule (delta-z), the device, the cloud, either by chance; beside them token-wise and sequence-wise synchronisation.
    The extra latency has a jitter of a fifth, with a period of 20 pi seconds.
    """
    from dsd_lab.papers.dragon_simulator import SEQUENCE_WISE, STRATEGIES, TOKEN_WISE, compare

    extras = [ms / 1e3 for ms in args.extra_ms]
    setting = _setting(args)
    found = compare(setting, extras, args.sequences, seed=args.seed)
    print(f"{_described(args)}; mean seconds of {args.sequences} answers of {args.tokens} tokens\n")
    names = (*STRATEGIES, TOKEN_WISE, SEQUENCE_WISE)
    shown = [["extra ms", *names, "auto over best"]]
    for one in found:
        seconds = [f"{one.seconds[name]:.2f}" for name in names]
        change = f"{100 * (one.over_best_side() - 1):+.1f} %"
        shown.append([f"{1e3 * one.extra:g}", *seconds, change])
    print_table(shown)
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_scheduling

        draw_scheduling(args.plot, found, f"{_described(args)}; {args.sequences} answers of {args.tokens}")
        print(f"\n{args.plot} shows the seconds by extra latency")
    rows = [asdict(one) | {"auto_over_best_side": one.over_best_side()} for one in found]
    head = header("dragon-scheduling", ("dsd_lab/papers/dragon_simulator.py", "dsd_ros/dragon/scheduler.py"))
    write_json(args.json, {**head, **asdict(setting), "sequences": args.sequences, "seed": args.seed, "rows": rows})
    return EXIT_DONE


@command.command(name="dragon-pipeline")
def pipeline(args: PipelineArguments = PipelineArguments()) -> int:
    """One simulated answer, event by event (Figure 9).

    When each token was decided and where, the round trip, delta Z (equation 8) and the acceptances estimated then.
    """
    from dsd_lab.papers.dragon_simulator import sample_acceptances, simulate, steady_link
    from dsd_lab.papers.theory import check_shares

    setting = _setting(args)
    check_shares(device=args.acceptance[0], cloud=args.acceptance[1])
    rows = sample_acceptances(args.tokens, *args.acceptance, args.seed)
    link = steady_link(setting.base, args.extra_ms / 1e3)
    run = simulate(rows, setting.device, setting.cloud, link, strategy=args.schedule, seed=args.seed)
    print(
        f"{_described(args)} ({args.extra_ms:g} ms); {args.schedule}: {run.seconds:.2f} s, at the device "
        f"{run.delivered:.2f} s, {run.switches} switches\n"
    )
    form = "{:>5}{:>9}{:>8}  {:<10}{:<10}{:<8}{:>8}{:>12}{:>9}{:>8}"
    print(
        form.format(
            *("token", "seconds", "wait", "side", "device's", "cloud's"), *("rtt ms", "delta Z ms", "device", "cloud")
        )
    )
    before = 0.0
    for event in run.events:
        if event.kind != "aggregated" or event.accepted is None:
            continue
        print(
            form.format(
                event.position,
                f"{event.seconds:.3f}",
                f"{event.seconds - before:.3f}",
                event.side + (" ->" if event.switch else ""),
                *("accepted" if held else "rejected" for held in event.accepted),
                f"{1e3 * event.rtt:.0f}",
                f"{1e3 * event.delta_z:+.0f}",
                *(f"{rate:.2f}" for rate in event.rates),
            )
        )
        before = event.seconds
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_pipeline

        title = f"{_described(args)} ({args.extra_ms:g} ms); schedule {args.schedule}"
        draw_pipeline(args.plot, run.events, title)
        print(f"\n{args.plot} shows both sides' pipelines")
    report = asdict(run) | {"events": [event._asdict() for event in run.events]}
    write_json(args.json, report)
    return EXIT_DONE
