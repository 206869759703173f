# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab evaluate questions --methods`: DRAGON and the methods that it is compared with, on questions with answers.

Device and cloud are processes with a core each that run the real reader at its own speed. They talk over a websocket
on loopback, and the link is emulated on the device's side. Keys and values of a side's own documents are there before
a question, since documents are read when they are stored. Those of several documents in one prompt, and of documents
that travel, are not.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from statistics import mean
from typing import Any

import torch

from dsd_lab.bench.real import two_cores
from dsd_lab.dragon import OF_AN_ORDINARY_CLOUD
from dsd_lab.dragon.baselines import kept_before, open_cloud, open_session
from dsd_lab.dragon.bench import link_profile
from dsd_lab.dragon.corpus import Passages
from dsd_lab.dragon.settings import VARIANTS, Variant
from dsd_lab.links.emulation import INITIAL_WINDOW, EmulatedChannel
from dsd_lab.pair.held_out import HeldOut, verdict
from dsd_lab.report import BenchError, Row, cell, check_range, header, ratio, share, table
from dsd_lab.workers import begin_worker
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.dragon.answers import Answer
from dsd_ros.dragon.documents.embedding import Encoder, SentenceEncoder
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import KeptDocuments
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.server import WithDocuments
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.websocket import WebsocketChannel

CODE = ("dsd_ros/dragon", "dsd_ros/vlm", "dsd_lab/dragon/questions.py", "dsd_lab/dragon/baselines.py")
MEASURED = tuple(variant for label, variant in VARIANTS.items() if not label.endswith(", full"))
TRAVELS = {"drcg-text": "texts", "drcg-kv": "texts, keys, values"}  # of the cloud's documents
MOST_OVER_DEVICE = 1.25  # seconds to an answer
_START_S = 300.0
_PATIENCE_S = 120.0  # nothing is lost on an emulated link


@dataclasses.dataclass(frozen=True)
class MethodsBench:
    """What is measured; ``count`` questions (0: all), drawn evenly over the kinds."""

    count: int = 48
    seed: int = 0
    trip_ms: float = 300.0
    mbps: float = 40.0
    documents: int = 2
    max_tokens: int = 48

    def __post_init__(self) -> None:
        check_range("trip-ms", self.trip_ms, 0, 10_000, " ms")
        check_range("mbps", self.mbps, 0, 1e6)
        check_range("documents", self.documents, 1, 16)


def drawn(items: Sequence[HeldOut], count: int, seed: int) -> list[HeldOut]:
    """``count`` of the questions, each kind by its share, in an order drawn by ``seed``; 0: all as they are."""
    if count < 0:
        raise BenchError(f"count is {count}; use 1 to {len(items)}, or 0 for all questions")
    if not count:
        return list(items)
    rng = random.Random(seed)
    mixed = rng.sample(list(items), len(items))
    mixed.sort(key=lambda item: item.kind)  # stable
    wanted = min(count, len(items))
    return rng.sample([mixed[number * len(items) // wanted] for number in range(wanted)], wanted)


class OwnDocuments:
    """A side's documents of each question, by its words; a ``retrieval.Retriever``."""

    def __init__(self, encoder: Encoder, items: Sequence[HeldOut], side: str) -> None:
        self.fingerprint = encoder.fingerprint
        self._passages = {item.question: Passages(encoder, getattr(item, side)) for item in items}

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        return self._passages[query].retrieve(query, count)


def _serve(pipe: Connection, model: ModelSettings, items: Sequence[HeldOut]) -> None:
    """The cloud's process: send each variant's address, and serve them until the pipe is closed."""
    begin_worker(heed_signals=False)
    torch.set_num_threads(1)
    loaded, kept = load_model(model), KeptDocuments()
    urls: dict[str, str] = {}
    documents = OwnDocuments(SentenceEncoder(), items, "cloud")
    with ExitStack() as stack:
        for variant in VARIANTS.values():
            service: Any = open_cloud(variant.method, variant.settings(), loaded, documents, kept=kept)
            engine = stack.enter_context(WithDocuments(VerifierEngine(loaded), service))
            urls[variant.label] = stack.enter_context(VerifierServer(engine, VerifierSettings(port=0))).url
        pipe.send(urls)
        with suppress(EOFError):
            pipe.recv()


@contextmanager
def cloud_process(model: ModelSettings, items: Sequence[HeldOut]) -> Iterator[dict[str, str]]:
    """The addresses of clouds for every variant, by label, in one process. BenchError if it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model, list(items)), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise BenchError(f"the cloud's process was not ready after {_START_S:g} s")
        yield ours.recv()
    except EOFError:
        raise BenchError("the cloud's process ended before it was ready; its error is above") from None
    finally:
        ours.close()
        process.join(10.0)
        process.kill()


def measure_methods(
    bench: MethodsBench,
    model: ModelSettings,
    items: Sequence[HeldOut],
    variants: Sequence[Variant] = MEASURED,
    progress: Callable[[float, str], object] | None = None,
    report: Callable[[HeldOut, str, str], object] | None = None,
) -> dict[str, Any]:
    """Ask each of ``items`` by each variant in turn, in sessions that stay open; the report. BenchError.

    ``report`` gets dragon's answers, with the verdict on them.
    """
    items = drawn(items, bench.count, bench.seed)
    answers: dict[str, list[Answer]] = defaultdict(list)
    with ExitStack() as stack:
        urls, cores = stack.enter_context(two_cores(cloud_process(model, items)))
        torch.set_num_threads(1)
        loaded = load_model(model)
        documents = OwnDocuments(SentenceEncoder(), items, "device")
        device = Device(bench, loaded, documents, urls, stack)
        sessions = {variant.label: device.session(variant) for variant in variants}
        readers = [device.session(VARIANTS[side], max_tokens=1) for side in ("device", "cloud")]
        for session in (*readers, *sessions.values()):
            session.answer(items[0].question)  # what happens once in a process, and dialling
        for number, item in enumerate(items):
            for reader in readers:
                reader.answer(item.question)  # reads the documents of its side
            for place in range(len(variants)):
                variant = variants[(number + place) % len(variants)]
                session = sessions[variant.label]
                session.kept = device.kept_for(variant.method, item.question)
                answer = session.answer(item.question)
                answers[variant.label].append(answer)
                if report is not None and variant.label == "dragon":
                    report(item, answer.text, verdict(item, answer.text))
                if progress is not None:
                    progress((number + (place + 1) / len(variants)) / len(items), f"{variant.label}: {item.id}")
    rows = [_row(variant, items, answers[variant.label], answers.get("device", ())) for variant in variants]
    return {
        **header("questions-methods", CODE, both=loaded),
        "setting": dataclasses.asdict(bench) | {"cores": cores},
        "rows": rows,
        "bars": _bars(rows),
        "answers": [
            {"id": item.id, "question": item.question, "answers": item.answers}
            | {variant.label: answers[variant.label][number].text for variant in variants}
            for number, item in enumerate(items)
        ],
    }


class Device:
    """The device's half: a model, its documents, and sessions over an emulated link each."""

    def __init__(
        self, bench: MethodsBench, model: Any, documents: OwnDocuments, urls: dict[str, str], stack: ExitStack
    ) -> None:
        self._bench, self._model, self._documents, self._urls, self._stack = bench, model, documents, urls, stack
        self._kept, self._sessions = KeptDocuments(), 0

    def session(self, variant: Variant, max_tokens: int = 0) -> Any:
        """A session of a variant, with a link of its own."""
        bench = self._bench
        settings = variant.settings(
            documents=bench.documents, max_tokens=max_tokens or bench.max_tokens, seed=bench.seed,
            patience_s=_PATIENCE_S,
        )  # fmt: skip
        self._sessions += 1
        link, inner = link_profile(bench.trip_ms, bench.mbps), WebsocketChannel(self._urls[variant.label])
        channel = self._stack.enter_context(EmulatedChannel(inner, link, self._sessions, INITIAL_WINDOW))
        if variant.method not in OF_AN_ORDINARY_CLOUD:  # the others dial
            channel.reconnect()
        session = open_session(variant.method, channel, self._model, self._documents, settings, kept=self._kept)
        return self._stack.enter_context(session)

    def kept_for(self, method: str, question: str) -> KeptDocuments:
        """The keys and values that a method may find on the device before a question."""
        if method == "crcg":
            return KeptDocuments()
        asking, ours = DocumentPrompt(self._model), self._documents.retrieve(question, self._bench.documents)
        return kept_before(method, self._kept, self._model, asking, question, ours)


def _row(variant: Variant, items: Sequence[HeldOut], said: Sequence[Answer], alone: Sequence[Answer]) -> Row:
    """A variant's figures, an answer's where nothing else is said; ``alone``: the device's own answers."""
    verdicts = [verdict(item, answer.text) for item, answer in zip(items, said, strict=True)]
    figures = [answer.statistics for answer in said]
    tokens, seconds = [len(answer.tokens) for answer in said], [one.seconds for one in figures]
    row: Row = {
        "label": variant.label,
        "right": share([how == "right" for how in verdicts]),
        "wrong": share([how == "wrong" for how in verdicts]),
        **{
            f"{how}_needs_{needs}": share(
                [found == how for item, found in zip(items, verdicts, strict=True) if item.needs == needs]
            )
            for how, needs in (("right", "both"), ("wrong", "none"))
        },
        "tokens": mean(tokens),
        "seconds": ratio(seconds),
        "first_token_seconds": mean(one.first_token_seconds for one in figures),
        "token_ms": ratio([1e3 * one for one in seconds], tokens),
        "bytes_up": mean(one.bytes_up for one in figures),
        "bytes_down": mean(one.bytes_down for one in figures),
        "travels": TRAVELS.get(variant.method, ""),
    }
    if alone:
        theirs = [answer.statistics.seconds for answer in alone]
        row["over_device"] = ratio(seconds, theirs)
        row["token_over_device"] = row["token_ms"]["value"] / (
            1e3 * sum(theirs) / sum(len(answer.tokens) for answer in alone)
        )
    if any(one.steps for one in figures):
        row["accepted"] = {side: mean(one.accepted[side] for one in figures) for side in ("device", "cloud")}
    return row


def _bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """DRAGON's time over that of the device alone, and its bar."""
    found = [row["over_device"] for row in rows if row["label"] == "dragon" and "over_device" in row]
    return [
        {"name": "dragon over the device alone, seconds an answer", "at_most": MOST_OVER_DEVICE, **one}
        | {"met": one["value"] <= MOST_OVER_DEVICE}
        for one in found
    ]


def render_methods(report: dict[str, Any]) -> str:
    """The report as a table."""
    setting = report["setting"]
    rows = [["method", "right", "wrong", "s an answer", "over device", "ms a token", "kB up", "down", "travels"]]
    for row in report["rows"]:
        over = row.get("over_device", {}).get("value")
        rows.append(
            [
                row["label"], f"{row['right']['value']:.0%}", f"{row['wrong']['value']:.0%}",
                f"{row['seconds']['value']:.2f}", cell(over, ".2f"), f"{row['token_ms']['value']:.0f}",
                f"{row['bytes_up'] / 1e3:.1f}", f"{row['bytes_down'] / 1e3:.1f}", row["travels"] or "nothing",
            ]
        )  # fmt: skip
    about = (
        f"{report['rows'][0]['right']['of']} questions, {report['models']['both']['name']} on both sides, "
        f"{setting['trip_ms']:g} ms round trip, {setting['mbps']:g} Mbit/s, {setting['documents']} documents a side."
    )
    return "\n".join([about, *table(rows)])
