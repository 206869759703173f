# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsd_lab.cli.bench import numbers_of, whole_numbers
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, word
from dsd_ros.cli.shared import EXIT_DONE, write_json
from dsd_ros.cli.terminal import Progress


@arguments
class PlanArguments:
    measured: Path = word(text="report of `dsd-lab bench fleet --json`", metavar="FILE")
    robots: str = flag("10,100,1000", "robots of each fleet, 10000 at most", metavar="N,...")
    p95: str = flag(
        "", "seconds within which 95 of 100 replies must end (default: 1.5 and 2 times a robot's alone)",
        metavar="S,...",
    )  # fmt: skip
    bag: Path | None = file_option("take the seconds between two replies from this recorded run", "BAG")
    pass_ms: str = flag(
        "", "a target of your own: milliseconds of a pass over so many rounds (default: as measured)",
        metavar="N:MS,...",
    )  # fmt: skip
    profile: str = flag(
        "",
        "another target: the times of a profile that gives them, or of a JSON of `dsd-lab bench gpu`",
        metavar="NAME",
    )
    max_batch: int = flag(32, "rounds in a pass at most")
    seed: int = flag(0, "of jitter, walks and the order of replies")
    plot: Path | None = file_option("draw seconds a reply, and verifiers (.png, .svg, .pdf)")
    json: Path | None = json_option()


def command(args: PlanArguments) -> int:
    """How many verifiers a fleet of robots needs.

    Simulates robots that draft, wait for their verifier, and walk between replies, as `dsd-lab bench fleet` measured
    them; verifiers share passes as the engine does. Prints what one verifier serves, and the fewest verifiers with
    which 95 of 100 replies end within each limit.
    """
    from dsd_lab.bench.plan import WALKS_S, draw, plan, read_workload, render, walks_of, with_times_of
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.plotting import check_plot

    if args.plot is not None:
        check_plot(args.plot)
    workload = replace(
        read_workload(args.measured),
        max_batch=args.max_batch,
        walks_s=WALKS_S if args.bag is None else walks_of(args.bag),
    )
    if args.pass_ms and args.profile:
        raise ValueError("--pass-ms and --profile both give the target's times; leave one out")
    if args.profile:
        workload = with_times_of(load_profile(args.profile), workload)
    if args.pass_ms:
        curve = parse_passes(args.pass_ms)
        workload = replace(workload, pass_s=curve, prefill_s=curve[0][1])
    with Progress() as bar:
        report = plan(
            workload, whole_numbers("robots", args.robots), numbers_of(args.p95, "--p95", float), args.seed, bar.to
        )
    print(render(report))
    write_json(args.json, report)
    if args.plot is not None:
        draw(report, args.plot)
    return EXIT_DONE


def parse_passes(text: str) -> tuple[tuple[float, float], ...]:
    """``1:18,8:31`` as (rounds, seconds), ascending; ValueError."""
    try:
        pairs = [tuple(float(part) for part in item.split(":")) for item in text.split(",")]
        curve = tuple(sorted((rounds, 1e-3 * ms) for rounds, ms in pairs))
    except ValueError:
        curve = ()
    rounds = [point[0] for point in curve]
    if not curve or rounds[0] != 1 or len(set(rounds)) < len(rounds) or not all(0 < s < 3600 for _, s in curve):
        raise ValueError(f"--pass-ms {text!r} is no list of passes; use for example 1:18,8:31,32:97, beginning with 1")
    return curve
