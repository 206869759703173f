# SPDX-License-Identifier: Apache-2.0
"""Table models whose tokens have texts, and replies of a constrained target alone."""

from __future__ import annotations

import numpy as np
import torch
from table_model import TableModel
from tokenizers import Tokenizer, decoders, models

from dsd_ros.decoding.constraint import Constrainer, Constraint, ReplyForm
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings

WORDS = ("x", " ", "!", " !", "g", "o", " go", " no", " on", "n", "x!", "<end>")
FORM = ReplyForm(("!",), (" go", " go on", " no"), 6)


def worded_tokenizer(words: tuple[str, ...] = WORDS) -> Tokenizer:
    """A tokenizer of these tokens, byte-level, of which the last is special."""
    vocabulary = {word.replace(" ", "\u0120"): id_ for id_, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, words[0]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([words[-1]])
    return tokenizer


class WordedTable(TableModel):
    """A TableModel whose tokens are WORDS; the last ends a reply."""

    def __init__(self, seed: int = 0, **values) -> None:
        super().__init__(seed, len(WORDS), **values)
        self.tokenizer = worded_tokenizer()
        self.constrainer = Constrainer(self.tokenizer)

    def decode_text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token < len(WORDS)], skip_special_tokens=True)


def allowed_row(sequence, constraint: Constraint) -> torch.Tensor:
    """The logits (V,) after a sequence's tokens, masked by nothing but the constraint's rule."""
    row = sequence.next_logits().clone()
    rule = constraint.rule(constraint.state(sequence.tokens), len(sequence.tokens))
    for token in range(len(row)):
        if rule is not None and (token in rule.ids) != rule.only:
            row[token] = -torch.inf
    return row


def constrained_alone(
    model, image, instruction: str, settings: DecodeSettings, form: ReplyForm, number: int = 1
) -> list[int]:
    """Reply ``number`` of the constrained target, nothing of the protocol in between: greedy, or with shared noise."""
    constraint = model.constrainer.of(form, model.eos_token_ids)
    sequence = model.prefill(image, instruction)
    tokens = sequence.tokens
    while len(tokens) < settings.max_tokens and not model.eos_token_ids & set(tokens):
        row = allowed_row(sequence, constraint)
        if settings.sampling.greedy:
            token = int(row.argmax())
        else:
            token = choose(transform(row, settings.sampling), gumbel(settings.seed, number, len(tokens), len(row)))
        sequence.append([token])
    return list(tokens)


def law_of_replies(model, image, instruction: str, settings: DecodeSettings, form: ReplyForm) -> dict[tuple, float]:
    """The chance of each reply of the constrained target alone."""
    constraint = model.constrainer.of(form, model.eos_token_ids)
    open_, law = [((), 1.0)], {}
    prompt = model.prefill(image, instruction)
    while open_:
        tokens, chance = open_.pop()
        if len(tokens) == settings.max_tokens or (tokens and tokens[-1] in model.eos_token_ids):
            law[tokens] = chance
            continue
        sequence = prompt.fork()
        sequence.append(tokens)
        row = transform(allowed_row(sequence, constraint), settings.sampling).double().numpy()
        row = row / row.sum()
        open_ += [((*tokens, int(token)), chance * row[token]) for token in np.flatnonzero(row)]
    return law
