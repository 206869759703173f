# SPDX-License-Identifier: Apache-2.0
"""Constrained replies: the tokens that may come next, so that a reply ends in an action of a grammar.

Which tokens they are follows from the reply's tokens alone. So rounds, forks, trees and another verifier need no state
of their own, and both sides of a session hold the same. Text is free until a mark begins the action; from there on
only tokens are possible that lead to a whole action, and then the end. The end is impossible before there was an
action, and where the reply's last tokens are needed to write one, it has to begin.

The mask is applied to logits before ``transform``. What is verified is then the constrained target, whatever the draft
was drawn from. Of a grammar only texts are needed, as they are written: marks and actions, with ``{20..300}`` for a
whole number in a range. Both sides make the same :class:`Automaton` of them.
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
_MAX_PLACES = 1 << 16  # in texts, of all nodes of an automaton
_MAX_MARKS = 8
_MAX_WORDS = 128  # characters of a mark or an action
MAX_ACTIONS = 4  # of a reply
_KEPT = 8  # constraints of one tokenizer
_FOLD = bytes.maketrans(string.ascii_uppercase.encode() + b"\t\n\r\f\v", string.ascii_lowercase.encode() + b" " * 5)
_SPACES = re.compile(b" +")
_OTHER = b"\0"  # stands for what precedes a mark and is no space
BARRED = b"\xff" * 4  # of a token that constrained replies do not use


@dataclass(frozen=True)
class ReplyForm:
    """What a constrained reply is: text, then one of ``marks`` and one of ``actions``, in ``limit`` tokens at most.

    An action begins with the space after its mark, and is written exactly so. A mark counts whatever the case of its
    ASCII letters, and with any white space. Without marks there is no text before the action. ``{lo..hi}`` stands for
    a whole number from lo to hi. Before the action up to ``most`` - 1 of ``before`` may come, which are actions with
    what stands between two. ValueError, one sentence, for texts that cannot be told apart.
    """

    marks: tuple[str, ...]
    actions: tuple[str, ...]
    limit: int
    before: tuple[str, ...] = ()
    most: int = 1

    def __post_init__(self) -> None:
        lead, written = " " if self.marks else "", (*self.actions, *self.before)
        texts = [*self.marks, *(text.removeprefix(lead) for text in self.actions)]
        texts += [text.removeprefix(lead).removesuffix(" ") for text in self.before]  # a space may lead to the next
        plain = all(text and text.isprintable() and " ".join(text.split()) == text for text in texts)
        if not (self.actions and plain and all(text.startswith(lead) for text in written)):
            raise ValueError("marks and actions must be printable words, with a space between a mark and an action")
        if len(self.marks) > _MAX_MARKS or any(len(text) > _MAX_WORDS for text in texts):
            raise ValueError(f"at most {_MAX_MARKS} marks are possible, and {_MAX_WORDS} characters in each text")
        if not 1 <= self.most <= MAX_ACTIONS or (self.most > 1) != bool(self.before):
            raise ValueError(f"a reply may have 1 to {MAX_ACTIONS} actions, and more than one where some come before")
        for mark in self.marks:
            if any(_lower(mark) in _lower(other) for other in (*self.marks, *written) if other is not mark):
                raise ValueError(f"the mark {mark!r} is part of another mark or action; write marks that are not")
        if len(self.text) > MAX_FORM_CHARS:
            raise ValueError(_too_long(f"take {len(self.text)} characters", MAX_FORM_CHARS))

    @property
    def text(self) -> str:
        """The form as it travels: in three words where it has neither numbers nor several actions, as it always was.

        A verifier that knows no others refuses it then, and does not take a range for words.
        """
        fields = asdict(self)
        if self.most == 1 and "{" not in "".join(self.actions):
            del fields["before"], fields["most"]
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> ReplyForm:
        """The form that ``text`` describes; ValueError, one sentence, for any other text."""
        try:
            found = json.loads(text)
            before, most = found.pop("before", []), found.pop("most", 1)
            lists, limit = [found["marks"], found["actions"], before], found["limit"]
            if len(found) != 3 or type(limit) is not int or limit < 1 or type(most) is not int:
                raise ValueError("it must hold marks, actions and limit, and before and most for several actions")
            if not all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in lists):
                raise ValueError("marks and actions must be texts")
            return cls(tuple(lists[0]), tuple(lists[1]), limit, tuple(before), most)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"the form that replies are to have cannot be used: {error}") from error


def _too_long(what: str, most: int) -> str:
    return f"its actions {what}; at most {most} are possible where replies are constrained"


class Place(NamedTuple):
    """A place in one of a form's texts: before its ``at``-th part, a byte or a range of numbers.

    ``left``: actions that may still be written, this one among them. ``digits``: within a number, how many digits are
    still to come, and the least and the greatest number that they may make.
    """

    left: int
    text: int
    at: int = 0
    digits: tuple[int, int, int] | None = None


class Automaton:
    """What may be written of a form's mark and actions, byte by byte: a deterministic automaton without loops.

    ``next``: the node after each possible byte, for each node; the first node is 0. ``ends``: nodes at the end of an
    action. ``texts``: a shortest text that leads to each node. Time and memory go with the places in the form's texts.
    """

    def __init__(self, form: ReplyForm) -> None:
        marks = [f" {mark}" for mark in form.marks]
        self._parts = [_parts(text) for text in (*marks, *form.actions, *form.before)]
        self._actions = range(len(marks), len(marks) + len(form.actions))
        self._begun: dict[int, frozenset[Place]] = {}  # the beginnings of an action, by how many may be written
        self._places = 0
        begun = [Place(form.most + 1, mark) for mark in range(len(marks))]
        first = self._closed(begun) if begun else self._beginnings(form.most)
        nodes, waiting = {first: 0}, [first]
        self.next: list[dict[int, int]] = []
        self.texts, self.ends = [b""], set[int]()
        for node, places in enumerate(waiting):
            if any(place.text in self._actions and place.at == len(self._parts[place.text]) for place in places):
                self.ends.add(node)
            self.next.append({})
            for byte, after in self._after(places):
                if after not in nodes:
                    nodes[after] = len(nodes)
                    waiting.append(after)
                    self.texts.append(self.texts[node] + bytes([byte]))
                self.next[node][byte] = nodes[after]

    def walk(self, text: bytes, node: int = 0) -> int | None:
        """The node after ``text``; None where that cannot be written."""
        at: int | None = node
        for byte in text:
            at = None if at is None else self.next[at].get(byte)
        return at

    def _beginnings(self, left: int) -> frozenset[Place]:
        """The beginnings of an action where ``left`` may be written."""
        if left not in self._begun:
            last = len(self._parts) if left > 1 else self._actions.stop
            self._begun[left] = self._closed([Place(left, text) for text in range(self._actions.start, last)])
        return self._begun[left]

    def _after(self, places: frozenset[Place]) -> list[tuple[int, frozenset[Place]]]:
        """Each possible byte, and the places after it."""
        found: dict[int, list[Place]] = {}
        for place in places:
            parts = self._parts[place.text]
            if place.digits is not None:
                for byte, digits in _digits(*place.digits):
                    found.setdefault(byte, []).append(place._replace(digits=digits))
            elif place.at < len(parts):
                part = parts[place.at]
                assert isinstance(part, int)
                found.setdefault(part, []).append(place._replace(at=place.at + 1))
        return [(byte, self._closed(after)) for byte, after in sorted(found.items())]

    def _closed(self, places: list[Place]) -> frozenset[Place]:
        """The places before a byte or at an action's end that these lead to without one."""
        found, waiting, then = set[Place](), list(places), set[int]()
        while waiting:
            place = waiting.pop()
            parts = self._parts[place.text]
            if place.digits is not None:
                if place.digits[0]:
                    found.add(place)
                else:
                    waiting.append(place._replace(at=place.at + 1, digits=None))
            elif place.at == len(parts) and place.text not in self._actions:
                then.add(place.left - 1)  # a mark, or an action that another follows
            elif place.at < len(parts) and isinstance(span := parts[place.at], tuple):
                waiting += [place._replace(digits=digits) for digits in _numbers(*span)]
            else:
                found.add(place)
        if not found and len(then) == 1:
            return self._beginnings(*then)
        closed = frozenset(found).union(*map(self._beginnings, then))
        self._places += len(closed)
        if self._places > _MAX_PLACES:
            raise ValueError(_too_long("can be combined in too many ways", _MAX_PLACES))
        return closed


_RANGE = re.compile(rb"\{(\d{1,4})\.\.(\d{1,4})\}")


def _parts(text: str) -> list[int | tuple[int, int]]:
    """The bytes of a text, and the ranges of its numbers. ValueError, one sentence, for a range without numbers."""
    written, parts, at = text.encode(), list[int | tuple[int, int]](), 0
    for found in _RANGE.finditer(written):
        low, high = int(found[1]), int(found[2])
        if low > high:
            raise ValueError(f"{found[0].decode()} holds no numbers; write the smaller one first")
        parts += [*written[at : found.start()], (low, high)]
        at = found.end()
    return [*parts, *written[at:]]


def _numbers(low: int, high: int) -> list[tuple[int, int, int]]:
    """The numbers from ``low`` to ``high``, by how many digits they have."""
    lengths = range(len(str(low)), len(str(high)) + 1)
    return [(n, max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10**n - 1)) for n in lengths]


def _digits(count: int, low: int, high: int) -> list[tuple[int, tuple[int, int, int]]]:
    """Each possible first of ``count`` digits that make a number from ``low`` to ``high``, and what the rest makes."""
    unit = 10 ** (count - 1)
    return [
        (ord("0") + digit, (count - 1, max(0, low - digit * unit), min(unit - 1, high - digit * unit)))
        for digit in range(low // unit, high // unit + 1)
    ]


class Rule(NamedTuple):
    """What may come next: these tokens alone if ``only``, else all but these."""

    only: bool
    ids: tuple[int, ...]


class State(NamedTuple):
    """Where a reply stands. ``writing``: at ``node`` of the form's automaton.

    Else ``text`` is what it ends in, folded: a character, and the beginning of a mark if there is one.
    """

    writing: bool
    text: bytes = b""
    node: int = 0


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
        self._longest = max(map(len, self._marks), default=0)
        self._whole = [token for text, ids in texts.folded.items() if self._marked(text) for token in ids]
        self._written = Automaton(form)
        self._first = State(False, b" ") if form.marks else State(True)
        steps = [[longer for longer, _ in self._continued(node)] for node in range(len(self._written.next))]
        fewest, order = {0: 0}, [0]  # tokens that lead to a node, at least; without those that none lead to
        for node in order:
            for longer in steps[node]:
                if longer not in fewest:
                    fewest[longer] = fewest[node] + 1
                    order.append(longer)
        most = max((fewest.get(node, math.inf), self._written.texts[node]) for node in self._written.ends)
        longest = most[1].decode().strip()
        if most[0] == math.inf:
            raise ValueError(
                f"the model's tokens cannot write {longest!r}; do not constrain its replies, or use "
                "a grammar that its tokenizer can write"
            )
        self._reserve = int(most[0]) + 1  # tokens for the longest action, and the end
        if form.limit < self._reserve:
            raise ValueError(
                f"a reply of {form.limit} tokens is too short for {longest!r}, which takes "
                f"{self._reserve}; raise max_tokens"
            )
        self._needed = self._tokens_to_an_end(steps)
        self._far = max(*self._needed.values(), self._reserve) + 2  # with more tokens left nothing is different
        # Only functions of their arguments are kept.
        self._step = lru_cache(1 << 16)(self._step_anew)
        self._rule = lru_cache(1 << 12)(self._rule_anew)

    def state(self, tokens: Sequence[int]) -> State | None:
        """Where a reply stands after ``tokens``; None after its end, or where they are against the rules."""
        state: State | None = self._first
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
        return state is not None and state.writing and state.node in self._written.ends

    # ------------------------------------------------------------------------------------- functions of their arguments

    def _left(self, place: int) -> int:
        return min(self.form.limit - place, self._far)

    def _at(self, state: State, left: int) -> State:
        """``state``, or the beginning of an action where the reply's last ``left`` tokens are needed for it."""
        return state if state.writing or left > self._reserve else State(True)

    def _step_anew(self, state: State, token: int, left: int) -> State | None:
        piece = self._texts.piece(token)
        if token in self._ends or piece == BARRED:
            return None
        writing, text, node = self._at(state, left)
        if writing:
            if not piece:
                return None
            at = self._written.walk(piece, node)
        else:
            text = folded(text + piece)
            found = self._marked(text)
            if found is None:
                return State(False, self._ending(text))
            start, mark = found
            rest = piece[len(piece) - (len(text) - start - len(mark)) :]
            if text[start - 1 : start] != b" " or folded(rest) != text[start + len(mark) :]:
                return None  # a mark has to stand on its own
            at = self._written.walk(self._marks[mark] + rest)
        return State(True, node=at) if at is not None and self._needed.get(at, math.inf) < left else None

    def _rule_anew(self, state: State, left: int) -> Rule | None:
        writing, text, node = self._at(state, left)
        if writing:
            ids = [*self._ends] if node in self._written.ends else []
            for longer, found in self._continued(node):
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

    def _continued(self, node: int) -> Iterator[tuple[int, list[int]]]:
        """The nodes that one more token may lead to, and the tokens that do."""
        waiting = [(node, b"")]
        while waiting:
            at, text = waiting.pop()
            for byte, longer in self._written.next[at].items():
                piece = text + bytes([byte])
                if ids := self._texts.ids(piece):
                    yield longer, ids
                if self._texts.begins_one(piece):
                    waiting.append((longer, piece))

    def _tokens_to_an_end(self, steps: Sequence[Sequence[int]]) -> dict[int, int]:
        """Tokens that still complete an action after each node, at least; without the nodes after which none do."""
        before: dict[int, list[int]] = {}
        for node, after in enumerate(steps):
            for longer in after:
                before.setdefault(longer, []).append(node)
        needed, order = dict.fromkeys(self._written.ends, 0), [*self._written.ends]
        for node in order:
            for earlier in before.get(node, ()):
                if earlier not in needed:
                    needed[earlier] = needed[node] + 1
                    order.append(earlier)
        return needed


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
