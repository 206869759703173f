# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench pictures`: what a camera's picture costs on its way, as each encoding and size of the link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from contextlib import closing

import numpy as np

from dsd_lab.bench.harness import Bench, PairFlags, Report, Told
from dsd_lab.bench.profiles import load_profile
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.parts import parts
from dsd_lab.report import BenchError, check_range, header
from dsd_lab.train.data import TEST_SEEDS
from dsd_ros.cli.arguments import arguments, flag
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.limits import ENCODINGS, MAX_SIDE
from dsd_ros.robot.sim.offscreen import Offscreen, import_mujoco
from dsd_ros.robot.sim.scene import build_mjcf
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode


@arguments
class Flags(PairFlags):
    profile: str = flag("lte", "whose link the pictures cross")
    images: int = flag(8, "camera pictures, each of another world")
    width: int = flag(1280, "of a picture, pixels")
    height: int = flag(720, "of a picture, pixels")


def measure(flags: Flags, told: Told) -> Report:
    """Decode camera pictures, sent in each way over the link of the profile; BenchError for values out of range.

    The models run at this machine's speed, in one process. A picture's age counts from when the session has it: at the
    first verified token, and at the reply's end.
    """
    images, sides, profile = flags.images, (flags.width, flags.height), load_profile(flags.profile)
    check_range("images", images, 1, len(TEST_SEEDS))
    if not all(64 <= side <= MAX_SIDE for side in sides):
        raise BenchError(f"sides {sides[0]}x{sides[1]} cannot be rendered; use 64 to {MAX_SIDE} pixels")
    models = dict(zip(("draft", "target"), map(load_model, flags.models), strict=True))
    settings = DecodeSettings(mode="dsd")
    ways = [(encoding, size) for size in (max(sides), 0) for encoding in ENCODINGS]
    samples: dict[tuple[str, int], list[dict[str, float]]] = {way: [] for way in ways}
    with closing(_scenes(images, sides)) as scenes, VerifierEngine(models["target"]) as engine:
        for number, (picture, instruction) in enumerate(parts(scenes)):
            for encoding, size in ways:  # in turn, so that a busy moment meets them all
                link = LinkSettings(600.0, 1, image_size=size, image_encoding=encoding)
                channel = EmulatedChannel(LocalChannel(engine), profile.link, seed=number)
                with channel, EdgeSession(channel, models["draft"], settings, link) as session:
                    samples[encoding, size].append(_sample(session, link, picture, instruction))
                told((number + 1) / images, f"{encoding} {size or 'as the target reads it'}")
    rows = [
        {"encoding": encoding, "size": size, "sent": str(size or "as the target reads it")}
        | {name: statistics.median(sample[name] for sample in found) for name in found[0]}
        for (encoding, size), found in samples.items()
    ]
    about = {"link": profile.name, "images": number + 1, "width": sides[0], "height": sides[1]}
    return {**header("pictures", **models), **about, "rows": rows}


def _scenes(count: int, sides: tuple[int, int]) -> Generator[tuple[np.ndarray, str], None, None]:
    worlds = [World.from_seed(seed) for seed in TEST_SEEDS[:count]]
    offscreen = Offscreen(import_mujoco().MjModel.from_xml_string(build_mjcf(worlds[0])), *sides)
    try:
        for world in worlds:
            with Simulator(world, *sides, offscreen=offscreen) as simulator:
                yield simulator.render(), world.instruction
    finally:
        offscreen.close()


def _sample(session: EdgeSession, link: LinkSettings, picture: np.ndarray, instruction: str) -> dict[str, float]:
    pictures = SessionPictures(link)
    began = time.perf_counter()
    pictures.begin(picture, (), session.verifier)
    prepared = time.perf_counter() - began
    firsts: list[float] = []
    began = time.perf_counter()
    session.decode(picture, instruction, on_progress=lambda *_: firsts.append(time.perf_counter() - began))
    return {
        "bytes": len(encode(pictures.observation(1, 1, instruction))),
        "prepare_ms": 1e3 * prepared,
        "first_age_s": firsts[0],
        "last_age_s": time.perf_counter() - began,
    }


BENCH = Bench(
    measure,
    lambda report: (
        ("encoding", "encoding", ""), ("longest side", "sent", ""), ("bytes", "bytes", ".0f"),
        ("prepare ms", "prepare_ms", ".1f"), ("age at first token s", "first_age_s", ".3f"),
        ("at the end s", "last_age_s", ".3f"),
    ),
    lambda report: ["{images} pictures of {width} x {height}, link {link}; medians".format(**report)],
    left=2,
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """What a camera's picture costs on its way to the verifier.

    Sends the same pictures in each encoding, whole and as the target reads them, over an emulated link; prints bytes,
    the time to shrink and encode, and how old the picture is when its reply begins and ends.
    """
    return BENCH.run(flags)
