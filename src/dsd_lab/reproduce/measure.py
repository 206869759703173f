# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab papers measure`: counts that the papers' tables need: tokens, rounds, bytes and passes of real replies.

Models, engine, sessions and messages are the product's own. Seconds follow from these counts by the papers' formulas,
so another load on the machine changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsd_lab.bench.scenes import Scene, decode, held_out_scenes, text_models, trained_for_text
from dsd_lab.papers import dragon_simulator as simulator
from dsd_lab.plotting import Curve, Panel, draw_panels
from dsd_lab.report import BenchError, Row, header
from dsd_lab.reproduce.table import PRINTED
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import next_logits_together
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Draft, Message

NARRATIVE: str = PRINTED["measure"]["narrative"]


@dataclass(frozen=True)
class Study:
    """What is decoded, how often and by which rows. ``scenes``: the questions, each asked ``draws`` times."""

    name: str
    rows: dict[str, DecodeSettings]  # by the row's label
    scenes: Callable[[], list[Scene]]
    draws: int


def cost_study(pictures: int = 30) -> Study:
    """FSD, Table 1 and Figure 1: what a provider could bill for the same replies, by where the draft runs."""

    def of(mode: str, **more: Any) -> DecodeSettings:
        return DecodeSettings(mode=mode, max_tokens=96, **({"draft_length": 4} if mode != "ar" else {}), **more)

    flight = {"pipeline_depth": 3, "predraft_workers": 8}
    rows = {
        "ar": of("ar"),
        "dsd": of("dsd"),
        "fsd": of("fsd", predraft_workers=2),
        "fsd, three rounds in flight": of("fsd", **flight),
    }
    return Study("cost", rows, lambda: held_out_scenes(pictures), 1)


class _CountingChannel(LocalChannel):
    """A channel in this process that counts the rounds sent."""

    drafts = 0

    def send(self, message: Message) -> None:
        self.drafts += isinstance(message, Draft) and bool(message.tokens)
        super().send(message)


def measure(
    study: Study, out: Path, draft: str, target: str, progress: Callable[[float, str], None] | None = None
) -> dict[str, Any]:
    """Decode the study's replies; the report, also written to ``out``. BenchError, ModelError, LinkError."""
    robot, cloud = (load_model(ModelSettings(path, threads=1)) for path in (draft, target))
    scenes = study.scenes()
    asked = [(scene, seed) for seed in range(study.draws) for scene in scenes]
    rows: list[Row] = [{"label": label, "settings": _settings(one)} for label, one in study.rows.items()]
    counted = LocalTarget(cloud)
    for place, (one, row) in enumerate(zip(study.rows.values(), rows, strict=True)):
        if progress is not None:
            progress(place / len(rows), row["label"])
        for number, (scene, seed) in enumerate(asked):
            settings = dataclasses.replace(one, seed=1000 * seed + number)
            with VerifierEngine(counted) as engine:
                channel = _CountingChannel(engine)
                _count(row, decode(channel, robot, settings, scene), channel.drafts)
    _check(study, rows)
    head = header("papers", draft=robot, target=cloud)
    report = {**head, "study": study.name, "model": "pair", "replies_a_row": len(asked), "rows": rows}
    write(out, report)
    return report


def _count(row: Row, reply: DecodedReply, sent: int) -> None:
    """Add a reply to its row. The bytes are those of its rounds, without the question; ``sent``: rounds sent."""
    records = reply.records
    own = {
        "replies": 1,
        "tokens": len(reply.tokens),
        "rounds": reply.rounds,
        "drafted": sum(r.drafted for r in records),
        "accepted": sum(r.accepted for r in records),
        # Of these the target judged the accepted ones, and one more where it rejected.
        "judged": sum(r.accepted + (r.accepted < r.depth) for r in records),
        "bytes_up": sum(r.bytes_up for r in records),
        "bytes_down": sum(r.bytes_down for r in records),
        "rounds_sent": sent,
    }
    for name, amount in own.items():
        row[name] = row.get(name, 0) + amount
    row.setdefault("digests", []).append(zlib.crc32(repr(reply.tokens).encode()))


def _check(study: Study, rows: Sequence[Row]) -> None:
    """Greedy rows decode the same replies, or the study is worth nothing."""
    greedy = [row for one, row in zip(study.rows.values(), rows, strict=True) if one.sampling.greedy]
    if any(row["digests"] != greedy[0]["digests"] for row in greedy):
        raise BenchError(f"greedy rows of study {study.name} decoded different tokens; report this")


def _settings(one: DecodeSettings) -> Row:
    """What sets a row apart from the settings' defaults."""
    usual = DecodeSettings(mode=one.mode)
    given = {f.name: getattr(one, f.name) for f in dataclasses.fields(usual)}
    return {name: value for name, value in given.items() if name == "mode" or value != getattr(usual, name)}


def write(out: Path, report: dict[str, Any]) -> None:
    """Write a report."""
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


BATCHES = (1, 2, 3, 4, 8, 12, 16, 32, 64)
_CONTEXT, _REPEATS = 128, 5


def measure_batches(out: Path, progress: Callable[[float, str], None] | None = None) -> dict[str, Any]:
    """FSD, Table 9: milliseconds of a pass over so many sequences, one token each, with SmolLM2 and its draft."""
    robot, cloud = map(load_model, text_models("", ""))
    report = {**header("papers", draft=robot, target=cloud, **trained_for_text()), "study": "batch", "model": "text"}
    report |= {"context": _CONTEXT, "repeats": _REPEATS}
    for place, (side, model) in enumerate((("target", cloud), ("draft", robot))):
        report[side] = _batches(model)
        if progress is not None:
            progress((place + 1) / 2, side)
    write(out, report)
    return report


def _batches(model: VisionLanguageModel) -> list[Row]:
    first = model.prefill(None, NARRATIVE)
    first.append([1 + place % 64 for place in range(max(1, _CONTEXT - first.prompt_length))])
    first.next_logits()
    seconds: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for turn in range(_REPEATS):  # sizes in turn, so that none has the quiet minutes to itself
        for batch, times in seconds.items():
            sequences = [first.fork() for _ in range(batch)]
            for shift in (0, 1):  # the first pass of a size, into memory that is new to it, is not timed
                for place, sequence in enumerate(sequences):
                    sequence.append([2 + (place + turn + shift) % 64])
                began = time.perf_counter()
                next_logits_together(sequences)
            times.append(time.perf_counter() - began)
    return [{"batch": batch, "median_ms": 1e3 * statistics.median(times)} for batch, times in seconds.items()]


def measure_scheduling(out: Path, plot: Path | None = None) -> dict[str, Any]:
    """DRAGON, Figure 8: mean seconds of 50 simulated answers of 100 tokens, by which side aggregates.

    Device 100 ms a step, cloud 50 ms, acceptances 80 %, a round trip of 20 ms and the extra latency.
    """
    setting, extras = simulator.Setting(0.1, 0.05, 0.02, (0.8, 0.8)), (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
    code = "dsd_lab/papers/dragon_simulator.py", "dsd_ros/dragon/scheduler.py"
    found = simulator.compare(setting, extras, 50)
    rows = [dataclasses.asdict(one) | {"auto_over_best_side": one.over_best_side()} for one in found]
    head = header("dragon-scheduling", code) | dataclasses.asdict(setting)
    report = {**head, "sequences": 50, "seed": 0, "rows": rows}
    write(out, report)
    if plot is not None:
        milliseconds = [1e3 * one.extra for one in found]
        curves = [Curve(name, milliseconds, [one.seconds[name] for one in found]) for name in found[0].seconds]
        panel = Panel("extra latency of the round trip, ms", "seconds an answer", curves)
        draw_panels(plot, "simulated answers by who aggregates", [panel])
    return report
