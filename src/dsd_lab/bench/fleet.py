# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench fleet`: how many robots one verifier serves, and what each of them gets.

Every robot has a thread, a session and an emulated link of its own; all share one verifier: an engine of this process,
or one at an address. Where the profile gives the times of other machines, forward passes are held to them, and a pass
of this process's target over several sequences lasts as FSD Table 9 has it. A prompt counts as one more sequence of its
pass, and takes a whole pass where nothing else waits: the papers give no other time for one. On request the same is
measured again beside one more robot, which takes all of the verifier that it can get.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsd_lab.bench.harness import Bench, Decoding, HeldFlags, Report, Told, curve, given
from dsd_lab.bench.pace import PacedModel, hold, paced
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.scenes import MAX_SCENES, PATIENT_LINK, WARM_UP_TOKENS, Scene, held_out_scenes
from dsd_lab.bench.sweeps import one_mode
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.parts import parts
from dsd_lab.plotting import Panel
from dsd_lab.report import CODE, BenchError, check_range, header, table
from dsd_ros.cli.arguments import arguments, file_option, flag, part
from dsd_ros.cli.shared import VerifierFlags
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.rounds import OnEarly, RoundRefused, Work
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LinkTimeout, LocalChannel
from dsd_ros.wire.messages import (
    MAX_REPLY,
    PROTOCOL_VERSION,
    Observation,
    Outcome,
    SessionReply,
    SessionRequest,
    VerifiedTokens,
)
from dsd_ros.wire.pictures import encode_picture

if TYPE_CHECKING:
    from typing_extensions import Self

_CODE = (*CODE, "dsd_lab/bench/fleet.py", "dsd_lab/bench/pace.py")
MAX_ROBOTS = 64
GREEDY = {"pictures": "pictures of 16 megapixels", "tokens": "replies without end"}
_LARGE, _SMALL = (2048, 8192), (112, 168)  # a greedy robot's pictures: as large as any may be, or like the others'
_PASSES = re.compile(r"^dsd_verifier_pass_rounds_(sum|count)(?:{[^}]*})? (\S+)", re.MULTILINE)


class GreedyRobot:
    """Takes all of a verifier that it can get, of what ``kind`` in GREEDY says, until the block ends."""

    def __init__(self, channel: Channel, model: VisionLanguageModel, kind: str) -> None:
        self._channel, self._kind = channel, kind
        self._shape = _LARGE if kind == "pictures" else _SMALL
        self._png = encode_picture(np.full((*self._shape, 3), 90, np.uint8))
        self._request = SessionRequest(
            1, PROTOCOL_VERSION, "ar", model.tokenizer_fingerprint, model.vocab_size, 0.0, 0, 1.0, 0,
            MAX_REPLY if kind == "tokens" else 1,
        )  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.replies = 0

    def __enter__(self) -> Self:
        self._channel.reconnect()
        self._channel.send(self._request)
        opened = self._channel.receive(30.0)
        if not isinstance(opened, SessionReply) or opened.error:
            raise BenchError(f"the verifier takes no greedy robot, which has no token: {opened}")
        self._session = opened.session
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._channel.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.replies += 1
            height, width = self._shape
            self._channel.send(Observation(self._session, self.replies, "find it", height, width, "png", self._png))
            while not self._stop.is_set():
                with suppress(LinkTimeout):
                    answer = self._channel.receive(0.1)
                    if not isinstance(answer, VerifiedTokens) or answer.ended:
                        break


class CountingTarget(LocalTarget):
    """Remembers how many rounds and prompts were in each pass."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self.batches: list[int] = []

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        self.batches.append(len(work))
        yield from super().verify(work, on_early)


@dataclasses.dataclass(frozen=True)
class Served:
    """A verifier that is up: how robots reach it, and the sum and number of its passes' rounds so far."""

    dial: Callable[[], Channel]
    passes: Callable[[], tuple[float, float] | None]
    largest: Callable[[], int | None] = lambda: None


@contextmanager
def own_engine(target: PacedModel, max_batch: int) -> Iterator[Served]:
    """An engine of this process."""
    counting = CountingTarget(target)
    with VerifierEngine(counting, EngineSettings(max_batch=max_batch)) as engine:
        batches = counting.batches
        yield Served(lambda: LocalChannel(engine), lambda: (sum(batches), len(batches)), lambda: max(batches))


@contextmanager
def at_address(dial: Callable[[], Channel], metrics: str) -> Iterator[Served]:
    """A verifier that is up already, with the address of its metrics page, if any."""
    yield Served(dial, lambda: passes_at(metrics))


def passes_at(metrics: str) -> tuple[float, float] | None:
    """The sum and number of the passes' rounds that a verifier's metrics page has; None without a page. BenchError."""
    if not metrics:
        return None
    try:
        with urllib.request.urlopen(metrics, timeout=10) as page:  # noqa: S310  # the address is the caller's
            found = dict(_PASSES.findall(page.read().decode()))
        return float(found["sum"]), float(found["count"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(
            f"{metrics} has no metrics of a verifier ({error!r}); give http://HOST:PORT/metrics of dsd verifier "
            "--metrics-port PORT"
        ) from error


@arguments
class Flags(HeldFlags):
    mode: str = flag("stream", "decoding mode, with settings if need be, as in bench modes")
    robots: str = flag("1,2,4,8", "how many robots at once", metavar="N,...")
    batches: str = flag("1,32", "robots in a pass at most; 1: they take turns", metavar="N,...")
    replies: int = flag(3, "pictures that each robot decodes")
    decoding: Decoding = part(Decoding)
    link: VerifierFlags = part(VerifierFlags)
    metrics: str = flag("", "metrics page of a verifier at an address, for the size of its batches", metavar="URL")
    greedy_robot: str = flag(
        "", "measure again beside one more robot that takes all it can get: pictures, tokens", metavar="KIND,..."
    )
    plot: Path | None = file_option("draw tokens a second and seconds a reply (.png, .svg, .pdf)")


def measure(flags: Flags, told: Told) -> Report:
    """Let each number of robots decode their pictures, with each limit of a pass; a row per combination.

    Each robot's replies must be those that it gets alone, unless sampled without shared noise. ValueErrors, ModelError,
    LinkError.
    """
    profile, replies, time_scale = load_profile(flags.profile), flags.replies, flags.time_scale
    settings = one_mode(flags.mode, given(flags.decoding), profile.gamma).decode
    robots, batches = _numbers("robots", flags.robots), _numbers("batches", flags.batches)
    greedy = [kind for kind in flags.greedy_robot.split(",") if kind]
    own = not flags.link.verifier
    _check(robots, flags, greedy)
    scenes = held_out_scenes(replies)
    robot = paced(load_model(flags.models[0]))
    cloud = paced(load_model(flags.models[1])) if own else None
    stretched = profile.stretched(time_scale)
    rows: list[dict[str, Any]] = []
    exact = True
    wanted: dict[tuple[int, int], list[int]] = {}
    limits = batches if cloud is not None else [0]
    for limit, count in parts(itertools.product(limits, robots)):
        up = own_engine(cloud, limit) if cloud is not None else at_address(flags.link.channel, flags.metrics)
        with up as served:
            fingerprint = _warm_up(served, robot, cloud, settings, scenes[0])
            hold(robot, cloud, stretched)
            before = served.passes()
            found, seconds = run_robots(served, robot, settings, scenes, count, stretched)
            row = _row(served, before, found, seconds / time_scale, time_scale)
            for kind in greedy:
                again = _run_beside(kind, served, robot, settings, scenes, count, stretched)
                exact &= [reply.tokens for reply in again] == [reply.tokens for reply in found]
                row["beside"][kind] = _times(again, time_scale)
        for place, reply in enumerate(found):
            exact &= wanted.setdefault((place % count, place // count), reply.tokens) == reply.tokens
        rows.append({"robots": count, "max_batch": limit or None} | row)
        done = len(rows) / (len(robots) * len(limits))
        told(done, f"{count} robots, batches of {limit or 'its own'}: {row['tokens_per_second']:.1f} tokens/s")
    _compare(rows)
    return {
        **header("fleet", _CODE, draft=robot, target=cloud or fingerprint),
        "profile": dataclasses.asdict(profile),
        "decode": dataclasses.asdict(settings),
        "replies": replies,
        "time_scale": time_scale,
        "exact": None if settings.draws else exact,
        "rows": rows,
    }


def _check(robots: Sequence[int], flags: Flags, greedy: Sequence[str]) -> None:
    for kind in greedy:
        if kind not in GREEDY:
            raise BenchError(f"no greedy robot is called {kind!r}; use {' or '.join(GREEDY)}")
    for count in robots:
        check_range("robots", count, 1, MAX_ROBOTS)
    check_range("replies", flags.replies, 1, MAX_SCENES)
    check_range("time-scale", flags.time_scale, 0.01, 100)
    if flags.link.verifier and flags.time_scale != 1:
        raise BenchError(
            f"time-scale is {flags.time_scale:g}, and a verifier at an address keeps its own times; leave it at 1"
        )
    if flags.metrics and not flags.link.verifier:
        raise BenchError("--metrics is the page of a verifier at an address; give --verifier too, or leave it out")


def _numbers(name: str, text: str) -> list[int]:
    """``--name``'s list of whole numbers; BenchError."""
    for word in text.split(","):
        if not word.strip().isdigit() or int(word) < 1:
            raise BenchError(f"--{name} has {word!r}; use whole numbers of 1 or more, separated by commas")
    return [int(word) for word in text.split(",")]


def _warm_up(
    served: Served, robot: PacedModel, cloud: PacedModel | None, settings: DecodeSettings, scene: Scene
) -> str:
    """Do what happens once, unmeasured; the target's fingerprint."""
    robot.pace = None
    if cloud is not None:
        cloud.pace = None
    short = dataclasses.replace(settings, max_tokens=min(settings.max_tokens, WARM_UP_TOKENS))
    with closing(served.dial()) as channel, EdgeSession(channel, robot, short, PATIENT_LINK) as session:
        session.decode(scene.image, scene.instruction)
        assert session.verifier is not None
        return session.verifier.target_fingerprint


def run_robots(
    served: Served, model: PacedModel, settings: DecodeSettings, scenes: Sequence[Scene], count: int, profile: Profile
) -> tuple[list[DecodedReply], float]:
    """All robots' replies, scene by scene, and the seconds until the last one."""
    together = threading.Barrier(count + 1)

    def drive(number: int) -> list[DecodedReply]:
        chosen = dataclasses.replace(settings, seed=settings.seed + number)
        mine = paced(model, model.pace)  # robots share no processor
        try:
            channel = EmulatedChannel(served.dial(), profile.link, seed=number)
            with closing(channel), EdgeSession(channel, mine, chosen, PATIENT_LINK) as session:
                session.open()
                together.wait(60)
                return [session.decode(scene.image, scene.instruction) for scene in scenes]
        except BaseException:
            together.abort()  # the others need not wait for this one
            raise

    with ThreadPoolExecutor(count) as pool:
        work = [pool.submit(drive, number) for number in range(count)]
        with suppress(threading.BrokenBarrierError):
            together.wait(60)
        began = time.monotonic()
        failed = [future.exception() for future in work]
        seconds = time.monotonic() - began
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [reply for scene in zip(*(future.result() for future in work), strict=True) for reply in scene], seconds


def _run_beside(kind: str, served: Served, model: PacedModel, *run: Any) -> list[DecodedReply]:
    """The same beside a greedy robot."""
    with GreedyRobot(served.dial(), model, kind):
        return run_robots(served, model, *run)[0]


def _row(
    served: Served, before: tuple[float, float] | None, replies: Sequence[DecodedReply], seconds: float, scale: float
) -> dict[str, Any]:
    after, mean = served.passes(), None
    if after is not None and before is not None:
        mean = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    passes = [record.verify_seconds / scale for reply in replies for record in reply.records[1:]]
    return {
        "tokens_per_second": sum(len(reply.tokens) for reply in replies) / seconds,
        **_times(replies, scale),
        "tau": statistics.fmean(reply.tau for reply in replies),
        "miss_rate": statistics.fmean(reply.miss_rate for reply in replies),
        "pass_seconds": statistics.median(passes) if passes else 0.0,
        "mean_batch": mean,
        "largest_batch": served.largest(),
        "beside": {},
    }


def _times(replies: Sequence[DecodedReply], scale: float) -> dict[str, float]:
    """Seconds of replies, and of the robots' waits for a round's outcome, from the second round on."""
    times = sorted(reply.seconds / scale for reply in replies)
    waits = [record.wait_seconds / scale for reply in replies for record in reply.records[1:]]
    return {
        "reply_seconds_median": statistics.median(times),
        "reply_seconds_p95": times[min(len(times) - 1, int(0.95 * len(times)))],
        "round_seconds_median": statistics.median(waits) if waits else 0.0,
    }


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row beside one robot."""
    alone = {row["max_batch"]: row["tokens_per_second"] for row in rows if row["robots"] == 1}
    for row in rows:
        count, limit = row["robots"], row["max_batch"]
        row["share_of_n_alone"] = row["tokens_per_second"] / (count * alone[limit]) if limit in alone else None


def _beside(report: Report) -> list[str]:
    """A table of what a greedy robot costs the others."""
    lines = [["robots", "max batch", "beside one more with", "s/round", "x without", "s/reply", "x without", "p95"]]
    for row in report["rows"]:
        for kind, found in row["beside"].items():
            cells = [str(row["robots"]), str(row["max_batch"] or "-"), GREEDY[kind]]
            for name in ("round_seconds_median", "reply_seconds_median"):
                cells += [f"{found[name]:.3f}", f"{found[name] / row[name]:.2f}" if row[name] else "-"]
            lines.append([*cells, f"{found['reply_seconds_p95']:.2f}"])
    return table(lines, left=0) if len(lines) > 1 else []


def _panels(report: Report) -> list[Panel]:
    """Tokens a second in all, and seconds a reply, over the number of robots."""
    limits = {row["max_batch"]: f"at most {row['max_batch']} in a pass" for row in report["rows"]}
    figures = {"tokens_per_second": "tokens a second in all", "reply_seconds_median": "seconds a reply, median"}
    return [
        Panel("robots", title, [
            curve(label, [row for row in report["rows"] if row["max_batch"] == limit], "robots", key)
            for limit, label in limits.items()
        ])
        for key, title in figures.items()
    ]  # fmt: skip


def _title(report: Report) -> str:
    held = " (held times)" if report["profile"]["times"] is not None else ""
    return f"{report['decode']['mode']} at profile {report['profile']['name']}{held}"


_EXACT = {True: "every reply is the one that the robot gets alone", False: "REPLIES DIFFER", None: ""}
BENCH = Bench(
    measure,
    lambda report: (
        ("robots", "robots", "d"), ("max batch", "max_batch", "d"), ("tokens/s", "tokens_per_second", ".1f"),
        ("of n x one", "share_of_n_alone", ".0%"), ("s/reply", "reply_seconds_median", ".2f"),
        ("p95", "reply_seconds_p95", ".2f"), ("tau", "tau", ".2f"), ("miss", "miss_rate", ".0%"),
        ("batch", "mean_batch", ".1f"), ("largest", "largest_batch", "d"),
    ),
    lambda report: [*_beside(report), _EXACT[report["exact"]], _title(report)],
    _panels, _title, holds="exact", left=0,
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """Several robots on one verifier.

    Each robot decodes held-out pictures over a link of its own; prints tokens a second in all, seconds a reply and the
    size of batches, for each number of robots and each limit of a pass. Exits with 1 if a reply is not the one that the
    robot gets alone.
    """
    return BENCH.run(flags)
