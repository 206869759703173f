# SPDX-License-Identifier: Apache-2.0
"""What a model's generation_config.json says of the next token by the tokens before it, as transformers applies it.

A repetition penalty, suppressed tokens, n-grams that must not repeat: they follow from the tokens of prompt and reply
alone. So they count in every mode, for early exits and for each node of a tree, before a constraint and before
temperature, top-k and top-p. Source: transformers' ``GenerationMixin._get_logits_processor``, whose order this is. Its
classes take one row at a time, and up to 10 ms for one of 150 000 logits; here all rows of a pass are changed at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

if TYPE_CHECKING:
    from dsd_ros.decoding.constraint import Constraint

Penalty = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Words = Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]


class TokenOptions(msgspec.Struct, frozen=True):
    """The options that need nothing but tokens, as generation_config.json has them; each is off by default."""

    sequence_bias: tuple[tuple[Words, float], ...] = ()
    encoder_repetition_penalty: Penalty = 1.0  # without an encoder the prompt stands for what it read
    repetition_penalty: Penalty = 1.0
    no_repeat_ngram_size: Size = 0
    encoder_no_repeat_ngram_size: Size = 0
    bad_words_ids: tuple[Words, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, object]) -> TokenOptions | None:
        """Those that a generation_config.json turns on; None if there is none. ValueError for what is no option."""
        try:
            options = msgspec.convert({name: value for name, value in config.items() if value is not None}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        return options if options.names else None

    @property
    def names(self) -> list[str]:
        """The names of those that are on."""
        off = TokenOptions()
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(off, name)]


class LogitsProcessor:
    """The options for all replies to one prompt. Holds no state of any reply; for any thread."""

    def __init__(
        self, options: TokenOptions, ends: Collection[int], prompt: Sequence[int], device: torch.device | None = None
    ) -> None:
        """``ends``: the tokens that end a reply; ``prompt``: with a placeholder for each token of each picture."""
        self._options, self._ends, self._length = options, sorted(ends), len(prompt)
        self._asked = frozenset(prompt)
        self._asked_ids = torch.tensor(sorted(self._asked), dtype=torch.int64, device=device)
        self._words = [word for word in options.bad_words_ids if len(word) > 1 or word[0] not in ends]
        self._biases = dict(options.sequence_bias)
        sizes = options.no_repeat_ngram_size, options.encoder_no_repeat_ngram_size
        self._followers = {size: _followers(prompt, size) for size in sizes if size}
        longest = max(*sizes, *map(len, self._words), *map(len, self._biases))
        self._tail = list(prompt[max(0, len(prompt) - longest) :])

    def process(self, logits: torch.Tensor, replies: Sequence[Sequence[int]]) -> torch.Tensor:
        """A copy of logits (n, V) with the options applied; row i follows the prompt and ``replies[i]``."""
        options, rows = self._options, logits.clone()
        if self._biases:
            for row, reply in zip(rows, replies, strict=True):
                self._add_bias(row, [*self._tail, *reply])
        if options.encoder_repetition_penalty != 1.0:
            self._penalize(rows, (), 1.0 / options.encoder_repetition_penalty)
        if options.repetition_penalty != 1.0:
            self._penalize(rows, replies, options.repetition_penalty)
        if options.exponential_decay_length_penalty is not None:
            for row, reply in zip(rows, replies, strict=True):
                self._favour_end(row, len(reply), *options.exponential_decay_length_penalty)
        rows[_places(rows, (self._barred(reply) for reply in replies))] = -math.inf
        return rows

    def _add_bias(self, row: torch.Tensor, ids: list[int]) -> None:
        bias = torch.zeros_like(row)
        for word, added in self._biases.items():
            if 0 <= word[-1] < len(row) and _end_in(ids, word[:-1]):
                bias[word[-1]] += added
        row += bias

    def _penalize(self, rows: torch.Tensor, replies: Sequence[Sequence[int]], penalty: float) -> None:
        """Make every token of the prompt, and of the reply before each row, less likely."""
        for places in (slice(None), self._asked_ids), _places(rows, ({*reply} - self._asked for reply in replies)):
            values = rows[places]
            rows[places] = torch.where(values < 0, values * penalty, values / penalty)

    def _favour_end(self, row: torch.Tensor, length: int, start: int, factor: float) -> None:
        if length > start:
            values = row[self._ends]
            added = values.abs() * (factor ** (length - start) - 1)
            row[self._ends] = values + added.masked_fill(~values.isfinite(), 0.0)

    def _barred(self, reply: Sequence[int]) -> set[int]:
        """The tokens that cannot come after ``reply``."""
        options, ids = self._options, [*self._tail, *reply]
        barred = {*options.suppress_tokens}
        if not reply:
            barred.update(options.begin_suppress_tokens)
        if len(reply) < options.min_new_tokens or self._length + len(reply) < options.min_length:
            barred.update(self._ends)
        barred.update(word[-1] for word in self._words if _end_in(ids, word[:-1]))
        for size, said in (options.no_repeat_ngram_size, ids), (options.encoder_no_repeat_ngram_size, ()):
            if size:
                last = tuple(ids[len(ids) + 1 - size :])
                barred |= self._followers[size].get(last, set())
                barred |= {said[end] for end in range(size - 1, len(said)) if tuple(said[end + 1 - size : end]) == last}
        return barred


def processed(
    logits: torch.Tensor,
    processor: LogitsProcessor | None,
    constraint: Constraint | None,
    before: Sequence[int],
    tokens: Sequence[int] = (),
    parents: Sequence[int] = (),
) -> torch.Tensor:
    """Logits (n, V) as the target's options and the reply's constraint leave them; they may be none.

    They follow the last n of: the reply ``before``, then each node of a token tree after it. Where both together leave
    no token, the options do not count.
    """

    def constrained(rows: torch.Tensor) -> torch.Tensor:
        return rows if constraint is None else constraint.mask(rows, before, tokens, parents)

    if processor is None:
        return constrained(logits)
    replies = [list(before)]
    for token, parent in zip(tokens, parents, strict=True):
        replies.append([*replies[parent + 1], token])
    rows = constrained(processor.process(logits, replies[-len(logits) :]))
    possible = rows.amax(dim=-1, keepdim=True) > -math.inf
    return rows if bool(possible.all()) else torch.where(possible, rows, constrained(logits))


def _followers(ids: Sequence[int], size: int) -> dict[tuple[int, ...], set[int]]:
    """The tokens that follow the others of each n-gram of ``size`` tokens, one or more."""
    found: dict[tuple[int, ...], set[int]] = {}
    for start in range(len(ids) + 1 - size):
        found.setdefault(tuple(ids[start : start + size - 1]), set()).add(ids[start + size - 1])
    return found


def _end_in(ids: Sequence[int], end: tuple[int, ...]) -> bool:
    return tuple(ids[max(0, len(ids) - len(end)) :]) == end


def _places(rows: torch.Tensor, found: Iterable[Collection[int]]) -> tuple[torch.Tensor, ...]:
    """The places of tokens in rows (n, V), as an index: those of each row, without what is no token."""
    most = rows.shape[-1]
    pairs = [(row, token) for row, tokens in enumerate(found) for token in tokens if 0 <= token < most]
    return torch.tensor(pairs, dtype=torch.int64, device=rows.device).reshape(-1, 2).unbind(1)
