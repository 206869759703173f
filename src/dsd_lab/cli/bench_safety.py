"""`dsd-lab bench safety`."""

from __future__ import annotations

import argparse
from typing import Any

from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, CommandError, add_json, write_json
from dsd_ros.cli.terminal import Progress


def add_safety(benches: Any) -> None:
    safety = benches.add_parser(
        "safety",
        help="time from each cause of a stop to zero velocity",
        description="Start the safety supervisor, drive it over DDS as robot, navigation and operator do, provoke "
        "every cause and time how long cmd_vel goes on commanding motion. Exit 1 when that is ever more than half a "
        "second.",
    )
    safety.add_argument("--trials", type=int, default=10, help="how often to provoke each cause (default: %(default)s)")
    safety.add_argument(
        "--causes",
        default="all",
        metavar="CAUSE,...",
        help="causes of SafetyState.msg, e.g. CAMERA_STALE,TILT (default: %(default)s)",
    )
    safety.add_argument(
        "--load", type=int, default=0, metavar="N",
        help="busy loops beside it, at ordinary priority (default: %(default)s)",
    )  # fmt: skip
    safety.add_argument("--no-realtime", action="store_true", help="the supervisor does without real-time scheduling")
    add_json(safety)
    safety.set_defaults(run=_bench_safety)


def _bench_safety(args: argparse.Namespace) -> int:
    from dsd_lab.faults.safety_bench import LIMIT_S, PROVOCATIONS, measure_safety, render
    from dsd_lab.faults.safety_standin import SafetyBenchError

    causes = None if args.causes == "all" else args.causes.split(",")
    count = sum(causes is None or p.cause.name in causes for p in PROVOCATIONS)
    try:
        with Progress() as bar:
            report = measure_safety(
                args.trials,
                causes,
                lambda name, times: bar.step(count, f"{name}: worst {max(times):.3f} s"),
                args.load,
                realtime=not args.no_realtime,
            )
    except SafetyBenchError as error:
        raise CommandError(error, EXIT_GOAL_MISSED) from error
    print(render(report))
    write_json(args.json, report)
    return EXIT_DONE if report["worst_s"] <= LIMIT_S else EXIT_GOAL_MISSED
