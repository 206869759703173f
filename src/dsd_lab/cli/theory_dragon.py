"""`dsd-lab theory` on two sides' documents: dragon-speedup, dragon-scheduling and dragon-pipeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsd_lab.report import print_table
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, write_json
from dsd_ros.dragon.settings import SCHEDULES


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


def speedup(args: SpeedupArguments = SpeedupArguments()) -> int:
    """DRAGON over token-wise synchronisation (equation 9).

    Seconds per token where the device aggregates (equation 7), and the speed-up over token-wise synchronisation, by
    how often the cloud's drafts are accepted.
    """
    from dsd_lab.papers.dragon import speedup as predicted
    from dsd_ros.dragon.scheduler import latency

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
    from dsd_lab.papers.dragon import Setting

    return Setting(args.device_ms / 1e3, args.cloud_ms / 1e3, args.base_ms / 1e3, tuple(args.acceptance), args.tokens)


def _described(args: AnswersArguments) -> str:
    return (
        f"device {args.device_ms:g} ms, cloud {args.cloud_ms:g} ms, acceptances {args.acceptance[0]:.0%} and "
        f"{args.acceptance[1]:.0%}, round trip {args.base_ms:g} ms and the extra latency"
    )


def scheduling(args: SchedulingArguments = SchedulingArguments()) -> int:
    """Simulated answers by who aggregates (Figure 8).

    Mean seconds of simulated answers, until the device has the last token, by which side aggregates: auto, the paper's
    rule (delta-z), the device, the cloud, either by chance; beside them token-wise and sequence-wise synchronisation.
    The extra latency has a jitter of a fifth, with a period of 20 pi seconds.
    """
    from dsd_lab.papers.dragon import SEQUENCE_WISE, STRATEGIES, TOKEN_WISE, compare

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
    write_json(args.json, {**asdict(setting), "sequences": args.sequences, "seed": args.seed, "rows": rows})
    return EXIT_DONE


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
