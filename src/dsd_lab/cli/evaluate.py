"""`dsd-lab evaluate`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields
from pathlib import Path

from dsd_lab.pair.settings import PairSettings
from dsd_ros.cli.flags import add_settings
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, add_json, add_model, model_path, write_json
from dsd_ros.cli.terminal import Progress

SUMMARY = "measure models on held-out scenes and in simulated runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations = parser.add_subparsers(required=True, metavar="WHAT")
    _add_pair(
        evaluations.add_parser(
            "pair",
            help="actions, truth of what is said, closed-loop success, acceptance, milliseconds",
            description="Measure a target and a draft, or a target alone, on held-out scenes and in simulated runs, "
            "situation by situation, against what they are to reach. Any Qwen2-VL will do.",
        )
    )
    reader = evaluations.add_parser(
        "reader",
        help="accuracy of the reader, from one document and from two sides",
        description="Measure a reader on synthetic questions that its training never drew.",
    )
    reader.add_argument("--questions", type=int, default=100, help="of each kind (default: %(default)s)")
    reader.add_argument("--errands", type=int, default=500, help="with facts on two sides (default: %(default)s)")
    add_model(reader, "--model", "reader")
    add_json(reader)
    reader.set_defaults(run=_evaluate_reader)


def _add_pair(pair: argparse.ArgumentParser) -> None:
    add_settings(pair, PairSettings)
    pair.add_argument("--no-draft", action="store_true", help="measure the target alone")
    pair.add_argument(
        "--page",
        type=Path,
        metavar="DIR",
        help="write pair.md with plots and a gallery of failures there (images in DIR/images)",
    )
    pair.add_argument("--strict", action="store_true", help="exit with 1 where what is to be reached is missed")
    add_json(pair)
    pair.set_defaults(run=_evaluate_pair)


def _evaluate_pair(args: argparse.Namespace) -> int:
    from dsd_lab.pair.figures import training_of
    from dsd_lab.pair.pair import SITUATIONS, measure
    from dsd_lab.pair.text import render
    from dsd_ros.vlm.loading import ModelSettings

    if args.no_draft and args.draft:
        raise ValueError("--draft names a model and --no-draft wants none; give one of them")
    if args.page is not None:
        from dsd_lab.pair.page import check_page, write_page

        check_page(args.page)
    models = [
        ModelSettings(model_path(given, role), device=args.device, dtype=args.dtype)
        for given, role in ((args.target, "target"), (args.draft, "draft"))
    ]
    training = training_of(Path(models[0].path))
    with Progress() as bar:
        evidence = measure(
            models[0],
            None if args.no_draft else models[1],
            scenes=args.scenes,
            seeds=args.seeds,
            situations=tuple(filter(None, args.situations.split(","))) or SITUATIONS,
            one_by_one=args.one_by_one,
            max_steps=args.max_steps,
            split=args.split,
            history=args.history,
            words=args.words,
            training=training,
            report=bar.report,
        )
    print(render(evidence.figures))
    write_json(args.json, evidence.figures)
    if args.page is not None:
        page = write_page(args.page, evidence, _as_written(args), training)
        print(f"\n{page} tells of it")
    missed = any(row["met"] is False for row in evidence.figures["bars"])
    return EXIT_GOAL_MISSED if args.strict and missed else EXIT_DONE


def _as_written(args: argparse.Namespace) -> str:
    """The command that made a page, so that it can be made again."""
    words = ["dsd", "evaluate", "pair"]
    for field in fields(PairSettings):
        value, flag = getattr(args, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default:
            words += [flag] if value is True else [flag, str(value)]
    words += ["--no-draft"] if args.no_draft else []
    return shlex.join([*words, "--page", str(args.page)])


def _evaluate_reader(args: argparse.Namespace) -> int:
    from dsd_lab.pair.reader import evaluate_reader

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
