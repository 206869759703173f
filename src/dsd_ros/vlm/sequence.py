"""One reply in the making: tokens, their keys and values, and where a next forward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.errors import SequenceError

if TYPE_CHECKING:
    from dsd_ros.vlm.model import VisionLanguageModel

LayerHook = Callable[[int, torch.Tensor], None]


class Feed(NamedTuple):
    """What one sequence brings to a forward pass.

    tokens: those not in the cache yet, 1 or more. rope_delta: the distance between a token's
    M-RoPE position and its place in the cache.
    """

    tokens: list[int]
    cache: KeyValueCache
    rope_delta: int


class Sequence:
    """A prompt with its reply so far, made by ``VisionLanguageModel.prefill``; for one thread.

    Tokens are fed lazily: ``append`` only notes them, and the next ``next_logits`` or ``verify``
    takes them along. Every position is explicit, so sequences of one model may be advanced in any
    order. Returned logits belong to the sequence: read them, do not change them in place.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        cache: KeyValueCache,
        last_prompt_token: int,
        rope_delta: int,
        prompt_logits: torch.Tensor,
    ) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.prompt_length = cache.length
        self._cache = cache
        self._last_prompt_token = last_prompt_token
        self._rope_delta = rope_delta
        self._prompt_logits = prompt_logits
        # Logits known from the last pass: row i stands behind reply token number _rows_start + i.
        self._rows = prompt_logits.unsqueeze(0)
        self._rows_start = 0

    def append(self, tokens: Tokens[int]) -> None:
        """Extend the reply; SequenceError for a token the model does not have."""
        self.tokens.extend(self._checked(tokens))

    def next_logits(self) -> torch.Tensor:
        """Logits (vocabulary,) float32 behind all tokens; runs a forward pass only if it must."""
        known = self.known_logits()
        return self._advance(0, None)[-1] if known is None else known

    def verify(self, draft: Tokens[int], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Append ``draft``; return the logits in front of it and behind each of its tokens.

        One pass; pending tokens ride along. Returns (len(draft) + 1, vocabulary) float32.
        ``on_layer(index, hidden)`` is called after each decoder layer, while deeper layers have not
        run yet, with hidden states (len(draft) + 1, hidden size) of the same rows, before the final
        norm. If the pass fails (ContextError, or an error of the hook) the draft is taken back.
        """
        draft = self._checked(draft)
        before = len(self.tokens)
        first_row = None
        if self._fed == before:
            first_row = self._known_row(before) if on_layer is None else None
            if first_row is None:
                self._step_back()
            elif not draft:
                return first_row.unsqueeze(0)
        self.tokens.extend(draft)
        try:
            if first_row is None:
                return self._advance(len(draft), on_layer)
            rows = torch.cat([first_row.unsqueeze(0), self._advance(len(draft) - 1, None)])
        except BaseException:
            del self.tokens[before:]
            raise
        self._rows, self._rows_start = rows, before
        return rows

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens of the reply, 0 to all of them; no forward pass."""
        if not 0 <= length <= len(self.tokens):
            raise SequenceError(
                f"cannot keep {length} tokens of a reply of {len(self.tokens)}; "
                f"give a length from 0 to {len(self.tokens)}"
            )
        del self.tokens[length:]
        if self._fed > length:
            self._cache.length = self.prompt_length + length

    def fork(self) -> Sequence:
        """An independent copy: from here on neither notices what becomes of the other."""
        twin = object.__new__(Sequence)
        twin.__dict__.update(self.__dict__)
        twin.tokens = list(self.tokens)
        twin._cache = self._cache.copy()
        return twin

    # What ``next_logits_together`` needs for a pass over several sequences.

    def known_logits(self) -> torch.Tensor | None:
        """What ``next_logits`` returns if it needs no forward pass, else None."""
        length = len(self.tokens)
        if self._fed != length:
            return None
        known = self._known_row(length)
        if known is None:
            self._step_back()
        return known

    def feed(self) -> Feed:
        """What the next forward pass has to be given."""
        fed = self._fed
        pending = self.tokens[fed:] if fed >= 0 else [self._last_prompt_token, *self.tokens]
        return Feed(pending, self._cache, self._rope_delta)

    def note_row(self, logits: torch.Tensor) -> None:
        """Keep the logits (vocabulary,) of a pass that has fed all pending tokens."""
        self._rows, self._rows_start = logits.unsqueeze(0), len(self.tokens)

    @property
    def _fed(self) -> int:
        """How many reply tokens are in the cache; -1: not even the last token of the prompt."""
        return self._cache.length - self.prompt_length

    def _known_row(self, length: int) -> torch.Tensor | None:
        if length == 0:
            return self._prompt_logits
        index = length - self._rows_start
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def _step_back(self) -> None:
        """Forget the last position, so that the next pass computes it, and its logits, again."""
        self._cache.length -= 1

    def _advance(self, draft_length: int, on_layer: LayerHook | None) -> torch.Tensor:
        """Feed what is pending; return logits of the last ``draft_length + 1`` positions."""
        rows = self.model.forward_tokens(*self.feed(), draft_length + 1, on_layer)
        self._rows, self._rows_start = rows, len(self.tokens) - draft_length
        return rows

    def _checked(self, tokens: Tokens[int]) -> list[int]:
        tokens = [int(token) for token in tokens]
        size = self.model.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise SequenceError(
                    f"token {token} is not in the vocabulary of {self.model.name} "
                    f"(0 to {size - 1}); draft and target must share a tokenizer"
                )
        return tokens
