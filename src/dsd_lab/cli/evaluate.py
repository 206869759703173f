# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab evaluate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cyclopts import App

from dsd_lab.pair.settings import PairSettings
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress
from dsd_ros.shown import shown

command = App(name="evaluate", help="Measure models on held-out scenes and in simulated runs.")


@arguments
class EvaluatePairArguments:
    settings: PairSettings = part(PairSettings)
    no_draft: bool = flag(False, "measure the target alone")
    page: Path | None = file_option("write the figures there as pair.md", "DIR")
    strict: bool = flag(False, "exit with 1 if a value misses its bar, however few the runs")
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


@arguments
class EvaluateQuestionsArguments:
    which: str = flag("held_out", "held_out: language that no training draws; shipped: over the documents that ship")
    documents: int = flag(2, "documents used per side")
    side: str = flag("both", "who answers: both, device or cloud")
    most: int = flag(0, "questions, every n-th of them (0: all)")
    answers: bool = flag(False, "print every answer that is not right")
    model: str = model_option("reader")
    json: Path | None = json_option()


@command.command
def questions(args: EvaluateQuestionsArguments = EvaluateQuestionsArguments()) -> int:
    """Right and wrong answers of a reader on questions over two sides' documents, by kind.

    Answered by DRAGON's mixture without the link. Wrong: said with confidence; the rest says that it does not know.
    """
    from dsd_lab.pair.held_out import SIDES, load_questions, read_all, shipped_questions
    from dsd_ros.dragon.documents.embedding import SentenceEncoder
    from dsd_ros.vlm.loading import load_model
    from dsd_ros.vlm.settings import ModelSettings

    if args.side not in ("both", *SIDES):
        raise ValueError(f"--side is both, device or cloud, not {args.side!r}")
    items = shipped_questions() if args.which == "shipped" else load_questions(args.which)
    items = items[:: max(1, len(items) // args.most)] if args.most else items
    rows = []
    with Progress() as bar:

        def report(item: Any, text: str, how: str) -> None:
            rows.append({"id": item.id, "text": text, "verdict": how})
            bar.to(len(rows) / len(items), item.id)
            if args.answers and how != "right":
                bar.say(f"{how:7} {item.question}  {shown(text)}  ({' / '.join(item.answers) or 'not told'})")

        model = load_model(ModelSettings(model_path(args.model, "reader")))
        sides = SIDES if args.side == "both" else (args.side,)
        figures = read_all(model, items, SentenceEncoder(), args.documents, sides, report)
    for name, found in figures.items():
        print(f"{name:15} {found['questions']:4.0f}  right {found['right']:6.1%}  wrong {found['wrong']:6.1%}")
    write_json(args.json, {"figures": figures, "answers": rows})
    return EXIT_DONE


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
