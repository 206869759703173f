# SPDX-License-Identifier: Apache-2.0
"""A target in vLLM's engine: a reply is one request, decoded at the engine's own speed, and drafts go to its scheduler.

Greedy replies are vLLM's own. Sampled ones are drawn with its noise: of the same distribution, drafts or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsd_ros.cloud.rounds import Generation, RoundRefused
from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.vllm import CAUSE, DIRECTORY, sentence_of
from dsd_ros.cloud.vllm.engine import check_environment, engine_arguments, engine_input, sampling_params
from dsd_ros.cloud.vllm.pipe import DraftWriter
from dsd_ros.decoding.modes import streams
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.vlm.errors import ModelError, VlmError
from dsd_ros.vlm.front import ModelFront, PreparedPrompt
from dsd_ros.wire.messages import DraftTokens, SessionRequest

_log = logging.getLogger(__name__)

EXIT_ENGINE_LOST = 70
_OWN = "or use a verifier with --backend local"


@dataclass
class EnginePrefix:
    """A prompt and the verified tokens of its reply; keys and values are the engine's."""

    prompt: PreparedPrompt
    tokens: list[int] = field(default_factory=list)

    unread = 0  # the engine reads it whole
    cache_bytes = 0  # of keys and values here

    def __post_init__(self) -> None:
        self.prompt_length = len(self.prompt.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """See ``rounds.Prefix``."""
        self.tokens.extend(int(token) for token in tokens)


def exit_without_answer(reason: str) -> None:
    """End the process at once, and the engine's with it: a robot that hears nothing redials and goes on elsewhere."""
    _log.critical("%s; this verifier exits, and its robots go on with the next one", reason)
    logging.shutdown()
    os._exit(EXIT_ENGINE_LOST)


class VllmTarget:
    """vLLM in processes of its own, which end with this one. Modes stream and ar, no early exits."""

    exit_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: ModelFront,
        settings: BackendSettings,
        dtype: str,
        on_lost: Callable[[str], object] = exit_without_answer,
    ) -> None:
        """Returns when the engine can be asked, 15 seconds to minutes. ModelError, one sentence, when it cannot."""
        check_environment()
        self.model = model
        self._arguments, without = engine_arguments(model, settings, dtype)
        if without:
            _log.warning("the robots' drafts are ignored: %s", without)
        self._timeout_s, self._on_lost = settings.engine_timeout_s, on_lost
        self._numbers = itertools.count(1)
        self._under_way = 0
        self._heard = 0.0  # time.monotonic() of the engine's last answer
        self._writer: DraftWriter | None = None
        self.llm: Any = None
        self._directory = tempfile.TemporaryDirectory(prefix="dsd-vllm-")
        self.loop = asyncio.new_event_loop()
        # The engine is this thread's child, and ends with it.
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ[DIRECTORY] = self._directory.name  # for the processes that begin now
        try:
            self.llm = AsyncLLM.from_engine_args(self._arguments)
        except Exception as error:
            cause = self._cause() or sentence_of(error)
            raise ModelError(f"vLLM cannot load the model in {self.model.directory}: {cause}") from error
        self.model.max_length = min(self.model.max_length, self.llm.model_config.max_model_len)
        self._writer = DraftWriter(self._directory.name)
        self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop the engine."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self._directory.cleanup()

    def check(self, request: SessionRequest, sampling: SamplingSettings) -> None:
        """See ``Target``: what needs the target's distributions, or changes them, is refused."""
        if not streams(request.mode):
            raise ValueError(
                f"backend vllm decodes replies by itself and gives no distributions, which mode {request.mode} needs; "
                f"use mode stream or ar, {_OWN}"
            )
        if request.grammar:
            raise ValueError(f"backend vllm does not hold replies to a form; set constrain to none, {_OWN}")

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]
    ) -> EnginePrefix:
        """See ``Target``. The engine reads the prompt when the reply begins."""
        return EnginePrefix(self.model.prompt(image, instruction, history))

    def generate(self, generation: Generation) -> None:
        """See ``GeneratingTarget``."""
        asyncio.run_coroutine_threadsafe(self._generate(generation), self.loop)

    def draft(self, message: DraftTokens) -> None:
        """See ``GeneratingTarget``."""
        if self._writer is not None:
            self._writer.send(message)

    async def _generate(self, generation: Generation) -> None:
        prefix, began = generation.reply.sequence, time.monotonic()
        assert isinstance(prefix, EnginePrefix), "this target has not read the reply's observation"
        if not self._under_way:
            self._heard = began
        self._under_way += 1
        try:
            params = sampling_params(generation.session, generation.reply, self.model)
            given = engine_input(prefix.prompt, prefix.tokens)
            steps = self.llm.generate(given, params, f"reply-{next(self._numbers)}")
            left, ended = params.max_tokens, False
            async with contextlib.aclosing(steps):
                async for output in steps:
                    before, self._heard = began, time.monotonic()
                    began = self._heard
                    tokens = list(output.outputs[0].token_ids)
                    if tokens:
                        left -= len(tokens)
                        ended = left <= 0 or tokens[-1] in self.model.eos_token_ids
                        generation.take(generation, tokens, began - before)
                    if generation.stopped:
                        return
            if not ended:
                raise VlmError(
                    f"prompt and reply fill the {self.model.max_length} tokens that {self.model.name} holds; use "
                    "fewer earlier pictures, a smaller one, or a smaller max_tokens"
                )
        except Exception as error:
            if self.llm.errored:
                return  # ``_watch`` says so; no answer, so that robots go on elsewhere
            refused = error if isinstance(error, VlmError) else VlmError(f"vLLM refuses it: {sentence_of(error)}")
            generation.take(generation, RoundRefused.of(refused), 0.0)
        finally:
            self._under_way -= 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)  # robots are patient for longer
            if self.llm.errored:
                cause = self._cause()
                lost = f"vLLM's engine has died{cause and f': {cause}'}"
            elif self._under_way and time.monotonic() - self._heard > self._timeout_s:
                lost = f"vLLM's engine has given no answer for {self._timeout_s:g} s"
            else:
                continue
            self._directory.cleanup()
            self._on_lost(lost)
            return

    def _cause(self) -> str:
        """Why an engine's process has failed, as it has left word; "" if it has not."""
        with contextlib.suppress(OSError):
            return (Path(self._directory.name) / CAUSE).read_text(encoding="utf-8")
        return ""

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.llm is not None:
            self.llm.shutdown()
        if self._writer is not None:
            self._writer.close()
