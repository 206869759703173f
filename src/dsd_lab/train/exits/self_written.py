# SPDX-License-Identifier: Apache-2.0
"""Conversations that a text model writes by itself, to train its exits on: no text of anybody else is needed.

After the beginning of a user's turn, a chat model writes a question as users ask them, and then its reply (Xu et al.,
Magpie, arXiv 2406.08464). Every second reply is greedy and the others are sampled, as in use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from dsd_lab.train.exits.backbones import Backbone, Example, Examples
from dsd_lab.train.frames import write_json
from dsd_lab.train.stages import Report
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.vlm.errors import ModelError

BLOCK = 32  # conversations that are written side by side
QUESTION_TOKENS = 96  # a longer question is dropped
REPLY_TOKENS = 128  # a longer reply ends there
_SAMPLING = SamplingSettings(1.0, top_p=0.9)  # small models say nonsense otherwise


def self_written_examples(
    backbone: Backbone, cache: Path, count: int, held_out: int, seed: int, report: Report
) -> tuple[Examples, Examples]:
    """Training and held-out examples, about ``count`` in all, of which at most a tenth is held out.

    Each block has a file in the cache, so that an interrupted run continues; equal seeds write equal blocks.
    """
    written: list[Example] = []
    for block in range(-(-count // BLOCK)):
        path = cache / backbone.fingerprint / f"written-{seed}-{block}.json"
        if not path.exists():
            report(f"the model writes conversations {block * BLOCK} to {(block + 1) * BLOCK}", block * BLOCK / count)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, [[example.ids, example.reply[0]] for example in _write(backbone, [seed, block])])
        written += [Example(ids, list(range(first, len(ids)))) for ids, first in json.loads(path.read_text())]
    held = max(1, min(held_out, len(written) // 10))
    if len(written) < 2:
        raise ModelError(f"{backbone.directory} writes no questions; name a file of conversations with --data")
    return Examples(written[:-held], backbone, 1 << 20), Examples(written[-held:], backbone, 1 << 20)


@torch.inference_mode()
def _write(backbone: Backbone, seed: list[int]) -> Iterator[Example]:
    """A block of conversations; rows leave the batch when they are done."""
    from transformers import DynamicCache

    texts = backbone.render([{"role": "user", "content": "\0"}], ask=True).split("\0")
    before, between = (backbone.tokenizer.encode(text, add_special_tokens=False) for text in texts)
    generator = torch.Generator(backbone.device).manual_seed(seed[0] * 1_000_003 + seed[1])
    rows: list[list[int]] = [list(before) for _ in range(BLOCK)]
    replies = [0] * BLOCK  # where each row's reply begins; 0: its question is not over
    alive, cache = list(range(BLOCK)), DynamicCache()
    fed = torch.tensor(rows, device=backbone.device)
    while alive:
        logits = backbone.hf(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        drawn = torch.multinomial(transform(logits, _SAMPLING), 1, generator=generator)[:, 0].tolist()
        kept = []
        for place, row in enumerate(alive):
            text = rows[row]
            if not replies[row] and drawn[place] == between[0]:
                replies[row] = len(text) + len(between)
            first = replies[row]
            token = int(logits[place].argmax()) if first and row % 2 == 0 else drawn[place]
            text.append(between[len(text) - first] if len(text) < first else token)
            most = first + REPLY_TOKENS if first else len(before) + QUESTION_TOKENS
            if len(text) < most and not (0 < first < len(text) and token == between[0]):
                kept.append(place)
        if kept:
            cache.batch_select_indices(torch.tensor(kept, device=backbone.device))
        alive = [alive[place] for place in kept]
        fed = torch.tensor([[rows[row][-1]] for row in alive], device=backbone.device)
    for row, first in zip(rows, replies, strict=True):
        if first and len(row) > first:
            yield Example(row, list(range(first, len(row))))
