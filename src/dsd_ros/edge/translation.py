# SPDX-License-Identifier: Apache-2.0
"""Drafts for a target with another tokenizer: the draft model's text, tokenized as the target would.

The robot holds both tokenizers, so only the target's tokens travel. A target that is greedy, or draws with shared
noise, keeps only its own tokens, so a bad translation costs time and changes nothing. Like universal assisted
generation in Hugging Face transformers, but texts are aligned by characters instead of windows of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from dsd_ros.edge.vocabulary import Vocabulary

if TYPE_CHECKING:
    from dsd_ros.edge.engine import DraftEngine
    from dsd_ros.vlm.model import VisionLanguageModel


class Translation:
    """What a draft model and a target's vocabulary share over all replies."""

    def __init__(self, target: Vocabulary, model: VisionLanguageModel | DraftEngine) -> None:
        self.target = target
        self.draft = Vocabulary(model.tokenizer.to_str())
        self.draft_ends = model.eos_token_ids
        ours, theirs = self.draft.special, target.special
        # A special token that both have is translated by its name; any other has no text.
        self.hidden_in_draft = _missing(ours, theirs)
        self.hidden_in_target = _missing(theirs, ours)
        self._target_of: np.ndarray | None = None

    def noise_of(self, size: int, noise: Callable[[int], np.ndarray]) -> np.ndarray:
        """The target's ``noise`` (ids) for the ``size`` tokens of the draft model: that of the token of the same text.

        A token whose text is no single token of the target gets the noise's mean.
        """
        if self._target_of is None:
            theirs = {text: token for token, text in self.target.texts().items()}
            ours = self.draft.texts()
            self._target_of = np.array([theirs.get(ours.get(token, ""), -1) for token in range(size)])
        known = self._target_of >= 0
        found = np.full(size, np.euler_gamma)
        found[known] = noise(int(self._target_of.max()) + 1)[self._target_of[known]]
        return found

    def target_text(self, tokens: Items[int]) -> str:
        """The text of the target's tokens, up to the last whole character."""
        return self.target.decode(tokens, self.hidden_in_target)[0]

    def draft_text(self, tokens: Items[int]) -> str:
        """The text of the draft model's tokens, up to the last whole character."""
        return self.draft.decode(tokens, self.hidden_in_draft)[0]

    def target_tokens(self, text: str, verified: Items[int]) -> list[int] | None:
        """The target's tokens of ``text`` after its ``verified`` ones; None if it contradicts a character they begin.

        ``text`` begins with that character.
        """
        whole, count = self.target.decode(verified, self.hidden_in_target)
        begun = [token for token in verified[count:] if token in self.target and token not in self.hidden_in_target]
        found = self.target.encode_after(text) if whole else self.target.encode(text)
        return found[len(begun) :] if found[: len(begun)] == begun or not text else None

    def end_token(self, token: int, ends: frozenset[int]) -> int | None:
        """The target's end token for the draft's end token ``token``."""
        name = self.draft.special.get(token)
        for end in sorted(ends):
            if name is not None and self.target.special.get(end) == name:
                return end
        # Chat models number the end-of-turn token after the end-of-text token.
        return max(ends, default=None)


def _missing(special: dict[int, str], elsewhere: dict[int, str]) -> frozenset[int]:
    names = set(elsewhere.values())
    return frozenset(token for token, name in special.items() if name not in names)
