# SPDX-License-Identifier: Apache-2.0
"""A tokenizer without a model: how two vocabularies are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dsd_ros.paths import user_path
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import read_tokenizer, tokenizer_fingerprint

# Put before text that is not the beginning: some tokenizers treat the first word of a text differently.
_ANCHOR = "\n"
_INCOMPLETE = "\ufffd"  # a decoder's placeholder for the first bytes of a character


class Vocabulary:
    """A tokenizer: text to tokens and back. Also serves as a session's text model."""

    def __init__(self, serialized: str) -> None:
        """``serialized``: what ``read_tokenizer`` returns. Raises whatever ``tokenizers`` does."""
        self._tokenizer = Tokenizer.from_str(serialized)
        self._tokenizer.post_processor = None  # it may move offsets
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
            return cls(read_tokenizer(file))
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

    def decode(self, tokens: Sequence[int], hidden: frozenset[int] = frozenset()) -> tuple[str, int]:
        """The text of known tokens that are not ``hidden``, special ones included, up to the last whole character.

        Also how many of the tokens that text is of.
        """
        for count in range(len(tokens), 0, -1):
            shown = [token for token in tokens[:count] if token in self and token not in hidden]
            text: str = self._tokenizer.decode(shown, skip_special_tokens=False)
            if text and not text.endswith(_INCOMPLETE):
                return text, count
        return "", 0

    def texts(self) -> dict[int, str]:
        """The text of every token that has whole characters by itself; special ones have none."""
        found = {token: self._tokenizer.decode([token], skip_special_tokens=True) for token in sorted(self._ids)}
        return {token: text for token, text in found.items() if text and _INCOMPLETE not in text}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_after(self, text: str) -> list[int]:
        """The tokens of a text that goes on from another."""
        anchor, found = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
        return found[len(anchor) :] if found[: len(anchor)] == anchor else self.encode(text)
