# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab evaluate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cyclopts import App

from dsd_lab.pair.settings import PairSettings
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress

command = App(name="evaluate", help="Measure models on held-out scenes and in simulated runs.")


@arguments
class EvaluatePairArguments:
    settings: PairSettings = part(PairSettings)
    no_draft: bool = flag(False, "measure the target alone")
    page: Path | None = file_option("write the figures there as pair.md", "DIR")
    strict: bool = flag(False, "exit with 1 if a bar is missed")
    json: Path | None = json_option()


@arguments
class EvaluateReaderArguments:
    questions: int = flag(100, "questions of each kind")
    errands: int = flag(500, "questions with facts on two sides")
    model: str = model_option("reader")
    json: Path | None = json_option()


@command.command
def pair(args: EvaluatePairArguments = EvaluatePairArguments()) -> int:
    """Actions, truth of what is said, closed-loop success, acceptance, milliseconds.

    Measures a target and a draft, or a target alone, on held-out scenes and in simulated runs, situation by situation,
    against the bars they should reach. Any Qwen2-VL will do.
    """
    from dsd_lab.pair.evaluate import command_of, evaluate_pair
    from dsd_lab.pair.report import render, write_page

    given = args.settings
    if args.no_draft and given.draft:
        raise ValueError("--draft names a model and --no-draft wants none; give one of them")
    if args.page is not None and not args.page.is_dir():
        raise ValueError(f"there is no folder {args.page} for the page; make it first")
    settings = replace(given, target=model_path(given.target, "target"), draft=model_path(given.draft, "draft"))
    with Progress() as bar:
        figures = evaluate_pair(settings, args.no_draft, bar.report)
    print(render(figures))
    write_json(args.json, figures)
    if args.page is not None:
        measured = f"{command_of(given, args.no_draft)} --page {args.page}"
        print(f"\nwritten: {write_page(args.page, figures, measured)}")
    missed = any(row["met"] is False for row in figures["bars"])
    return EXIT_GOAL_MISSED if args.strict and missed else EXIT_DONE


@command.command
def reader(args: EvaluateReaderArguments = EvaluateReaderArguments()) -> int:
    """Accuracy of a reader, from one document and from two sides.

    Measured on synthetic questions that its training never drew.
    """
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
