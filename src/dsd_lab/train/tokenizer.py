# SPDX-License-Identifier: Apache-2.0
"""The small tokenizer that the pair shares, its prompt, and the files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dsd_lab.train.frames import COLUMNS, ROWS
from dsd_ros.vlm.prompts import CHAT_TEMPLATE

VOCABULARY = 512
IMAGE_TOKENS = ROWS * COLUMNS
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
EOS = SPECIAL_TOKENS.index("<|im_end|>")
IMAGE = SPECIAL_TOKENS.index("<|image_pad|>")
# Qwen2-VL's image normalization (that of CLIP).
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def train_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer`; distances share their tokens, digit by digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    cut = [
        pre_tokenizers.Split(" Action:", "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def kept_tokenizer(path: Path, texts: Iterable[str]) -> Any:
    """The tokenizer in a file, trained on the texts where there is none yet."""
    from tokenizers import Tokenizer

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        train_tokenizer(texts).save(str(part))
        part.replace(path)
    return Tokenizer.from_file(str(path))


def prompt_ids(tokenizer: Any, instructions: Sequence[str]) -> list[list[int]]:
    """Token ids of the prompts for one picture each, as the chat template renders them."""
    picture = f"<|vision_start|>{'<|image_pad|>' * IMAGE_TOKENS}<|vision_end|>"
    texts = [f"<|im_start|>user\n{one}{picture}<|im_end|>\n<|im_start|>assistant\n" for one in instructions]
    return [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]


def write_processor_files(folder: Path, tokenizer: Any) -> None:
    """Write everything of the pair's model directories but config, weights and card."""
    pixels = IMAGE_TOKENS * 28 * 28
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": pixels,
        "max_pixels": pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "generation_config.json", {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0})
    _write(folder / "preprocessor_config.json", preprocessor)
    _write(folder / "dsd.json", {"format": 1, "prompt": "{instruction}"})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
