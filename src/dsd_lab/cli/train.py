"""`dsd-lab train`."""

from __future__ import annotations

import argparse

from dsd_ros.cli.flags import add_settings, settings_from
from dsd_ros.cli.shared import EXIT_DONE, add_json, model_path, write_json
from dsd_ros.cli.terminal import Progress

SUMMARY = "train the shipped models, or early exits for any model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trainings = parser.add_subparsers(required=True, metavar="WHAT")
    pair = trainings.add_parser(
        "pair",
        help="the shipped target and draft, from nothing",
        description="Train both shipped models on scenes of the simulator; interrupted, the same command "
        "goes on where it stopped.",
    )
    from dsd_lab.train.settings import PUBLISHED, ExitSettings, ReaderSettings, TrainSettings

    add_settings(pair, TrainSettings)
    add_json(pair)
    pair.set_defaults(run=_train_pair)
    reader = trainings.add_parser(
        "reader",
        help="the shipped text model that answers from a document, from nothing",
        description="Train the shipped reader of short documents on synthetic sentences; interrupted, the "
        "same command goes on where it stopped.",
    )
    add_settings(reader, ReaderSettings)
    add_json(reader)
    reader.set_defaults(run=_train_reader)
    exits = trainings.add_parser(
        "exits",
        help="early-exit adapters for a model, beside it",
        description="Train adapters that let a model's LM head foretell its final layer from earlier ones; "
        "on rendered scenes and the model's own replies, or on conversations (JSONL of images and text, "
        "ShareGPT's JSON). Interrupted, the same command goes on where it stopped.",
    )
    add_settings(exits, ExitSettings)
    exits.add_argument(
        "--count",
        choices=[*PUBLISHED, "all"],
        help="train nothing: count the exits' parameters in a model of the paper's",
    )
    add_json(exits)
    exits.set_defaults(run=_train_exits)


def _train_pair(args: argparse.Namespace) -> int:
    from dsd_lab.train.pair import train_pair
    from dsd_lab.train.settings import TrainSettings

    with Progress() as bar:
        figures = train_pair(settings_from(args, TrainSettings), bar.report)
    write_json(args.json, figures)
    return EXIT_DONE


def _train_reader(args: argparse.Namespace) -> int:
    from dsd_lab.train.reader import train_reader
    from dsd_lab.train.settings import ReaderSettings

    with Progress() as bar:
        figures = train_reader(settings_from(args, ReaderSettings), bar.report)
    write_json(args.json, figures)
    return EXIT_DONE


def _train_exits(args: argparse.Namespace) -> int:
    from dsd_lab.train.exit_report import count_exits, render_count, table
    from dsd_lab.train.exits import train_exits
    from dsd_lab.train.settings import PUBLISHED, ExitSettings

    if args.count:
        names = list(PUBLISHED) if args.count == "all" else [args.count]
        counts = [count_exits(name, args.rank) for name in names]
        print("\n".join(map(render_count, counts)))
        write_json(args.json, {"counts": counts})
        return EXIT_DONE
    args.model = model_path(args.model, "target")
    with Progress() as bar:
        report = train_exits(settings_from(args, ExitSettings), bar.report)
    print(table(report))
    write_json(args.json, report)
    return EXIT_DONE
