"""A decoder layer's arithmetic in few operations, for models whose passes are mostly overhead.

A small draft spends more time between operations than in them. Where transformers' layer is plain
(unquantized, SiLU), the same mathematics is done on its own weights with one matrix for queries,
keys and values, one for both halves of the MLP's input, and rotations by a roll.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Rotations = tuple[torch.Tensor, torch.Tensor]


def lean_rotations(rotations: Rotations) -> Rotations:
    """Cosines and sines (batch, n, head size) as ``LeanLayer`` wants them, (batch, n, 1, head size).

    The sines' first half is negated: rotating half is then a roll, whose result needs no sign.
    """
    cos, sin = rotations
    half = sin.shape[-1] // 2
    return cos.unsqueeze(2), torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(2)


class LeanLayer:
    """Stands in for a transformers Qwen2-VL, Qwen2 or Llama decoder layer, whose weights it shares."""

    def __init__(self, layer: Any) -> None:
        """``layer``: one that ``fits``. Its matrices become views of the joined ones."""
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._size: int = attention.head_dim
        self._queries: int = attention.q_proj.out_features // self._size
        self._keys: int = attention.k_proj.out_features // self._size
        self._scale: float = attention.scaling
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv, self._qkv_bias = _join(*projections)
        self._gate_up, _ = _join(mlp.gate_proj, mlp.up_proj)
        self._out = attention.o_proj.weight
        self._down = mlp.down_proj.weight
        self._norm, self._norm2 = layer.input_layernorm, layer.post_attention_layernorm

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether all of a layer's matrices are plain and its parts are those computed here."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return (
            all(type(linear) is torch.nn.Linear for linear in (*projections, *others))
            and len({linear.bias is None for linear in projections}) == 1
            and all(linear.bias is None for linear in others)
            and mlp.config.hidden_act == "silu"
            and getattr(attention, "sliding_window", None) is None  # Llama knows no such thing
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any,
        position_embeddings: Rotations,
        **_: object,
    ) -> torch.Tensor:
        """Hidden states (batch, n, hidden size) in and out; arguments as of transformers' layer.

        ``attention_mask`` (batch or 1, 1, n, all) is True where a row attends; None means causal,
        which for one row is everything. Rotations are those of ``lean_rotations``.
        """
        batch, count, _width = hidden.shape
        queries, keys = self._queries, self._keys
        cos, sin = position_embeddings
        joined = functional.linear(rms_norm(self._norm, hidden), self._qkv, self._qkv_bias)
        heads = joined.view(batch, count, queries + 2 * keys, self._size)
        turned = heads[:, :, : queries + keys]
        turned = torch.addcmul(turned * cos, turned.roll(self._size // 2, -1), sin)
        query = turned[:, :, :queries].transpose(1, 2)
        all_keys, all_values = past_key_values.update(
            turned[:, :, queries:].transpose(1, 2), heads[:, :, queries + keys :].transpose(1, 2), self._index
        )
        mixed = self._attend(query, all_keys, all_values, attention_mask)
        hidden = hidden + functional.linear(mixed.reshape(batch, count, -1), self._out)
        both = functional.linear(rms_norm(self._norm2, hidden), self._gate_up)
        gate, up = both.chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, self._down)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of (batch, heads, n, head size); the result is (batch, n, heads, head size)."""
        batch, heads, count, size = query.shape
        attend = functional.scaled_dot_product_attention
        if mask is None and count > 1:
            groups = heads != self._keys
            mixed = attend(query, keys, values, is_causal=True, scale=self._scale, enable_gqa=groups)
            return mixed.transpose(1, 2)
        # Heads that share keys become rows of one head, so that no key is ever copied.
        shared = heads // self._keys
        rows = query.reshape(batch, self._keys, shared * count, size)
        if mask is not None and count > 1:
            mask = mask.repeat(1, 1, shared, 1)
        mixed = attend(rows, keys, values, attn_mask=mask, scale=self._scale)
        return mixed.reshape(batch, heads, count, size).transpose(1, 2)


def rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What a transformers RMS norm does, in one operation."""
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _join(*linears: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The matrices of linears with one input as one, of which each one's own becomes a view."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.data for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias
