# SPDX-License-Identifier: Apache-2.0
"""Tiny random text-only models for tests, with the tokenizer of ``tiny_models``.

make_tiny_text(directory, seed=0)               # a Llama: tied embeddings, grouped keys, no biases
make_tiny_text(directory, seed=0, noise=0.1)    # its draft
make_tiny_text(directory, seed=0, kind="qwen2") # biases, an LM head of its own
write_gguf(directory, path)                     # the Llama as a GGUF file; needs the package gguf
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_models import SPECIAL_TOKENS, TOKENS, _weights, _write_json, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

TEXT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_text(
    directory: str | Path, seed: int = 0, *, kind: str = "llama", noise: float = 0.0, max_positions: int = 512
) -> Path:
    """Write a whole model directory and return its path; ``noise`` as of ``make_tiny_model``."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    options = {
        "vocab_size": TOKENS + 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "tie_word_embeddings": kind == "llama",
    }
    llama = kind == "llama"
    model = LlamaForCausalLM(LlamaConfig(**options)) if llama else Qwen2ForCausalLM(Qwen2Config(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, parameter.shape, seed, noise, 1))
        if llama:  # which is its LM head too
            model.model.embed_tokens.weight.mul_(0.3)
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    tokens = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    _write_json(directory / "tokenizer_config.json", tokens)
    return directory


def write_gguf(directory: Path, path: Path, architecture: str = "llama") -> Path:
    """A tiny Llama's directory as one file, written as llama.cpp's converter does."""
    from gguf import GGUFWriter
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    tokenizer = make_tokenizer()
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    # No converter expects a tokenizer without merges: the row that is padding gets one.
    tokens = [tokenizer.id_to_token(i) or "" for i in range(TOKENS)] + ["ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(TEXT_TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
    }
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.float().numpy()
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "attn_q" in name or "attn_k" in name:
            heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            shape = values.shape
            values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
            values = values.swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
