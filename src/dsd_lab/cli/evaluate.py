"""`dsd-lab evaluate`."""

from __future__ import annotations

import shlex
from dataclasses import fields
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
    page: Path | None = file_option("write pair.md with plots and a gallery of failures (images in DIR/images)", "DIR")
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
    from dsd_lab.pair.figures import training_of
    from dsd_lab.pair.pair import SITUATIONS, measure
    from dsd_lab.pair.text import render
    from dsd_ros.vlm.loading import ModelSettings

    settings = args.settings
    if args.no_draft and settings.draft:
        raise ValueError("--draft names a model and --no-draft wants none; give one of them")
    if args.page is not None:
        from dsd_lab.pair.page import check_page, write_page

        check_page(args.page)
    models = [
        ModelSettings(model_path(given, role), device=settings.device, dtype=settings.dtype)
        for given, role in ((settings.target, "target"), (settings.draft, "draft"))
    ]
    training = training_of(Path(models[0].path))
    with Progress() as bar:
        evidence = measure(
            models[0],
            None if args.no_draft else models[1],
            scenes=settings.scenes,
            seeds=settings.seeds,
            situations=tuple(filter(None, settings.situations.split(","))) or SITUATIONS,
            one_by_one=settings.one_by_one,
            max_steps=settings.max_steps,
            split=settings.split,
            history=settings.history,
            words=settings.words,
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


def _as_written(args: EvaluatePairArguments) -> str:
    """The command that made a page, so that it can be made again."""
    words = ["dsd-lab", "evaluate", "pair"]
    for field in fields(PairSettings):
        value, flag = getattr(args.settings, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default:
            words += [flag] if value is True else [flag, str(value)]
    words += ["--no-draft"] if args.no_draft else []
    return shlex.join([*words, "--page", str(args.page)])


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
