"""`dsd-lab theory`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from dsd_lab.cli import theory_dragon, theory_proofs
from dsd_ros.cli.shared import EXIT_DONE, add_json, write_json

SUMMARY = "what the papers' formulas predict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="FORMULA")
    _add_cost(kinds.add_parser("fsd-cost", help="API bill with and without a draft (Table 1)"))
    _add_latency(kinds.add_parser("fsd-latency", help="seconds a reply and speed-ups (Table 4, equation 9)"))
    theory_proofs.add_kinds(kinds)
    theory_dragon.add_kinds(kinds)


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What cloud decoding alone, speculative decoding in the cloud, and the draft at the edge cost in dollars. "
        "Without prices: the paper's Table 1."
    )
    for model in ("draft", "target"):
        parser.add_argument(
            f"--{model}-price",
            nargs=2,
            type=float,
            metavar=("IN", "OUT"),
            help=f"dollars for a million tokens the {model} reads and writes",
        )
    _add_round(parser, tau=2.5)
    parser.add_argument("--requests", type=float, default=1e6, help="requests billed (default: 1e6)")
    parser.add_argument("--input-tokens", type=float, default=100, help="tokens a request has (default: %(default)s)")
    parser.add_argument("--output-tokens", type=float, default=500, help="tokens a reply has (default: %(default)s)")
    add_json(parser)
    parser.set_defaults(run=_cost)


def _add_latency(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Seconds a reply by the paper's Table 4, and the speed-ups that follow. The defaults are its robot "
        "(Table 8); the systems it measured are listed below, formula beside report."
    )
    parser.add_argument("--draft-ms", type=float, default=72.0, help="T_p, one draft forward (default: %(default)s)")
    parser.add_argument("--target-ms", type=float, default=620.0, help="T_q, one target forward (default: %(default)s)")
    parser.add_argument("--link-ms", type=float, default=120.0, help="T_c, one way (default: %(default)s)")
    parser.add_argument("--sync-ms", type=float, default=0.0, help="T_r, picking up a pre-draft (default: %(default)s)")
    _add_round(parser, tau=2.92)
    parser.add_argument(
        "--miss-rate",
        type=float,
        default=0.5563,
        metavar="SHARE",
        help="r, rounds without a pre-draft (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=float, default=200, help="n, of a reply (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw equation 9 over r and c (Figure 6)")
    add_json(parser)
    parser.set_defaults(run=_latency)


def _add_round(parser: argparse.ArgumentParser, tau: float) -> None:
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted a round (default: %(default)s)")
    parser.add_argument("--tau", type=float, default=tau, help="tokens gained a round (default: %(default)s)")


def _cost(args: argparse.Namespace) -> int:
    from dsd_lab.papers.theory import PRICES, Prices, TheoryError, api_cost

    if (args.draft_price is None) != (args.target_price is None):
        raise TheoryError("give both --draft-price and --target-price, or neither for Table 1")
    rows = list(PRICES)
    if args.draft_price is not None:
        rows = [Prices("given prices", *args.draft_price, *args.target_price)]
    shape = {
        "gamma": args.gamma,
        "tau": args.tau,
        "requests": args.requests,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
    }
    costs = [(prices, api_cost(prices, **shape)) for prices in rows]
    print(
        f"{args.requests:,.0f} requests, {args.input_tokens:g} tokens in, {args.output_tokens:g} out, "
        f"gamma {args.gamma}, tau {args.tau:g}; prices in dollars for a million tokens\n"
    )
    form = "{:<31}{:>13}{:>13}{:>13}{:>19}{:>19}"
    print(form.format("", "draft", "target", "cloud AR", "cloud SD", "edge-cloud SD"))
    for prices, cost in costs:
        print(
            form.format(
                prices.name,
                f"{prices.draft_in:g}/{prices.draft_out:g}",
                f"{prices.target_in:g}/{prices.target_out:g}",
                _dollars(cost.ar),
                _saving(cost.cloud_sd, cost.ar),
                _saving(cost.edge_cloud_sd, cost.ar),
            )
        )
    report = {**shape, "rows": [asdict(prices) | asdict(cost) for prices, cost in costs]}
    write_json(args.json, report)
    return EXIT_DONE


def _latency(args: argparse.Namespace) -> int:
    from dsd_lab.papers.theory import SETUPS, predict

    given = {
        "n": args.tokens,
        "tau": args.tau,
        "gamma": args.gamma,
        "t_p": args.draft_ms / 1e3,
        "t_q": args.target_ms / 1e3,
        "t_c": args.link_ms / 1e3,
        "t_r": args.sync_ms / 1e3,
        "r": args.miss_rate,
    }
    latency = predict(**given)
    print(
        f"{args.tokens:g} tokens, T_p {args.draft_ms:g} ms, T_q {args.target_ms:g} ms, c {latency.cost_ratio:.3g}, "
        f"T_c {args.link_ms:g} ms, T_r {args.sync_ms:g} ms, gamma {args.gamma}, tau {args.tau:g}, "
        f"r {args.miss_rate:.2%}\n"
    )
    form = "{:<47}{:>10}{:>10}"
    print(form.format("", "seconds", "over AR"))
    for name, seconds in (
        ("cloud AR    2Tc + nTq", latency.ar_seconds),
        ("SD          n/tau (2Tc + gTp + Tq)", latency.sd_seconds),
        ("FSD         n/tau (2Tc + rgTp + (1-r)Tr + Tq)", latency.fsd_seconds),
        ("limit       n/tau Tq + 2Tc", latency.limit_seconds),
    ):
        print(form.format(name, f"{seconds:.3f}", f"{latency.ar_seconds / seconds:.2f}x"))
    print(f"\nFSD over SD {latency.fsd_over_sd:.3f}x; link and hits free (equation 9) {latency.equation_9:.3f}x")
    print("\nThe paper's systems, 200 tokens at gamma 4: formula | reported")
    form = "{:<30}{:>18}{:>18}{:>18}"
    print(form.format("", "SD over AR", "FSD over SD", "FSD over AR"))
    for setup in SETUPS:
        says = setup.predicted()
        together = setup.sd_over_ar * setup.fsd_over_sd
        print(
            form.format(
                setup.name,
                f"{says.sd_over_ar:.2f} | {setup.sd_over_ar:.2f}",
                f"{says.fsd_over_sd:.2f} | {setup.fsd_over_sd:.2f}",
                f"{says.fsd_over_ar:.2f} | {together:.2f}",
            )
        )
    if args.plot is not None:
        from dsd_lab.papers.plots import draw_speedups

        draw_speedups(args.plot, latency.cost_ratio, args.miss_rate)
        print(f"\n{args.plot} shows equation 9; the star is the setting above")
    report = {
        **given,
        **asdict(latency),
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
