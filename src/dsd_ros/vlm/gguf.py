"""Reads a Llama from a GGUF file: configuration, weights as float32, tokenizer and chat template.

Needs the package ``gguf`` (``pip install "dsd-ros[text-model]"``). Matrices may have any of GGUF's types; they are
expanded when read. transformers reads such files too, but needs ``accelerate`` for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_ros.vlm.errors import ModelError

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufModel(NamedTuple):
    """The content of a file; ``tokenizer`` is the text of a ``tokenizer.json``."""

    config: Any
    weights: dict[str, torch.Tensor]
    tokenizer: str
    chat_template: str
    special_tokens: dict[str, str]


def read_gguf(path: Path) -> GgufModel:
    """Read a file; ModelError if it is not GGUF, holds another model than a Llama, or ``gguf`` is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{path} needs the package gguf to be read; pip install gguf")
    try:
        return _read(path)
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path} cannot be read as a GGUF model: {reason}") from error


def _read(path: Path) -> GgufModel:
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ModelError(f"{path} holds a model of type {kind!r}; only llama can be read from GGUF")
    scaling = [name for name in fields if name.startswith("llama.rope.scaling")]
    if scaling or any(tensor.name.startswith("rope_") for tensor in reader.tensors):
        raise ModelError(f"{path} scales its positions, which is not read from GGUF; use the safetensors model")
    heads = int(fields["llama.attention.head_count"])
    groups = int(fields.get("llama.attention.head_count_kv", heads))
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, part = _name(path, tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in ("attn_q", "attn_k"):
            values = _halves(values, heads if part == "attn_q" else groups)
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    width = int(fields["llama.embedding_length"])
    config = LlamaConfig(
        vocab_size=len(weights["model.embed_tokens.weight"]),
        hidden_size=width,
        intermediate_size=int(fields["llama.feed_forward_length"]),
        num_hidden_layers=int(fields["llama.block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=int(fields.get("llama.attention.key_length", width // heads)),
        attention_bias="model.layers.0.self_attn.q_proj.bias" in weights,
        max_position_embeddings=int(fields["llama.context_length"]),
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise ModelError(f"{path} has no chat template; use a model that was made for instructions")
    special = {"bos_token": str(tokenizer.bos_token or ""), "eos_token": str(tokenizer.eos_token or "")}
    return GgufModel(config, weights, tokenizer.backend_tokenizer.to_str(), template, special)


def _name(path: Path, name: str) -> tuple[str, str]:
    """A tensor's name in transformers, and its matrix' name in GGUF."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _OUTER:
        return f"{_OUTER[parts[0]]}.{parts[1]}", parts[0]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}", parts[2]
    raise ModelError(f"{path} has a tensor {name}, which no Llama has; use another file")


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in transformers' order; GGUF interleaves the two halves that a rotation mixes."""
    rows = values.reshape(heads, -1, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)
