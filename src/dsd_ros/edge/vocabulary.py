# SPDX-License-Identifier: Apache-2.0
"""A tokenizer without a model, and text that grows token by token: how two vocabularies are compared."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from dsd_ros.paths import user_path
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import tokenizer_fingerprint

# Put before text that is not the beginning: some tokenizers treat the first word of a text differently.
_ANCHOR = "\n"
_INCOMPLETE = "\ufffd"  # a decoder's placeholder for the first bytes of a character
_MAX_PENDING = 16
_CONTEXT_TOKENS = 4
_CONTEXT_CHARS, _MAX_CONTEXT_CHARS = 32, 96


class Piece(NamedTuple):
    """A token of an encoded text, and the index of its first character."""

    token: int
    start: int


class Vocabulary:
    """A tokenizer: text to tokens and back. Also serves as a session's text model."""

    def __init__(self, serialized: str) -> None:
        """``serialized``: the content of a tokenizer.json. Raises whatever ``tokenizers`` does."""
        self._tokenizer = Tokenizer.from_str(serialized)
        # A post-processor may move offsets, and a tokenizer.json may truncate long texts.
        self._tokenizer.post_processor = None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokenizer_fingerprint = tokenizer_fingerprint(serialized)
        self._ids = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._ids, default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {id_: token.content for id_, token in added.items() if token.special}

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """From a model directory or a tokenizer.json; ModelError for anything else."""
        file = user_path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(
                f"there is no tokenizer {file}; give the target's model directory or its tokenizer.json"
            ) from error
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{file} cannot be read as a tokenizer: {error}") from error

    def __contains__(self, token: int) -> bool:
        return token in self._ids

    def decode_text(self, tokens: Sequence[int]) -> str:
        """The text of reply tokens, without special tokens and unknown ids."""
        return self._tokenizer.decode([t for t in tokens if t in self], skip_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of known tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def texts(self) -> dict[int, str]:
        """The text of every token that has whole characters by itself; special ones have none."""
        found = {token: self._tokenizer.decode([token], skip_special_tokens=True) for token in sorted(self._ids)}
        return {token: text for token, text in found.items() if text and _INCOMPLETE not in text}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def pieces_after(self, context: str, text: str) -> list[Piece]:
        """The tokens of ``text`` after ``context``; starts are indices into ``text``.

        If a token would span both, the tokens of ``text`` alone.
        """
        if not text:
            return []
        for front in (context, _ANCHOR, "") if context else ("",):
            encoding = self._tokenizer.encode(front + text, add_special_tokens=False)
            pieces = [
                Piece(token, start - len(front))
                for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if end > len(front) or not front
            ]
            if not pieces or pieces[0].start >= 0:
                break
        return pieces


def context_of(text: str, end: int) -> str:
    """The last words before ``end``: enough to tell how the text after them is tokenized; "" for 0."""
    begin = max(0, end - _CONTEXT_CHARS)
    while begin > 0 and end - begin < _MAX_CONTEXT_CHARS and not text[begin].isspace():
        begin -= 1
    return (_ANCHOR if begin else "") + text[begin:end]


class Transcript:
    """The text of tokens that are appended one by one and may be taken back.

    ``text`` holds whole characters only. Tokens that so far give no text, or an incomplete character, are ``pending``.
    Ids in ``hidden`` and unknown ids have no text.
    """

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int] = frozenset()) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._ends: list[int] = []  # the text's length after each token
        self._whole: list[int] = [0]  # token counts after which no character is incomplete
        self._visible: list[int] = []
        self._seen: list[int] = []  # number of visible tokens up to and including each token

    @property
    def pending(self) -> list[int]:
        """The tokens that ``text`` does not show yet."""
        return self.tokens[self._whole[-1] :]

    def end(self, count: int) -> int:
        """The text's length after the first ``count`` tokens."""
        return self._ends[count - 1] if count else 0

    def whole_up_to(self, length: int) -> int:
        """The largest token count that gives whole characters, at most ``length`` of them."""
        return next(count for count in reversed(self._whole) if self.end(count) <= length)

    def whole_before(self, count: int) -> int:
        """The largest token count below ``count`` (1 or more) that gives whole characters."""
        return self._whole[bisect_left(self._whole, count) - 1]

    def fork(self) -> Transcript:
        """An independent copy."""
        twin = copy.copy(self)
        twin.tokens, twin._ends, twin._whole = list(self.tokens), list(self._ends), list(self._whole)
        twin._visible, twin._seen = list(self._visible), list(self._seen)
        return twin

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        whole, visible = self._whole[-1], token in self._vocabulary and token not in self._hidden
        nothing_pending = whole == len(self.tokens)
        self.tokens.append(token)
        if visible:
            self._visible.append(token)
        self._seen.append(len(self._visible))
        if visible:
            # Decode only a few tokens, so that the time is linear in the text's length. They include some known
            # ones, because decoders treat the first token differently.
            known = self._shown(whole)
            first = self._shown(self._whole[max(0, len(self._whole) - _CONTEXT_TOKENS)])
            decode = self._vocabulary.decode
            before, text = decode(self._visible[first:known]), decode(self._visible[first:])
            if len(self._visible) - known >= _MAX_PENDING or (text != before and not text.endswith(_INCOMPLETE)):
                self.text += text[len(before) :]
                self._whole.append(len(self.tokens))
        elif nothing_pending:
            self._whole.append(len(self.tokens))
        self._ends.append(len(self.text))

    def _shown(self, count: int) -> int:
        """How many of the first ``count`` tokens have text."""
        return self._seen[count - 1] if count else 0

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.tokens[count:], self._ends[count:], self._seen[count:]
        while self._whole[-1] > count:
            self._whole.pop()
        self.text = self.text[: self.end(count)]
        del self._visible[self._shown(count) :]
