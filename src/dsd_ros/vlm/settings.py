# SPDX-License-Identifier: Apache-2.0
"""Which model is loaded, and how. Loads no torch, for what only reads settings."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from dsd_ros.options import check_options, option
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.prompts import read_json

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "4bit")
PROMPT_HELP = (
    "how the model is asked: dsd or navila (config/prompts), or a JSON file as dsd.json; empty: the dsd.json beside "
    "its weights; draft and target need the same"
)
_UNFOLLOWED = (  # of generation_config.json: what decides on tokens in transformers' ``generate`` and not here
    "forced_eos_token_id", "stop_strings", "num_beams", "guidance_scale", "penalty_alpha", "dola_layers", "min_p",
    "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config", "token_healing",
)  # fmt: skip
_OFF_AT_ONE = ("num_beams", "guidance_scale", "typical_p")


def unfollowed_options(directory: Path) -> list[str]:
    """The options in a model's generation_config.json that replies do not follow; ModelError if it cannot be read."""
    found = generation_config(directory)
    return [name for name in _UNFOLLOWED if found.get(name) and not (found[name] == 1 and name in _OFF_AT_ONE)]


def generation_config(directory: Path) -> dict[str, object]:
    """A model's generation_config.json, empty if there is none; ModelError if it cannot be read."""
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


@dataclass(frozen=True)
class ModelSettings:
    """A model, its device and its precision; ModelError for a value out of range."""

    path: str = field(metadata={"help": "model directory or Hugging Face id"})
    device: str = option("cpu", "device of the model: cpu, cuda or cuda:N")
    dtype: str = option(DTYPES[0], "precision of the weights", choices=DTYPES)
    quantization: str = option("none", "for drafts: int8 (CPU alone, its fastest) or 4bit", choices=QUANTIZATIONS)
    threads: int = option(0, "CPU threads of this process's models; 0: torch's choice", 0)
    prompt: str = option("", PROMPT_HELP)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        if not self.path:
            raise ModelError("no model is named; give a model directory or a Hugging Face id")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ModelError(f"unknown device {self.device!r}; use cpu, cuda or cuda:N")
        check_options(self, ModelError)
        if self.threads < 0:
            raise ModelError(f"threads is {self.threads}; use 0 (torch's choice) or more")
        on_cpu = self.device == "cpu"
        if self.quantization == "int8" and not on_cpu:
            raise ModelError("int8 quantization is for the CPU; on CUDA choose 4bit")
        if self.quantization != "none" and on_cpu and self.dtype == "float16":
            raise ModelError(f"{self.quantization} quantization on the CPU needs dtype float32 or bfloat16, no float16")
