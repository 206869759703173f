# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench pictures`: what a camera's picture costs on its way, as each encoding and size of the link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import numpy as np

from dsd_lab.bench.profiles import Profile
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.report import BenchError, check_range, header, table
from dsd_lab.train.data import TEST_SEEDS
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
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode


def measure_pictures(
    profile: Profile,
    images: int,
    sides: tuple[int, int],
    draft: str,
    target: str,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Decode ``images`` camera pictures of ``sides`` (width, height), sent in each way over the link of ``profile``.

    The models run at this machine's speed, in one process. A picture's age counts from when the session has it: at the
    first verified token, and at the reply's end. BenchError for values out of range.
    """
    check_range("images", images, 1, len(TEST_SEEDS))
    if not all(64 <= side <= MAX_SIDE for side in sides):
        raise BenchError(f"sides {sides[0]}x{sides[1]} cannot be rendered; use 64 to {MAX_SIDE} pixels")
    models = {name: load_model(ModelSettings(path, threads=1)) for name, path in (("draft", draft), ("target", target))}
    settings = DecodeSettings(mode="dsd")
    ways = [(encoding, size) for size in (max(sides), 0) for encoding in ENCODINGS]
    samples: dict[tuple[str, int], list[dict[str, float]]] = {way: [] for way in ways}
    with closing(_scenes(images, sides)) as scenes, VerifierEngine(models["target"]) as engine:
        for number, (picture, instruction) in enumerate(scenes):
            for encoding, size in ways:  # in turn, so that a busy moment meets them all
                link = LinkSettings(600.0, 1, image_size=size, image_encoding=encoding)
                channel = EmulatedChannel(LocalChannel(engine), profile.link, seed=number)
                with channel, EdgeSession(channel, models["draft"], settings, link) as session:
                    samples[encoding, size].append(_sample(session, link, picture, instruction))
                if progress is not None:
                    progress((number + 1) / images, f"{encoding} {size or 'as the target reads it'}")
    rows = [
        {"encoding": encoding, "size": size}
        | {name: statistics.median(sample[name] for sample in found) for name in found[0]}
        for (encoding, size), found in samples.items()
    ]
    about = {"link": profile.name, "images": images, "width": sides[0], "height": sides[1]}
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


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    rows = [["encoding", "longest side", "kB", "prepare ms", "age at first token s", "at the end s"]]
    rows += [
        [
            row["encoding"], str(row["size"] or "as the target reads it"), f"{row['bytes'] / 1e3:.1f}",
            f"{row['prepare_ms']:.1f}", f"{row['first_age_s']:.3f}", f"{row['last_age_s']:.3f}",
        ]
        for row in report["rows"]
    ]  # fmt: skip
    about = "{images} pictures of {width} x {height}, link {link}; medians".format(**report)
    return "\n".join([about, *table(rows, left=2)])
