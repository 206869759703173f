"""`dsd-lab bench`."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any

from dsd_lab.cli.bench_dragon import add_dragon
from dsd_lab.cli.bench_faults import add_faults
from dsd_lab.cli.bench_safety import add_safety
from dsd_lab.cli.bench_view import add_view
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, add_json, add_model, model_path, write_json
from dsd_ros.cli.terminal import Progress

SUMMARY = "measure the system on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="BENCH")
    overhead = benches.add_parser(
        "overhead",
        help="time per round not spent in models or on the link",
        description="Decode replies over each transport on loopback, the verifier in a process of its own; "
        "print the median and 95th percentile of what a round costs beyond both models' time, and of what a "
        "tree of 64 nodes adds to the verifier's CPU time (mask and positions).",
    )
    overhead.add_argument(
        "--transports",
        default="local,websocket,dds",
        help="comma-separated: local, websocket, dds (default: %(default)s)",
    )
    overhead.add_argument("--replies", type=int, default=30, help="per transport (default: %(default)s)")
    add_model(overhead, "--draft", "draft")
    add_model(overhead, "--target", "target")
    add_json(overhead)
    overhead.set_defaults(run=_bench_overhead)
    _add_modes(benches)
    _add_wire(benches)
    _add_soak(benches)
    add_safety(benches)
    add_faults(benches)
    add_view(benches)
    add_dragon(benches)


def _bench_overhead(args: argparse.Namespace) -> int:
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


def _add_modes(benches: Any) -> None:
    modes = benches.add_parser(
        "modes",
        help="decoding modes side by side over an emulated link",
        description="Decode the same held-out pictures with every mode in turn over a link of the profile's delay, "
        "jitter and bandwidth; print seconds per reply, the speed-up over mode ar, and what the paper's formulas "
        "say. Exit 1 when a mode's tokens are not the target's.",
    )
    modes.add_argument("--profile", default="go2-a100", help="one of config/profiles.yaml (default: %(default)s)")
    modes.add_argument(
        "--modes",
        default="ar,dsd,fsd",
        help="separated by commas or spaces; a mode may have settings of its own: "
        "fsd:predraft_source=exits+predraft_workers=10 (default: %(default)s)",
    )
    modes.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="SETTING=VALUES",
        help="gamma=1..10 or predraft_workers=1,3,6; given several times, the sweeps are crossed",
    )
    modes.add_argument("--images", type=int, default=8, help="pictures (default: %(default)s)")
    modes.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="S",
        help="multiply every held time and delay by S while measuring, and divide what is reported by it "
        "(default: %(default)s)",
    )
    modes.add_argument(
        "--transport",
        default="local",
        metavar="local|websocket",
        help="what the emulated link is put round (default: %(default)s)",
    )
    _add_decode_settings(modes)
    add_model(modes, "--draft", "draft")
    add_model(modes, "--target", "target")
    add_json(modes)
    modes.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up and miss rate (.png, .svg, .pdf)")
    modes.set_defaults(run=_bench_modes)


def _add_decode_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """A flag for each of these decode settings, or for every one but the mode; None where it is not given."""
    from dsd_ros.cli.flags import reader, said
    from dsd_ros.decoding.settings import DecodeSettings

    hints = typing.get_type_hints(DecodeSettings)
    for field in dataclasses.fields(DecodeSettings):
        if field.name == "mode" or (names and field.name not in names):
            continue
        of_profile = field.name == "draft_length" and parser.get_default("profile")
        preset = parser.get_default(field.name)
        default = "the profile's" if of_profile else said(field) if preset is None else preset
        choices = field.metadata.get("choices")
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=reader(field, hints[field.name]),
            metavar="|".join(choices) if choices else field.name.upper(),
            help=field.metadata["help"] + (f" (default: {default})" if default != "" else ""),
        )


def _given_settings(args: argparse.Namespace) -> dict[str, Any]:
    from dsd_ros.decoding.settings import DecodeSettings

    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(DecodeSettings) if f.name != "mode"}
    return {name: value for name, value in given.items() if value is not None}


def _bench_modes(args: argparse.Namespace) -> int:
    from dsd_lab.bench.modes import measure_modes
    from dsd_lab.bench.modes_plots import draw
    from dsd_lab.bench.modes_report import render
    from dsd_lab.bench.profiles import load_profile
    from dsd_lab.bench.sweeps import crossed, parse_modes, parse_sweep
    from dsd_lab.plotting import check_plot

    profile = load_profile(args.profile)
    if args.plot is not None:
        check_plot(args.plot)
    common = _given_settings(args)
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


def _add_wire(benches: Any) -> None:
    wire = benches.add_parser(
        "wire",
        help="bytes, acceptance and seconds of each proof and shape of a draft",
        description="Sample replies about the same held-out pictures, or to a text model's instructions, with every "
        "proof and shape; print bytes per generated token, acceptance, tokens per round, and seconds per reply at each "
        "uplink rate of an emulated link, with what the papers' formulas say. Exit 1 when a reply is not what it must "
        "be.",
    )
    wire.add_argument(
        "--model",
        default="pair",
        metavar="pair|text",
        help="pair: the shipped models, or those named; text: the pretrained SmolLM2-135M with its int8 copy as draft, "
        "or text models named (default: %(default)s)",
    )
    wire.add_argument("--proofs", default="full,split,truncated,coupled", help="comma-separated (default: %(default)s)")
    wire.add_argument(
        "--shapes",
        default="sequence",
        metavar="SHAPE,...",
        help="shapes of drafts: sequence, sequence:3 (of 3 tokens), 2x2x2 (children level by level), budget16 or "
        "budget16:8 (nodes, and depth; for proof coupled only) (default: %(default)s)",
    )
    wire.add_argument(
        "--kept",
        default="2,1%,10%",
        metavar="K,...",
        help="ids that proof truncated keeps: numbers, or shares of the vocabulary (default: 2,1%%,10%%)",
    )
    wire.add_argument(
        "--uplinks",
        default="0.1,1,10,100",
        metavar="MBIT,...",
        help="rates to measure at, Mbit/s (default: %(default)s)",
    )
    wire.add_argument(
        "--downlink",
        type=float,
        default=0.0,
        metavar="MBIT",
        help="rate of the other direction, Mbit/s; 0: that of the uplink (default: %(default)s)",
    )
    wire.add_argument(
        "--delay-ms", type=float, default=20.0, metavar="MS", help="the link's delay, one way (default: %(default)s)"
    )
    wire.add_argument("--images", type=int, default=6, help="pictures, or instructions (default: %(default)s)")
    wire.add_argument(
        "--draws", type=int, default=4, help="replies a picture to count bytes and acceptance of (default: %(default)s)"
    )
    wire.add_argument(
        "--timed",
        type=int,
        metavar="N",
        help="pictures of which one reply is timed at each rate; 0: compute all seconds from bytes and rounds "
        "(default: all)",
    )
    wire.add_argument(
        "--longest",
        type=float,
        default=120.0,
        metavar="S",
        help="compute a reply's seconds, too, where it would take longer than this (default: %(default)s)",
    )
    wire.add_argument(
        "--profile",
        metavar="PROFILE",
        help="hold the models to the times of this one of config/profiles.yaml (default: this machine's speed)",
    )
    wire.set_defaults(temperature=1.0)  # greedy drafts need no proof
    _add_decode_settings(wire, "draft_length", "temperature", "top_k", "top_p", "seed", "max_tokens")
    add_model(wire, "--draft", "draft")
    add_model(wire, "--target", "target")
    add_json(wire)
    wire.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw kept mass, acceptance and seconds (.png, .svg, .pdf)"
    )
    wire.set_defaults(run=_bench_wire)


def _bench_wire(args: argparse.Namespace) -> int:
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
    common = _given_settings(args)
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


def _add_soak(benches: Any) -> None:
    soak = benches.add_parser(
        "soak",
        help="memory, threads, open files and queues over many replies",
        description="Decode many replies to small noise pictures over an emulated link, with short pauses and a new "
        "session now and then, and watch what the process holds. Exit 1 when it grows beyond the bounds.",
    )
    soak.add_argument("--replies", type=int, default=2000, help="how many to decode (default: %(default)s)")
    soak.add_argument(
        "--mode", default="fsd", help="with settings if need be, as in bench modes (default: %(default)s)"
    )
    soak.add_argument(
        "--max-growth-mb",
        type=float,
        default=48.0,
        help="how much memory may grow after the warm-up (default: %(default)s)",
    )
    _add_decode_settings(soak)
    add_model(soak, "--draft", "draft")
    add_model(soak, "--target", "target")
    add_json(soak)
    soak.set_defaults(run=_bench_soak)


def _bench_soak(args: argparse.Namespace) -> int:
    from dsd_lab.bench.soak import render, soak
    from dsd_lab.bench.sweeps import parse_modes

    variants = parse_modes(args.mode, _given_settings(args))
    if len(variants) != 1:
        raise ValueError(f"--mode {args.mode} names several modes; soak one at a time")
    with Progress() as bar:
        report = soak(
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
