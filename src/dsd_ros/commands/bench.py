"""`dsd bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsd_ros.commands.shared import EXIT_DONE, add_model, model_path, write_json

SUMMARY = "measure the system on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="BENCH")
    overhead = benches.add_parser(
        "overhead",
        help="time per round not spent in models or on the link",
        description="Decode replies over each transport on loopback, the verifier in a process of its own; "
        "print the median and 95th percentile of what a round costs beyond both models' time.",
    )
    overhead.add_argument(
        "--transports",
        default="local,websocket,dds",
        help="comma-separated: local, websocket, dds (default: %(default)s)",
    )
    overhead.add_argument(
        "--replies", type=int, default=30, help="per transport (default: %(default)s)"
    )
    add_model(overhead, "--draft", "draft")
    add_model(overhead, "--target", "target")
    overhead.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    overhead.set_defaults(run=_bench_overhead)


def _bench_overhead(args: argparse.Namespace) -> int:
    from dsd_ros.evaluation.overhead import measure_overhead, render

    report = measure_overhead(
        transports=args.transports.split(","),
        replies=args.replies,
        draft=model_path(args.draft, "draft"),
        target=model_path(args.target, "target"),
    )
    print(render(report))
    write_json(args.json, report)
    return EXIT_DONE
