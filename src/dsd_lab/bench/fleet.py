# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench fleet`: how many robots one verifier serves, and what each of them gets.

Every robot has a thread, a session and an emulated link of its own; all share one verifier. Where the profile gives
the times of other machines, forward passes are held to them, and a pass of the target over several robots' rounds
lasts as FSD Table 9 has it.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from dsd_lab.bench.pace import Pace, paced
from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.scenes import BATCH_GROWTH, MAX_SCENES, PATIENT_LINK, WARM_UP_TOKENS, Scene, decode, held_out_scenes
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.plotting import BLUE, GREEN, RED, YELLOW, new_figure, tidy
from dsd_lab.report import check_range, header, table
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.cloud.target import LocalTarget, OnEarly
from dsd_ros.cloud.verification import PendingRound, RoundRefused
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Outcome

# FSD Table 9: 17.94, 30.73 and 96.94 ms for a pass of the target over 1, 8 and 32 sequences.
TABLE_9 = ((1, 1.0), (8, 30.73 / 17.94), (32, 96.94 / 17.94))
MAX_ROBOTS = 64


class CountingTarget(LocalTarget):
    """Remembers how many rounds each pass verified."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self.batches: list[int] = []

    def verify(
        self, rounds: Sequence[PendingRound], on_early: OnEarly
    ) -> Iterator[tuple[PendingRound, Outcome | RoundRefused]]:
        self.batches.append(len(rounds))
        yield from super().verify(rounds, on_early)


def measure_fleet(
    profile: Profile,
    settings: DecodeSettings,
    robots: Sequence[int],
    batches: Sequence[int],
    replies: int,
    draft: str,
    target: str,
    *,
    time_scale: float = 1.0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Let each number of robots decode ``replies`` pictures each, with each ``max_batch``; a row per combination.

    Every robot's replies must be those that it gets alone ("exact"), unless they are sampled without shared noise.
    ValueErrors, ModelError, LinkError.
    """
    for count in robots:
        check_range("robots", count, 1, MAX_ROBOTS)
    check_range("replies", replies, 1, MAX_SCENES)
    check_range("time-scale", time_scale, 0.01, 100)
    scenes = held_out_scenes(replies)
    robot, cloud = (paced(load_model(ModelSettings(path, threads=1))) for path in (draft, target))
    stretched = profile.stretched(time_scale)
    rows, exact = [], True
    wanted: dict[tuple[int, int], list[int]] = {}
    for max_batch in batches:
        for count in robots:
            robot.pace = cloud.pace = None
            with VerifierEngine(CountingTarget(cloud), EngineSettings(max_batch=max_batch)) as engine:
                short = dataclasses.replace(settings, max_tokens=WARM_UP_TOKENS)
                decode(LocalChannel(engine), robot, short, scenes[0])  # what happens once must not be measured
                if stretched.draft_s is not None and stretched.target_s is not None:
                    robot.pace = Pace(stretched.draft_s, BATCH_GROWTH)
                    cloud.pace = Pace(stretched.target_s, batch_curve=TABLE_9)
                found, seconds = _run(engine, robot, settings, scenes, count, stretched)
            for place, reply in enumerate(found):
                key = (place % count, place // count)
                exact &= wanted.setdefault(key, reply.tokens) == reply.tokens
            row = _row(engine, found, seconds / time_scale, time_scale) | {"robots": count, "max_batch": max_batch}
            rows.append(row)
            if progress is not None:
                done = len(rows) / (len(robots) * len(batches))
                progress(done, f"{count} robots, batches of {max_batch}: {row['tokens_per_second']:.1f} tokens/s")
    comparable = settings.temperature == 0 or settings.proven_by is Proof.COUPLED
    return {
        **header("fleet", draft=robot, target=cloud),
        "profile": dataclasses.asdict(profile),
        "decode": dataclasses.asdict(settings),
        "replies": replies,
        "time_scale": time_scale,
        "exact": exact if comparable else None,
        "rows": rows,
    }


def _run(
    engine: VerifierEngine,
    model: VisionLanguageModel,
    settings: DecodeSettings,
    scenes: Sequence[Scene],
    count: int,
    profile: Profile,
) -> tuple[list[DecodedReply], float]:
    """All robots' replies, scene by scene, and the seconds until the last one."""
    together = threading.Barrier(count + 1)

    def drive(number: int) -> list[DecodedReply]:
        chosen = dataclasses.replace(settings, seed=settings.seed + number)
        channel = EmulatedChannel(LocalChannel(engine), profile.link, seed=number)
        with closing(channel), EdgeSession(channel, model, chosen, PATIENT_LINK) as session:
            together.wait(60)
            return [session.decode(scene.image, scene.instruction) for scene in scenes]

    with ThreadPoolExecutor(count) as pool:
        work = [pool.submit(drive, number) for number in range(count)]
        together.wait(60)
        began = time.monotonic()
        each = [future.result() for future in work]
        seconds = time.monotonic() - began
    return [reply for scene in zip(*each, strict=True) for reply in scene], seconds


def _row(engine: VerifierEngine, replies: Sequence[DecodedReply], seconds: float, scale: float) -> dict[str, Any]:
    target = engine.target
    assert isinstance(target, CountingTarget)
    times = sorted(reply.seconds / scale for reply in replies)
    return {
        "tokens_per_second": sum(len(reply.tokens) for reply in replies) / seconds,
        "reply_seconds_median": statistics.median(times),
        "reply_seconds_p95": times[min(len(times) - 1, int(0.95 * len(times)))],
        "tau": statistics.fmean(reply.tau for reply in replies),
        "miss_rate": statistics.fmean(reply.miss_rate for reply in replies),
        "mean_batch": statistics.fmean(target.batches),
        "largest_batch": max(target.batches),
    }


def render(report: dict[str, Any]) -> str:
    """The rows as a table, each beside the same batch limit with one robot."""
    alone = {row["max_batch"]: row for row in report["rows"] if row["robots"] == 1}
    lines = [["robots", "max batch", "tokens/s", "x one", "s/reply", "p95", "x one", "tau", "miss %", "mean batch"]]
    for row in report["rows"]:
        one = alone.get(row["max_batch"])
        more = [f"{row[name] / one[name]:.2f}" if one else "" for name in ("tokens_per_second", "reply_seconds_median")]
        lines.append([
            str(row["robots"]), str(row["max_batch"]), f"{row['tokens_per_second']:.1f}", more[0],
            f"{row['reply_seconds_median']:.2f}", f"{row['reply_seconds_p95']:.2f}", more[1],
            f"{row['tau']:.2f}", f"{100 * row['miss_rate']:.0f}", f"{row['mean_batch']:.1f}",
        ])  # fmt: skip
    exact = {True: "every reply is the one that the robot gets alone", False: "REPLIES DIFFER", None: ""}
    held = " (held times)" if report["profile"]["target_s"] is not None else ""
    title = f"{report['decode']['mode']} at profile {report['profile']['name']}{held}"
    return "\n".join([title, *table(lines, left=0), exact[report["exact"]], report["machine"]])


def draw(report: dict[str, Any], path: Path) -> None:
    """Tokens a second in all, and seconds a reply, over the number of robots."""
    figure = new_figure(path, 9, 4)
    speed, wait = figure.subplots(1, 2)
    limits = sorted({row["max_batch"] for row in report["rows"]})
    for number, limit in enumerate(limits):
        colour = (BLUE, GREEN, RED, YELLOW)[number % 4]
        rows = [row for row in report["rows"] if row["max_batch"] == limit]
        counts, label = [row["robots"] for row in rows], f"at most {limit} in a pass"
        speed.plot(counts, [row["tokens_per_second"] for row in rows], "o-", color=colour, label=label)
        wait.plot(counts, [row["reply_seconds_median"] for row in rows], "o-", color=colour, label=label)
    for axes, name in ((speed, "tokens a second in all"), (wait, "seconds a reply, median")):
        axes.set_xlabel("robots")
        axes.set_ylabel(name)
        axes.legend()
    tidy(speed, wait)
    figure.savefig(path)
