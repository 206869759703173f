# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab papers`: docs/papers.md, every table and figure of the four papers, and the counts that it needs."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path, output_file, word
from dsd_ros.cli.shared import EXIT_DONE, write_json
from dsd_ros.cli.terminal import Progress

command = App(name="papers", help="The four papers: every table and figure, and their formulas for any numbers.")

STUDIES = ("cost", "text", "batch", "scheduling")


@arguments
class PageArguments:
    out: Path | None = file_option("write the page to FILE instead of printing it")


@arguments
class MeasureArguments:
    study: str = word(text="what to count", choices=STUDIES)
    draft: str = model_option("draft")
    target: str = model_option("target")
    json: Path | None = flag(
        None, "write the report to FILE (default: benchmarks/papers-STUDY.json)", convert=output_file
    )
    plot: Path | None = file_option("draw the study scheduling (.png, .svg, .pdf)")


@arguments
class FormulaArguments:
    name: str = word("", "a formula's name (none: all of them are listed)")
    values: list[str] = word(
        [], "NAME=VALUE of each argument, such as tau=2.5; lists with commas", metavar="NAME=VALUE"
    )
    json: Path | None = json_option()


def _checkout() -> Path:
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks").is_dir():
        raise ValueError("docs/papers.md is made from a checkout of dsd_ros, with its benchmarks/; run this in one")
    return root


@command.default
def page(args: PageArguments = PageArguments()) -> int:
    """Print the page docs/papers.md (`dsd-lab figures --pages` writes it there).

    Every table and figure of the four papers: what it prints, its formula, and ours, computed, simulated, timed, held
    or counted.
    """
    from dsd_lab.reproduce.page import write_page

    text = write_page(_checkout())
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
        print(f"{args.out} is written")
    return EXIT_DONE


@command.command
def measure(args: MeasureArguments) -> int:
    """Count tokens, rounds, bytes and passes for the tables (minutes).

    cost: what a provider could bill (FSD Table 1). text: draft lengths and truncations with SmolLM2-135M (DSSD Tables 2
    and 3, TSLT). batch: passes over 1 to 64 sequences (FSD Table 9). scheduling: simulated answers by which side
    aggregates (DRAGON Figure 8).
    """
    from dsd_lab.reproduce import measure as studies
    from dsd_lab.reproduce.acceptances import measure_text

    out = args.json or _checkout() / "benchmarks" / f"papers-{args.study}.json"
    models = {"draft": model_path(args.draft, "draft"), "target": model_path(args.target, "target")}
    with Progress() as bar:
        if args.study == "text":
            measure_text(out, bar.to)
        elif args.study == "batch":
            studies.measure_batches(out, bar.to)
        elif args.study == "scheduling":
            studies.measure_scheduling(out, args.plot)
        else:
            studies.measure(studies.cost_study(), out, **models, progress=bar.to)
    print(f"{out} is written")
    return EXIT_DONE


@command.command
def formula(args: FormulaArguments = FormulaArguments()) -> int:
    """A formula of the papers for your numbers; without a name, the list of them.

    docs/theory.md explains them. Times are in seconds, rates in bit/s.
    """
    from dsd_lab.papers.formulas import FORMULAS, described, evaluate

    found = evaluate(args.name, args.values) if args.name else {name: described(name) for name in FORMULAS}
    print("\n".join(f"{name:16} {value}" if args.name else value for name, value in found.items()))
    write_json(args.json, found)
    return EXIT_DONE
