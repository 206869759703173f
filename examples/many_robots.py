#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several robots, one verifier: each robot a thread with a session of its own, all verified in the same passes.

python examples/many_robots.py 4        # robots; the pair that ships, everything in this process
"""

import sys
import threading
import time
from pathlib import Path

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

MODELS = Path(__file__).resolve().parents[1] / "models"


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal() or not 1 <= int(sys.argv[1]) <= 16:
        print("usage: many_robots.py ROBOTS, 1 to 16", file=sys.stderr)
        return 2
    draft = load_model(ModelSettings(str(MODELS / "draft"), threads=1))  # holds no state: robots of a process share it
    scenes = [scene(seed) for seed in range(int(sys.argv[1]))]
    lines = [""] * len(scenes)
    began = time.perf_counter()
    with VerifierEngine(load_model(ModelSettings(str(MODELS / "target"), threads=1))) as engine:

        def robot(number: int) -> None:
            picture, instruction = scenes[number]
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, DecodeSettings()) as session:
                reply = session.decode(picture, instruction)
            lines[number] = f"robot {number}, {instruction!r}: {reply.text} ({reply.seconds:.2f} s)"

        robots = [threading.Thread(target=robot, args=(number,)) for number in range(len(scenes))]
        for thread in robots:
            thread.start()
        for thread in robots:
            thread.join()
    print("\n".join(lines))
    print(f"{len(scenes)} replies in {time.perf_counter() - began:.2f} s")
    return 0 if all(lines) else 1


def scene(seed: int):
    """What the camera of a robot in world ``seed`` sees, and what it is told."""
    world = World.from_seed(seed)
    with Simulator(world) as simulator:
        return simulator.render(), world.instruction


if __name__ == "__main__":
    sys.exit(main())
