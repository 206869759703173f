"""`dsd-lab bench view`."""

from __future__ import annotations

import argparse
from typing import Any

from dsd_ros.cli.shared import EXIT_BAD_INPUT, EXIT_DONE, EXIT_GOAL_MISSED, CommandError, add_json, write_json
from dsd_ros.cli.terminal import Progress


def add_view(benches: Any) -> None:
    view = benches.add_parser(
        "view",
        help="what overlay and web view cost",
        description="Run the simulated robot, the decoder, the visualization node with somebody looking, and the web "
        "view; print the share of a CPU core the views take at 15 pictures a second, and how much longer replies take "
        "with them than with the views held. Exit 1 when that is more than 5 % of a core or more than 3 % of a reply "
        "beyond twice its standard error.",
    )
    view.add_argument(
        "--pairs", type=int, default=120,
        help="of replies, one with views and one without (default: %(default)s)",
    )  # fmt: skip
    view.add_argument("--mode", default="fsd", help="decoding mode (default: %(default)s)")
    add_json(view)
    view.set_defaults(run=_bench_view)


def _bench_view(args: argparse.Namespace) -> int:
    from dsd_lab.faults.view_bench import CORE_LIMIT, REPLY_LIMIT, ViewBenchError, measure_views, render
    from dsd_ros.observe.view.web import MISSING, available

    if args.pairs < 1:
        raise ValueError("--pairs must be at least 1")
    if not available():
        raise CommandError(MISSING, EXIT_BAD_INPUT)
    try:
        with Progress() as bar:
            report = measure_views(args.pairs, args.mode, lambda line: bar.step(args.pairs, line))
    except ViewBenchError as error:
        raise CommandError(error, EXIT_GOAL_MISSED) from error
    print(render(report))
    write_json(args.json, report)
    surely = report["reply_percent"] - 2 * report["reply_percent_standard_error"]
    missed = report["core_percent_together"] > CORE_LIMIT or surely > REPLY_LIMIT
    return EXIT_GOAL_MISSED if missed else EXIT_DONE
