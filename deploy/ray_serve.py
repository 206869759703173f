# SPDX-License-Identifier: Apache-2.0
"""Verifiers under Ray Serve. Run it from the repository's root, in an environment with ray[serve]:

    serve run deploy.ray_serve:app model=/models/target device=cuda gpus=1 replicas=2 tokens_file=/etc/dsd/tokens.yaml

Robots dial ws://HOST:8000/. Each replica has an engine and the server of `dsd verifier`, on a local port;
Ray's proxy chooses a replica for each robot, and what it sends is handed on. Ray's proxy takes messages of 16 MiB.
Options: model, device, dtype, replicas, gpus (of a replica), and the settings of `dsd verifier` but host, port and TLS.
"""

# No `from __future__ import annotations`: FastAPI reads those of a replica's methods where it cannot look names up.
import asyncio
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from ray import serve
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.messages import MAX_FRAME_BYTES

TRY_AGAIN = 1013
MODEL_OPTIONS = ("device", "dtype")
NOT_HERE = ("host", "port", "certificate", "key")
api = FastAPI()


async def up(robot: WebSocket, verifier: ClientConnection) -> None:
    """From the robot."""
    try:
        while True:
            await verifier.send(await robot.receive_bytes())
    except (WebSocketDisconnect, ConnectionClosed, KeyError):  # KeyError: a text frame
        pass


async def down(robot: WebSocket, verifier: ClientConnection) -> None:
    """To the robot; what ends the link at the verifier ends it there."""
    async for frame in verifier:
        await robot.send_bytes(frame)
    await robot.close(verifier.close_code or TRY_AGAIN, verifier.close_reason or "")


# Ray copies this class with what the module has by now: what it uses stands above.
@serve.deployment(max_ongoing_requests=128, health_check_period_s=5, graceful_shutdown_timeout_s=30)
@serve.ingress(api)
class Verifier:
    """One replica."""

    def __init__(self, model: ModelSettings, settings: VerifierSettings) -> None:
        self.engine = VerifierEngine(load_model(model), settings)
        self.server = VerifierServer(self.engine, settings)
        self.server.start()

    def check_health(self) -> None:
        """Have Ray replace a replica whose engine has failed."""
        if not self.engine.alive:
            raise RuntimeError("the verifier's engine has failed")

    @api.websocket("/")
    async def robot(self, robot: WebSocket) -> None:
        """Hand one robot's frames on, both ways, until either side ends."""
        shown = [("Authorization", value) for value in robot.headers.getlist("authorization")]
        try:
            verifier = await connect(
                self.server.url, additional_headers=shown, compression=None, max_size=MAX_FRAME_BYTES, proxy=None
            )
        except (InvalidStatus, OSError) as error:
            await robot.accept()
            await robot.close(TRY_AGAIN, str(error)[:120])
            return
        await robot.accept()
        async with verifier:
            ways = [asyncio.create_task(way(robot, verifier)) for way in (up, down)]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


def app(options: dict[str, Any]) -> serve.Application:
    """The application, from the options of `serve run`; ValueError, one sentence, for one that cannot be used."""
    options = {"replicas": 1, "gpus": 0.0} | options
    replicas, gpus = int(options.pop("replicas")), float(options.pop("gpus"))
    if "model" not in options:
        raise ValueError("model is missing: give the target's directory, model=/models/target")
    model = ModelSettings(
        options.pop("model"), **{name: options.pop(name) for name in MODEL_OPTIONS if name in options}
    )
    kinds = {field.name: type(field.default) for field in fields(VerifierSettings)}
    for name in options:
        if name not in kinds or name in NOT_HERE:
            raise ValueError(
                f"{name} is no option here; use model, device, dtype, replicas, gpus or one of dsd verifier's"
            )
    settings = VerifierSettings(port=0, **{name: kinds[name](value) for name, value in options.items()})
    return Verifier.options(num_replicas=replicas, ray_actor_options={"num_gpus": gpus}).bind(model, settings)
