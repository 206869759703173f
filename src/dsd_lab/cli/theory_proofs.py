"""`dsd-lab theory` on how a draft is proved: dssd-table1, dssd, tslt, acceptance and proofs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsd_lab.report import print_table
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, write_json

_NTT = "T_NTT, there and back without sending"


@arguments
class TableArguments:
    send_ms: float = flag(8.0, "V b / R, sending one distribution")
    ntt_ms: float = flag(20.0, _NTT)
    json: Path | None = json_option()


@arguments
class DssdArguments:
    alpha: float = flag(0.61, "acceptance")
    gamma: int = flag(8, "tokens drafted per round")
    draft_ms: float = flag(2.0, "one draft forward pass")
    target_ms: float = flag(20.0, "one target forward pass")
    ntt_ms: float = flag(20.0, _NTT)
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


def dssd_table1(args: TableArguments = TableArguments()) -> int:
    """Communication of DSSD (its Table 1).

    1 - alpha^gamma and the communication time of equation 9. The defaults are the paper's.
    """
    from dsd_lab.papers.proofs import TABLE_1_ALPHAS, TABLE_1_GAMMAS, dssd_table_1

    rows = dssd_table_1(args.send_ms / 1e3, args.ntt_ms / 1e3)
    shown = [["gamma \\ alpha", *map(str, TABLE_1_ALPHAS)]]
    for gamma, row in zip(TABLE_1_GAMMAS, rows, strict=True):
        shown.append([str(gamma), *(f"{share:.2f} ({1e3 * seconds:.2f} ms)" for share, seconds in row)])
    print_table(shown)
    cells_json = [
        {"gamma": gamma, "alpha": alpha, "rejected": share, "comm_seconds": seconds}
        for gamma, row in zip(TABLE_1_GAMMAS, rows, strict=True)
        for alpha, (share, seconds) in zip(TABLE_1_ALPHAS, row, strict=True)
    ]
    write_json(args.json, {**_given(args), "cells": cells_json})
    return EXIT_DONE


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
        "config": [1] * args.gamma,
        "t_p": args.draft_ms / 1e3,
        "t_q": args.target_ms / 1e3,
        "t_ntt": args.ntt_ms / 1e3,
        "vocabulary": args.vocabulary,
        "b_prob": args.bits,
        "kept": args.top_k,
        "target_kept": args.target_top_k,
    }
    found = [
        predict_proof(
            proof, alpha=ranges[proof][0], rate_up=args.up_mbit * 1e6, rate_down=args.down_mbit * 1e6, **setting
        )
        for proof in PROOFS
    ]
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
