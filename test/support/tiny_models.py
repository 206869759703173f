# SPDX-License-Identifier: Apache-2.0
"""Tiny random Qwen2-VL, Qwen2.5-VL and Qwen3-VL directories for tests: complete, and loaded like any other model.

    make_tiny_model(directory, seed=0)                    # a "target"
    make_tiny_model(directory, seed=0, noise=0.15)        # its "draft": same weights, perturbed
    make_tiny_model(directory, seed=0, layers=1, vocab_rows=320)   # a smaller one, other padding
    make_tiny_model(directory, seed=0, family="qwen3_vl")          # or "qwen2_5_vl"

Weights depend on (seed, parameter name) alone, and padding rows come after the real ones, so that
models made with the same seed share what they have in common: a draft made from its target's seed
agrees with it often, not always. At temperature 1 such a draft of noise .05, .1, .15, .2, .3 has
about .86, .73, .62, .53, .39 of its tokens accepted (greedy .80, .59, .42, .35, .18); of one layer
instead of two, without noise, .52 (greedy .39).
The LM head is scaled so that distributions are neither flat nor peaked (about 3 nats), and what the
model answers depends on the image, the instruction and every token before. Replies are gibberish;
their end-of-reply token comes by chance.

The tokenizer is byte-level without merges (one token per byte, 256, then Qwen2-VL's special tokens)
and always the same: 263 tokens. ``other_tokenizer=True`` permutes it, for tests of tokenizers that
do not match.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dsd_ros.vlm.prompts import CHAT_TEMPLATE

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FAMILIES = {  # transformers' class, by model type
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
TOKENS = 256 + len(SPECIAL_TOKENS)


def make_tiny_model(
    directory: str | Path,
    seed: int = 0,
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab_rows: int = 264,
    noise: float = 0.0,
    noise_seed: int = 1,
    max_positions: int = 512,
    other_tokenizer: bool = False,
    family: str = "qwen2_vl",
) -> Path:
    """Write a whole model directory and return its path.

    hidden: width, a multiple of 32 (head size 16, half as many key/value heads as heads).
    vocab_rows: rows of embedding and LM head, 263 or more; what exceeds the tokenizer is padding.
    noise: relative size of the random change to every weight (0: none), drawn with ``noise_seed``.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if vocab_rows < TOKENS:
        raise ValueError(f"vocab_rows must be at least {TOKENS}")
    tokenizer = make_tokenizer(other_tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    kind = getattr(transformers, FAMILIES[family])
    text = {
        "vocab_size": vocab_rows,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 32,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 4]},
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
    }
    if family == "qwen3_vl":
        text["head_dim"] = 16
        text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        text = {key: value for key, value in text.items() if key not in ("bos_token_id", "eos_token_id")}
    config = kind.config_class(
        text_config=text,
        vision_config=_vision(family, hidden),
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, parameter.shape, seed, noise, noise_seed))
    model.generation_config.eos_token_id = [special["<|im_end|>"], special["<|endoftext|>"]]
    model.generation_config.pad_token_id = special["<|endoftext|>"]
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": max_positions,
        },
    )
    _write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 168 * 168},
            "patch_size": 16 if family == "qwen3_vl" else 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    )
    _write_json(directory / "dsd.json", {"format": 1, "prompt": "{instruction}"})
    return directory


def _vision(family: str, hidden: int) -> dict[str, object]:
    """The vision tower's configuration: windows of two by two tokens in Qwen2.5-VL, two deep features in Qwen3-VL."""
    if family == "qwen2_vl":
        return {"depth": 1, "embed_dim": 32, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        return tower | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return tower | {"patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}


def make_tokenizer(other: bool = False) -> Tokenizer:
    """A byte-level tokenizer of ``TOKENS`` tokens; ``other`` gives the bytes different ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if other:
        alphabet.reverse()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def _weights(name: str, shape: torch.Size, seed: int, noise: float, noise_seed: int) -> torch.Tensor:
    if "norm" in name or name.endswith(("ln_q.weight", "ln_q.bias")):
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    if len(shape) == 1:
        scale = 0.1
    elif "embed_tokens" in name:
        scale = 1.0
    else:
        scale = 1.0 / math.sqrt(math.prod(shape[1:]))
        if "lm_head" in name:
            scale *= 2.5
        elif "q_proj" in name or "k_proj" in name:
            scale *= 1.5
    weights = _normal(name, shape, seed)
    if noise:
        weights = weights + noise * _normal(name, shape, 1_000_003 * noise_seed + seed + 17)
    return weights * scale


def _normal(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Standard normal numbers by (seed, name); rows past TOKENS do not shift the others."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if ("embed_tokens" in name or "lm_head" in name) and shape[0] > TOKENS:
        real = torch.randn((TOKENS, *shape[1:]), generator=generator)
        return torch.cat([real, torch.randn((shape[0] - TOKENS, *shape[1:]), generator=generator)])
    return torch.randn(tuple(shape), generator=generator)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
