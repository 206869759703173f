"""Many greedy replies at once, from cached image tokens: for distillation, roll-outs and figures."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from .forward import attend, norm, rotate
from .language_stage import EOS, Batch, Example, batches, collate, embed, positions

Past = list[tuple[torch.Tensor, torch.Tensor]]


def forward_cached(
    language: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: Past
) -> torch.Tensor:
    """As `language_forward`, behind keys and values that `past` holds and is extended by."""
    count, length, _ = hidden.shape
    causal = torch.full((length, length), -1e4).triu(1) if length > 1 else None
    for index, layer in enumerate(language.layers):
        attention = layer.self_attn
        normed = norm(layer.input_layernorm, hidden)
        q, k, v = (
            linear(normed).view(count, length, -1, attention.head_dim).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if index < len(past):
            k, v = torch.cat((past[index][0], k), 2), torch.cat((past[index][1], v), 2)
            past[index] = (k, v)
        else:
            past.append((k, v))
        groups = attention.num_key_value_groups
        out = attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), causal)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).reshape(count, length, -1))
        hidden = hidden + layer.mlp(norm(layer.post_attention_layernorm, hidden))
    return norm(language.norm, hidden)


@torch.inference_mode()
def greedy_replies(
    model: Any,
    features: torch.Tensor,
    prompts: list[list[int]],
    project: nn.Linear | None = None,
    max_tokens: int = 64,
    size: int = 128,
) -> list[list[int]]:
    """The greedy reply (ids with the end token) to each prompt about its image tokens."""
    replies: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for n, prompt in enumerate(prompts):
        by_length[len(prompt)].append(n)
    for members in by_length.values():
        for span in batches(len(members), size):
            some = members[span.start : span.stop]
            tokens = features[some].float()
            if project is not None:
                tokens = project(tokens)
            for n, reply in zip(
                some, _decode(model, tokens, prompts, some, max_tokens), strict=True
            ):
                replies[n] = reply
    return replies


def _decode(
    model: Any, tokens: torch.Tensor, prompts: list[list[int]], some: list[int], limit: int
) -> list[list[int]]:
    language = model.model.language_model
    empty = [Example(0, None, [EOS])] * len(some)
    batch: Batch = collate(empty, [prompts[n] for n in some])
    hidden, cos, sin = embed(language, batch, tokens)
    past: Past = []
    last = forward_cached(language, hidden, cos, sin, past)[:, -1]
    start = batch.ids.shape[1]
    out: list[torch.Tensor] = []
    done = torch.zeros(len(some), dtype=torch.bool)
    for step in range(limit):
        chosen = model.lm_head(last).argmax(-1)
        out.append(chosen)
        done |= chosen == EOS
        if bool(done.all()):
            break
        place = positions(batch.image_at, start + step + 1)[..., -1:]
        cos, sin = language.rotary_emb(hidden, place)
        new = language.embed_tokens(chosen)[:, None]
        last = forward_cached(language, new, cos[:, None], sin[:, None], past)[:, -1]
    rows = torch.stack(out, dim=1).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@torch.inference_mode()
def followed(
    model: Any,
    features: torch.Tensor,
    prompts: list[list[int]],
    replies: list[list[int]],
    project: nn.Linear | None = None,
    size: int = 128,
) -> list[list[int]]:
    """What a model would have said at each place of given replies (teacher forced, greedy)."""
    language = model.model.language_model
    said: list[list[int]] = []
    for span in batches(len(prompts), size):
        some = list(span)
        examples = [Example(0, None, replies[n]) for n in some]
        batch = collate(examples, [prompts[n] for n in some])
        tokens = features[some].float()
        if project is not None:
            tokens = project(tokens)
        hidden = forward_cached(language, *embed(language, batch, tokens), [])
        best = model.lm_head(hidden).argmax(-1)
        for row, n in enumerate(some):
            first = len(prompts[n]) - 1
            said.append(best[row, first : first + len(replies[n])].tolist())
    return said


def acceptance(
    said: list[list[int]], replies: list[list[int]], gamma: int = 4
) -> tuple[float, float]:
    """Greedy speculative decoding of the target's replies by what the draft would have said.

    Returns the share of drafted tokens that were accepted, and the tokens per round of the target.
    """
    drafted = accepted = rounds = tokens = 0
    for guess, reply in zip(said, replies, strict=True):
        place = 0
        while place < len(reply):
            width = min(gamma, len(reply) - place)
            run = 0
            while run < width and guess[place + run] == reply[place + run]:
                run += 1
            drafted += width
            accepted += run
            rounds += 1
            place += run + 1
        tokens += len(reply)
    return accepted / max(drafted, 1), tokens / max(rounds, 1)
