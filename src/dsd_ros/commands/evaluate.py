"""`dsd evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsd_ros.commands.shared import EXIT_DONE, add_json, add_model, model_path, write_json
from dsd_ros.commands.terminal import Progress

SUMMARY = "measure models on held-out scenes and in simulated runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations = parser.add_subparsers(required=True, metavar="WHAT")
    pair = evaluations.add_parser(
        "pair",
        help="accuracy, acceptance and closed-loop success of a pair",
        description="Measure a target and a draft on held-out scenes and in simulated runs from unseen seeds.",
    )
    pair.add_argument(
        "--scenes", type=int, default=1000, help="held-out scenes (default: %(default)s)"
    )
    pair.add_argument("--seeds", type=int, default=50, help="simulated runs (default: %(default)s)")
    add_model(pair, "--draft", "draft")
    add_model(pair, "--target", "target")
    add_json(pair)
    pair.set_defaults(run=_evaluate_pair)
    reader = evaluations.add_parser(
        "reader",
        help="accuracy of the reader, from one document and from two sides",
        description="Measure a reader on synthetic questions that its training never drew.",
    )
    reader.add_argument(
        "--questions", type=int, default=100, help="of each kind (default: %(default)s)"
    )
    reader.add_argument(
        "--errands", type=int, default=500, help="with facts on two sides (default: %(default)s)"
    )
    add_model(reader, "--model", "reader")
    add_json(reader)
    reader.set_defaults(run=_evaluate_reader)


def _evaluate_pair(args: argparse.Namespace) -> int:
    from dsd_ros.evaluation.pair import evaluate_pair

    target, draft = model_path(args.target, "target"), model_path(args.draft, "draft")
    with Progress() as bar:
        figures = evaluate_pair(
            Path(target), Path(draft), scenes=args.scenes, seeds=args.seeds, report=bar.report
        )
    for name in ("target", "draft"):
        row = figures[name]
        print(
            f"{name:6}  actions right {row['actions_right']:.1%}  closed loop {row['closed_loop']:.0%}  "
            f"collided {row['collided']:.0%}  steps {row['steps']:.1f}"
        )
    print(f"acceptance {figures['acceptance']:.3f}, tau {figures['tokens_per_round']:.2f}")
    write_json(args.json, figures)
    return EXIT_DONE


def _evaluate_reader(args: argparse.Namespace) -> int:
    from dsd_ros.evaluation.reader import evaluate_reader

    folder = Path(model_path(args.model, "reader"))
    with Progress() as bar:
        figures = evaluate_reader(folder, args.questions, args.errands, report=bar.report)
    for kind, found in figures["single"].items():
        print(f"{kind:14}  right {found['trained']:6.1%}  held out {found['held_out']:6.1%}")
    for row in figures["mixture"]:
        weights = "even" if row["even"] else "softmax"
        line = f"{row['documents']} documents a side, eta {row['eta']}, {weights}:  both {row['both']:.1%}"
        for name in ("device", "cloud"):
            line += f"  {name} alone {row[name]:.1%}" if name in row else ""
        print(line)
    write_json(args.json, figures)
    return EXIT_DONE
