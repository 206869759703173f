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
    count: int = flag(0, "questions, drawn evenly over the kinds (0: all)")
    seed: int = flag(0, "seed of that draw, and of sampled answers")
    documents: int = flag(2, "documents used per side")
    side: str = flag("both", "who answers: both, device, cloud, or each of these in turn")
    methods: bool = flag(False, "ask by DRAGON and by each method that it is compared with, over an emulated link")
    variants: list[str] = flag([], "with --methods: these alone, by the names in its table", many=True)
    trip_ms: float = flag(300.0, "with --methods: round trip")
    mbps: float = flag(40.0, "with --methods: rate of the link, Mbit/s")
    answers: bool = flag(False, "print every answer that is not right")
    model: str = model_option("reader")
    json: Path | None = json_option()


@command.command
def questions(args: EvaluateQuestionsArguments = EvaluateQuestionsArguments()) -> int:
    """Right and wrong answers of a reader on questions over two sides' documents, by kind.

    Answered by DRAGON's mixture without the link. Wrong: said with confidence; the rest says that it does not know.
    With --methods, two processes answer over a link, by DRAGON and by what it is compared with.
    """
    from dsd_lab.dragon.questions import MEASURED, MethodsBench, drawn, measure_methods, render_methods
    from dsd_lab.dragon.settings import variants_named
    from dsd_lab.pair.held_out import load_questions, measure_sides, render_sides, shipped_questions
    from dsd_ros.vlm.settings import ModelSettings

    items = shipped_questions() if args.which == "shipped" else load_questions(args.which)
    model = ModelSettings(model_path(args.model, "reader"))

    with Progress() as bar:

        def wrong(item: Any, text: str, how: str) -> None:
            if args.answers and how != "right":
                bar.say(f"{how:7} {item.question}  {shown(text)}  ({' / '.join(item.answers) or 'not told'})")

        if args.methods:
            bench = MethodsBench(args.count, args.seed, args.trip_ms, args.mbps, args.documents)
            found = measure_methods(bench, model, items, variants_named(args.variants, MEASURED), bar.to, wrong)
        else:
            found = measure_sides(model, drawn(items, args.count, args.seed), args.documents, args.side, bar.to, wrong)
    print(render_methods(found) if args.methods else render_sides(found))
    write_json(args.json, found)
    return EXIT_DONE
