"""`dsd-lab bench dragon`: answers from two sides' documents, by each method, over links of growing round trips.

As section 7.3 of DRAGON: the best two passages of at most 64 tokens on each side, 20 tokens of answer, 0 to 300 ms
of round trip with a jitter of one fifth. Sessions, services, messages and what the models say are the real ones; the
link is emulated, carrying as TCP does, and the models' times are given (``recorded``). Which documents are in a
store beforehand is known, so that their keys and values are there, save where they have to travel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsd_lab.dragon.baseline_service import BaselineService, pack_sequence, together
from dsd_lab.dragon.baselines import open_session
from dsd_lab.dragon.corpus import QUESTIONS, read_corpus, two_sides
from dsd_lab.dragon.methods import OF_AN_ORDINARY_CLOUD
from dsd_lab.dragon.recorded import RecordedModel, Rows
from dsd_lab.dragon.report import make_report
from dsd_lab.links.emulation import INITIAL_WINDOW, EmulatedChannel, LinkProfile
from dsd_lab.report import BenchError
from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.answers import Answer
from dsd_ros.dragon.client import AskSession
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture
from dsd_ros.dragon.peer import Profile
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.server import AggregationService
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.dragon.state import own_choice
from dsd_ros.vlm.pace import Pace
from dsd_ros.wire.local import LocalChannel

PASSAGE_TOKENS = 64
BATCH_GROWTH = 0.15  # of a pass over eight sequences (FSD, table 9)
JITTER = 0.2
_BASE_TRIP_S = 0.002  # of the paper's Wi-Fi, without what is added
_PATIENCE_S = 120.0  # nothing is lost on an emulated link


@dataclass(frozen=True)
class Variant:
    """A method with what it sends. ``timed`` false: only counted, over a link without delay."""

    label: str
    method: str
    evidence: str = "sparse"
    temperature: float = 0.0
    randomness: str = "shared"
    timed: bool = True


VARIANTS = (
    Variant("dragon", "dragon"),
    Variant("dragon, full", "dragon", "full"),
    Variant("dragon, sampled", "dragon", temperature=1.0),
    Variant("dragon, independent", "dragon", temperature=1.0, randomness="independent", timed=False),
    Variant("drdg-tw", "drdg-tw"),
    Variant("drdg-tw, full", "drdg-tw", "full"),
    Variant("drdg-sw", "drdg-sw"),
    Variant("drdg-sw, full", "drdg-sw", "full"),
    Variant("drcg-text", "drcg-text"),
    Variant("drcg-kv", "drcg-kv"),
    Variant("crcg", "crcg"),
    Variant("crcg-cloud", "crcg-cloud"),
    Variant("device", "device"),
)  # fmt: skip
ON_A_NARROW_LINK = ("dragon", "drdg-tw, full", "drdg-sw", "drdg-sw, full", "device")


@dataclass(frozen=True)
class Bench:
    """What is measured. Times in milliseconds, of one token on either side (``read``: of one token of a prompt)."""

    questions: int = 4
    trips_ms: tuple[float, ...] = (0.0, 100.0, 200.0, 300.0)
    mbps: float = 40.0
    narrow_mbps: float = 5.0
    window_bytes: int = INITIAL_WINDOW
    device_ms: float = 80.0
    cloud_ms: float = 25.0
    device_read_ms: float = 10.0
    cloud_read_ms: float = 0.5
    documents: int = 2
    max_tokens: int = 20
    seed: int = 0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= len(QUESTIONS):
            raise BenchError(f"questions is {self.questions}; use 1 to {len(QUESTIONS)}")
        if not self.trips_ms or not all(0.0 <= trip <= 10_000.0 for trip in self.trips_ms):
            raise BenchError("round trips must be 0 to 10000 ms, for example 0,100,200,300")
        for name in ("device_ms", "cloud_ms", "device_read_ms", "cloud_read_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0.0 <= value <= 10_000.0):
                raise BenchError(f"{name} is {value}; use 0 to 10000 ms")
        for name in ("mbps", "narrow_mbps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value == 0.0 or 0.01 <= value <= 1e6)):
                raise BenchError(f"{name} is {value}; use 0.01 to 1000000 Mbit/s, or 0: unlimited")
        if self.window_bytes != 0 and not 1460 <= self.window_bytes <= 1 << 30:
            raise BenchError(f"window-bytes is {self.window_bytes}; use 1460 or more, or 0: none")
        if not 0.1 <= self.time_scale <= 100.0:
            raise BenchError(f"time-scale is {self.time_scale}; use 0.1 to 100")
        if not 2 <= self.max_tokens <= 64 or not 1 <= self.documents <= 16:
            raise BenchError("an answer has 2 to 64 tokens here, from 1 to 16 documents a side")

    def links(self) -> list[tuple[float, float]]:
        """(extra round trip in ms, Mbit/s): the narrow link with the longest one comes last."""
        wide = [(trip, self.mbps) for trip in self.trips_ms]
        return wide + ([(max(self.trips_ms), self.narrow_mbps)] if self.narrow_mbps else [])


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
        """The side's own over these documents."""
        return LocalMixture(self.model, self.asking, question, documents, temperature, self.kept)


def measure_dragon(
    bench: Bench,
    model: Any,
    encoder: Encoder,
    variants: Sequence[Variant] = VARIANTS,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """The report of ``dragon_report``. ``model``: of ``vlm.loading``, which both sides have. BenchError."""

    def count_tokens(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    corpus = read_corpus(count_tokens, PASSAGE_TOKENS)
    rows = Rows(model)
    sides = [
        Side(RecordedModel(rows, name), passages, KeptDocuments(), DocumentPrompt(model))
        for name, passages in zip(("device", "cloud"), two_sides(encoder, corpus.passages), strict=True)
    ]  # fmt: skip
    runs: list[dict[str, Any]] = []
    profiles: dict[Any, Profile] = {}
    agreed = []
    for number in range(bench.questions):
        question = QUESTIONS[number]
        rows.clear()
        _hold(bench, sides, held=False)
        agreed.append(_prepare(bench, sides, question, variants))
        for index, (trip, mbps) in enumerate(bench.links()):
            narrow = index == len(bench.trips_ms)
            chosen = [
                variant for variant in variants
                if (not narrow or variant.label in ON_A_NARROW_LINK) and (variant.timed or index == 0)
            ]  # fmt: skip
            # Each begins with another one: what comes first must not always be the same.
            start = (number + index) % len(chosen)
            for variant in chosen[start:] + chosen[:start]:
                _hold(bench, sides, held=variant.timed)
                link = link_profile(trip, mbps) if variant.timed else LinkProfile()
                key = (variant.label, trip, mbps)
                profile = profiles.setdefault(key, Profile())
                answer = answer_to(bench, sides, question, variant, link, number, profile)
                runs.append(_run(bench, variant, trip, mbps, number, answer))
                if progress is not None:
                    done = number + (index + chosen.index(variant) / len(chosen)) / len(bench.links())
                    progress(done / bench.questions, f"{variant.label} at {trip:g} ms")
    passes = sum(side.model.passes for side in sides)
    late = sum(side.model.late for side in sides) / max(1, passes)
    return make_report(dataclasses.asdict(bench), model.name, len(corpus.passages), late, runs, agreed)


def _hold(bench: Bench, sides: Sequence[Side], held: bool) -> None:
    """Give both models their times, or take them away."""
    scale = 1e-3 * bench.time_scale
    for side, token, read in zip(
        sides, (bench.device_ms, bench.cloud_ms), (bench.device_read_ms, bench.cloud_read_ms),
        strict=True,
    ):  # fmt: skip
        side.model.pace = Pace(scale * token, BATCH_GROWTH) if held else None
        side.model.reading_s = scale * read if held else 0.0


def answer_to(
    bench: Bench, sides: Sequence[Side], question: str, variant: Variant, link: LinkProfile, seed: int, profile: Profile
) -> Answer:
    """One answer, of a session of its own; what it learns of the link stays in ``profile``."""
    device, cloud = sides
    settings = AggregationSettings(
        documents=bench.documents, max_tokens=bench.max_tokens, temperature=variant.temperature,
        evidence=variant.evidence, randomness=variant.randomness, seed=bench.seed,
        patience_s=_PATIENCE_S * max(1.0, bench.time_scale),
    )  # fmt: skip
    service: AggregationService | BaselineService
    if variant.method in OF_AN_ORDINARY_CLOUD:
        service = AggregationService(cloud.model, cloud.passages, kept=cloud.kept)
    else:
        service = BaselineService(cloud.model, cloud.passages, kept=cloud.kept)
    # What the other side's text is read with, nobody has kept.
    kept = KeptDocuments() if variant.method == "drcg-text" else device.kept
    if variant.method == "drcg-kv":
        kept = _copied(device, question, bench.documents)
    with (
        service,
        EmulatedChannel(LocalChannel(service), link.stretched(bench.time_scale), seed, bench.window_bytes) as channel,
        open_session(variant.method, channel, device.model, device.passages, settings, kept=kept) as session,
    ):
        if isinstance(session, AskSession):
            session.profile = profile
        return session.answer(question)


def _copied(side: Side, question: str, count: int) -> KeptDocuments:
    """The keys and values of a side's own documents for a question, and of no others."""
    kept = KeptDocuments()
    for document in side.passages.retrieve(question, count):
        head = side.asking.pieces(document.text, question).head
        sequence = side.kept.find(side.model, head)
        if sequence is not None:
            kept.keep(side.model, head, sequence)
    return kept


def _prepare(bench: Bench, sides: Sequence[Side], question: str, variants: Sequence[Variant]) -> dict[str, Any]:
    """Have every pass made once that an answer may take; how far the sides agree on this question.

    A pass that is made all the same while it is timed takes this machine's time, and counts as late.
    """
    window = AggregationSettings().window
    shares = {}
    methods = {variant.method for variant in variants}
    for temperature in sorted({v.temperature for v in variants if v.timed}):
        settings = AggregationSettings(temperature=temperature, seed=bench.seed)

        def choose(p: Any, position: int, settings: AggregationSettings = settings) -> int:
            return own_choice(settings, 1, p, position)

        mixtures = [
            side.mixture(question, side.passages.retrieve(question, bench.documents), temperature) for side in sides
        ]
        target: list[int] = []
        while len(target) < bench.max_tokens:
            for own in mixtures:
                own.follow(target)
            one, other = (own.next() for own in mixtures)
            p = mixture(one.p, other.p, one.log_weight, other.log_weight)
            target.append(choose(p, len(target)))
        for side, own in zip(sides, mixtures, strict=True):
            held = 0
            for start in range(bench.max_tokens):
                alone = temperature == 0.0 and start == 0
                last = bench.max_tokens if alone else min(bench.max_tokens, start + window)
                tokens = target[:start]
                while len(tokens) < last:
                    own.follow(tokens)
                    tokens = [*tokens, choose(own.next().p, len(tokens))]
                held += tokens[start] == target[start]
            name = f"{side.model.name} at temperature {temperature:g}"
            shares[name] = held / bench.max_tokens
    for side, method in zip(sides, ("crcg", "crcg-cloud"), strict=True):
        if method in methods:
            documents = side.passages.retrieve(question, bench.documents)
            _read_alone(side.mixture(question, together(documents)), bench.max_tokens)
    if {"drcg-text", "drcg-kv"} & methods:
        device, cloud = sides
        both = [d for s in sides for d in s.passages.retrieve(question, bench.documents)]
        for documents in (together(both), both):
            # Kept by nobody: they have to travel first.
            own = LocalMixture(device.model, device.asking, question, documents, 0.0)
            _read_alone(own, bench.max_tokens)
        for document in cloud.passages.retrieve(question, bench.documents):
            head = cloud.asking.pieces(document.text, question).head
            sequence = cloud.kept.find(cloud.model, head)
            if sequence is not None:
                pack_sequence(sequence)
    return shares


def _read_alone(own: LocalMixture, count: int) -> None:
    """A greedy answer of one mixture."""
    tokens: list[int] = []
    while len(tokens) < count:
        own.follow(tokens)
        tokens.append(int(own.next().p.argmax()))


def _run(bench: Bench, variant: Variant, trip: float, mbps: float, number: int, answer: Answer) -> dict[str, Any]:
    """One answer's figures; times on the clock of the times given."""
    figures = answer.statistics
    to_ms = 1e3 / bench.time_scale
    return {
        "variant": variant.label,
        "method": variant.method,
        "timed": variant.timed,
        "trip_ms": trip,
        "mbps": mbps,
        "question": number,
        "tokens": len(answer.tokens),
        "total_ms": to_ms * figures.token_seconds[-1],
        "first_token_ms": to_ms * figures.first_token_seconds,
        "bytes_up": figures.bytes_up,
        "bytes_down": figures.bytes_down,
        "accepted": figures.accepted if figures.steps else None,
        "by_device": sum(side == "device" for side in figures.aggregators),
        "switches": figures.switches,
        "reveals": figures.reveals,
        "text": answer.text,
    }
