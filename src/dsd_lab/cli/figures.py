# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab figures`."""

from __future__ import annotations

import sys

from dsd_ros.cli.arguments import arguments, flag, word
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED


@arguments
class FiguresArguments:
    names: list[str] = word([], "reports, such as overhead or modes-* (default: all)", metavar="NAME ...")
    again: bool = flag(False, "measure the named reports even if they are of the present weights and code")
    dry_run: bool = flag(False, "only say what would be measured, why, and how long it takes")
    pages: bool = flag(False, "measure nothing, only write the pages from the reports that there are")


def command(args: FiguresArguments = FiguresArguments()) -> int:
    """Measure every figure of the pages again, and write them there.

    Runs the benchmarks whose reports in benchmarks/ are not of the present weights and code, each in a process of its
    own, and writes the figures into README, docs/ and benchmarks/README.md. A report is replaced when its command ends:
    run it again after an interruption and it goes on there. One that fails does not end the rest.
    """
    from dsd_lab.figures.runs import load_runs, make_figures, plan, select, write_pages

    if args.pages:
        failures = write_pages()
    elif args.dry_run:
        runs = load_runs()
        _, lines = plan(select(runs, args.names), args.again)
        print("\n".join(lines))
        failures = []
    else:
        failures = make_figures(args.names, args.again, say=lambda line: print(line, flush=True))
    for line in failures:
        print(line, file=sys.stderr)
    return EXIT_GOAL_MISSED if failures else EXIT_DONE
