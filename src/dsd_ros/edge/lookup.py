# SPDX-License-Identifier: Apache-2.0
"""Drafting without a model: what followed the same tokens earlier, in the prompt or in the reply.

Prompt look-up decoding (Saxena, 2023). It pays where replies repeat their prompt: summaries, corrections, answers from
a document.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dsd_ros.decoding.methods import RoundContext
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.edge.proposer import NoTokens, Plan, Proposer, ReplyRequest
from dsd_ros.vlm.model import VisionLanguageModel

MOST_TOKENS = 3  # that must be the same


def look_up(tokens: Sequence[int], length: int) -> list[int]:
    """At most ``length`` tokens that followed the latest place where ``tokens`` ended as they do now.

    The longest common end counts, up to MOST_TOKENS; nothing where even the last token is new.
    """
    for size in range(min(MOST_TOKENS, len(tokens) - 1), 0, -1):
        end = list(tokens[-size:])
        for place in range(len(tokens) - size - 1, -1, -1):
            if tokens[place : place + size] == end:
                return list(tokens[place + size : place + size + length])
    return []


@dataclass(frozen=True)
class FoundTokens(NoTokens):
    """A draft that was looked up; it may be empty."""

    autonomous_rounds: int = 0


class LookUp(Proposer):
    """Proposes what ``look_up`` finds. Of the draft model, only tokenizer and prompt are used."""

    def __init__(self, model: VisionLanguageModel, settings: DecodeSettings) -> None:
        self._model, self._settings = model, settings
        self._eos: frozenset[int] = frozenset()
        self._prompt: list[int] = []
        self._reply = self._number = 0

    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None:
        """Tokenize the prompt; pictures do not matter."""
        self._reply, self._number, self._eos = request.number, 0, eos_token_ids
        self._prompt = self._model.prompt_tokens(request.instruction, 0)

    def propose(self, tokens: list[int]) -> FoundTokens:
        """The tokens found, up to one that ends the reply."""
        began, settings = time.perf_counter(), self._settings
        self._number += 1
        # One token of the round is always the target's own.
        found = look_up(self._prompt + tokens, min(settings.depth, settings.max_tokens - len(tokens) - 1))
        end = next((count for count, token in enumerate(found, 1) if token in self._eos), len(found))
        tree = TokenTree(tuple(found[:end]), tuple(range(-1, end - 1)))
        return FoundTokens(
            self._number,
            list(tokens),
            RoundContext(settings.sampling, settings.seed, self._reply, self._number, len(tokens)),
            tree=tree,
            vocab_size=self._model.vocab_size,
            plan=Plan(settings.depth),
            seconds=time.perf_counter() - began,
        )
