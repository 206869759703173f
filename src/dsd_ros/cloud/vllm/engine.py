# SPDX-License-Identifier: Apache-2.0
"""How vLLM's engine is started and asked, by its public API."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from dsd_ros.cloud.drafts import MOST_DRAFTED
from dsd_ros.cloud.rounds import ReplyState, Session
from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.vllm import REQUEST, sentence_of
from dsd_ros.decoding.generation import TokenOptions
from dsd_ros.limits import MAX_HISTORY
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.front import ModelFront, PreparedPrompt

PLUGIN_GROUP = "vllm.general_plugins"
INSTALL = "make vllm-venv makes an environment with it (.venv-vllm)"
_ENVIRONMENT = {
    # What vLLM says belongs into the log, not between the lines that a verifier prints.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would not call plug-ins
}
# Those of a window at most. Their pixels are prepared here, as for every other target.
_PICTURES = {"limit_mm_per_prompt": {"image": MAX_HISTORY + 1, "video": 0}, "mm_device_do_normalize": False}


def check_environment() -> None:
    """ModelError when this environment has no vLLM, or its processes would not find dsd_ros."""
    missing = next((name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None), None)
    if missing:
        raise ModelError(f"backend vllm needs the package {missing} in this environment; {INSTALL}")
    if not entry_points(group=PLUGIN_GROUP, name="dsd_ros"):
        raise ModelError(
            "vLLM's processes do not find dsd_ros, which gives them the robots' drafts; install dsd_ros into this "
            f"environment (pip install --no-deps .), or {INSTALL}"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def engine_arguments(model: ModelFront, settings: BackendSettings, dtype: str) -> tuple[Any, str]:
    """vLLM's ``AsyncEngineArgs``, and why the engine takes no drafts, "" if it does. ModelError."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    given = json.loads(settings.engine_args or "{}")
    on_cpu = current_platform.is_cpu()
    drafts, without = _draft_arguments(settings.drafts, given, on_cpu)
    arguments = {
        "dtype": dtype,
        "max_model_len": model.max_length,
        "disable_log_stats": True,
        **(_PICTURES if model.images is not None else {}),
        **(_cpu_arguments() if on_cpu else {}),
        **drafts,
        **given,
        "model": str(model.directory),
        "enable_prefix_caching": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "data_parallel_size": settings.data_parallel,
    }
    try:
        return AsyncEngineArgs(**arguments), without
    except (TypeError, ValueError) as error:
        raise ModelError(f"vLLM does not take these engine_args: {sentence_of(error)}") from error


def _draft_arguments(wanted: bool, given: dict[str, Any], on_cpu: bool) -> tuple[dict[str, Any], str]:
    if not wanted:
        return {}, "drafts are switched off"
    if named := sorted({"speculative_config", "scheduler_cls"} & given.keys()):
        return {}, f"engine_args has {' and '.join(named)}"
    try:
        from dsd_ros.cloud.vllm import scheduler
    except Exception as error:  # whatever a release of vLLM has moved
        return {}, f"this vLLM is not as it is known here ({sentence_of(error)})"
    module = scheduler.__name__
    proposer = f"{module}.{scheduler.NoProposer.__name__}"
    found = {
        "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": MOST_DRAFTED},
        "scheduler_cls": f"{module}.{scheduler.DraftScheduler.__name__}",
    }
    if on_cpu:  # where the worker is a process of its own
        found["distributed_executor_backend"] = f"{module}.{scheduler.DraftExecutor.__name__}"
    return found, ""


def _cpu_arguments() -> dict[str, Any]:
    """A quarter of the free memory for its cache; vLLM wants 92 % of all. Small blocks: whole ones are cached."""
    free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    assert free is not None
    return {"kv_cache_memory_bytes": 1024 * int(free[1]) // 4, "block_size": 32}


def ignored_options(options: TokenOptions) -> list[str]:
    """Those that vLLM has no equal for, or none with drafts: of ``min_tokens`` it bars ends even after all of them."""
    return [name for name in options.names if name != "repetition_penalty"]


def sampling_params(session: Session, reply: ReplyState, model: ModelFront) -> Any:
    """vLLM's ``SamplingParams`` for the rest of a reply."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling, request, known = session.sampling, session.request, len(reply.tokens)
    # Noise of its own for each reply, and for what follows tokens that other noise has chosen.
    seed = random.Random(f"{request.seed} {reply.number} {known}").getrandbits(63)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=model.token_options.repetition_penalty if model.token_options else 1.0,
        seed=None if sampling.greedy else seed,
        max_tokens=request.max_tokens - known,
        ignore_eos=True,  # these alone end a reply:
        stop_token_ids=sorted(model.eos_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={REQUEST: [session.id, reply.number, known]},
    )


def engine_input(prompt: PreparedPrompt, verified: list[int]) -> Any:
    """What ``AsyncLLM.generate`` takes: the prompt and a reply's verified tokens, with the pictures' pixels."""
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    pictures, tokens = prompt.pictures, [*prompt.tokens, *verified]
    if not pictures:
        return tokens_input(tokens)
    grids = torch.cat([picture.grid for picture in pictures])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    pixels = torch.cat([picture.pixels for picture in pictures])
    items = MultiModalKwargsItems.from_hf_inputs({"pixel_values": pixels, "image_grid_thw": grids}, fields)
    names = {"image": [picture.name for picture in pictures]}
    places = {"image": [PlaceholderRange(picture.offset, picture.tokens) for picture in pictures]}
    return mm_input(tokens, items, names, places)
