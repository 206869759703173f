# SPDX-License-Identifier: Apache-2.0
"""The cloud's half of `dsd-lab bench engine`, which runs in vLLM's environment: both engines, each behind a verifier.

    python -m dsd_lab.bench.engine_cloud MODEL ENGINE_ARGS

prints a line of JSON with the verifiers' addresses, by the engine's name. Then each line that it reads has vLLM's own
client ask an engine, ``{"engine", "clients", "asked": [[a PNG in base64 or null, height, width, instruction], ...],
"max_tokens"}``, and is answered by ``{"tokens": of each client's replies, "first": seconds to each reply's first token,
"seconds"}``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from contextlib import ExitStack, closing
from typing import Any

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import BackendSettings, VerifierSettings
from dsd_ros.cloud.vllm.engine import engine_input
from dsd_ros.cloud.vllm.target import VllmTarget
from dsd_ros.vlm.loading import load_front
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.pictures import decode_bytes

ENGINES = {"drafts": True, "stock": False}  # by name: whether it verifies drafts

ALL_STAY = VerifierSettings(port=0, max_sessions=1024, session_expiry_s=86_400.0)


def main() -> None:
    """Serve until standard input ends."""
    model, engine_args = sys.argv[1:]
    with ExitStack() as stack:
        targets, addresses = {}, {}
        for name, drafts in ENGINES.items():
            settings = BackendSettings("vllm", drafts=drafts, engine_args=engine_args)
            targets[name] = stack.enter_context(
                closing(VllmTarget(load_front(ModelSettings(model)), settings, "float32"))
            )
            engine = stack.enter_context(VerifierEngine(targets[name], ALL_STAY))
            addresses[name] = stack.enter_context(VerifierServer(engine, ALL_STAY)).url
        print(json.dumps(addresses), flush=True)
        for line in sys.stdin:
            given = json.loads(line)
            target = targets[given.pop("engine")]
            found = asyncio.run_coroutine_threadsafe(_stock(target, **given), target.loop).result()
            print(json.dumps(found), flush=True)


async def _stock(target: VllmTarget, clients: int, asked: list[Any], max_tokens: int) -> dict[str, Any]:
    """``clients`` at once, one question of each after the other, as vLLM's own API is used."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=sorted(target.model.eos_token_ids), ignore_eos=True,
        detokenize=False, output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    first: list[float] = []

    async def ask(client: int) -> list[list[int]]:
        replies: list[list[int]] = []
        for number, (picture, height, width, instruction) in enumerate(asked):
            began, tokens = time.perf_counter(), []
            image = None if picture is None else decode_bytes(base64.b64decode(picture), "png", height, width)
            given = engine_input(target.model.prompt(image, instruction), [])
            async for output in target.llm.generate(given, params, f"stock-{time.time_ns()}-{client}-{number}"):
                if not tokens:
                    first.append(time.perf_counter() - began)
                tokens += output.outputs[0].token_ids
            replies.append(tokens)
        return replies

    began = time.perf_counter()
    tokens = await asyncio.gather(*(ask(client) for client in range(clients)))
    return {"tokens": tokens, "first": first, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
