# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench dragon`: answers from two sides' documents, by each method, over links of growing round trips.

As section 7.3 of DRAGON: the best two passages of at most 64 tokens a side, 20 tokens of answer, 0 to 300 ms of round
trip with a jitter of one fifth. The link is emulated, carrying as TCP does, and the models' times are given
(``recorded``). Keys and values of a store's documents are there before a question, except where they have to travel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from dsd_lab.bench.pace import Pace
from dsd_lab.bench.scenes import BATCH_GROWTH
from dsd_lab.dragon.ablations import AblationClient
from dsd_lab.dragon.baseline_service import pack_sequence, together
from dsd_lab.dragon.baselines import kept_before, open_cloud, open_session
from dsd_lab.dragon.corpus import ASKED, QUESTIONS, SOURCE, count_tokens, read_corpus, two_sides
from dsd_lab.dragon.recorded import RecordedModel, Rows
from dsd_lab.dragon.settings import VARIANTS, AblationSettings, Variant
from dsd_lab.links.emulation import INITIAL_WINDOW, EmulatedChannel, LinkProfile
from dsd_lab.parts import parts
from dsd_lab.plotting import BLUE, GREEN, GREY, RED, YELLOW, new_figure, tidy
from dsd_lab.report import BenchError, Row, cell, check_range, header, render_template, table
from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.answers import Answer
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture
from dsd_ros.dragon.profiler import Profile
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.state import own_choice
from dsd_ros.wire.channel import LocalChannel

_CODE = ("dsd_ros/dragon", "dsd_lab/dragon/bench.py")
PASSAGE_TOKENS = 64
JITTER = 0.2
_BASE_TRIP_S = 0.002  # of the paper's Wi-Fi, without what is added
_PATIENCE_S = 120.0  # nothing is lost on an emulated link


# By default; the others are measured where they are named.
MEASURED = tuple(variant for label, variant in VARIANTS.items() if label not in ("dragon, independent", "cloud"))


@dataclass(frozen=True)
class DragonBench:
    """What is measured. Times in milliseconds, of one token on either side (``read``: of one token of a prompt)."""

    questions: int = 4
    trips_ms: tuple[float, ...] = (0.0, 100.0, 200.0, 300.0)
    mbps: float = 40.0
    window_bytes: int = INITIAL_WINDOW
    device_ms: float = 80.0
    cloud_ms: float = 25.0
    device_read_ms: float = 10.0
    cloud_read_ms: float = 0.5
    documents: int = 2
    max_tokens: int = 20
    seed: int = 0
    time_scale: float = 1.0
    as_asked: bool = False  # the bare questions, a dozen tokens each

    def __post_init__(self) -> None:
        check_range("questions", self.questions, 1, len(QUESTIONS))
        check_range("time-scale", self.time_scale, 0.1, 100)
        check_range("max-tokens", self.max_tokens, 2, 64)
        check_range("documents", self.documents, 1, 16)
        for name in ("device_ms", "cloud_ms", "device_read_ms", "cloud_read_ms"):
            check_range(name, getattr(self, name), 0, 10_000, " ms")
        if not self.trips_ms or not all(0.0 <= trip <= 10_000.0 for trip in self.trips_ms):
            raise BenchError("round trips must be 0 to 10000 ms, for example 0,100,200,300")
        if not (self.mbps == 0.0 or 0.01 <= self.mbps <= 1e6):
            raise BenchError(f"mbps is {self.mbps}; use 0.01 to 1000000 Mbit/s, or 0: unlimited")
        if self.window_bytes != 0 and not 1460 <= self.window_bytes <= 1 << 30:
            raise BenchError(f"window-bytes is {self.window_bytes}; use 1460 or more, or 0: none")


def link_profile(trip_ms: float, mbps: float) -> LinkProfile:
    """Half of the trip each way, up to a fifth more or less, and the rate both ways."""
    half = (1e-3 * trip_ms) / 2
    delay = _BASE_TRIP_S / 2 + (1.0 - JITTER) * half
    return LinkProfile(delay, delay, 2 * JITTER * half, 1e6 * mbps, 1e6 * mbps)


@dataclass
class Side:
    """A model with its documents, and the keys and values of those."""

    model: RecordedModel
    passages: Any
    kept: KeptDocuments
    asking: DocumentPrompt

    def mixture(self, question: str, documents: Sequence[Retrieved], temperature: float = 0.0) -> LocalMixture:
        """The side's own mixture over these documents."""
        return LocalMixture(self.model, self.asking, question, documents, temperature, self.kept)


def _sides(model: Any, rows: Rows, passages: Sequence[Any]) -> list[Side]:
    return [
        Side(RecordedModel(rows, name), found, KeptDocuments(), DocumentPrompt(model))
        for name, found in zip(("device", "cloud"), passages, strict=True)
    ]


def measure_dragon(
    bench: DragonBench,
    model: Any,
    encoder: Encoder,
    variants: Sequence[Variant] = MEASURED,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """The report of ``dragon.report``. ``model``: of ``vlm.loading``, which both sides have. BenchError."""
    corpus = read_corpus(count_tokens(model), PASSAGE_TOKENS)
    rows = Rows(model)
    sides = _sides(model, rows, two_sides(encoder, corpus.passages))
    runs: list[Row] = []
    profiles: dict[Any, Profile] = {}
    for number in parts(range(bench.questions)):
        question = (ASKED if bench.as_asked else QUESTIONS)[number]
        rows.clear()
        _hold(bench, sides, held=False)
        _prepare(bench, sides, question, variants)
        _hold(bench, sides, held=True)
        for index, trip in enumerate(bench.trips_ms):
            # Each question and trip begins with another variant, so that the first is not always the same.
            start = (number + index) % len(variants)
            for place, variant in enumerate([*variants[start:], *variants[:start]]):
                profile = profiles.setdefault((variant.label, trip), Profile())
                link = link_profile(trip, bench.mbps)
                answer = answer_to(bench, sides, question, variant, link, number, profile)
                runs.append(_run(bench, variant, trip, number, answer))
                if progress is not None:
                    done = number + (index + place / len(variants)) / len(bench.trips_ms)
                    progress(done / bench.questions, f"{variant.label} at {trip:g} ms")
    late = sum(side.model.late for side in sides) / max(1, sum(side.model.passes for side in sides))
    return make_report(dataclasses.asdict(bench), model, len(corpus.passages), late, runs)


def _hold(bench: DragonBench, sides: Sequence[Side], held: bool) -> None:
    """Give both models their times, or take them away."""
    scale = 1e-3 * bench.time_scale
    times = (bench.device_ms, bench.device_read_ms), (bench.cloud_ms, bench.cloud_read_ms)
    for side, (token, read) in zip(sides, times, strict=True):
        side.model.pace = Pace(scale * token, BATCH_GROWTH) if held else None
        side.model.reading_s = scale * read if held else 0.0


def answer_to(
    bench: DragonBench,
    sides: Sequence[Side],
    question: str,
    variant: Variant,
    link: LinkProfile,
    seed: int,
    profile: Profile,
) -> Answer:
    """One answer, in a session of its own; what it learns about the link stays in ``profile``."""
    device, cloud = sides
    settings = variant.settings(
        documents=bench.documents, max_tokens=bench.max_tokens, seed=bench.seed,
        patience_s=_PATIENCE_S * max(1.0, bench.time_scale),
    )  # fmt: skip
    ours = device.passages.retrieve(question, bench.documents)
    kept = kept_before(variant.method, device.kept, device.model, device.asking, question, ours)
    with (
        open_cloud(variant.method, settings, cloud.model, cloud.passages, kept=cloud.kept) as service,
        EmulatedChannel(LocalChannel(service), link.stretched(bench.time_scale), seed, bench.window_bytes) as channel,
        open_session(variant.method, channel, device.model, device.passages, settings, kept=kept) as session,
    ):
        if isinstance(session, AblationClient):
            session.profile = profile
        return session.answer(question)


def _prepare(bench: DragonBench, sides: Sequence[Side], question: str, variants: Sequence[Variant]) -> None:
    """Make every pass once that an answer may take: a first pass takes this machine's time."""
    for temperature in sorted({v.temperature for v in variants}):
        _prepare_mixtures(bench, sides, question, temperature)
    methods = {variant.method for variant in variants}
    device, cloud = sides
    ours, theirs = (side.passages.retrieve(question, bench.documents) for side in sides)
    for side, method, documents in ((device, "crcg", ours), (cloud, "crcg-cloud", theirs)):
        if method in methods:
            _answer_greedily(side.mixture(question, together(documents)), bench.max_tokens)
    if {"drcg-text", "drcg-kv"} & methods:
        for documents in (together(ours + theirs), ours + theirs):
            # Nothing is kept of these: they have to travel first.
            own = LocalMixture(device.model, device.asking, question, documents, 0.0)
            _answer_greedily(own, bench.max_tokens)
        for document in theirs:
            head = cloud.asking.pieces(document.text, question).head
            sequence = cloud.kept.find(cloud.model, head)
            if sequence is not None:
                pack_sequence(sequence)


def _prepare_mixtures(bench: DragonBench, sides: Sequence[Side], question: str, temperature: float) -> None:
    """Make the passes of both sides' mixtures: after the answer's tokens, and after drafts that follow them."""
    settings = AblationSettings(temperature=temperature, seed=bench.seed)
    mixtures = [
        side.mixture(question, side.passages.retrieve(question, bench.documents), temperature) for side in sides
    ]
    target: list[int] = []
    while len(target) < bench.max_tokens:
        for own in mixtures:
            own.follow(target)
        one, other = (own.next() for own in mixtures)
        p = mixture(one.p, other.p, one.log_weight, other.log_weight)
        target.append(own_choice(settings, 1, p, len(target)))
    for own in mixtures:
        for start in range(bench.max_tokens):
            alone = temperature == 0.0 and start == 0
            last = bench.max_tokens if alone else min(bench.max_tokens, start + settings.window)
            tokens = target[:start]
            while len(tokens) < last:
                own.follow(tokens)
                tokens = [*tokens, own_choice(settings, 1, own.next().p, len(tokens))]


def _answer_greedily(own: LocalMixture, count: int) -> None:
    tokens: list[int] = []
    while len(tokens) < count:
        own.follow(tokens)
        tokens.append(int(own.next().p.argmax()))


def _run(bench: DragonBench, variant: Variant, trip: float, number: int, answer: Answer) -> Row:
    """One answer's figures; times on the clock of the times given."""
    figures = answer.statistics
    to_ms = 1e3 / bench.time_scale
    return {
        "variant": variant.label,
        "method": variant.method,
        "trip_ms": trip,
        "mbps": bench.mbps,
        "question": number,
        "tokens": len(answer.tokens),
        "total_ms": to_ms * figures.token_seconds[-1],
        "first_token_ms": to_ms * figures.first_token_seconds,
        "bytes_up": figures.bytes_up,
        "bytes_down": figures.bytes_down,
        "accepted": figures.accepted if figures.steps else None,
        "by_device": sum(side == "device" for side in figures.aggregators),
        "reveals": figures.reveals,
        "text": answer.text,
    }


BELOW_TOKEN_WISE = 0.42  # the paper's 42.4 % and 49.5 % at 300 ms
BELOW_SEQUENCE_WISE = 0.49
FIRST_TOKEN_ABOVE = 0.10  # of device-only's
_STYLES = {
    "dragon": (BLUE, "-"),
    "dragon, full": (BLUE, "--"),
    "dragon, sampled": (BLUE, ":"),
    "drdg-tw": (RED, "-"),
    "drdg-tw, full": (RED, "--"),
    "drdg-sw": (YELLOW, "-"),
    "drdg-sw, full": (YELLOW, "--"),
    "drcg-text": (GREEN, "-"),
    "drcg-kv": (GREEN, "--"),
    "crcg": (GREY, "-"),
    "crcg-cloud": (GREY, "--"),
    "device": ("#222222", "-"),
}


def make_report(bench: dict[str, Any], model: Any, passages: int, late: float, runs: list[Row]) -> dict[str, Any]:
    """One row for each variant and round trip, and what the bars say; JSON. ``late``: the share of late passes."""
    keys = dict.fromkeys((run["variant"], run["trip_ms"]) for run in runs)
    rows = [_row([run for run in runs if (run["variant"], run["trip_ms"]) == key]) for key in keys]
    for row in rows:
        base = _find(rows, "device", row["trip_ms"])
        if base is not None:
            # All tokens of whole sequences come at once: device-only's first token stands for theirs.
            first = base if row["method"] == "drdg-sw" else row
            row["decode_ms"] = (row["total_ms"] - first["first_token_ms"]) / max(1.0, row["tokens"] - 1)
    trips = dict.fromkeys(row["trip_ms"] for row in rows)
    bars = [_bars(rows, trip, bench["mbps"]) for trip in trips if _find(rows, "device", trip) is not None]
    return {
        **header("dragon", _CODE, both=model),
        "corpus": SOURCE,
        "passages": passages,
        "model": model.name,
        "setting": bench,
        "late_passes": late,
        "rows": rows,
        "bars": bars,
        "reached": {} if bench["as_asked"] else reached(bars),
        "answers": [
            {key: run[key] for key in ("variant", "question", "text")}
            for run in runs
            if run["trip_ms"] == bench["trips_ms"][0]
        ],
    }


def _row(runs: Sequence[Row]) -> Row:
    tokens, first = sum(run["tokens"] for run in runs), runs[0]
    row = {name: first[name] for name in ("variant", "method", "trip_ms", "mbps")}
    row |= {name: mean(run[name] for run in runs) for name in ("tokens", "total_ms", "first_token_ms")}
    row["per_token_ms"] = row["total_ms"] / row["tokens"]
    row |= {f"{name}_per_token": sum(run[name] for run in runs) / tokens for name in ("bytes_up", "bytes_down")}
    if first["accepted"] is not None:
        row["accepted"] = {side: mean(run["accepted"][side] for run in runs) for side in ("device", "cloud")}
        row["by_device"] = sum(run["by_device"] for run in runs) / tokens
        row["reveals_per_token"] = sum(run["reveals"] for run in runs) / tokens
    return row


def _find(rows: Sequence[Row], variant: str, trip: float) -> Row | None:
    return next((row for row in rows if (row["variant"], row["trip_ms"]) == (variant, trip)), None)


def _bars(rows: Sequence[Row], trip: float, mbps: float) -> dict[str, Any]:
    """How much lower dragon's decoding latency is than each synchronised method's, and its first token."""
    dragon, base = _find(rows, "dragon", trip), _find(rows, "device", trip)
    bars: dict[str, Any] = {"trip_ms": trip, "mbps": mbps}
    if dragon is None or base is None:
        return bars
    for other in ("drdg-tw", "drdg-tw, full", "drdg-sw", "drdg-sw, full"):
        row = _find(rows, other, trip)
        if row is not None:
            bars[f"below {other}"] = {
                "decode": 1.0 - dragon["decode_ms"] / row["decode_ms"],
                "end_to_end": 1.0 - dragon["per_token_ms"] / row["per_token_ms"],
            }
    bars["first_token_above_device"] = dragon["first_token_ms"] / base["first_token_ms"] - 1.0
    return bars


def reached(bars: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """The paper's claims at the longest round trip (sequence-wise with whole distributions), and whether they hold."""
    found: dict[str, bool] = {}
    bar = max(bars, key=lambda bar: bar["trip_ms"], default={})
    for name, least in (
        ("drdg-tw", BELOW_TOKEN_WISE),
        ("drdg-tw, full", BELOW_TOKEN_WISE),
        ("drdg-sw, full", BELOW_SEQUENCE_WISE),
    ):
        saved = bar.get(f"below {name}")
        if saved is not None:
            found[f"{least:.0%} below {name} at {bar['mbps']:g} Mbit/s"] = saved["decode"] >= least
    above = bar.get("first_token_above_device")
    if above is not None:
        at = f"first token within {FIRST_TOKEN_ABOVE:.0%} of device-only's at {bar['mbps']:g} Mbit/s"
        found[at] = above <= FIRST_TOKEN_ABOVE
    return found


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ["method", "ms/token", "decoding", "first ms", "B/token up", "down", "device accepted", "cloud", "by device"]
    trips = dict.fromkeys(row["trip_ms"] for row in report["rows"])
    rows = {trip: [_cells(row) for row in report["rows"] if row["trip_ms"] == trip] for trip in trips}
    tables = [(trip, "\n".join(table([head, *some]))) for trip, some in rows.items()]
    return render_template("dragon/bench.txt", r=report, s=report["setting"], tables=tables).rstrip("\n")


def _cells(row: Row) -> list[str]:
    accepted = row.get("accepted") or {}
    return [
        row["variant"],
        *(cell(row.get(name), ".0f") for name in ("per_token_ms", "decode_ms", "first_token_ms")),
        *(cell(row[name], ".0f") for name in ("bytes_up_per_token", "bytes_down_per_token")),
        *(cell(accepted.get(side), ".0%") for side in ("device", "cloud")),
        cell(row.get("by_device"), ".0%"),
    ]


def draw_dragon(report: dict[str, Any], path: Path) -> None:
    """Decoding latency and time to first token over the round trip; PlotError, OSError."""
    canvas = new_figure(path, 11, 4.4)
    decoding, first = canvas.subplots(1, 2)
    for variant, (colour, line) in _STYLES.items():
        rows = [r for r in report["rows"] if r["variant"] == variant]
        trips = [row["trip_ms"] for row in rows]
        style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3.5}
        decoding.plot(trips, [row["decode_ms"] for row in rows], label=variant, **style)
        first.plot(trips, [row["first_token_ms"] for row in rows], label=variant, **style)
    decoding.set(xlabel="extra round trip, ms", ylabel="ms a token after the first", ylim=(0, None))
    first.set(xlabel="extra round trip, ms", ylabel="ms to the first token", yscale="log")
    tidy(decoding, first)
    first.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    setting = report["setting"]
    canvas.suptitle(
        f"{report['model']}, device {setting['device_ms']:g} ms and cloud {setting['cloud_ms']:g} ms a token (held), "
        f"{setting['mbps']:g} Mbit/s, {setting['documents']} documents a side",
        fontsize=10,
    )
    canvas.savefig(path)
