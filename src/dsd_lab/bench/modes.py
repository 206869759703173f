"""`dsd-lab bench modes`: decoding modes side by side on the same pictures, over an emulated link.

Models, engine, sessions and messages are the system's own. Only the link is emulated, and where a profile gives
the times of other machines each forward pass is held to them; such a clock can be run faster or slower as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsd_lab.bench.modes_report import Measured, make_report
from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.sweeps import BenchError, Variant
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.train.data import TEST_SEEDS, shared_offscreen, world_frames
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.draft_length import Tuner
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession, tuner_for
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.pace import Pace
from dsd_ros.wire.channel import Channel
from dsd_ros.wire.local import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

TRANSPORTS = ("local", "websocket")
BATCH_GROWTH = 0.15  # FSD Table 9: eight sequences in one forward of the draft cost 15 % more than one
_PER_WORLD = 3  # pictures: two from anywhere, one on the expert's way
_WARM_UP_TOKENS = 8
# Nothing is lost on an emulated link, and what is sent again would be measured too.
_PATIENCE = LinkSettings(response_timeout_s=600.0, attempts=1)


@dataclass(frozen=True)
class Scene:
    """What is asked: a camera picture (H, W, 3), uint8 RGB, or None for a text model, and an instruction."""

    image: np.ndarray | None
    instruction: str


def held_out_scenes(count: int) -> list[Scene]:
    """Camera pictures of worlds that no training saw, each with "find the" a thing that is asked for there."""
    scenes: list[Scene] = []
    offscreen = shared_offscreen()
    try:
        for seed in TEST_SEEDS:
            _, frames = world_frames(seed, _PER_WORLD, offscreen)
            with Simulator(World.from_seed(seed), offscreen=offscreen) as simulator:
                for frame in frames:
                    simulator.pose = frame.pose
                    scenes.append(Scene(simulator.render(), f"find the {frame.replies[0][0]}"))
                    if len(scenes) == count:
                        return scenes
    finally:
        offscreen.close()
    raise BenchError(f"there are only {len(scenes)} held-out pictures; ask for no more")


def measure_modes(
    profile: Profile,
    variants: Sequence[Variant],
    images: int,
    draft: str,
    target: str,
    *,
    transport: str = "local",
    time_scale: float = 1.0,
    seed: int = 0,
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
    progress: Callable[[int, int, Variant, DecodedReply], None] | None = None,
) -> dict[str, Any]:
    """Decode ``images`` held-out pictures with every variant in turn; the report of ``modes_report``.

    ``draft`` and ``target`` are model directories or hub ids. Every time of the profile is multiplied by
    ``time_scale`` while measuring and what is reported is divided by it. ``sweeps``, of which the variants were
    made, are for the report. progress(replies done, replies in all,
    variant, reply) after each reply. Raises ValueErrors for what cannot be measured, ModelError, LinkError.
    """
    if not 1 <= images <= 3 * len(TEST_SEEDS):
        raise BenchError(f"images is {images}; use 1 to {3 * len(TEST_SEEDS)}")
    if not (math.isfinite(time_scale) and 0.01 <= time_scale <= 100.0):
        raise BenchError(f"time-scale is {time_scale}; use 0.01 to 100")
    if time_scale != 1.0 and not profile.paced:
        raise BenchError(
            f"profile {profile.name} runs the models at this machine's speed, which no time-scale changes; leave "
            "--time-scale out, or use a profile with draft_ms and target_ms"
        )
    if transport not in TRANSPORTS:
        raise BenchError(f"unknown transport {transport!r}; choose from {', '.join(TRANSPORTS)}")
    if not variants:
        raise BenchError("no mode is named; use for example ar,dsd,fsd")
    scenes = held_out_scenes(images)
    # One thread each: the models share this machine, and their threads would wait for each other.
    robot = load_model(ModelSettings(draft, threads=1))
    cloud = load_model(ModelSettings(target, threads=1))
    link = profile.stretched(time_scale).link
    measured = [Measured(variant, []) for variant in variants]
    with _verifier(cloud, transport) as connect:

        def decode(
            settings: DecodeSettings, scene: Scene, channel: Channel, tuner: Tuner | None = None
        ) -> DecodedReply:
            # A session for each reply: only its own threads and caches are there while it is measured.
            with ExitStack() as stack:
                stack.callback(channel.close)
                session = stack.enter_context(EdgeSession(channel, robot, settings, _PATIENCE, tuner=tuner))
                return session.decode(scene.image, scene.instruction)

        for variant in variants:  # at full speed: what happens once in a process is not to be measured
            short = dataclasses.replace(variant.decode, max_tokens=_WARM_UP_TOKENS)
            decode(short, scenes[0], connect())
        _hold(profile.stretched(time_scale), robot, cloud)
        # What is learned of lengths stays from picture to picture, as on a robot.
        tuners = [tuner_for(variant.decode, robot.vocab_size) for variant in variants]
        done = 0
        for number, scene in enumerate(scenes):
            # Each picture begins with another variant: what comes first must not always be the same.
            order = [(number + offset) % len(variants) for offset in range(len(variants))]
            for index in order:
                settings = dataclasses.replace(variants[index].decode, seed=seed + number)
                channel = EmulatedChannel(connect(), link, seed=seed + number)
                reply = decode(settings, scene, channel, tuners[index])
                measured[index].replies.append(reply)
                done += 1
                if progress is not None:
                    progress(done, images * len(variants), variants[index], reply)
    return make_report(
        measured, profile, images=images, seed=seed, time_scale=time_scale, transport=transport, sweeps=sweeps
    )


def _hold(profile: Profile, robot: VisionLanguageModel, cloud: VisionLanguageModel) -> None:
    if profile.draft_s is not None and profile.target_s is not None:
        robot.pace = Pace(profile.draft_s, BATCH_GROWTH)
        cloud.pace = Pace(profile.target_s)


@contextmanager
def _verifier(model: VisionLanguageModel, transport: str) -> Iterator[Callable[[], Channel]]:
    """A verifier of ``model`` in this process, and what makes channels to it."""
    with ExitStack() as stack:
        engine = stack.enter_context(VerifierEngine(model))
        if transport == "local":
            yield lambda: LocalChannel(engine)
            return
        server = stack.enter_context(VerifierServer(engine, VerifierSettings(port=0)))
        yield lambda: WebsocketChannel(server.url)
