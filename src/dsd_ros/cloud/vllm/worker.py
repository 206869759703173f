# SPDX-License-Identifier: Apache-2.0
"""What runs in vLLM's worker: models whose pooler says what the target would emit after the last tokens of a prompt.

A round is one pooling request: prompt, verified tokens and draft. So vLLM batches all robots' rounds, its prefix cache
holds what was read before, and a rejected token costs nothing to take back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.pooler import Pooler, PoolingParamsUpdate
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from dsd_ros.decoding.constraint import Rule, apply_rule
from dsd_ros.decoding.coupling import gumbel_rows
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import SamplingSettings

TASK = "token_classify"  # the pooling task that gives something for each token


class VerifyPooler(Pooler):  # type: ignore[misc]  # vLLM is not in every environment
    """Gives the last rows of each request, see ``judged``; fewer where the prefix cache held the others' tokens.

    ``PoolingParams.extra_kwargs``: ``rows``, how many of the last positions, and what ``judged`` needs.
    """

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self._compute_logits = compute_logits

    def get_supported_tasks(self) -> set[str]:
        return {TASK}

    def get_pooling_updates(self, task: str) -> Any:
        return PoolingParamsUpdate()

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: Any) -> list[torch.Tensor | None]:
        """One step of the engine: None for a request whose prompt is not read to its end."""
        cursor = pooling_metadata.get_pooling_cursor()
        counts, ends = cursor.num_scheduled_tokens_cpu.tolist(), cursor.seq_lens_cpu.tolist()
        wishes = [params.extra_kwargs or {} for params in pooling_metadata.pooling_params]
        ready: list[torch.Tensor | None] = []
        step = zip(
            hidden_states[: sum(counts)].split(counts), ends, cursor.get_finished_mask(), wishes,
            pooling_metadata.pooling_states, strict=True,
        )  # fmt: skip
        for hidden, end, finished, wish, state in step:
            wanted, kept = wish.get("rows", 1), state.hidden_states_cache
            if kept and state.dsd_end != end - len(hidden):
                kept.clear()  # the request was interrupted and is read again, from somewhere else
            kept.append(hidden[-wanted:] if finished else hidden[-wanted:].clone())
            state.dsd_end = end
            ready.append(torch.cat(kept)[-wanted:] if finished else None)
            if finished:
                state.clean()
        pieces = [piece for piece in ready if piece is not None]
        if not pieces:
            return ready
        # One call for all, whatever they ask for: with tensor parallelism each rank must make the same calls.
        logits = self._compute_logits(torch.cat(pieces))
        if logits is None:  # not the rank whose answer is taken
            return [None if piece is None else hidden_states.new_empty(0) for piece in ready]
        rows = iter(logits.float().split([len(piece) for piece in pieces]))
        return [None if piece is None else judged(next(rows), wish) for piece, wish in zip(ready, wishes, strict=True)]


@torch.inference_mode()
def judged(logits: torch.Tensor, wish: Mapping[str, Any]) -> torch.Tensor:
    """What a request wants of its last logits (n, V): themselves, or (n, 2), the chosen ids and the model's confidence.

    wish: ``want`` is "rows", "argmax" or "coupled". ``tokens``: rows of the vocabulary after these are padding. For
    "coupled", ``temperature``, ``top_k``, ``top_p``, and ``names``, (seed, reply, position) of each position. ``rules``
    of each position: see ``decoding.constraint``. An id is -1 where the logits are not finite. Never raises: that would
    end the engine for everybody.
    """
    logits = logits.clone()
    logits[:, wish.get("tokens", logits.shape[-1]) :] = -torch.inf
    for row, rule in zip(logits, wish.get("rules", ())[-len(logits) :], strict=False):
        apply_rule(row, rule and Rule(*rule))
    if wish.get("want", "rows") == "rows":
        return logits
    highest = logits.amax(dim=-1)
    finite = torch.isfinite(highest)
    logits = torch.where(finite[:, None], logits, 0.0)
    chosen = logits.argmax(dim=-1)
    if wish["want"] == "coupled":
        sampling = SamplingSettings(wish["temperature"], wish["top_k"], wish["top_p"])
        chosen = coupled_choice(logits, sampling, wish["names"][-len(logits) :])
    confidence = 1.0 / (logits - logits.amax(dim=-1, keepdim=True)).exp().sum(dim=-1)
    return torch.stack([torch.where(finite, chosen, -1).float(), confidence], dim=-1)


def coupled_choice(
    logits: torch.Tensor, sampling: SamplingSettings, names: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """argmax(log p + G) of logits (n, V), on their device; ``names``: (seed, reply, position) of each row's noise."""
    p = transform(logits, sampling)
    return (torch.log(p.double()) + gumbel_rows(names, p.shape[-1], p.device)).argmax(dim=-1)


def _verifying(base: Any) -> Any:
    class Verifying(base):  # type: ignore[misc]
        is_pooling_model = True

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.pooler = VerifyPooler(self.compute_logits)

    return Verifying


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2VLMultiModalProcessor, info=Qwen2VLProcessingInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class VerifyingQwen2VL(_verifying(Qwen2VLForConditionalGeneration)):  # type: ignore[misc]
    """Qwen2-VL."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLMultiModalProcessor, info=Qwen2_5_VLProcessingInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class VerifyingQwen25VL(_verifying(Qwen2_5_VLForConditionalGeneration)):  # type: ignore[misc]
    """Qwen2.5-VL."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor, info=Qwen3VLProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class VerifyingQwen3VL(_verifying(Qwen3VLForConditionalGeneration)):  # type: ignore[misc]
    """Qwen3-VL."""


class VerifyingQwen2(_verifying(Qwen2ForCausalLM)):  # type: ignore[misc]
    """Qwen2 of text alone."""


class VerifyingQwen3(_verifying(Qwen3ForCausalLM)):  # type: ignore[misc]
    """Qwen3 of text alone."""


class VerifyingLlama(_verifying(LlamaForCausalLM)):  # type: ignore[misc]
    """Llama."""
