"""Many greedy replies at once, from cached image tokens: for distillation, roll-outs and figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dsd_lab.train.architecture import IMAGE_TOKENS
from dsd_lab.train.batches import EOS, IMAGE, NOTHING, Batch, Ragged, assemble
from dsd_lab.train.forward import attend, norm, rotate
from dsd_lab.train.language_stage import batches, embed, positions

Past = list[tuple[torch.Tensor, torch.Tensor]]


def forward_cached(
    language: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: Past
) -> torch.Tensor:
    """As `language_forward`, behind keys and values that `past` holds and is extended by."""
    count, length, _ = hidden.shape
    causal = None
    if length > 1:
        causal = torch.full((length, length), -1e4, device=hidden.device).triu(1)
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
    pictures: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """The greedy reply (ids with the end token) to each prompt about its image tokens.

    `features` (N, IMAGE_TOKENS, hidden) on the model's device; `pictures`: which of them a prompt shows, oldest
    first (the one of its own number by default).
    """
    replies: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for n, prompt in enumerate(prompts):
        by_length[len(prompt)].append(n)
    for members in by_length.values():
        for span in batches(len(members), size):
            some = members[span.start : span.stop]
            batch = _rows([prompts[n] for n in some], [[EOS]] * len(some), features.device)
            tokens = _features(features, some, pictures, project)
            for n, reply in zip(some, _decode(model, tokens, batch, max_tokens), strict=True):
                replies[n] = reply
    return replies


def _rows(prompts: list[list[int]], replies: list[list[int]], device: torch.device) -> Batch:
    """A batch whose pictures are chosen elsewhere."""
    asked, said = Ragged(prompts), Ragged(replies)
    runs = np.zeros(max(int((asked.flat == IMAGE).sum()) // IMAGE_TOKENS, 1), np.int64)
    classes = np.zeros((len(prompts), len(NOTHING)), np.int64)
    batch = assemble((asked.flat, asked.lengths), (said.flat, said.lengths), runs, classes)
    return batch.to(device)


def _features(
    features: torch.Tensor, some: list[int], pictures: Sequence[Sequence[int]] | None, project: nn.Linear | None
) -> torch.Tensor:
    rows = some if pictures is None else [row for n in some for row in pictures[n]]
    tokens = features[torch.tensor(rows, device=features.device)].float()
    return tokens if project is None else project(tokens)


def _decode(model: Any, tokens: torch.Tensor, batch: Batch, limit: int) -> list[list[int]]:
    language = model.model.language_model
    hidden, cos, sin = embed(language, batch, tokens)
    past: Past = []
    last = forward_cached(language, hidden, cos, sin, past)[:, -1]
    place = positions(batch.ids)[..., -1:]
    out: list[torch.Tensor] = []
    done = torch.zeros(len(batch.ids), dtype=torch.bool, device=tokens.device)
    for _ in range(limit):
        chosen = model.lm_head(last).argmax(-1)
        out.append(chosen)
        done |= chosen == EOS
        if bool(done.all()):
            break
        place = place + 1
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
    pictures: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """What a model would have said at each place of given replies (teacher forced, greedy).

    `features` and `pictures` as of `greedy_replies`.
    """
    language = model.model.language_model
    said: list[list[int]] = []
    for span in batches(len(prompts), size):
        some = list(span)
        batch = _rows([prompts[n] for n in some], [replies[n] for n in some], features.device)
        tokens = _features(features, some, pictures, project)
        hidden = forward_cached(language, *embed(language, batch, tokens), [])
        best = model.lm_head(hidden.flatten(0, 1)[batch.wanted]).argmax(-1).cpu()
        said += [part.tolist() for part in best.split([len(replies[n]) for n in some])]
    return said


def acceptance(said: list[list[int]], replies: list[list[int]], gamma: int = 4) -> tuple[float, float]:
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
