# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that the product uses, over a model of transformers, for tests without vLLM.

``install`` puts them where the real ones would be imported from. The engine runs the product's own pooler, reads
prompts in pieces and interrupts them, keeps a prefix cache by whole blocks, and misbehaves when it is told to:
``AsyncLLM.faults`` has a name for each next request, see ``FAULTS``.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import random
import sys
import threading
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

FAULTS = ("", "rows", "forgets", "error", "raises", "dies", "silent", "nan", "shape", "slow")
BLOCK = 8  # tokens of a block of the prefix cache
PATIENT = LinkSettings(response_timeout_s=20.0, attempts=3)


class EngineDeadError(Exception):
    pass


class Pooler(torch.nn.Module):
    pass


@dataclass
class AsyncEngineArgs:
    model: str
    runner: str
    hf_overrides: dict[str, Any]
    enable_prefix_caching: bool
    dtype: str
    max_model_len: int
    disable_log_stats: bool = False
    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    mm_device_do_normalize: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enforce_eager: bool = False


@dataclass
class PoolingParams:
    task: str
    skip_reading_prefix_cache: bool
    extra_kwargs: dict[str, Any]

    def clone(self) -> PoolingParams:
        return deepcopy(self)


@dataclass(frozen=True)
class PlaceholderRange:
    offset: int
    length: int


class MultiModalFieldConfig:
    flat_from_sizes = staticmethod(lambda modality, sizes: lambda batch: batch.split(sizes.tolist()))
    batched = staticmethod(lambda modality, keep_on_cpu=False: lambda batch: batch.split(1))


class MultiModalKwargsItems(dict[str, Any]):
    @classmethod
    def from_hf_inputs(cls, inputs: dict[str, torch.Tensor], fields: dict[str, Any]) -> MultiModalKwargsItems:
        parts = {name: cut(inputs[name]) for name, cut in fields.items()}
        count = len(parts["image_grid_thw"])
        return cls(image=[{name: part[i] for name, part in parts.items()} for i in range(count)])


def tokens_input(tokens: list[int], *, cache_salt: str) -> dict[str, Any]:
    return {"prompt_token_ids": tokens, "cache_salt": cache_salt}


def mm_input(tokens: list[int], items: Any, hashes: Any, places: Any, *, cache_salt: str) -> dict[str, Any]:
    more = {"mm_kwargs": items, "mm_hashes": hashes, "mm_placeholders": places}
    return {"prompt_token_ids": tokens, "cache_salt": cache_salt, **more}


class AsyncLLM:
    """The engine, with counts of what it was asked."""

    last: AsyncLLM

    def __init__(self, args: AsyncEngineArgs) -> None:
        from dsd_ros.cloud.vllm.worker import VerifyPooler

        self.args = args
        self.errored = self.closed = False
        self.faults: deque[str] = deque()
        self.requests = self.asked_again = self.under_way = self.most = 0
        self.pixels_sent = 0
        self.free = threading.Event()  # ends what is slow
        self._model = load_model(ModelSettings(args.model), exits=False)
        # Its "hidden states" are logits.
        self._pooler = VerifyPooler(lambda hidden: hidden)
        self._pictures: dict[str, Any] = {}
        self._cached: set[tuple[Any, ...]] = set()
        self._chance = random.Random(0)
        AsyncLLM.last = self

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLM:
        return cls(args)

    def shutdown(self) -> None:
        self.closed = True

    async def encode(self, prompt: Any, params: PoolingParams, request_id: str) -> Any:
        self.requests += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        fault = self.faults.popleft() if self.faults else ""
        try:
            yield await self._answer(prompt, params, fault)
        finally:
            self.under_way -= 1

    async def _answer(self, prompt: Any, params: PoolingParams, fault: str) -> Any:
        if fault == "dies" or self.errored:
            self.errored = True
            raise EngineDeadError("EngineCore encountered an issue")
        if fault == "silent":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.to_thread(self.free.wait, 20)
        if fault == "raises":
            raise ValueError("the prompt is longer than the maximum\nsecond line")
        if fault == "error":
            return failed("internal", "a worker failed")
        if fault == "forgets":
            self._pictures.clear()
        items = list(prompt.get("mm_kwargs", {}).get("image", []))
        names = prompt.get("mm_hashes", {}).get("image", [])
        for place, (name, item) in enumerate(zip(names, items, strict=True)):
            if item is None and name not in self._pictures:
                return failed("multimodal_cache_miss", "Multi-modal processor cache miss.")
            self.pixels_sent += item is not None
            items[place] = self._pictures.setdefault(name, item)
        places = prompt.get("mm_placeholders", {}).get("image", [])
        rows = await asyncio.to_thread(self._logits, prompt["prompt_token_ids"], items, places)
        if fault == "nan":
            rows = torch.full_like(rows, torch.nan)
        if fault == "shape":
            rows = rows[:, :-7]
        cached = self._hits(prompt, params, fault)
        return SimpleNamespace(error=None, outputs=SimpleNamespace(data=self._pooled(rows, cached, params)))

    def _hits(self, prompt: Any, params: PoolingParams, fault: str) -> int:
        """How many tokens the prefix cache holds; the last one is always read."""
        tokens, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
        blocks = [(salt, *tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        held = next((n for n, block in enumerate(blocks) if block not in self._cached), len(blocks))
        self._cached.update(blocks)
        if params.skip_reading_prefix_cache:
            self.asked_again += 1
            return 0
        return len(tokens) - 1 if fault == "rows" else min(held * BLOCK, len(tokens) - 1)

    @torch.inference_mode()
    def _logits(self, tokens: list[int], pictures: list[Any], places: list[PlaceholderRange]) -> torch.Tensor:
        """A picture's token in a reply is a token like any other."""
        hf, ids, more = self._model.hf, torch.tensor([tokens]), {}
        embedded = hf.model.language_model.embed_tokens(ids)
        if pictures:
            is_picture = torch.zeros(ids.shape, dtype=torch.bool)
            for place in places:
                is_picture[0, place.offset : place.offset + place.length] = True
            grids = torch.cat([picture["image_grid_thw"] for picture in pictures])
            pixels = torch.cat([picture["pixel_values"] for picture in pictures])
            seen = hf.model.get_image_features(pixels, grids)
            embedded[is_picture] = torch.cat(list(seen.pooler_output))
            if deep := getattr(seen, "deepstack_features", None):
                more["visual_pos_masks"] = is_picture
                more["deepstack_visual_embeds"] = [torch.cat(list(layer)) for layer in deep]
            more["position_ids"], _ = hf.model.get_rope_index(ids, is_picture.int(), grids)
        hidden = hf.model.language_model(inputs_embeds=embedded, use_cache=False, **more).last_hidden_state
        return hf.lm_head(hidden)[0]

    def _pooled(self, rows: torch.Tensor, start: int, params: PoolingParams) -> torch.Tensor:
        """In one piece or several; now and then interrupted, and then begun anew where the cache ends."""
        state = SimpleNamespace(hidden_states_cache=[])
        state.clean = state.hidden_states_cache.clear
        here, total = start, len(rows)
        while True:
            count = min(total - here, self._chance.choice([1, 2, 5, total]))
            cursor = SimpleNamespace(
                num_scheduled_tokens_cpu=torch.tensor([count]),
                seq_lens_cpu=torch.tensor([here + count]),
                get_finished_mask=lambda done=here + count == total: [done],
            )
            metadata = SimpleNamespace(
                get_pooling_cursor=lambda c=cursor: c, pooling_params=[params], pooling_states=[state]
            )
            # The buffer is the engine's, and is used again for its next step.
            buffer = torch.cat([rows[here : here + count], torch.full((3, rows.shape[1]), torch.nan)])
            found = self._pooler(buffer, metadata)[0]
            buffer.fill_(torch.nan)
            here += count
            if found is not None:
                return found
            if self._chance.random() < 0.2:
                here = start + (here - start) // 2


def failed(code: str, message: str) -> Any:
    empty = SimpleNamespace(data=torch.empty(0))
    return SimpleNamespace(error=SimpleNamespace(code=code, message=message, retryable=True), outputs=empty)


def process_dict_updates(entries: dict[int, Any], update: Any, new: Any) -> None:
    """What a batch's rows want, after requests came."""
    for row, params, prompt, output in update.added if update else ():
        entries.pop(row, None)
        if (wish := new(params, prompt, output)) is not None:
            entries[row] = wish


def install(monkeypatch: Any) -> None:
    """Let the names be imported as vLLM's, and the plug-in be found."""
    one = SimpleNamespace
    registry = one(register_processor=lambda *_, **__: lambda cls: cls)
    base = type("Base", (), {})
    parts = ("DummyInputsBuilder", "MultiModalProcessor", "ProcessingInfo", "ForConditionalGeneration")
    towers = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": AsyncEngineArgs, "PoolingParams": PoolingParams},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"mm_input": mm_input, "tokens_input": tokens_input},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": registry},
        "vllm.multimodal.inputs": {
            "MultiModalFieldConfig": MultiModalFieldConfig,
            "MultiModalKwargsItems": MultiModalKwargsItems,
            "PlaceholderRange": PlaceholderRange,
        },
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": object},
        "vllm.v1.sample.logits_processor.builtin": {"process_dict_updates": process_dict_updates},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.pooler": {"Pooler": Pooler, "PoolingParamsUpdate": one},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.llama": {"LlamaForCausalLM": base},
        "vllm.model_executor.models.qwen2": {"Qwen2ForCausalLM": base},
        "vllm.model_executor.models.qwen3": {"Qwen3ForCausalLM": base},
    } | {
        f"vllm.model_executor.models.{kind}": {f"{name}{part}": base for part in parts}
        for kind, name in towers.items()
    }  # fmt: skip
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dsd_ros.cloud.vllm.worker", raising=False)
    from dsd_ros.cloud.vllm import engine

    monkeypatch.setattr(engine, "entry_points", lambda **_: ["dsd_ros"])


def decode(engine, draft, settings, asked):
    with closing(LocalChannel(engine)) as channel, EdgeSession(channel, draft, settings, PATIENT) as session:
        return [session.decode(image, text, history=history).tokens for image, text, history in asked]


def decode_at_once(engine, draft, plans, asked):
    """``decode`` with each of the plans, all at the same time; what each gave, in order."""
    with ThreadPoolExecutor(len(plans)) as robots:
        futures = [robots.submit(decode, engine, draft, plan, asked) for plan in plans]
        return [future.result(120) for future in futures]


def questions(picture, count):
    """(picture, instruction, history): with a history, and without a picture, too."""
    kinds = [(), ((picture(8), "go left"), (picture(9), "stop"))]
    return [(picture(n), f"go {n}", kinds[n % 2]) for n in range(count)]
