"""The small tokenizer that both shipped models share, and the files beside their weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsd_lab.train.architecture import IMAGE_TOKENS, SPECIAL_TOKENS, VOCABULARY
from dsd_lab.worlds.phrases import all_instructions as all_instructions
from dsd_lab.worlds.phrases import instruction_for as instruction_for


def train_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of 512 tokens with Qwen2-VL's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits one by one, so that distances share their tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" Action:", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt_ids(tokenizer: Any, instruction: str) -> list[int]:
    """Token ids of the whole prompt, as the chat template renders it."""
    image = "<|image_pad|>" * IMAGE_TOKENS
    text = f"<|im_start|>user\n{instruction}<|vision_start|>{image}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def write_processor_files(folder: Path, tokenizer: Any) -> None:
    """Everything of a model directory but config, weights and card."""
    from dsd_ros.vlm.prompts import CHAT_TEMPLATE

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1024,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    pixels = IMAGE_TOKENS * 28 * 28
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": pixels,
            "max_pixels": pixels,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    _write(
        folder / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
            "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        },
    )
    _write(folder / "dsd.json", {"format": 1, "prompt": "{instruction}"})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
