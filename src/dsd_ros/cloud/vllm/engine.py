# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine, started by this process: its scheduler, batches and caches, and the pooler of ``worker``."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.vllm import ARCHITECTURES
from dsd_ros.cloud.vllm.target import COUPLED, ROWS, EngineLost, EnginePrefix, Wish
from dsd_ros.limits import MAX_HISTORY
from dsd_ros.vlm.errors import ModelError, VlmError
from dsd_ros.vlm.front import ModelFront

PLUGIN_GROUP = "vllm.general_plugins"
INSTALL = "make vllm-venv makes an environment with it (.venv-vllm)"
_TASK = "token_classify"  # that of ``worker.VerifyPooler``, which only vLLM's processes can import
_FORGOTTEN = "multimodal_cache_miss"
# What vLLM says belongs into the log, not between the lines that a verifier prints; nothing is reported to anybody.
_ENVIRONMENT = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


class VllmEngine:
    """An ``EngineClient`` of an engine in processes of its own, which are children of this one."""

    def __init__(self, model: ModelFront, settings: BackendSettings, dtype: str) -> None:
        """ModelError when this environment has no vLLM, or arguments that vLLM does not know."""
        missing = next((name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None), None)
        if missing:
            raise ModelError(f"backend vllm needs the package {missing} in this environment; {INSTALL}")
        if not entry_points(group=PLUGIN_GROUP, name="dsd_ros"):
            raise ModelError(
                "vLLM's processes do not find dsd_ros, whose models it runs; install dsd_ros into this environment "
                f"(pip install --no-deps .), or {INSTALL}"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._model = model
        self._llm: Any = None
        self._numbers = itertools.count(1)
        self._arguments = self._engine_arguments(settings, dtype)
        model.max_length = min(model.max_length, self._arguments.max_model_len)

    def _engine_arguments(self, settings: BackendSettings, dtype: str) -> Any:
        from vllm import AsyncEngineArgs

        model = self._model
        pictures: dict[str, Any] = {}
        if model.images is not None:
            # The pixels are prepared here, as for every other target.
            limits = {"image": MAX_HISTORY + 1, "video": 0}
            pictures = {"limit_mm_per_prompt": limits, "mm_device_do_normalize": False}
        arguments = {
            "dtype": dtype,
            "max_model_len": model.max_length,
            "disable_log_stats": True,
            **pictures,
            **json.loads(settings.engine_args or "{}"),
            "model": str(model.directory),
            "runner": "pooling",
            "hf_overrides": {"architectures": [ARCHITECTURES[model.kind]]},
            "enable_prefix_caching": True,
            "tensor_parallel_size": settings.tensor_parallel,
            "data_parallel_size": settings.data_parallel,
        }
        try:
            return AsyncEngineArgs(**arguments)
        except (TypeError, ValueError) as error:
            raise ModelError(f"vLLM does not take these engine_args: {_first_line(error)}") from error

    async def start(self) -> None:
        """See ``EngineClient``: load the model, which takes from 15 seconds to minutes."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(self._arguments)
        except Exception as error:
            raise ModelError(
                f"vLLM cannot load the model in {self._model.directory}: {_first_line(error)}; its log says more"
            ) from error

    async def healthy(self) -> bool:
        """See ``EngineClient``."""
        return not self._llm.errored

    async def close(self) -> None:
        """See ``EngineClient``."""
        if self._llm is not None:
            self._llm.shutdown()

    async def ask(self, prefix: EnginePrefix, tail: Sequence[int], rows: int, wish: Wish) -> torch.Tensor:
        """See ``EngineClient``. A request that lacks rows is asked again without the prefix cache, once."""
        for cached in (True, False):
            found = await self._request(prefix, tail, self._asked(prefix, tail, rows, wish), cached)
            if len(found) >= rows:
                return found[-rows:]
        raise VlmError(f"vLLM gave {len(found)} of {rows} rows; it may be of a version that is not supported")

    def _asked(self, prefix: EnginePrefix, tail: Sequence[int], rows: int, wish: Wish) -> dict[str, Any]:
        asked: dict[str, Any] = {"rows": rows, "want": wish.want, "tokens": self._model.known_tokens}
        if wish.want == COUPLED:
            # The row at the last verified token says what is emitted at the position after it.
            end = len(prefix.tokens) + len(tail) + 1
            sampling = wish.sampling
            asked |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "names": [(wish.seed, wish.reply, position) for position in range(end - rows, end)],
            }
        if wish.constraint is not None and wish.want != ROWS:
            asked["rules"] = wish.constraint.rules([*prefix.tokens, *tail], rows)
        return asked

    async def _request(
        self, prefix: EnginePrefix, tail: Sequence[int], asked: dict[str, Any], cached: bool
    ) -> torch.Tensor:
        from vllm import PoolingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        params = PoolingParams(task=_TASK, skip_reading_prefix_cache=not cached, extra_kwargs=asked)
        tokens = [*prefix.prompt.tokens, *prefix.tokens, *tail]
        for whole in dict.fromkeys([not prefix.shown, True]):
            try:
                request = self._input(prefix, tokens, whole), params.clone(), f"round-{next(self._numbers)}"
                output = [part async for part in self._llm.encode(*request)][-1]
            except EngineDeadError as error:
                raise EngineLost("vLLM's engine has died") from error
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if self._llm.errored:
                    raise EngineLost("vLLM's engine has died") from error
                raise VlmError(f"vLLM refuses a request: {_first_line(error)}") from error
            failure: Any = output.error
            if failure is None:
                prefix.shown = True
                found: torch.Tensor = output.outputs.data
                return found
            if failure.code != _FORGOTTEN:
                break  # else it has forgotten the pictures and gets them once more
        raise VlmError(f"vLLM gave no answer: {failure.message}")

    def _input(self, prefix: EnginePrefix, tokens: list[int], whole: bool) -> Any:
        """A request's prompt. ``whole``: with the pictures' pixels, not their names alone."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        pictures = prefix.prompt.pictures
        if not pictures:
            return tokens_input(tokens, cache_salt=prefix.salt)
        items: Any = MultiModalKwargsItems({"image": [None] * len(pictures)})
        if whole:
            grids = torch.cat([picture.grid for picture in pictures])
            fields = {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
                "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            }
            pixels = torch.cat([picture.pixels for picture in pictures])
            items = MultiModalKwargsItems.from_hf_inputs({"pixel_values": pixels, "image_grid_thw": grids}, fields)
        names = {"image": [picture.name for picture in pictures]}
        places = {"image": [PlaceholderRange(picture.offset, picture.tokens) for picture in pictures]}
        return mm_input(tokens, items, names, places, cache_salt=prefix.salt)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
