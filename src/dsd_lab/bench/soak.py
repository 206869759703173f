# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench soak`: many replies in one process, and whether anything in it grows."""

from __future__ import annotations

import gc
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.harness import Bench, Decoding, PairFlags, Report, Told, given
from dsd_lab.bench.sweeps import one_mode
from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_lab.parts import parts
from dsd_lab.report import check_range, header
from dsd_ros.cli.arguments import arguments, flag, part
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.channel import LocalChannel

LINK = LinkProfile(delay_up_s=0.001, delay_down_s=0.001, jitter_s=0.001, rate_down_bps=2e6)
SESSIONS_EVERY = 50  # replies of one session; opening and closing may leak as well
_SAMPLES = 40
_WARM_UP = 0.2  # share of the replies after which nothing may grow any more
_PAUSE_S = 0.002
_REST_S = 0.05  # before a sample: after a reply a worker still ends the pass that it is in

Sample = dict[str, float]


@arguments
class Flags(PairFlags):
    replies: int = flag(2000, "how many to decode")
    mode: str = flag("fsd", "decoding mode, with settings if need be, as in bench modes")
    max_growth_mb: float = flag(48.0, "how much memory may grow after the warm-up")
    decoding: Decoding = part(Decoding)


def measure(flags: Flags, told: Told) -> Report:
    """Decode noise pictures, a new session for every 50, and sample what the process holds.

    It is "steady" when memory grows by at most ``max_growth_mb`` after the warm-up, live key/value caches by one
    round's pre-drafts, and threads, open files and sessions not at all. ValueErrors, ModelError, LinkError.
    """
    replies, settings = flags.replies, one_mode(flags.mode, given(flags.decoding)).decode
    check_range("replies", replies, _SAMPLES, 1_000_000)
    check_range("max-growth-mb", flags.max_growth_mb, 0.1, 100_000)
    robot, cloud = map(load_model, flags.models)
    rng = np.random.default_rng(0)
    began, done, tokens = time.monotonic(), 0, 0
    samples: list[Sample] = []
    every = max(1, replies // _SAMPLES)
    with _only_new_garbage(), VerifierEngine(cloud) as engine:
        for first in parts(range(0, replies, SESSIONS_EVERY)):
            with (
                EmulatedChannel(LocalChannel(engine), LINK, seed=done) as channel,
                EdgeSession(channel, robot, settings) as session,
            ):
                for _ in range(min(SESSIONS_EVERY, replies - first)):
                    picture = rng.integers(0, 256, (112, 168, 3), dtype=np.uint8)
                    tokens += len(session.decode(picture, "find the silver bottle").tokens)
                    done += 1
                    time.sleep(_PAUSE_S)
                    if done % every == 0:
                        samples.append({"replies": done, **_holds(engine)})
                        last = samples[-1]
                        told(done / replies, f"{last['memory_mb']:.0f} MB, {last['threads']:g} threads")
    if not samples:
        raise KeyboardInterrupt  # before the first
    # Key/value caches of one round's work may exist at one sample and not at another.
    caches = 2 + (settings.predraft_budget * settings.pipeline_depth if settings.predrafts else 0)
    return {
        **header("soak", draft=robot, target=cloud),
        "mode": settings.mode,
        "replies": replies,
        "tokens": tokens,
        "seconds": round(time.monotonic() - began, 1),
        **_judged(samples, {"memory_mb": flags.max_growth_mb, "caches": caches}),
        "rows": samples,
    }


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Keep what exists now, modules above all, out of the search at every sample."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _judged(samples: Sequence[Sample], bounds: Mapping[str, float]) -> dict[str, Any]:
    """Growth from the first to the last quarter of the samples after the warm-up, within ``bounds`` (else 0)."""
    settled = samples[int(_WARM_UP * len(samples)) :]
    quarter = max(1, len(settled) // 4)
    growth: dict[str, dict[str, float]] = {}
    for name in (name for name in samples[0] if name != "replies"):
        typical = statistics.median if name == "memory_mb" else max
        first, last = (typical([s[name] for s in part]) for part in (settled[:quarter], settled[-quarter:]))
        growth[name] = {"growth": round(last - first, 2), "bound": bounds.get(name, 0)}
    steady = all(judged["growth"] <= judged["bound"] for judged in growth.values())
    return {"steady": steady, "growth": growth}


def _holds(engine: VerifierEngine) -> Sample:
    """What the process holds now, garbage apart."""
    time.sleep(_REST_S)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_mb": round(pages * resource.getpagesize() / 1e6, 2),
        "threads": threading.active_count(),
        "sessions": engine.sessions,
        "caches": sum(type(thing) is KeyValueCache for thing in gc.get_objects()),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
    }


def _notes(report: Report) -> list[str]:
    return [
        f"{name}: {'grew by' if judged['growth'] > judged['bound'] else 'steady:'} {judged['growth']:+g} "
        f"(bound {judged['bound']:g})"
        for name, judged in report["growth"].items()
    ]


BENCH = Bench(measure, lambda report: [(name, name, "g") for name in report["rows"][0]], _notes, holds="steady", left=0)


def command(flags: Flags = Flags()) -> int:
    """Memory, threads, open files and queues over many replies.

    Decodes many replies to small noise pictures over an emulated link, with short pauses and a new session now and
    then, and watches what the process holds. Exits with 1 if it grows beyond the bounds.
    """
    return BENCH.run(flags)
