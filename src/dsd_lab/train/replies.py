# SPDX-License-Identifier: Apache-2.0
"""Greedy replies about pictures: many at once in the training of the pair, one by one for any Qwen2-VL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dsd_lab.train.forward import KeysValues, embed, language_forward, positions
from dsd_lab.train.tokenizer import EOS
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel

MAX_TOKENS = 64
_TOGETHER = 128


@torch.inference_mode()
def greedy_replies(
    model: Any,
    features: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = MAX_TOKENS,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """The greedy reply (ids with the end token) to each prompt about its picture.

    `features` are image tokens (N, IMAGE_TOKENS, hidden); `rows`: which of them each prompt shows (default: its own).
    """
    replies: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for n, prompt in enumerate(prompts):
        by_length[len(prompt)].append(n)
    for members in by_length.values():
        for first in range(0, len(members), _TOGETHER):
            some = members[first : first + _TOGETHER]
            tokens = features[some if rows is None else [rows[n] for n in some]].float()
            ids = torch.tensor([prompts[n] for n in some], device=features.device)
            for n, reply in zip(some, _decode(model, tokens, ids, max_tokens), strict=True):
                replies[n] = reply
    return replies


def _decode(model: Any, tokens: torch.Tensor, ids: torch.Tensor, limit: int) -> list[list[int]]:
    language = model.model.language_model
    hidden, cos, sin = embed(language, ids, tokens)
    past: KeysValues = []
    last = language_forward(language, hidden, cos, sin, past)[0][:, -1]
    place = positions(ids)[..., -1:]
    out: list[torch.Tensor] = []
    done = torch.zeros(len(ids), dtype=torch.bool, device=tokens.device)
    for _ in range(limit):
        chosen = model.lm_head(last).argmax(-1)
        out.append(chosen)
        done |= chosen == EOS
        if bool(done.all()):
            break
        place = place + 1
        cos, sin = language.rotary_emb(hidden, place)
        new = language.embed_tokens(chosen)[:, None]
        last = language_forward(language, new, cos[:, None], sin[:, None], past)[0][:, -1]
    rows = torch.stack(out, dim=1).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


class Speaker:
    """A model that answers greedily about pictures, uint8 (height, width, 3) RGB, one by one, as on the robot."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.model = model

    @classmethod
    def load(cls, settings: ModelSettings) -> Speaker:
        """The model of a directory or hub id; ModelError as of ``load_model``, ValueError if it reads no pictures."""
        model = load_model(settings)
        if not model.reads_pictures:
            raise ValueError(f"{settings.path} reads text alone: give a Qwen2-VL.")
        return cls(model)

    def replies(
        self, pictures: Sequence[np.ndarray], instructions: Sequence[str], report: Callable[[float], None] | None = None
    ) -> list[list[int]]:
        """The reply's tokens to each picture with its instruction, the end token included."""
        said = []
        for n, (picture, instruction) in enumerate(zip(pictures, instructions, strict=True)):
            sequence = self.model.prefill(picture, instruction)
            while len(sequence.tokens) < MAX_TOKENS and not self.ended(sequence.tokens):
                try:
                    sequence.append([int(sequence.next_logits().argmax())])
                except ContextError:
                    break
            said.append(list(sequence.tokens))
            if report is not None:
                report((n + 1) / len(pictures))
        return said

    def answer(self, pictures: Sequence[np.ndarray], instructions: Sequence[str]) -> list[str]:
        """The replies as texts."""
        return [self.model.decode_text(tokens) for tokens in self.replies(pictures, instructions)]

    def followed(
        self, pictures: Sequence[np.ndarray], instructions: Sequence[str], replies: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """What the model would say at each place of given replies in its own tokens."""
        said = []
        for picture, instruction, reply in zip(pictures, instructions, replies, strict=True):
            rows = self.model.prefill(picture, instruction).verify(list(reply)[:-1])
            said.append(rows.argmax(-1).tolist())
        return said

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether a reply came to its end by itself."""
        return bool(tokens) and tokens[-1] in self.model.eos_token_ids
