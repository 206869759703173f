"""`dsd-lab theory`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from cyclopts import App

from dsd_lab.report import print_table
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, write_json

command = App(name="theory", help="What the papers' formulas predict.")
for name in ("dssd-table1", "dssd", "tslt", "acceptance", "proofs"):
    command.command(f"dsd_lab.cli.theory_proofs:{name.replace('-', '_')}", name=name)
for name in ("dragon-speedup", "dragon-scheduling", "dragon-pipeline"):
    command.command(f"dsd_lab.cli.theory_dragon:{name.removeprefix('dragon-')}", name=name)


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
        says, together = setup.predicted(), setup.sd_over_ar * setup.fsd_over_sd
        pairs = (
            (says.sd_over_ar, setup.sd_over_ar),
            (says.fsd_over_sd, setup.fsd_over_sd),
            (says.fsd_over_ar, together),
        )
        shown.append([setup.name, *(f"{formula:.2f} | {reported:.2f}" for formula, reported in pairs)])
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
