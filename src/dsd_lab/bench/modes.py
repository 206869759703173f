# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes`: decoding modes side by side on the same pictures, over an emulated link.

Models, engine, sessions and messages are the product's own. Where a profile gives the times of other machines, each
forward pass is held to them; the whole clock can run faster or slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dsd_lab.bench.modes_report import Measured, make_report
from dsd_lab.bench.pace import hold, paced
from dsd_lab.bench.profiles import ASSUMPTIONS, Profile
from dsd_lab.bench.queues import queues_of
from dsd_lab.bench.real import REAL, measure_real
from dsd_lab.bench.scenes import MAX_SCENES, WARM_UP_TOKENS, Told, decode, held_out_scenes, said, text_scenes
from dsd_lab.bench.sweeps import Variant
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.report import BenchError, cell, check_range, table
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

TRANSPORTS = ("local", "websocket", "process", "one-process")


def measure_modes(
    profile: Profile,
    variants: Sequence[Variant],
    images: int,
    draft: str | ModelSettings,
    target: str | ModelSettings,
    *,
    prompts: Sequence[str] = (),
    transport: str = "local",
    time_scale: float = 1.0,
    seed: int = 0,
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
    progress: Told | None = None,
) -> dict[str, Any]:
    """Decode ``images`` held-out pictures with every variant in turn; the report of ``modes_report``.

    A text model gets instructions instead: the first ones of ``prompts``, or of ``scenes.INSTRUCTIONS``.
    Every time of the profile is multiplied by ``time_scale`` while measuring, and reported times are divided by it.
    progress(share done, what) after each reply. ValueErrors, ModelError, LinkError.
    """
    _check(profile, variants, images, transport, time_scale)
    # One thread each: the models share this machine, and their threads would wait for each other.
    settled = [ModelSettings(given, threads=1) if isinstance(given, str) else given for given in (draft, target)]
    if transport in REAL:
        return measure_real(
            profile, variants, images, *settled, prompts, transport=transport, seed=seed, sweeps=sweeps,
            progress=progress,
        )  # fmt: skip
    robot, cloud = (paced(load_model(settings)) for settings in settled)
    scenes = held_out_scenes(images) if cloud.reads_pictures else text_scenes(images, prompts)
    stretched = profile.stretched(time_scale)
    measured = [Measured(variant, []) for variant in variants]
    with verifier_of(cloud, transport) as connect:
        for variant in variants:  # at full speed: what happens once in a process must not be measured
            decode(connect(), robot, dataclasses.replace(variant.decode, max_tokens=WARM_UP_TOKENS), scenes[0])
        hold(robot, cloud, stretched)
        done = 0
        for number, scene in enumerate(scenes):
            # Each picture begins with another variant, so that the first is not always the same.
            for index in ((number + offset) % len(variants) for offset in range(len(variants))):
                settings = dataclasses.replace(variants[index].decode, seed=seed + number)
                with queues_of(dict(variants[index].own)):
                    channel = EmulatedChannel(connect(), stretched.link, seed=seed + number)
                    reply = decode(channel, robot, settings, scene)
                measured[index].replies.append(reply)
                done += 1
                if progress is not None:
                    progress(done / (images * len(variants)), said(variants[index].label, reply))
    setting = {"images": images, "seed": seed, "transport": transport, "time_scale": time_scale}
    return make_report(measured, profile, {"draft": robot, "target": cloud}, setting, sweeps)


def measure_assumptions(
    profile: Profile,
    variants: Sequence[Variant],
    images: int,
    draft: str,
    target: str,
    *,
    time_scale: float = 1.0,
    progress: Told | None = None,
) -> dict[str, Any]:
    """``measure_modes`` with all that the profile assumes beyond T_p and T_q, without each in turn, and without any.

    A row for each of these and each variant: what it takes, over ar of the same assumptions.
    """
    cases = ((), *((name,) for name in ASSUMPTIONS), ASSUMPTIONS)
    rows, found = [], {}
    for number, case in enumerate(cases):

        def told(done: float, text: str, before: int = number) -> None:
            if progress is not None:
                progress((before + done) / len(cases), text)

        found = measure_modes(
            profile.without(*case), variants, images, draft, target, time_scale=time_scale, progress=told
        )
        if not found["exact"]:
            raise BenchError(f"without {', '.join(case) or 'nothing'}, {found['differences'][0]}; report it")
        keys = ("label", "seconds_per_reply", "speedup", "speedup_interval", "tau", "miss_rate")
        rows += [{"without": list(case), "limit": found["limit"]} | {k: row[k] for k in keys} for row in found["rows"]]
    kept = {key: found[key] for key in list(found)[: list(found).index("temperature")]}
    return kept | {"bench": "assumptions", "times": dataclasses.asdict(profile)["times"], "rows": rows}


def render_assumptions(report: dict[str, Any]) -> str:
    """The report of ``measure_assumptions`` as a table."""
    rows = [["without", "mode", "s/reply", "speed-up", "limit", "miss"]]
    for row in report["rows"]:
        limit = None if row["limit"] is None else row["limit"]["speedup"]
        figures = cell(row["seconds_per_reply"], ".2f"), cell(row["speedup"], ".2f"), cell(limit, ".2f")
        rows.append([", ".join(row["without"]) or "-", row["label"], *figures, cell(row["miss_rate"], ".1%")])
    return "\n".join([*table(rows, left=2), f"profile {report['profile']}, {report['machine']}"])


def _check(profile: Profile, variants: Sequence[Variant], images: int, transport: str, time_scale: float) -> None:
    check_range("images", images, 1, MAX_SCENES)
    check_range("time-scale", time_scale, 0.01, 100)
    if time_scale != 1.0 and not profile.paced:
        raise BenchError(
            f"profile {profile.name} runs the models at this machine's speed, which no time-scale changes; leave "
            "--time-scale out, or use a profile with draft_ms and target_ms"
        )
    if transport in REAL and profile.paced:
        raise BenchError(
            f"profile {profile.name} holds the models to given times, which --transport {transport} cannot; "
            "use --transport local, or a profile at this machine's speed"
        )
    if transport not in TRANSPORTS:
        raise BenchError(f"unknown transport {transport!r}; choose from {', '.join(TRANSPORTS)}")
    if not variants:
        raise BenchError("no mode is named; use for example ar,dsd,fsd")


@contextmanager
def verifier_of(model: VisionLanguageModel, transport: str) -> Iterator[Callable[[], Channel]]:
    """A verifier of ``model`` in this process; yields a function that opens channels to it."""
    with ExitStack() as stack:
        engine = stack.enter_context(VerifierEngine(model))
        if transport == "local":
            yield lambda: LocalChannel(engine)
        else:
            server = stack.enter_context(VerifierServer(engine, VerifierSettings(port=0)))
            yield lambda: WebsocketChannel(server.url)
