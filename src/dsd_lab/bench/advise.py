# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench advise`: what `dsd advise` says of emulated machines, beside what is then measured on them.

Models, engine, sessions and messages are the product's own, over an emulated link; each pass is held to the profile's
times. Advice and measurements are of the same held-out pictures: on others drafts do better or worse.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from dsd_lab.bench.fleet import Served, run_robots
from dsd_lab.bench.harness import Bench, PairFlags, Report, Told
from dsd_lab.bench.pace import PacedModel, hold, paced
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.scenes import MAX_SCENES, Scene, decode, held_out_scenes
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.report import CODE, BenchError, Row, check_range, header
from dsd_ros.cli.advice import Advice, computed_gain, measure as advise, pays_from
from dsd_ros.cli.arguments import arguments, flag
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.channel import Channel, LocalChannel

WITHIN = 0.15  # of what is measured
_CODE = (*CODE, "dsd_ros/cli/advice.py", "dsd_lab/bench/advise.py", "dsd_lab/bench/pace.py")
_OTHERS = (0.5, 2.0)  # other targets, as parts of the profile's time


@arguments
class Flags(PairFlags):
    profiles: str = flag(
        "go2-a100,agx-72b-5g,agx-72b-wifi,orin-8b-wifi", "machines of config/profiles.yaml", metavar="NAME,..."
    )
    images: int = flag(6, "pictures")
    robots: int = flag(4, "robots that decode at the same time")
    shortest_ms: float = flag(
        15.0, "multiply a machine's times so that its faster model takes this for a token, which this machine keeps"
    )


def measure(flags: Flags, told: Told) -> Report:
    """For each machine rows of what was advised and measured: this target, others, several robots. ValueErrors."""
    check_range("images", flags.images, 1, MAX_SCENES)
    check_range("robots", flags.robots, 2, 64)
    check_range("shortest-ms", flags.shortest_ms, 1, 1000)
    profiles = [load_profile(name) for name in flags.profiles.split(",")]
    for profile in profiles:
        if not profile.paced:
            raise BenchError(f"profile {profile.name} gives no times of models; use one with draft_ms and target_ms")
    robot, cloud = (paced(load_model(settings)) for settings in flags.models)
    scenes = held_out_scenes(flags.images)
    rows: list[Row] = []
    with VerifierEngine(cloud) as engine:
        for place, profile in enumerate(profiles):
            times = profile.times
            assert times is not None
            scale = 1e-3 * flags.shortest_ms / min(times.draft_s, min(_OTHERS) * times.target_s)
            on = _Machine(engine, robot, cloud, profile.stretched(scale))
            for what, advised, measured in on.compare(scenes, flags.robots):
                error = advised / measured - 1.0
                rows.append({"profile": profile.name, "what": what, "advised": advised, "measured": measured})
                rows[-1] |= {"error": error, "time_scale": scale}
                told(place / len(profiles), f"{profile.name}, {what}: {advised:.2f} advised, {measured:.2f} measured")
    return {
        **header("advise", _CODE, draft=robot, target=cloud),
        "images": flags.images,
        "within": all(abs(row["error"]) <= WITHIN for row in rows),
        "rows": rows,
    }


class _Machine:
    """One profile's, held."""

    def __init__(self, engine: VerifierEngine, robot: PacedModel, cloud: PacedModel, profile: Profile) -> None:
        self._engine, self._robot, self._cloud, self._profile = engine, robot, cloud, profile
        self._channels = 0

    def compare(self, scenes: Sequence[Scene], robots: int) -> Iterator[tuple[str, float, float]]:
        """What, as advised, as measured: speed-ups over ar, and seconds of a reply for ``robots`` at once."""
        hold(self._robot, self._cloud, self._profile)
        questions = [(scene.image, scene.instruction) for scene in scenes]
        told: Advice = advise(self._connect, self._robot, DecodeSettings(), questions, len(questions), robots)
        pays = pays_from(told.machines, told.replies)
        yield "times as fast", told.gain, self._gain(scenes)
        for times in _OTHERS:
            other = told.machines.with_target(times * told.machines.target_s)
            hold(self._robot, self._cloud, _with_target(self._profile, times))
            yield f"with target x {times:g}", computed_gain(other, told.replies), self._gain(scenes)
        if pays is not None:
            hold(self._robot, self._cloud, _with_target(self._profile, pays / told.machines.target_s))
            yield (
                "with the first that pays",
                computed_gain(told.machines.with_target(pays), told.replies),
                self._gain(scenes),
            )
        hold(self._robot, self._cloud, self._profile)
        served = Served(lambda: LocalChannel(self._engine), lambda: None)
        replies, _ = run_robots(served, self._robot, DecodeSettings(), scenes, robots, self._profile)
        measured = statistics.fmean(reply.seconds for reply in replies)
        yield f"s a reply, {robots} robots", told.beside(robots)[1], measured

    def _gain(self, scenes: Sequence[Scene]) -> float:
        ratios = []
        for scene in scenes:
            alone, stream = (
                decode(self._connect(), self._robot, DecodeSettings(mode=mode), scene).seconds
                for mode in ("ar", "stream")
            )
            ratios.append(alone / stream)
        return statistics.geometric_mean(ratios)

    def _connect(self) -> Channel:
        self._channels += 1
        return EmulatedChannel(LocalChannel(self._engine), self._profile.link, seed=self._channels)


def _with_target(profile: Profile, factor: float) -> Profile:
    """The same machines with a target that takes ``factor`` times as long for everything."""
    held: Any = profile.times
    prefill = None if held.target_prefill_s is None else factor * held.target_prefill_s
    times = dataclasses.replace(held, target_s=factor * held.target_s, target_prefill_s=prefill)
    return dataclasses.replace(profile, times=times)


def _notes(report: Report) -> list[str]:
    how = "all" if report["within"] else "NOT ALL"
    return [f"{how} within {WITHIN:.0%}, {report['images']} pictures"]


BENCH = Bench(
    measure,
    lambda report: (
        ("profile", "profile", ""), ("what", "what", ""), ("advised", "advised", ".2f"),
        ("measured", "measured", ".2f"), ("error", "error", "+.0%"),
    ),
    _notes, holds="within", left=2,
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """What dsd advise says of emulated machines, and what is then measured on them.

    For each profile: the speed-up of mode stream over ar for its target, for others and for the first that pays, and
    seconds of a reply with several robots. Exits with 1 if one is more than 15 % off.
    """
    return BENCH.run(flags)
