# SPDX-License-Identifier: Apache-2.0
"""Drafts for a target with another tokenizer: the draft model's text, tokenized as the target would.

The robot holds both tokenizers, so only the target's tokens travel. A target that is greedy, or draws with shared
noise, keeps only its own tokens, so a bad translation costs time and changes nothing. Like universal assisted
generation in Hugging Face transformers, but texts are aligned by characters instead of windows of tokens, and the draft
model's cache is kept as far as its text holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Items

import numpy as np

from dsd_ros.edge.vocabulary import Piece, Transcript, Vocabulary, context_of
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence

_MAX_STEP_BACK = 16  # tokens back to the beginning of a word, at most


class Translation:
    """What a draft model and a target's vocabulary share over all replies."""

    def __init__(self, target: Vocabulary, model: VisionLanguageModel) -> None:
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

    def begin(self, sequence: Sequence, ends: frozenset[int]) -> TranslatedReply:
        """A reply to the prompt that ``sequence`` has read; ``ends`` are the target's end tokens."""
        return TranslatedReply(self, sequence, ends)

    def end_token(self, token: int, ends: frozenset[int]) -> int | None:
        """The target's end token for the draft's end token ``token``."""
        name = self.draft.special.get(token)
        for end in sorted(ends):
            if name is not None and self.target.special.get(end) == name:
                return end
        # Chat models number the end-of-turn token after the end-of-text token.
        return max(ends, default=None)


class TranslatedReply:
    """One reply in two vocabularies: the target's verified tokens, and the draft model's tokens of the same text.

    ``sequence`` always holds the verified text, and perhaps more: drafted text after it that is not refuted.
    """

    def __init__(self, translation: Translation, sequence: Sequence, ends: frozenset[int]) -> None:
        self.sequence = sequence
        self.translation = translation
        self.target_size = translation.target.vocab_size
        self._ends = ends
        self._verified = Transcript(translation.target, translation.hidden_in_target)
        self._own = Transcript(translation.draft, translation.hidden_in_draft)
        # Up to here the texts are known to agree; a normalizing tokenizer may change lengths.
        self._agreed, self._agreed_own = 0, 0
        self._end: int | None = None  # the draft's token that ended its text
        self.place = 0  # how many tokens of the target that text after the verified part makes

    @property
    def ended(self) -> bool:
        """Whether the draft model has ended its text."""
        return self._end is not None

    def draft(self) -> list[int] | None:
        """The text after the verified part in the target's tokens, without the last one while it may still change.

        None: it contradicts a character that the target has begun. Counts the tokens anew as ``place``.
        """
        pieces = self._said_in_pieces()
        self.place = len(pieces or ())
        if pieces is None:
            return None
        if self._end is None:
            return [piece.token for piece in pieces[:-1]]
        tokens = [piece.token for piece in pieces]
        end = self.translation.end_token(self._end, self._ends)
        begun = self._verified.pending and not self._said
        return tokens if end is None or begun else [*tokens, end]

    def verified(self, tokens: Items[int]) -> None:
        """Continue after these tokens of the target. The draft model's cache is kept as far as it fits."""
        self._verified.append(tokens)
        text = self._verified.text
        news, said = text[self._agreed :], self._said
        if said.startswith(news):  # whatever the tokens: the draft model's own text stands
            self._agreed_own += len(news)
        else:
            self._say(text, self._agreed_own + _common(news, said))
            self._agreed_own = len(self._own.text)
            self._end = None
        self._agreed = len(text)

    def take(self, token: int) -> None:
        """Add the draft model's next token."""
        if token in self.translation.draft_ends:
            self._end = token
            return
        self.sequence.append([token])
        self._own.append([token])

    @property
    def _said(self) -> str:
        """The draft model's text after the verified text."""
        return self._own.text[self._agreed_own :]

    def _said_in_pieces(self) -> list[Piece] | None:
        """That text in the target's tokens; None if it contradicts a character that the target has begun."""
        verified = self._verified
        context = context_of(verified.text, len(verified.text))
        pieces = self.translation.target.pieces_after(context, self._said)
        pending = verified.pending
        if not pieces:
            return []
        if [piece.token for piece in pieces[: len(pending)]] != pending:
            return None
        return pieces[len(pending) :]

    def _say(self, text: str, common: int) -> None:
        """Make ``text`` the draft model's text; they agree up to the draft text's character ``common``."""
        own, sequence = self._own, self.sequence
        ahead = self._agreed - self._agreed_own
        # 1. Step back to the beginning of a word, so that its rest is not tokenized oddly.
        keep = own.whole_up_to(common)
        for _ in range(_MAX_STEP_BACK):
            here = own.end(keep) + ahead
            if keep == 0 or (here >= 0 and text[here : here + 1].isspace()):
                break
            before = own.whole_before(keep)
            word = own.text[own.end(before) : own.end(keep)]
            if text[max(0, here - len(word)) : max(0, here)] != word:
                break
            keep = before
        here = max(0, own.end(keep) + ahead) if keep else 0
        # 2. Tokens that stay the same keep their place in the cache.
        pieces = self.translation.draft.pieces_after(context_of(text, here), text[here:])
        tokens = [piece.token for piece in pieces]
        same = _common(own.tokens[keep:], tokens)
        own.truncate(keep + same)
        own.append(tokens[same:])
        sequence.rollback(keep + same)
        sequence.append(tokens[same:])


def _common(one: Items[object], other: Items[object]) -> int:
    """The length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _missing(special: dict[int, str], elsewhere: dict[int, str]) -> frozenset[int]:
    names = set(elsewhere.values())
    return frozenset(token for token, name in special.items() if name not in names)
