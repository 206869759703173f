# SPDX-License-Identifier: Apache-2.0
"""Runs deploy/ray_serve.py with two replicas of the shipped target, and kills the one that serves, in mid-reply:

python tools/ray_replicas.py KILLS
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import psutil
import ray
import torch
from ray import serve

from deploy.ray_serve import app
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.paths import models_directory
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.websocket import WebsocketChannel

PORT = 8123
IMAGE = np.random.default_rng(0).integers(0, 255, (112, 168, 3)).astype(np.uint8)


def replicas() -> list[psutil.Process]:
    """The replicas' processes, which are this one's descendants."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


def serves(process: psutil.Process) -> bool:
    """Whether a replica holds a robot: a connection to the server that it runs for itself."""
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    up = [one for one in connections if one.status == psutil.CONN_ESTABLISHED]
    ends = {one.laddr for one in up}  # of its own; Ray's connections have their other end elsewhere
    listening = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return any(one.laddr.port in listening and one.raddr in ends for one in up)


def both_serve() -> bool:
    """Whether two replicas run and are ready: a robot whose replica dies would wait for one that still loads."""
    states = serve.status().applications["default"].deployments["Verifier"].replica_states
    return len(replicas()) == 2 and states == {"RUNNING": 2}


def main(kills: int) -> int:
    torch.set_num_threads(1)
    os.environ |= {"RAY_raylet_start_wait_time_s": "120", "RAY_AUTH_MODE": "disabled"}  # a busy machine; loopback only
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(app({"model": str(models_directory() / "target"), "replicas": 2}))
    draft = load_model(ModelSettings(str(models_directory() / "draft")))
    equal = 0
    slowest = 0.0
    with WebsocketChannel(f"ws://127.0.0.1:{PORT}/") as channel:
        link = LinkSettings(attempts=40, response_timeout_s=5.0)
        session = EdgeSession(channel, draft, DecodeSettings(max_tokens=48, draft_length=3), link)
        expected = session.decode(IMAGE, "find the silver bottle").tokens
        for kill in range(kills):
            killed = []

            def in_the_middle(_: str, verified: int, __: int, killed: list = killed, after: int = 3 + kill % 8) -> None:
                if not killed and verified > after:
                    killed.extend(process for process in replicas() if serves(process))
                    for process in killed:
                        process.kill()

            began = time.monotonic()
            reply = session.decode(IMAGE, "find the silver bottle", on_progress=in_the_middle)
            slowest = max(slowest, time.monotonic() - began)
            if len(killed) != 1:
                print(f"kill {kill}: {len(killed)} replicas served")
                return 1
            equal += reply.tokens == expected
            deadline = time.monotonic() + 120
            while not both_serve() and time.monotonic() < deadline:
                time.sleep(0.2)
    print(f"{equal} of {kills} replies equal, the slowest in {slowest:.2f} s")
    serve.shutdown()
    ray.shutdown()
    return 0 if equal == kills else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
