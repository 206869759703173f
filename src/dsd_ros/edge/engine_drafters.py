# SPDX-License-Identifier: Apache-2.0
"""Drafting with an engine, a server beside this process: what it says is a hint, and while it fails nothing is drafted.

An engine goes on by its own likeliest token. Where another is wanted (shared noise, or a grammar), it is chosen among
the engine's likeliest ones, and the engine is asked to go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsd_ros.decoding.constraint import Constraint
from dsd_ros.decoding.methods import Result, RoundContext, method_of
from dsd_ros.decoding.methods.base import Kept
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.edge.draft_model import Origin
from dsd_ros.edge.drafters import LEAD, Drafter, common_length
from dsd_ros.edge.engine import CANDIDATES, DraftEngine, EnginePrompt, EngineStream, Piece
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.translation import Translation
from dsd_ros.wire.messages import Outcome

_LOOK_S = 0.002  # how long a token is waited for, before the link is looked at again
_INCOMPLETE = "\ufffd"


class _Asking:
    """What both drafters share: one request at a time."""

    device: torch.device | None = None

    def __init__(self, engine: DraftEngine, settings: DecodeSettings, longest: int | None = None) -> None:
        """``longest``: tokens to draft of a reply, at most; None: all but the last, which is the target's own."""
        self._engine, self._settings = engine, settings
        self._longest = settings.max_tokens - 1 if longest is None else longest
        self._prompt: EnginePrompt | None = None
        self._ends: frozenset[int] = frozenset()
        self._stream: EngineStream | None = None
        self._grew = False  # the draft, by what this request brought
        self._stuck = False  # the engine has nothing to say after the tokens there are
        self.error = ""  # of the engine in this reply, one sentence

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        self._stop()
        self.error, self._ends = self._engine.trouble if self._engine.rests else "", ends
        self._prompt = self._engine.prompt(request.image, request.instruction, request.history)

    def close(self) -> None:
        self._stop()
        self._prompt = None

    def _stop(self) -> None:
        """What is being said is not needed."""
        if self._stream is not None:
            self._stream.give_up()
        self._stream, self._stuck = None, False

    @property
    def _silent(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._stuck or (self._stream is None and self._engine.rests)

    def _more(self, said: str, left: int, candidates: int) -> list[Piece]:
        """What comes next after ``said``, as far as it has come."""
        assert self._prompt is not None, "begin comes first"
        if self._stream is None:
            self._stream, self._grew = self._engine.ask(self._prompt, said, min(LEAD, left), candidates), False
        stream = self._stream
        pieces = stream.take(_LOOK_S)
        if stream.over and not pieces:
            self._stream = None
            self.error = stream.error or self.error
            self._stuck = not (self._grew or stream.error)
        return pieces


class EngineDrafter(_Asking):
    """Drafts with an engine that names tokens, and has the target's tokenizer."""

    def __init__(self, engine: DraftEngine, settings: DecodeSettings, longest: int | None = None) -> None:
        super().__init__(engine, settings, longest)
        self._method = method_of(Proof.COUPLED, settings.sampling.greedy)
        self._constraint: Constraint | None = None
        self._context = RoundContext(settings.sampling, settings.seed, 0, 0, 0)
        self._tokens: list[int] = []  # the verified ones, then the drafted ones
        self._verified = 0
        self._at = 0  # place in the reply of what the engine says next: a target that is ahead is caught up with

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        super().begin(request, ends)
        self._constraint = request.constrain(ends) if request.constrain is not None else None
        self._context = RoundContext(self._settings.sampling, self._settings.seed, request.number, 0, 0)
        self._tokens, self._verified = [], 0

    def follow(self, tokens: Sequence[int]) -> None:
        held = common_length(self._tokens, tokens)
        if held < len(tokens):
            if held < len(self._tokens) or self._stuck:
                self._stop()
            self._tokens = list(tokens)
        self._verified = len(tokens)

    @property
    def far_enough(self) -> bool:
        drafted, longest = self._tokens, min(self._verified + LEAD, self._longest)
        return len(drafted) >= longest or (bool(drafted) and drafted[-1] in self._ends) or self._silent

    def next(self) -> list[int]:
        if not self.far_enough:
            said, count = "", len(self._tokens)
            if self._stream is None:
                said, count = self._engine.vocabulary.decode(self._tokens)
            if count < len(self._tokens):  # they end amid a character, which no text can say
                self._stuck = True
            else:
                self._at = count if self._stream is None else self._at
                self._read(said)
        return self._tokens[self._verified : self._longest]

    def _read(self, said: str) -> None:
        free = self._constraint is None and self._settings.sampling.greedy
        for piece in self._more(said, self._longest - len(self._tokens), 0 if free else CANDIDATES):
            tokens = self._checked(piece)
            self._grew |= bool(tokens)
            for token in tokens:
                if self._at == len(self._tokens):
                    self._tokens.append(self._chosen(token, piece.candidates) if len(tokens) == 1 else token)
                self._at += 1
                if self._tokens[self._at - 1] != token:  # it has to go on from another
                    self._stop()
                    return

    def _checked(self, piece: Piece) -> list[int]:
        """Its tokens. llama-server leaves out those that only begin a character: then the text's."""
        vocabulary = self._engine.vocabulary
        if vocabulary.decode_text(piece.tokens) == piece.text:
            return [token for token in piece.tokens if 0 <= token < self._engine.known_tokens]
        return [] if _INCOMPLETE in piece.text else vocabulary.encode(piece.text)

    def _chosen(self, token: int, candidates: list[tuple[int, float]]) -> int:
        """``token``, or among its alternatives the likeliest that is allowed, or the one that the noise selects."""
        known = [(each, chance) for each, chance in candidates if 0 <= each < self._engine.known_tokens]
        if not known:
            return token
        row = torch.full((1, self._engine.vocab_size), -torch.inf)
        row[0, [each for each, _ in known]] = torch.tensor([chance for _, chance in known])
        if self._constraint is not None:
            row = self._constraint.mask(row, self._tokens)
            if not torch.isfinite(row).any():
                rule = self._constraint.rule(self._constraint.state(self._tokens), len(self._tokens))
                return rule.ids[0] if rule is not None and rule.only else token
        rows, _ = self._method.draw_from(row, [len(self._tokens)], self._context)
        return int(rows.argmax())


class EngineTextDrafter(_Asking):
    """Drafts with an engine's text, tokenized as the target would: see ``drafters.TextDrafter``."""

    def __init__(
        self,
        engine: DraftEngine,
        settings: DecodeSettings,
        translation: Translation | None = None,
        longest: int | None = None,
    ) -> None:
        """``translation``: to the target's tokenizer, None if the engine's model has the same."""
        super().__init__(engine, settings, longest)
        self._translation = translation or Translation(engine.vocabulary, engine)
        self._verified: list[int] = []
        self._text = ""  # as the engine has it: what is verified and drafted; short of that while the target is ahead
        self._agreed = ""  # the verified text
        self._ended = False
        self._draft: list[int] | None = []  # None: its text cannot be what the target says

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        super().begin(request, ends)
        self._verified, self._text, self._agreed, self._ended, self._draft = [], "", "", False, []

    def follow(self, tokens: Sequence[int]) -> None:
        if len(tokens) <= len(self._verified):
            return
        self._verified = list(tokens)
        text = self._agreed = self._translation.target_text(tokens)
        ahead = self._stream is not None and not self._ended and text.startswith(self._text)
        if not (ahead or self._text.startswith(text)):
            self._stop()
            self._text, self._ended = text, False
        self._translate()

    @property
    def far_enough(self) -> bool:
        most = min(LEAD, self._longest - len(self._verified))
        return self._draft is None or self._ended or len(self._draft) >= most or self._silent

    def next(self) -> list[int]:
        if not self.far_enough:
            if self._stream is None and len(self._text) < len(self._agreed):
                self._text = self._agreed
            for piece in self._more(self._text, self._longest - len(self._verified), 0):
                self._text += piece.text
                self._grew |= bool(piece.text)
                self._ended |= piece.ended
            if not (self._text.startswith(self._agreed) or self._agreed.startswith(self._text)):
                self._stop()
                self._text, self._ended = self._agreed, False
            self._translate()
        return (self._draft or [])[: max(0, self._longest - len(self._verified))]

    def _translate(self) -> None:
        tokens = self._translation.target_tokens(self._text[len(self._agreed) :], self._verified)
        if tokens is not None and not self._ended:
            tokens = tokens[:-1]  # what follows may change it
        elif tokens is not None:
            end = self._translation.end_token(max(self._engine.eos_token_ids), self._ends)
            tokens = [*tokens, *([] if end is None else [end])]
        self._draft = tokens


def engine_drafter(
    engine: DraftEngine, settings: DecodeSettings, translation: Translation | None = None, longest: int | None = None
) -> Drafter:
    """By tokens where the engine names them and the target has the same, else by text."""
    if engine.names_tokens and translation is None:
        return EngineDrafter(engine, settings, longest)
    return EngineTextDrafter(engine, settings, translation, longest)


@dataclass(frozen=True)
class EngineDraft:
    """One round's draft, which follows ``prefix``; see ``draft_model.ModelDraft``."""

    number: int
    prefix: list[int]
    tree: TokenTree
    context: RoundContext
    seconds: float
    vocab_size: int
    q: Sequence[torch.Tensor] = ()
    kept: Sequence[Kept] = field(default=())


class EngineRounds:
    """Proposes each round's draft, made by an engine; see ``draft_model.DraftModel``."""

    origin = Origin()
    device: torch.device | None = None

    def __init__(self, engine: DraftEngine, settings: DecodeSettings) -> None:
        self._drafter = engine_drafter(engine, settings)
        self._settings, self._vocab_size = settings, engine.vocab_size
        self._request: ReplyRequest | None = None
        self._tokens: list[int] = []
        self._number = 1

    @property
    def error(self) -> str:
        """The engine's failure in this reply, "" if none."""
        return self._drafter.error

    def begin(self, request: ReplyRequest, eos_token_ids: frozenset[int]) -> None:
        """Start a reply. ``eos_token_ids`` are the target's."""
        self._drafter.begin(request, eos_token_ids)
        self._request, self._tokens, self._number = request, [], 1

    def propose(self) -> EngineDraft:
        """The next round's draft; shorter, or empty, while the engine fails. DeadlineExceeded, DecodeCancelled."""
        assert self._request is not None, "begin comes first"
        began, settings = time.perf_counter(), self._settings
        most = max(0, min(settings.draft_length, settings.max_tokens - len(self._tokens) - 1))
        drafted: list[int] = self._drafter.next() if most else []
        while len(drafted) < most and not self._drafter.far_enough:
            self._request.limits.check()
            drafted = self._drafter.next()
        context = RoundContext(settings.sampling, settings.seed, self._request.number, self._number, len(self._tokens))
        seconds = time.perf_counter() - began
        tree = TokenTree.chain(drafted[:most])
        return EngineDraft(self._number, list(self._tokens), tree, context, seconds, self._vocab_size)

    def draft_ahead(self, draft: Any) -> None:
        """The engine goes on by itself."""

    def on_early(self, outcome: Outcome) -> None:
        """Early exits are not asked for."""

    def update(self, draft: Any, result: Result) -> None:
        """The round is over, with this result."""
        self._tokens = [*draft.prefix, *draft.tree.tokens[: result.accepted], result.next_token]
        self._number += 1
        self._drafter.follow(self._tokens)

    def reset(self) -> None:
        """Give back the memory of the reply."""
        self._drafter.close()
        self._request = None

    close = reset
