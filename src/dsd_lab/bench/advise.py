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

import numpy as np

from dsd_lab.bench.fleet import Served, run_robots
from dsd_lab.bench.harness import Bench, Decoding, PairFlags, Report, Told, given
from dsd_lab.bench.pace import PacedModel, hold, paced
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.scenes import MAX_SCENES, Scene, decode, held_out_scenes
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.report import CODE, BenchError, Row, check_range, header
from dsd_ros.cli.advice import WORTH, measure as advise
from dsd_ros.cli.arguments import arguments, flag, part
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.channel import Channel, LocalChannel

WITHIN = 0.15  # of what is measured
_CODE = (*CODE, "dsd_ros/cli/advice.py", "dsd_lab/bench/advise.py", "dsd_lab/bench/pace.py")
_AROUND = (0.87, 0.95, 1.05, 1.15)  # targets beside the advised one among which the first that pays is looked for


@arguments
class Flags(PairFlags):
    profiles: str = flag(
        "go2-a100,agx-72b-5g,agx-72b-wifi,orin-8b-wifi", "machines of config/profiles.yaml", metavar="NAME,..."
    )
    images: int = flag(4, "pictures")
    robots: int = flag(4, "robots that decode at the same time")
    shortest_ms: float = flag(
        15.0, "multiply a machine's times so that its faster model takes this for a token, which this machine keeps"
    )
    decoding: Decoding = part(Decoding)


def measure(flags: Flags, told: Told) -> Report:
    """For each machine rows of what was advised and measured. ValueErrors."""
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
            scale = 1e-3 * flags.shortest_ms / min(times.draft_s, times.target_s)
            on = _Machine(engine, robot, cloud, profile, scale, DecodeSettings(**given(flags.decoding)))
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

    def __init__(
        self,
        engine: VerifierEngine,
        robot: PacedModel,
        cloud: PacedModel,
        profile: Profile,
        scale: float,
        settings: DecodeSettings,
    ) -> None:
        self._engine, self._robot, self._cloud, self._settings = engine, robot, cloud, settings
        self._profile, self._scale = profile.stretched(scale), scale
        self._channels = 0

    def compare(self, scenes: Sequence[Scene], robots: int) -> Iterator[tuple[str, float, float]]:
        """What, as advised, as measured: speed-ups over ar, the first target that pays, seconds for ``robots``."""
        hold(self._robot, self._cloud, self._profile)
        questions = [(scene.image, scene.instruction) for scene in scenes]
        told = advise(self._connect, self._robot, self._settings, questions, len(questions), robots)
        yield "times as fast", told.gain, self._gain(scenes)
        served = Served(lambda: LocalChannel(self._engine), lambda: None)
        alone = dataclasses.replace(self._settings, mode="ar")
        replies, _ = run_robots(served, self._robot, alone, scenes, robots, self._profile)
        measured = statistics.fmean(reply.seconds for reply in replies)
        yield f"s a reply, {robots} robots alone", told.at_once[robots] / self._scale, measured / self._scale
        if (pays := told.pays_from_s) is not None:
            held = self._profile.target_s or 0.0
            beyond = told.machines.target_s - held  # what a token takes outside the model
            targets = [pays * around for around in _AROUND]
            gains = [self._gain(scenes, (target - beyond) / held) for target in targets]
            slope, base = np.polyfit(np.log(targets), gains, 1)
            first = float(np.exp((WORTH - base) / slope))
            yield "pays from, ms a target token", 1e3 * pays / self._scale, 1e3 * first / self._scale

    def _gain(self, scenes: Sequence[Scene], times: float = 1.0) -> float:
        """As measured with a target that takes so many times as long."""
        hold(self._robot, self._cloud, _with_target(self._profile, times))
        ratios = []
        for scene in scenes:
            alone, stream = (
                decode(self._connect(), self._robot, dataclasses.replace(self._settings, mode=mode), scene).seconds
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

    For each profile: the speed-up of mode stream over ar, seconds of a reply with several robots, and the first target
    that pays. Exits with 1 if one is more than 15 % off.
    """
    return BENCH.run(flags)
