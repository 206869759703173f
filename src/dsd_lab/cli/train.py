# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cyclopts import App

from dsd_lab.train.settings import ExitSettings, ReaderSettings, TextDraftSettings, TrainSettings
from dsd_ros.cli.arguments import arguments, json_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE, write_json
from dsd_ros.cli.terminal import Progress

command = App(name="train", help="Train the shipped models, or early exits for any model.")


@arguments
class TrainPairArguments:
    settings: TrainSettings = part(TrainSettings)
    json: Path | None = json_option()


@arguments
class TrainReaderArguments:
    settings: ReaderSettings = part(ReaderSettings)
    json: Path | None = json_option()


@arguments
class TrainExitsArguments:
    settings: ExitSettings = part(ExitSettings)
    json: Path | None = json_option()


@arguments
class TrainTextDraftArguments:
    settings: TextDraftSettings = part(TextDraftSettings)
    json: Path | None = json_option()


@command.command
def pair(args: TrainPairArguments = TrainPairArguments()) -> int:
    """The shipped target and draft, from nothing.

    Trains both shipped models on scenes of the simulator. After an interruption, the same command resumes.
    """
    from dsd_lab.pair.evaluate import train_and_evaluate

    with Progress() as bar:
        figures = train_and_evaluate(args.settings, bar.report)
    write_json(args.json, figures)
    return EXIT_DONE


@command.command
def reader(args: TrainReaderArguments = TrainReaderArguments()) -> int:
    """The adapters that make SmolLM2-135M answer from documents.

    Trains them on synthetic sentences. After an interruption, the same command resumes.
    """
    from dsd_lab.train.reader.adapter import train_reader

    with Progress() as bar:
        figures = train_reader(args.settings, bar.report)
    write_json(args.json, figures)
    return EXIT_DONE


@command.command
def exits(args: TrainExitsArguments = TrainExitsArguments()) -> int:
    """Early-exit adapters for a model, written beside it.

    Trains adapters that let a model's LM head predict its final layer from earlier ones, on the model's own replies
    about rendered scenes, or of a text model to questions that it writes. After an interruption, the same command
    resumes.
    """
    from dsd_lab.bench.scenes import text_base
    from dsd_lab.train.exits.training import table, train_exits

    model = str(text_base()) if args.settings.model == "text" else model_path(args.settings.model, "target")
    with Progress() as bar:
        report = train_exits(replace(args.settings, model=model), bar.report)
    print(table(report))
    write_json(args.json, report)
    return EXIT_DONE


@command.command
def text_draft(args: TrainTextDraftArguments = TrainTextDraftArguments()) -> int:
    """A draft for SmolLM2-135M, of its own first layers and a trained one.

    Trains the layer on conversations that the model writes itself. After an interruption, the same command resumes.
    """
    from dsd_lab.bench.scenes import text_base
    from dsd_lab.train.text_draft import train_text_draft

    with Progress() as bar:
        report = train_text_draft(args.settings, text_base(), bar.report)
    print(f"agreement {report['agreement']:.1%}, acceptance {report['acceptance']:.1%} when sampling")
    write_json(args.json, report)
    return EXIT_DONE
