"""`dsd-lab bench`."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from cyclopts import App

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress
from dsd_ros.decoding.settings import DecodeSettings

command = App(name="bench", help="Measure the system on this machine.")
for name in ("safety", "faults", "view"):
    command.command(f"dsd_lab.cli.bench_{name}:command", name=name)
command.command("dsd_lab.cli.bench_dragon:dragon", name="dragon")
command.command("dsd_lab.cli.bench_dragon:lm", name="dragon-lm")


def decode_flags(*names: str, **defaults: Any) -> type:
    """Flags for these decode settings, or for every one but the mode; None where not given."""
    hints = typing.get_type_hints(DecodeSettings)
    made = []
    for item in dataclasses.fields(DecodeSettings):
        if item.name == "mode" or (names and item.name not in names):
            continue
        said = {value: text for text, value in item.metadata.get("words", {}).items()}
        usual = defaults.get(item.name, said.get(item.default, item.default))
        text = item.metadata["help"] + (f" (default: {usual})" if usual != "" else "")
        setting = dataclasses.field(default=None, metadata={**item.metadata, "help": text})
        made.append((item.name, hints[item.name] | None, setting))
    return dataclasses.make_dataclass("GivenDecodeSettings", made, frozen=True, namespace={"__module__": __name__})


AnyDecoding = decode_flags()
ModesDecoding = decode_flags(draft_length="the profile's")
WireDecoding = decode_flags("draft_length", "temperature", "top_k", "top_p", "seed", "max_tokens", temperature=1.0)


def _given(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if value is not None}


@arguments
class BenchOverheadArguments:
    transports: str = flag("local,websocket,dds", "comma-separated: local, websocket, dds")
    replies: int = flag(30, "replies per transport")
    draft: str = model_option("draft")
    target: str = model_option("target")
    json: Path | None = json_option()


@command.command
def overhead(args: BenchOverheadArguments = BenchOverheadArguments()) -> int:
    """Time per round not spent in models or on the link.

    Decodes replies over each transport on loopback, the verifier in a process of its own; prints the median and 95th
    percentile of what a round costs beyond both models' time, and of what a tree of 64 nodes adds to the verifier's
    CPU time (mask and positions).
    """
    from dsd_lab.bench.overhead import measure_overhead, render

    with Progress() as bar:
        report = measure_overhead(
            transports=args.transports.split(","),
            replies=args.replies,
            draft=model_path(args.draft, "draft"),
            target=model_path(args.target, "target"),
            progress=bar.to,
        )
    print(render(report))
    write_json(args.json, report)
    return EXIT_DONE


@arguments
class BenchModesArguments:
    profile: str = flag("go2-a100", "one of config/profiles.yaml")
    modes: str = flag(
        "ar,dsd,fsd",
        "separated by commas or spaces; a mode may have settings of its own: "
        "fsd:predraft_source=exits+predraft_workers=10",
    )
    sweep: list[str] = flag(
        [], "gamma=1..10 or predraft_workers=1,3,6; if given several times, the sweeps are crossed",
        metavar="SETTING=VALUES",
    )  # fmt: skip
    images: int = flag(8, "pictures")
    time_scale: float = flag(
        1.0, "multiply every held time and delay by S while measuring, and divide what is reported by it", metavar="S"
    )
    transport: str = flag("local", "what carries the emulated link", choices=("local", "websocket"))
    decoding: ModesDecoding = part(ModesDecoding)
    draft: str = model_option("draft")
    target: str = model_option("target")
    plot: Path | None = file_option("draw speed-up and miss rate (.png, .svg, .pdf)")
    json: Path | None = json_option()


@command.command
def modes(args: BenchModesArguments = BenchModesArguments()) -> int:
    """Decoding modes side by side over an emulated link.

    Decodes the same held-out pictures with every mode in turn over a link of the profile's delay, jitter and
    bandwidth; prints seconds per reply, the speed-up over mode ar, and what the paper's formulas predict. Exits with 1
    if a mode's tokens are not the target's.
    """
    from dsd_lab.bench.modes import measure_modes
    from dsd_lab.bench.modes_plots import draw
    from dsd_lab.bench.modes_report import render
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.sweeps import crossed, parse_modes, parse_sweep
    from dsd_lab.plotting import check_plot

    profile = load_profile(args.profile)
    if args.plot is not None:
        check_plot(args.plot)
    common = _given(args.decoding)
    sweeps = [parse_sweep(text) for text in args.sweep]
    variants = crossed(parse_modes(args.modes, common, profile.gamma), sweeps)
    with Progress() as bar:
        report = measure_modes(
            profile,
            variants,
            args.images,
            draft=model_path(args.draft, "draft"),
            target=model_path(args.target, "target"),
            transport=args.transport,
            time_scale=args.time_scale,
            seed=common.get("seed", 0),
            sweeps=sweeps,
            progress=lambda done, total, variant, reply: bar.to(done / total, _said(variant.label, reply)),
        )
    print(render(report))
    write_json(args.json, report)
    if args.plot is not None:
        draw(report, args.plot)
    return EXIT_DONE if report["exact"] else EXIT_GOAL_MISSED


def _said(label: str, reply: Any) -> str:
    return f"{label}: {len(reply.tokens)} tokens in {reply.seconds:.2f} s"


@arguments
class BenchWireArguments:
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
    draft: str = model_option("draft")
    target: str = model_option("target")
    plot: Path | None = file_option("draw kept mass, acceptance and seconds (.png, .svg, .pdf)")
    json: Path | None = json_option()


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
    from dsd_lab.bench.wire_plots import draw_wire
    from dsd_lab.bench.wire_report import render
    from dsd_lab.bench.wire_setting import WireSetting, parse_kept, parse_proofs, parse_shapes, parse_uplinks
    from dsd_lab.plotting import check_plot
    from dsd_ros.decoding.settings import DecodeSettings
    from dsd_ros.vlm.loading import ModelSettings

    if args.plot is not None:
        check_plot(args.plot)
    common = {"temperature": 1.0, **_given(args.decoding)}  # greedy drafts need no proof
    if args.model == "text":
        common = {"max_tokens": TEXT_TOKENS, **common}
    setting = WireSetting(
        decode=DecodeSettings(**common),
        model=args.model,
        proofs=parse_proofs(args.proofs),
        shapes=parse_shapes(args.shapes),
        kept=parse_kept(args.kept),
        uplinks=parse_uplinks(args.uplinks),
        downlink=args.downlink,
        delay_s=1e-3 * args.delay_ms,
        images=args.images,
        draws=args.draws,
        timed=args.timed,
        longest_s=args.longest,
        profile=load_profile(args.profile) if args.profile else None,
    )
    if args.model == "text":
        draft, target = text_models(args.draft, args.target)
    else:  # one thread each: the models share this machine, and their threads would wait for each other
        draft = ModelSettings(model_path(args.draft, "draft"), threads=1)
        target = ModelSettings(model_path(args.target, "target"), threads=1)
    with Progress() as bar:
        report = measure_wire(
            setting, draft, target, progress=lambda done, total, label, reply: bar.to(done / total, _said(label, reply))
        )
    print(render(report))
    write_json(args.json, report)
    if args.plot is not None:
        draw_wire(report, args.plot)
    return EXIT_DONE if report["exact"] else EXIT_GOAL_MISSED


@arguments
class BenchSoakArguments:
    replies: int = flag(2000, "how many to decode")
    mode: str = flag("fsd", "decoding mode, with settings if need be, as in bench modes")
    max_growth_mb: float = flag(48.0, "how much memory may grow after the warm-up")
    decoding: AnyDecoding = part(AnyDecoding)
    draft: str = model_option("draft")
    target: str = model_option("target")
    json: Path | None = json_option()


@command.command
def soak(args: BenchSoakArguments = BenchSoakArguments()) -> int:
    """Memory, threads, open files and queues over many replies.

    Decodes many replies to small noise pictures over an emulated link, with short pauses and a new session now and
    then, and watches what the process holds. Exits with 1 if it grows beyond the bounds.
    """
    from dsd_lab.bench.soak import render
    from dsd_lab.bench.soak import soak as measure
    from dsd_lab.bench.sweeps import parse_modes

    variants = parse_modes(args.mode, _given(args.decoding))
    if len(variants) != 1:
        raise ValueError(f"--mode {args.mode} names several modes; soak one at a time")
    with Progress() as bar:
        report = measure(
            variants[0].decode,
            args.replies,
            draft=model_path(args.draft, "draft"),
            target=model_path(args.target, "target"),
            max_growth_mb=args.max_growth_mb,
            progress=lambda sample: bar.to(
                sample["replies"] / args.replies, f"{sample['memory_mb']:.0f} MB, {sample['threads']:g} threads"
            ),
        )
    print(render(report))
    write_json(args.json, report)
    return EXIT_DONE if report["steady"] else EXIT_GOAL_MISSED
