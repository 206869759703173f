"""`dsd inspect`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dsd_ros.cli.shared import EXIT_DONE

SUMMARY = "what happened in a recorded run: figures, tables, plots; also of a bag whose end is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Needs no ROS: what the messages mean is in the bag."
    parser.add_argument("bag", metavar="BAG", help="folder of a bag, or one of its files")
    parser.add_argument("--rounds", action="store_true", help="print every round, too")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")
    for name, what in (
        ("html", "write a report with plots and pictures, in one file"),
        ("png", "write the plots alone"),
        ("csv", "write a row per round"),
        ("parquet", "write a row per round; takes the package pyarrow"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    parser.add_argument("--repair", type=Path, metavar="DIR", help="write what can be read as a new, whole bag")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from dsd_ros.observe.bag.reader import open_bag
    from dsd_ros.observe.bag.report import as_csv, as_json, round_lines, step_lines, summary_lines, write_parquet
    from dsd_ros.observe.bag.run import read_run

    bag = open_bag(args.bag)
    run = read_run(bag)
    if args.json:
        print(json.dumps(as_json(run), indent=1))
    else:
        lines = [*summary_lines(run), "", *step_lines(run)]
        if args.rounds:
            lines += ["", *round_lines(run)]
        print("\n".join(lines))
    if args.csv is not None:
        args.csv.write_text(as_csv(run), encoding="utf-8")
    if args.parquet is not None:
        write_parquet(run, args.parquet)
    if args.html is not None or args.png is not None:
        from dsd_ros.observe.bag.plots import draw, page

        if args.png is not None:
            args.png.write_bytes(draw(run))
        if args.html is not None:
            args.html.write_text(page(run), encoding="utf-8")
    if args.repair is not None:
        from dsd_ros.observe.bag.bag_repair import repair

        count = repair(bag, args.repair)
        if not args.json:
            print(f"\n{args.repair}: {count} messages")
    return EXIT_DONE
