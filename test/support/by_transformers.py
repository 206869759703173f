# SPDX-License-Identifier: Apache-2.0
"""What transformers' own ``generate``, and its processors, make of a model and its generation_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.sampling import transform

Change = Callable[[Sequence[int], torch.Tensor], torch.Tensor]  # of logits (V,) after a reply's tokens


class _Stock(GenerationMixin):
    config = SimpleNamespace(is_encoder_decoder=False)


def processors(config: Mapping[str, object], ends: Sequence[int], prompt: Sequence[int]) -> Change:
    """The changes that transformers makes to a row after the prompt and a reply."""
    generation, asked = GenerationConfig(**config, eos_token_id=list(ends)), torch.tensor([list(prompt)])
    generation._eos_token_tensor = torch.tensor(list(ends))
    stock = _Stock()._get_logits_processor(generation, len(prompt), encoder_input_ids=asked, device="cpu")
    return lambda reply, row: stock(torch.tensor([[*prompt, *reply]]), row[None].clone())[0]


class _Also(LogitsProcessor):
    def __init__(self, prompt_length: int, change: Change) -> None:
        self._prompt_length, self._change = prompt_length, change

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._change(input_ids[0, self._prompt_length :].tolist(), scores[0])[None]


def generated(model, image, instruction: str, settings, number: int = 1, constraint=None) -> list[int]:
    """Reply ``number`` as ``generate`` gives it by the generation_config.json of the model's folder.

    What it does not know, processors after its own do: padding is no token, a constraint, shared noise.
    """
    shown, count = {}, 0
    if image is not None:
        pixels, grid = model.images(image)
        shown, count = {"pixel_values": pixels, "image_grid_thw": grid}, int(grid.prod()) // model.images.merge_size**2
        model.hf.model.rope_deltas = None
    ids = model.prompt_tokens(instruction, count)
    known = torch.arange(model.vocab_size) < model.tokenizer.get_vocab_size(with_added_tokens=True)
    rules: list[Change] = [lambda _, row: row.where(known, -torch.inf)]
    if constraint is not None:
        rules.append(lambda reply, row: constraint.mask(row[None], reply)[0])
    if not settings.sampling.greedy:
        rules.append(
            lambda reply, row: (
                transform(row, settings.sampling).double().log()
                + torch.tensor(gumbel(settings.seed, number, len(reply), len(row)))
            ).float()
        )
    asked = torch.tensor([ids])
    if shown:
        shown["mm_token_type_ids"] = (asked == model.hf.config.image_token_id).int()
    found = model.hf.generate(
        input_ids=asked,
        **shown,
        attention_mask=torch.ones_like(asked),
        logits_processor=LogitsProcessorList(_Also(len(ids), rule) for rule in rules),
        max_new_tokens=settings.max_tokens,
        do_sample=False,
    )
    return found[0, len(ids) :].tolist()
