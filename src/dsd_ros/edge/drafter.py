"""Drafting: a few tokens ahead of what is verified, from the robot's own small model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.decoding.sampling import SamplingSettings, sample, transform
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens and, unless greedy, the distributions q (len(tokens), V) float32 they were drawn from."""

    tokens: list[int]
    q: torch.Tensor | None


class Drafter:
    """One reply's draft. Its sequence holds exactly the verified tokens between two rounds.

    ``eos_token_ids`` are the target's: nothing is drafted behind the end of a reply.
    """

    def __init__(
        self, model: VisionLanguageModel, sampling: SamplingSettings, eos_token_ids: frozenset[int]
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._eos = eos_token_ids
        self._sequence: Sequence | None = None
        self._confirmed = 0
        self._able = False

    def start(self, image: np.ndarray, instruction: str) -> None:
        """Read image (RGB uint8, (H, W, 3)) and instruction; VlmError when they cannot be used."""
        self._sequence = None
        self._sequence = self._model.prefill(image, instruction)
        self._confirmed = 0
        self._able = True

    def draft(self, length: int, generator: np.random.Generator) -> DraftedTokens:
        """Up to ``length`` tokens; fewer at the end of the reply or of the draft model's context."""
        sequence = self._sequence
        assert sequence is not None, "start comes first"
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        try:
            while len(tokens) < length and self._able:
                q = transform(sequence.next_logits(), self._sampling)
                # Greedy needs no draw, and its q is known to the verifier: one at the drafted token.
                token = int(q.argmax()) if self._sampling.greedy else sample(q, generator)
                sequence.append([token])
                tokens.append(token)
                rows.append(q)
                if token in self._eos:
                    break
        except ContextError:
            self._able = False  # the target may hold more: it goes on without drafts
        if self._sampling.greedy or not tokens:
            return DraftedTokens(tokens, None)
        return DraftedTokens(tokens, torch.stack(rows))

    def confirm(self, accepted: int, next_token: int) -> None:
        """Keep ``accepted`` drafted tokens, drop the rest, and go on behind ``next_token``."""
        sequence = self._sequence
        assert sequence is not None, "start comes first"
        if not self._able:
            return
        sequence.rollback(self._confirmed + accepted)
        if next_token >= self._model.vocab_size:
            self._able = False  # a token only the target has: nothing can be drafted behind it
            return
        sequence.append([next_token])
        self._confirmed += accepted + 1
