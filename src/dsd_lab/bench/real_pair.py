# SPDX-License-Identifier: Apache-2.0
"""Writes a draft and a target of a published size that agree on most tokens, though nobody has trained them.

Weights are random and depend on their name alone, so both models share what they both have: the draft is the target's
first layers, and the target's later layers add little (``LATER``). Random logits would be nearly tied, which tells two
models apart by their rounding; so the embeddings, which are the LM head as well, make a few tokens likely after each:

* A token's row is (A, B). Four tokens share A, four others share B, with the sign of two of them turned.
* The final norm turns the sign of the second half, so a token speaks for A . A' - B . B': not for itself, but for the
  three that share its A, and the two whose B is opposite.
* Which of these five follows is decided by what the layers add: picture, instruction and reply so far.
"""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dsd_ros.vlm.loading import quiet_transformers
from dsd_ros.vlm.prompts import CHAT_TEMPLATE, DSD_FORMAT

SHARD_BYTES = 2_000_000_000
LATER = 0.05  # of the target's layers that the draft lacks: what they add, as a share of the others
SPECIAL_TOKENS = {  # of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, after 151 643 ordinary ones
    "<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|vision_start|>": 9, "<|vision_end|>": 10,
    "<|vision_pad|>": 11, "<|image_pad|>": 12, "<|video_pad|>": 13,
}  # fmt: skip
_ORDINARY = 151_643
_ROW = 0.55  # root mean square of an embedding; what a layer adds has about as much
_TOP = 20.0  # about the logit of the likeliest tokens
_ATTENTION = {"q_proj": 4.0, "o_proj": 2.0}  # few tokens are attended to, and they matter: picture and reply so far
_SHARED = 4  # tokens that have half a row in common


def write_pair(
    size: dict[str, Any], directory: Path, *, draft_layers: int, later: float = LATER, shard: int = SHARD_BYTES
) -> tuple[Path, Path]:
    """Write ``directory``/draft and ``directory``/target in bfloat16; their paths.

    size: a configuration of ``gpu_models.read_sizes``. draft_layers: of the decoder. shard: bytes of a file at most.
    Takes memory for about two files.
    """
    made = []
    for name, layers in (("draft", draft_layers), ("target", size["text_config"]["num_hidden_layers"])):
        path = directory / name
        path.mkdir(parents=True, exist_ok=True)
        ordinary = min(_ORDINARY, size["text_config"]["vocab_size"] - len(SPECIAL_TOKENS) - 6)
        words = _tokenizer(ordinary)
        words.save(str(path / "tokenizer.json"))
        model = _meta_model(size, layers, {token: words.token_to_id(token) for token in SPECIAL_TOKENS})
        model.config.save_pretrained(path)
        _write_weights(model, path, draft_layers, later, shard)
        _write_texts(path, size["vision_config"]["patch_size"])
        made.append(path)
    return made[0], made[1]


def _meta_model(size: dict[str, Any], layers: int, tokens: dict[str, int]) -> Any:
    """The transformers model without memory for its weights."""
    import transformers

    given = copy.deepcopy(size)
    given["text_config"] |= {"num_hidden_layers": layers, "eos_token_id": tokens["<|im_end|>"]}
    for kind in ("image", "video"):
        given[f"{kind}_token_id"] = tokens[f"<|{kind}_pad|>"]
    for end in ("start", "end"):
        given[f"vision_{end}_token_id"] = tokens[f"<|vision_{end}|>"]
    kind = getattr(transformers, given.pop("architecture"))
    with quiet_transformers(), torch.device("meta"):
        config = kind.config_class(**given, architectures=[kind.__name__], dtype="bfloat16")
        return kind(config)


def _tokenizer(ordinary: int) -> Tokenizer:
    """Byte level without merges: 256 bytes, words that no text is cut into, and the family's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {symbol: number for number, symbol in enumerate(alphabet)}
    words |= {f"Ġw{number}": number for number in range(len(alphabet), ordinary)}
    words |= {f"<|unused_{number}|>": ordinary + number for number in range(max(SPECIAL_TOKENS.values()))}
    words = {word: number for word, number in words.items() if number - ordinary not in SPECIAL_TOKENS.values()}
    words |= {token: ordinary + number for token, number in SPECIAL_TOKENS.items()}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _write_weights(model: Any, path: Path, shared_layers: int, later: float, shard: int) -> None:
    """Write the weights of a model on the meta device, a file after the other."""
    tied = model.config.tie_word_embeddings
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if not (tied and "lm_head" in name)}
    groups: list[list[str]] = [[]]
    room = shard
    for name, shape in shapes.items():
        if groups[-1] and 2 * shape.numel() > room:
            groups.append([])
            room = shard
        groups[-1].append(name)
        room -= 2 * shape.numel()
    hidden = model.config.get_text_config().hidden_size
    # Qwen2-VL's published files leave out this part of a name.
    part = "model.language_model." if model.config.model_type == "qwen2_vl" else ""
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name in group:
            stored = name.replace(part, "model.").replace("model.visual.", "visual.") if part else name
            tensors[stored] = _weight(name, shapes[name], hidden, shared_layers, later)
            weight_map[stored] = file
        save_file(tensors, path / file, metadata={"format": "pt"})
    total = 2 * sum(shape.numel() for shape in shapes.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _weight(name: str, shape: torch.Size, hidden: int, shared_layers: int, later: float) -> torch.Tensor:
    """The bfloat16 weights of that name."""
    half = hidden // 2
    if name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        return _embeddings(shape)
    if name == "model.language_model.norm.weight":
        gain = torch.full(shape, _TOP / (half * _ROW**2))
        gain[half:] *= -1
        return gain.bfloat16()
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if len(shape) == 1:  # a norm; queries that are normed must still choose
        return torch.full(shape, 2.5 if name.endswith("q_norm.weight") else 1.0, dtype=torch.bfloat16)
    scale = 0.8 / (shape[1:].numel() if "patch_embed" in name else hidden) ** 0.5
    parts = name.split(".")
    if parts[1] == "language_model":
        if parts[4] == "self_attn":
            scale *= _ATTENTION.get(parts[5], 1.0)
        if parts[5] in ("o_proj", "down_proj") and int(parts[3]) >= shared_layers:
            scale *= later
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, scale, generator=_generator(name))


def _embeddings(shape: torch.Size) -> torch.Tensor:
    """Rows (A, B), see the module."""
    rows, half = shape[0], shape[1] // 2
    generator = _generator("embeddings")
    numbers = torch.arange(rows)
    found = torch.empty(shape, dtype=torch.bfloat16)
    for start, order in ((0, numbers), (half, torch.randperm(rows, generator=generator))):
        codes = torch.empty(rows // _SHARED + 1, half, dtype=torch.bfloat16).normal_(0, _ROW, generator=generator)
        found[:, start : start + half] = codes[order // _SHARED]
    found[numbers, half:] *= torch.where(order % 2 == 0, 1, -1)[:, None].bfloat16()
    return found


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _write_texts(path: Path, patch_size: int) -> None:
    """What a model directory holds beside weights, configuration and tokenizer."""
    pixels = (2 * patch_size) ** 2
    _write_json(
        path / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * pixels, "max_pixels": 1280 * pixels,
            "patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2,
        },
    )  # fmt: skip
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(path / "tokenizer_config.json", names)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(path / "dsd.json", {"format": DSD_FORMAT, "prompt": "{instruction}"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
