# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes`: decoding modes side by side on the same pictures, over an emulated link.

Models, engine, sessions and messages are the product's own. Where a profile gives the times of other machines, each
forward pass is held to them; the whole clock can run faster or slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dsd_lab.bench.harness import Bench, Decoding, HeldFlags, Report, Told, given
from dsd_lab.bench.modes_report import COLUMNS, Measured, make_report, notes, panels, title
from dsd_lab.bench.pace import hold, paced
from dsd_lab.bench.profiles import ASSUMPTIONS, Profile, load_profile
from dsd_lab.bench.queues import queues_of
from dsd_lab.bench.real import REAL, measure_real
from dsd_lab.bench.scenes import (
    MAX_SCENES,
    TEXT_MODEL,
    WARM_UP_TOKENS,
    decode,
    held_out_scenes,
    read_prompts,
    said,
    text_models,
    text_scenes,
)
from dsd_lab.bench.sweeps import Variant, crossed, parse_modes, parse_sweep
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.parts import parts
from dsd_lab.report import BenchError, check_range
from dsd_ros.cli.arguments import arguments, file_option, flag, part
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

_CASES = ((), *((name,) for name in ASSUMPTIONS), ASSUMPTIONS)  # left out
TRANSPORTS = ("local", "websocket", "process", "one-process")


@arguments
class Flags(HeldFlags):
    modes: str = flag(
        "ar,dsd,fsd",
        "separated by commas or spaces; a mode may have settings of its own: "
        "fsd:predraft_source=exits+predraft_workers=10",
    )
    sweep: list[str] = flag(
        [], "gamma=1..10 or predraft_workers=1,3,6; if given several times, the sweeps are crossed",
        metavar="SETTING=VALUES",
    )  # fmt: skip
    images: int = flag(8, "pictures, or instructions for a text model")
    model: str = flag("", TEXT_MODEL, metavar="DIR")
    prompts: Path | None = flag(None, "instructions for a text model, one a line (default: eight of the bench's own)")
    transport: str = flag(
        "local",
        "what carries the emulated link; process: the verifier is a process, robot and verifier have a core each, and "
        "transformers' own generate is timed as well; one-process: so is it, with both sides in one process, as in "
        "dsd decode without a verifier",
        choices=TRANSPORTS,
    )
    without: str = flag(
        "", "leave these of the profile's times out: prefill, exits, batch, threads; each: one after another, and all",
        metavar="ASSUMPTION,...",
    )  # fmt: skip
    decoding: Decoding = part(Decoding)
    plot: Path | None = file_option("draw speed-up and miss rate (.png, .svg, .pdf)")


def measure(flags: Flags, told: Told) -> Report:
    """``measure_modes`` of the command's flags; with ``--without each`` a row for each case and mode. ValueErrors."""
    profile, common = load_profile(flags.profile), given(flags.decoding)
    sweeps = [parse_sweep(text) for text in flags.sweep]
    variants = crossed(parse_modes(flags.modes, common, profile.gamma), sweeps)
    draft, target = flags.models
    if flags.model:
        if flags.target:
            raise BenchError("--model and --target both name the target; leave one out")
        draft, target = text_models(flags.draft, "" if flags.model == "text" else flags.model)
    each = flags.without == "each"
    cases = _CASES if each else (tuple(filter(None, flags.without.split(","))),)
    reports: list[Report] = []
    for case in parts(cases):
        try:
            reports.append(measure_modes(
                profile.without(*case), variants, flags.images, draft, target, transport=flags.transport,
                prompts=read_prompts(flags.prompts) if flags.prompts else (), time_scale=flags.time_scale,
                seed=common.get("seed", 0), sweeps=sweeps,
                told=lambda done, text, before=len(reports): told((before + done) / len(cases), text),
            ))  # fmt: skip
        except KeyboardInterrupt:  # before its first picture
            if not reports:
                raise
    if not each:
        return reports[0]
    rows = [
        {"without": list(case), "limit": report["limit"]} | row
        for case, report in zip(cases, reports, strict=False)  # those that are done
        for row in report["rows"]
    ]
    differences = [sentence for report in reports for sentence in report["differences"]]
    return reports[0] | {"rows": rows, "exact": not differences, "differences": differences}


def measure_modes(
    profile: Profile,
    variants: Sequence[Variant],
    images: int,
    draft: ModelSettings,
    target: ModelSettings,
    *,
    prompts: Sequence[str] = (),
    transport: str = "local",
    time_scale: float = 1.0,
    seed: int = 0,
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
    told: Told = lambda done, text: None,
) -> Report:
    """Decode ``images`` held-out pictures with every variant in turn; the report of ``modes_report``.

    A text model gets instructions instead: the first ones of ``prompts``, or of ``scenes.INSTRUCTIONS``.
    Every time of the profile is multiplied by ``time_scale`` while measuring, and reported times are divided by it.
    ValueErrors, ModelError, LinkError.
    """
    check_range("images", images, 1, MAX_SCENES)
    check_pace(profile, transport, time_scale)
    if transport in REAL:
        return measure_real(
            profile, variants, images, draft, target, prompts, transport=transport, seed=seed, sweeps=sweeps, told=told
        )  # fmt: skip
    robot, cloud = (paced(load_model(settings)) for settings in (draft, target))
    scenes = held_out_scenes(images) if cloud.reads_pictures else text_scenes(images, prompts)
    stretched = profile.stretched(time_scale)
    measured = [Measured(variant, []) for variant in variants]
    with verifier_of(cloud, transport) as connect:
        for variant in variants:  # at full speed: what happens once in a process must not be measured
            decode(connect(), robot, dataclasses.replace(variant.decode, max_tokens=WARM_UP_TOKENS), scenes[0])
        hold(robot, cloud, stretched)
        done = 0
        for number, scene in enumerate(parts(scenes)):
            # Each picture begins with another variant, so that the first is not always the same.
            for index in ((number + offset) % len(variants) for offset in range(len(variants))):
                settings = dataclasses.replace(variants[index].decode, seed=seed + number)
                with queues_of(dict(variants[index].own)):
                    channel = EmulatedChannel(connect(), stretched.link, seed=seed + number)
                    reply = decode(channel, robot, settings, scene)
                measured[index].replies.append(reply)
                done += 1
                told(done / (images * len(variants)), said(variants[index].label, reply))
    setting = {"images": len(measured[0].replies), "seed": seed, "transport": transport, "time_scale": time_scale}
    return make_report(measured, profile, {"draft": robot, "target": cloud}, setting, sweeps)


def check_pace(profile: Profile, transport: str, time_scale: float) -> None:
    """BenchError for what a profile at this machine's speed, or at given times, cannot do."""
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


BENCH = Bench(measure, lambda report: COLUMNS, notes, panels, title, holds="exact", left=2)


def command(flags: Flags = Flags()) -> int:
    """Decoding modes side by side over an emulated link.

    Decodes the same held-out pictures with every mode in turn over a link of the profile's delay, jitter and
    bandwidth; prints seconds per reply, the speed-up over mode ar, and what the paper's formulas predict. Exits with 1
    if a mode's tokens are not the target's.
    """
    return BENCH.run(flags)
