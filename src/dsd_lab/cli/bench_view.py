"""`dsd-lab bench view`."""

from __future__ import annotations

from pathlib import Path

from dsd_ros.cli.arguments import arguments, flag, json_option
from dsd_ros.cli.shared import EXIT_BAD_INPUT, EXIT_DONE, EXIT_GOAL_MISSED, CommandError, write_json
from dsd_ros.cli.terminal import Progress


@arguments
class BenchViewArguments:
    pairs: int = flag(120, "pairs of replies, one with views and one without")
    mode: str = flag("fsd", "decoding mode")
    json: Path | None = json_option()


def command(args: BenchViewArguments = BenchViewArguments()) -> int:
    """What overlay and web view cost.

    Runs the simulated robot, the decoder, the visualization node with somebody looking, and the web view; prints the
    share of a CPU core the views take at 15 pictures a second, and how much longer replies take with them than with
    the views held. Exits with 1 if that is more than 5 % of a core, or more than 3 % of a reply beyond twice its
    standard error.
    """
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
