# SPDX-License-Identifier: Apache-2.0
"""A Llama in a GGUF file (format 2 and 3 of llama.cpp), read without transformers' reader.

That one takes the packages gguf and accelerate, and parses a file's strings four times: SmolLM2-135M took 25 s of
processor time, and takes 1.5 s here. The tokenizer of a SmolLM is built here, too, so that it is the same with every
version of transformers.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_ros.vlm.errors import ModelError

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's letters, by the file's type
_STRING, _ARRAY = 8, 9
_PLAIN = {0: np.float32, 1: np.float16}  # numpy's types, by the file's type of a tensor
_BLOCK = 32  # numbers that share a scale in the types below
_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}
_CONTROL = 3  # type of a special token
_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONFIG = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "embedding_length": "hidden_size", "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip


class _Tensor(NamedTuple):
    shape: tuple[int, ...]  # rows first, as torch has it
    kind: int
    place: int  # from the end of the table


class GgufFile:
    """An open file: ``metadata`` by name, and tensors."""

    def __init__(self, path: Path) -> None:
        """ModelError, ValueError, struct.error or UnicodeDecodeError for a file that is none."""
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, tensors, pairs = self._take("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"its format {version} is not 2 or 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(*self._take("<I"))
        self.tensors: dict[str, _Tensor] = {}
        for _ in range(tensors):
            name = self._string()
            shape = self._take(f"<{self._take('<I')[0] % 5}Q")
            self.tensors[name] = _Tensor(shape[::-1], *self._take("<IQ"))
        alignment = int(self.metadata.get("general.alignment", _BLOCK))
        self._start = -(-self._at // alignment) * alignment

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (size,) = self._take("<Q")
        if size > len(self._data) - self._at:
            raise ValueError("it is cut off")
        self._at += size
        return self._data[self._at - size : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(f"<{_SCALARS[kind]}")[0]
        inner, count = self._take("<IQ")
        if count > len(self._data) - self._at:
            raise ValueError("it is cut off")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        return list(self._take(f"<{count}{_SCALARS[inner]}"))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in float32; ModelError for a quantization that needs a package."""
        shape, kind, place = self.tensors[name]
        count, start = int(np.prod(shape)), self._start + place
        if kind in _PLAIN:
            values = np.frombuffer(self._data, _PLAIN[kind], count, start).astype(np.float32)
        elif kind in _BLOCK_BYTES:
            size = _BLOCK_BYTES[kind]
            blocks = np.frombuffer(self._data, np.uint8, count // _BLOCK * size, start).reshape(-1, size)
            values = _expanded(blocks, kind)
        else:
            values = self._expanded_by_package(kind, count, start)
        return torch.from_numpy(values.reshape(shape))

    def _expanded_by_package(self, kind: int, count: int, start: int) -> np.ndarray:
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{self.path} is quantized in a way that takes the package gguf; pip install gguf")
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        of = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[of]
        found: np.ndarray = dequantize(np.frombuffer(self._data, np.uint8, count // block * size, start), of)
        return found


def _expanded(blocks: np.ndarray, kind: int) -> Any:
    """Blocks (N, bytes) of 32 numbers as (N, 32) float32: a float16 scale, for Q4_1 a least value, then the numbers."""
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == _Q8_0:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    packed = blocks[:, 4 if kind == _Q4_1 else 2 :]
    numbers = np.concatenate((packed & 15, packed >> 4), 1)
    if kind == _Q4_0:
        return scale * (numbers.astype(np.int8) - np.int8(8)).astype(np.float32)
    return scale * numbers.astype(np.float32) + blocks[:, 2:4].copy().view(np.float16).astype(np.float32)


def read_llama(file: GgufFile, dtype: torch.dtype) -> Any:
    """The transformers model in a file, frozen; ModelError for one that is not a whole Llama."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = _config(file)
    config.dtype, config._attn_implementation = dtype, "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wanted, state = set(model.state_dict()), {}
    for name in file.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        ours = f"model.layers.{layer[1]}.{_LAYER.get(layer[2], '')}.{layer[3]}" if layer else _WHOLE.get(name, "")
        if ours not in wanted:
            raise ModelError(f"{file.path} holds the tensor {name!r}, which no Llama here has; use another model")
        tensor = file.tensor(name)
        if layer and layer[2] in ("attn_q", "attn_k"):  # llama.cpp has each head's halves interleaved
            heads = config.num_attention_heads if layer[2] == "attn_q" else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        state[ours] = tensor.to(dtype)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing = sorted(wanted - state.keys())
    if missing:
        raise ModelError(
            f"the weights in {file.path} lack {len(missing)} tensors, {missing[0]} among them; "
            "the files are incomplete, fetch them again"
        )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are no weights
    return model.eval().requires_grad_(False)


def _config(file: GgufFile) -> Any:
    from transformers import LlamaConfig

    told = {ours: file.metadata[f"llama.{name}"] for name, ours in _CONFIG.items() if f"llama.{name}" in file.metadata}
    theta = told.pop("rope_theta", 10_000.0)
    ends: dict[str, Any] = {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
    }
    return LlamaConfig(
        **told, **ends, rope_parameters={"rope_type": "default", "rope_theta": theta},
        vocab_size=file.tensors["token_embd.weight"].shape[0], tie_word_embeddings="output.weight" not in file.tensors,
    )  # fmt: skip


def read_tokenizer(file: GgufFile) -> Any:
    """The transformers tokenizer of a file: a SmolLM's is built here, any other by transformers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    facts = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    if (facts.get("model"), facts.get("pre")) != ("gpt2", "smollm"):
        return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    tokens, names = facts["tokens"], {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    pairs: Any = [tuple(merge.split(" ")) for merge in facts["merges"]]
    tokenizer: Any = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs, **names))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, facts["token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    ends = {
        f"{name}_token": tokens[facts[f"{name}_token_id"]] for name in ("bos", "eos") if f"{name}_token_id" in facts
    }
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)
