"""Instructions in many words, and the small tokenizer that both shipped models share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dsd_ros.robot.world import COLOURS, KINDS

from .architecture import IMAGE_TOKENS, SPECIAL_TOKENS, VOCABULARY

PHRASES = (
    "find the {}",
    "find me the {}",
    "find a {}",
    "go to the {}",
    "go find the {}",
    "walk to the {}",
    "walk over to the {}",
    "walk up to the {}",
    "move to the {}",
    "move towards the {}",
    "head to the {}",
    "head for the {}",
    "head over to the {}",
    "look for the {}",
    "search for the {}",
    "seek the {}",
    "locate the {}",
    "approach the {}",
    "reach the {}",
    "get to the {}",
    "navigate to the {}",
    "run to the {}",
    "come to the {}",
    "bring yourself to the {}",
    "stop at the {}",
    "stop in front of the {}",
    "stand by the {}",
    "stand next to the {}",
    "where is the {}",
    "show me the {}",
    "take me to the {}",
    "lead me to the {}",
    "I want the {}",
    "I need the {}",
    "the {}",
    "your goal is the {}",
    "the goal is the {}",
    "drive to the {}",
    "step up to the {}",
    "spot the {} and go there",
    "find the {} and stop there",
    "look around and find the {}",
    "look around for the {}",
    "there is a {} here, find it",
    "go to the {} and wait",
)
_OPENINGS = ("please ", "now ", "robot, ", "could you ", "can you ", "then ", "Go2, ")


def instruction_for(goal: str, rng: np.random.Generator) -> str:
    """One of the ways to ask for a goal called "colour kind"; plain "find the" most often."""
    phrase = PHRASES[0] if rng.random() < 0.25 else PHRASES[int(rng.integers(len(PHRASES)))]
    opening = str(rng.choice(_OPENINGS)) if rng.random() < 0.15 else ""
    ending = str(rng.choice(("", ".", "!", ", please"))) if rng.random() < 0.15 else ""
    text = opening + phrase.format(goal) + ending
    return text[0].upper() + text[1:] if rng.random() < 0.15 else text


def all_instructions() -> list[str]:
    """Every phrase with every goal, for the tokenizer's training."""
    goals = [f"{colour} {kind}" for colour in COLOURS for kind in KINDS]
    return [
        f"{opening}{phrase}".format(goal)
        for opening in ("", *_OPENINGS)
        for phrase in PHRASES
        for goal in goals[:: 1 if not opening else 13]
    ]


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
    text = (
        f"<|im_start|>user\n{instruction}<|vision_start|>{image}<|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
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
