# SPDX-License-Identifier: Apache-2.0
"""Constrained replies: the tokens that may come next, so that a reply ends in an action of a grammar.

Which tokens they are follows from the reply's tokens alone. So rounds, forks, trees and another verifier need no state
of their own, and both sides of a session hold the same. Text is free until a mark begins the action; from there on
only tokens are possible that lead to a whole action, and then the end. The end is impossible before there was an
action, and where the reply's last tokens are needed to write one, it has to begin.

The mask is applied to logits before ``transform``. What is verified is then the constrained target, whatever the draft
was drawn from. Of a grammar only texts are needed, as they are written: marks and actions.
"""

from __future__ import annotations

import json
import math
import re
import string
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MAX_FORM_CHARS = 16_384  # of a form as text
_MAX_WRITTEN = 1 << 15  # characters of all marks with all actions
_MAX_MARKS = 8
_MAX_WORDS = 128  # characters of a mark or an action
_KEPT = 8  # constraints of one tokenizer
_FOLD = bytes.maketrans(string.ascii_uppercase.encode() + b"\t\n\r\f\v", string.ascii_lowercase.encode() + b" " * 5)
_SPACES = re.compile(b" +")
_OTHER = b"\0"  # stands for what precedes a mark and is no space
BARRED = b"\xff" * 4  # of a token that constrained replies do not use


@dataclass(frozen=True)
class ReplyForm:
    """What a constrained reply is: text, then one of ``marks`` and one of ``actions``, in ``limit`` tokens at most.

    An action begins with the space after its mark, and is written exactly so. A mark counts whatever the case of its
    ASCII letters, and with any white space. ValueError, one sentence, for texts that cannot be told apart.
    """

    marks: tuple[str, ...]
    actions: tuple[str, ...]
    limit: int

    def __post_init__(self) -> None:
        texts = [*self.marks, *(action[1:] for action in self.actions)]
        plain = all(text and text.isprintable() and " ".join(text.split()) == text for text in texts)
        if not (self.marks and self.actions and plain and all(action[0] == " " for action in self.actions)):
            raise ValueError("marks and actions must be printable words, and an action begins with a space")
        if len(self.marks) > _MAX_MARKS or any(len(text) > _MAX_WORDS for text in texts):
            raise ValueError(f"at most {_MAX_MARKS} marks are possible, and {_MAX_WORDS} characters in each text")
        for mark in self.marks:
            if any(_lower(mark) in _lower(other) for other in (*self.marks, *self.actions) if other is not mark):
                raise ValueError(f"the mark {mark!r} is part of another mark or action; write marks that are not")
        written = sum(len(mark) + len(action) for mark in self.marks for action in self.actions)
        if len(self.text) > MAX_FORM_CHARS or written > _MAX_WRITTEN:
            raise ValueError(
                f"its actions take {len(self.text)} characters, {written} with each mark; at most {MAX_FORM_CHARS} and "
                f"{_MAX_WRITTEN} are possible where replies are constrained"
            )

    @property
    def text(self) -> str:
        """The form as it travels."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> ReplyForm:
        """The form that ``text`` describes; ValueError, one sentence, for any other text."""
        try:
            found = json.loads(text)
            lists, limit = [found["marks"], found["actions"]], found["limit"]
            if len(found) != 3 or type(limit) is not int or limit < 1:
                raise ValueError("it must hold marks, actions and limit")
            if not all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in lists):
                raise ValueError("marks and actions must be texts")
            return cls(tuple(lists[0]), tuple(lists[1]), limit)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"the form that replies are to have cannot be used: {error}") from error


class Rule(NamedTuple):
    """What may come next: these tokens alone if ``only``, else all but these."""

    only: bool
    ids: tuple[int, ...]


class State(NamedTuple):
    """Where a reply stands. ``writing``: ``text`` is what it has of a mark, with a space before it, and an action.

    Else ``text`` is what it ends in, folded: a character, and the beginning of a mark if there is one.
    """

    writing: bool
    text: bytes


def folded(text: bytes) -> bytes:
    """As marks are found in texts: ASCII letters small, a run of white space one space."""
    text = text.translate(_FOLD)
    return _SPACES.sub(b" ", text) if b"  " in text else text


def _lower(text: str) -> bytes:
    return text.encode().lower()  # of bytes: ASCII letters alone


class TokenTexts:
    """A tokenizer's tokens by their bytes. ``pieces``: those of each token, empty for a special one."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.barred = [token for token, piece in enumerate(pieces) if piece == BARRED]
        self._ids: dict[bytes, list[int]] = {}
        self.folded: dict[bytes, list[int]] = {}
        for token, piece in enumerate(pieces):
            if piece:
                self._ids.setdefault(piece, []).append(token)
                self.folded.setdefault(folded(piece), []).append(token)
        self._ordered, self._plain = sorted(self.folded), sorted(self._ids)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none beyond the vocabulary."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def ids(self, text: bytes) -> list[int]:
        """The tokens of exactly this text."""
        return self._ids.get(text, [])

    def begins_one(self, text: bytes) -> bool:
        """Whether a token begins with exactly this text."""
        place = bisect_left(self._plain, text)
        return place < len(self._plain) and self._plain[place].startswith(text)

    def beginning(self, text: bytes) -> Iterator[int]:
        """The tokens that begin with this text when folded."""
        for found in _beginning(self._ordered, text):
            yield from self.folded[found]


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each token of a ``tokenizers.Tokenizer``, by id; none for special tokens, which replies do not show.

    BARRED for a byte beyond ASCII that SentencePiece falls back to: with it, decoders lose the bytes beside it.
    ValueError, one sentence, for a tokenizer that is neither byte-level nor like SentencePiece.
    """
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {each["type"] for each in (decoder, *decoder.get("decoders", ())) if "type" in each}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(
            f"replies cannot be constrained with a tokenizer that decodes by {', '.join(sorted(kinds)) or 'nothing'}; "
            "use a model whose tokenizer is byte-level or SentencePiece's"
        )
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    of_char = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for name, id_ in vocabulary.items():
        if id_ in added:
            found[id_] = b"" if added[id_].special else added[id_].content.encode()
        elif "ByteLevel" in kinds:
            found[id_] = bytes(of_char[char] for char in name if char in of_char)
        elif re.fullmatch("<0x[0-9A-F]{2}>", name):
            byte = int(name[3:5], 16)
            found[id_] = bytes([byte]) if byte < 0x80 else BARRED
        else:
            found[id_] = name.replace("\u2581", " ").encode()
    return found


class Constraint:
    """The rule for each place of a reply. Holds no state of any reply; for any thread."""

    def __init__(self, form: ReplyForm, texts: TokenTexts, ends: Collection[int]) -> None:
        """``ends``: the tokens that end a reply. ValueError, one sentence, when the tokens cannot write the actions."""
        self.form = form
        self._texts, self._ends = texts, tuple(sorted(token for token in ends if token < len(texts.pieces)))
        self._marks = {_lower(mark): b" " + mark.encode() for mark in form.marks}
        self._starts = {mark[:length] for mark in self._marks for length in range(len(mark))}
        self._longest = max(map(len, self._marks))
        self._whole = [token for text, ids in texts.folded.items() if self._marked(text) for token in ids]
        self._full = {mark + action.encode() for mark in self._marks.values() for action in form.actions}
        self._longer: dict[bytes, list[bytes]] = {}  # each part of an action -> those with one more byte
        for part in {text[:length] for text in self._full for length in range(1, len(text) + 1)}:
            self._longer.setdefault(part[:-1], []).append(part)
        steps = {b"": [longer for longer, _ in self._continued(b"")]}  # what one token makes of a part, shorter first
        for text in sorted((text for parts in self._longer.values() for text in parts), key=len):
            steps[text] = [longer for longer, _ in self._continued(text)]
        fewest: dict[bytes, float] = {
            b"": 0
        }  # tokens that write a part, at least; without those that cannot be written
        for text, longer in steps.items():
            for part in longer if text in fewest else ():
                fewest[part] = min(fewest.get(part, math.inf), fewest[text] + 1)
        most = max((fewest.get(text, math.inf), text) for text in self._full)
        if most[0] == math.inf:
            raise ValueError(
                f"the model's tokens cannot write {most[1].decode().strip()!r}; do not constrain its replies, or use "
                "a grammar that its tokenizer can write"
            )
        self._reserve = int(most[0]) + 1  # tokens for the longest action, and the end
        if form.limit < self._reserve:
            raise ValueError(
                f"a reply of {form.limit} tokens is too short for {most[1].decode().strip()!r}, which takes "
                f"{self._reserve}; raise max_tokens"
            )
        self._needed: dict[bytes, int] = {}  # tokens that still complete an action, at least; without those that cannot
        for text, longer in reversed(steps.items()):
            needed = [1 + self._needed[part] for part in longer if part in self._needed]
            if text in self._full or needed:
                self._needed[text] = 0 if text in self._full else min(needed)
        self._far = max(*self._needed.values(), self._reserve) + 2  # with more tokens left nothing is different
        # Only functions of their arguments are kept.
        self._step = lru_cache(1 << 16)(self._step_anew)
        self._rule = lru_cache(1 << 12)(self._rule_anew)

    def state(self, tokens: Sequence[int]) -> State | None:
        """Where a reply stands after ``tokens``; None after its end, or where they are against the rules."""
        state: State | None = State(False, b" ")
        for place, token in enumerate(tokens):
            state = self.after(state, token, place)
        return state

    def after(self, state: State | None, token: int, place: int) -> State | None:
        """Where it stands after one more token, the reply's ``place``-th from 0."""
        return None if state is None else self._step(state, token, self._left(place))

    def rule(self, state: State | None, place: int) -> Rule | None:
        """What may be the token at ``place``; None: nothing is known against any."""
        return None if state is None else self._rule(state, self._left(place))

    def rules(self, tokens: Sequence[int], rows: int) -> list[Rule | None]:
        """The rules of the ``rows`` places up to the one after ``tokens``."""
        return [self.rule(self.state(tokens[:end]), end) for end in range(len(tokens) - rows + 1, len(tokens) + 1)]

    def mask(
        self, logits: torch.Tensor, before: Sequence[int], tokens: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> torch.Tensor:
        """A copy of logits (n, V) where what is not allowed has minus infinity.

        They follow the last n of: the reply ``before``, then each node of a token tree after it.
        """
        states, places = [self.state(before)], [len(before)]
        for token, parent in zip(tokens, parents, strict=True):
            states.append(self.after(states[parent + 1], token, places[parent + 1]))
            places.append(places[parent + 1] + 1)
        masked = logits.clone()
        for row, state, place in zip(masked, states[-len(masked) :], places[-len(masked) :], strict=True):
            apply_rule(row, self.rule(state, place))
        return masked

    def written(self, tokens: Sequence[int]) -> bool:
        """Whether a reply, with or without an end token, ends in a whole action."""
        said = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        state = self.state(said)
        return state is not None and state.writing and state.text in self._full

    # ------------------------------------------------------------------------------------- functions of their arguments

    def _left(self, place: int) -> int:
        return min(self.form.limit - place, self._far)

    def _at(self, state: State, left: int) -> State:
        """``state``, or the beginning of an action where the reply's last ``left`` tokens are needed for it."""
        return state if state.writing or left > self._reserve else State(True, b"")

    def _step_anew(self, state: State, token: int, left: int) -> State | None:
        piece = self._texts.piece(token)
        if token in self._ends or piece == BARRED:
            return None
        writing, text = self._at(state, left)
        if writing:
            text += piece
        else:
            text = folded(text + piece)
            found = self._marked(text)
            if found is None:
                return State(False, self._ending(text))
            start, mark = found
            rest = piece[len(piece) - (len(text) - start - len(mark)) :]
            if text[start - 1 : start] != b" " or folded(rest) != text[start + len(mark) :]:
                return None  # a mark has to stand on its own
            text = self._marks[mark] + rest
        if not piece:
            return None
        return State(True, text) if self._needed.get(text, math.inf) < left else None

    def _rule_anew(self, state: State, left: int) -> Rule | None:
        writing, text = self._at(state, left)
        if writing:
            ids = [*self._ends] if text in self._full else []
            for longer, found in self._continued(text):
                if self._needed.get(longer, math.inf) < left:
                    ids += found
            return Rule(True, tuple(sorted(ids))) if ids else None
        suspects = set(self._whole)
        for mark in self._marks:
            for length in range(1, len(mark)):
                if text[1:].endswith(mark[:length]):
                    suspects.update(self._texts.beginning(mark[length:]))
                    if text.endswith(b" "):
                        suspects.update(self._texts.beginning(b" " + mark[length:]))
        wrong = {token for token in suspects if self._step(state, token, left) is None}
        return Rule(False, tuple(sorted(wrong.union(self._ends, self._texts.barred))))

    def _marked(self, text: bytes) -> tuple[int, bytes] | None:
        """Where the first mark in ``text`` begins, and that mark."""
        found = [(text.find(mark) + len(mark), mark) for mark in self._marks if mark in text]
        return (min(found)[0] - len(min(found)[1]), min(found)[1]) if found else None

    def _ending(self, text: bytes) -> bytes:
        """The longest beginning of a mark that ``text`` ends in, and a character before it: a space or any other."""
        for length in range(min(self._longest, len(text)) - 1, -1, -1):
            start = text[len(text) - length :]
            if start in self._starts:
                return (b" " if text[-length - 1 : len(text) - length] == b" " else _OTHER) + start
        return _OTHER

    def _continued(self, text: bytes) -> Iterator[tuple[bytes, list[int]]]:
        """What one more token may make of a part of an action, and the tokens that do."""
        waiting = [*self._longer.get(text, ())]
        while waiting:
            longer = waiting.pop()
            piece = longer[len(text) :]
            if ids := self._texts.ids(piece):
                yield longer, ids
            if self._texts.begins_one(piece):
                waiting += self._longer.get(longer, ())


class Constrainer:
    """Makes the constraints of one model's tokenizer, and keeps the last few. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: TokenTexts | None = None
        self._made = lru_cache(_KEPT)(self._make)
        self._lock = threading.Lock()

    def of(self, form: ReplyForm, ends: frozenset[int]) -> Constraint:
        """The constraint of a form; ValueError as ``Constraint`` and ``token_bytes``."""
        with self._lock:
            return self._made(form, ends)

    def _make(self, form: ReplyForm, ends: frozenset[int]) -> Constraint:
        if self._tokenizer is None:
            raise ValueError("replies cannot be constrained without a tokenizer; use a model that has one")
        self._texts = self._texts or TokenTexts(token_bytes(self._tokenizer))
        return Constraint(form, self._texts, ends)


def apply_rule(row: torch.Tensor, rule: Rule | None) -> None:
    """Give minus infinity to what a rule does not allow of logits (V,), in place."""
    if rule is None:
        return
    ids = torch.tensor([token for token in rule.ids if token < len(row)], dtype=torch.int64, device=row.device)
    if rule.only:
        kept = row[ids]
        row.fill_(-math.inf)
        row[ids] = kept
    else:
        row[ids] = -math.inf


def _beginning(ordered: Sequence[bytes], text: bytes) -> Iterator[bytes]:
    """The texts that begin with ``text``, of all in their order."""
    for place in range(bisect_left(ordered, text), len(ordered)):
        if not ordered[place].startswith(text):
            return
        yield ordered[place]
