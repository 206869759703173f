# SPDX-License-Identifier: Apache-2.0
"""vLLM as the target. Nothing here is imported unless a backend of vLLM is asked for."""

from __future__ import annotations

ARCHITECTURES = {  # by model type
    "qwen2_vl": "VerifyingQwen2VL",
    "qwen2_5_vl": "VerifyingQwen25VL",
    "qwen3_vl": "VerifyingQwen3VL",
    "llama": "VerifyingLlama",
    "qwen2": "VerifyingQwen2",
    "qwen3": "VerifyingQwen3",
}


def register() -> None:
    """vLLM's plug-in (entry point group ``vllm.general_plugins``), which each of its processes calls."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"dsd_ros.cloud.vllm.worker:{name}")
