# SPDX-License-Identifier: Apache-2.0
"""Drafters of mode stream: each says, token after token, what comes next after the verified ones.

A draft is a hint. The target decides every token, so a drafter may be wrong, slow or silent: it only costs time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.methods import RoundContext, method_of
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.engine import DraftEngine, NotYet, failure_of
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.translation import Translation
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence as TokenSequence

LEAD = 32  # tokens ahead of the verified ones: what the target takes in the step it is at, and in the next
_RECENT, _FEW, _TRY_AGAIN = 256, 16, 16  # see ``Worth``


class Drafter(Protocol):
    """Drafts one reply at a time. For one thread."""

    device: torch.device | None  # where a model of this process runs

    @property
    def error(self) -> str:
        """What is wrong with the engine in this reply, one sentence; "" if nothing is."""

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        """Start a reply: read its prompt. ``ends`` are the target's end tokens."""

    def follow(self, tokens: Sequence[int]) -> None:
        """The verified tokens of the reply so far: roll back to the first one that was drafted differently."""

    @property
    def far_enough(self) -> bool:
        """Whether there is nothing more to draft until more tokens are verified."""

    def next(self) -> list[int]:
        """Draft one token more, unless far enough; all drafted tokens after the verified ones."""

    def close(self) -> None:
        """Give back the memory of the reply."""


class ModelDrafter:
    """Drafts with a model of this process, or an engine, that has the target's tokenizer."""

    def __init__(
        self, model: VisionLanguageModel | DraftEngine, settings: DecodeSettings, longest: int | None = None
    ) -> None:
        """``longest``: tokens to draft of a reply, at most; None: all but the last, which is the target's own."""
        self._longest = settings.max_tokens - 1 if longest is None else longest
        self.device: torch.device | None = model.device
        self._model, self._settings = model, settings
        self._method = method_of(Proof.COUPLED, settings.sampling.greedy)
        self._sequence: TokenSequence | None = None
        self._ends: frozenset[int] = frozenset()
        self._verified: list[int] = []
        self._able = True  # False: its context is full, it lacks a token of the target's, or the engine fails
        self._context = RoundContext(settings.sampling, settings.seed, 0, 0, 0)

    @property
    def error(self) -> str:
        return failure_of(self._sequence)

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        self._sequence = request.prefill(self._model, ends)
        self._ends, self._verified, self._able = ends, [], True
        self._context = RoundContext(self._settings.sampling, self._settings.seed, request.number, 0, 0)

    def follow(self, tokens: Sequence[int]) -> None:
        sequence = self._begun
        held = common_length(sequence.tokens, tokens)
        self._able &= all(token < self._model.vocab_size for token in tokens[held:])
        if held < len(tokens) and self._able:
            sequence.rollback(held)
            sequence.append(tokens[held:])
        self._verified = list(tokens)

    @property
    def far_enough(self) -> bool:
        drafted = self._begun.tokens
        longest = min(len(self._verified) + LEAD, self._longest)
        return not self._able or len(drafted) >= longest or (bool(drafted) and drafted[-1] in self._ends)

    def next(self) -> list[int]:
        if not self.far_enough:
            try:
                self._draft_token(self._begun)
            except ContextError:
                self._able = False
            except NotYet:
                pass
        return self._drafted

    def close(self) -> None:
        self._sequence = None

    def _draft_token(self, sequence: TokenSequence) -> None:
        """ContextError, or ``NotYet``."""
        logits = sequence.constrained(sequence.next_logits().unsqueeze(0))
        rows, _ = self._method.draw_from(logits, [len(sequence.tokens)], self._context)
        sequence.append([int(rows.argmax())])

    @property
    def _drafted(self) -> list[int]:
        """All drafted tokens."""
        return self._begun.tokens[len(self._verified) :] if self._able else []

    @property
    def _begun(self) -> TokenSequence:
        assert self._sequence is not None, "begin comes first"
        return self._sequence


class TextDrafter(ModelDrafter):
    """The same with another tokenizer: the model's text after the verified part, tokenized as the target would.

    The last token of such a text is left out while the text may go on: what follows often changes it. The model's
    sequence holds the verified text, and perhaps drafted text after it that is not refuted.
    """

    def __init__(
        self, model: VisionLanguageModel | DraftEngine, settings: DecodeSettings, translation: Translation
    ) -> None:
        super().__init__(model, settings)
        self._translation = translation
        # Characters of the verified text, and of the model's own for them: a normalizing tokenizer changes lengths.
        self._agreed, self._agreed_own = 0, 0
        self._end: int | None = None  # the model's token that ended its text
        self._draft: list[int] | None = []  # None: its text cannot be what the target says
        self._place = 0  # how many tokens of the target the drafted text makes

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        super().begin(request, ends)
        self._agreed, self._agreed_own, self._end = 0, 0, None
        self._translate()

    def follow(self, tokens: Sequence[int]) -> None:
        if len(tokens) <= len(self._verified):
            return
        self._verified = list(tokens)
        translation, sequence = self._translation, self._begun
        text, said = translation.target_text(tokens), self._said
        news = text[self._agreed :]
        if said.startswith(news):  # whatever the tokens: the model's own text stands
            self._agreed_own += len(news)
        else:
            own = translation.draft.encode(text)
            held = common_length(sequence.tokens, own)
            sequence.rollback(held)
            sequence.append(own[held:])
            self._agreed_own = len(translation.draft_text(own))
            self._end = None
        self._agreed = len(text)
        self._translate()

    @property
    def far_enough(self) -> bool:
        most = min(LEAD, self._longest - len(self._verified))
        return not self._able or self._draft is None or self._end is not None or len(self._draft) >= most

    def _draft_token(self, sequence: TokenSequence) -> None:
        token = self._chosen(sequence.constrained(sequence.next_logits().unsqueeze(0))[0])
        if token in self._translation.draft_ends:
            self._end = token
        else:
            sequence.append([token])
        self._translate()

    @property
    def _drafted(self) -> list[int]:
        return self._draft or []

    def _chosen(self, logits: torch.Tensor) -> int:
        """The likeliest token, or what the shared noise of the target's next token selects."""
        if self._settings.sampling.greedy:
            return int(logits.argmax())
        q, position = transform(logits, self._settings.sampling), len(self._verified) + self._place
        return choose(q, self._translation.noise_of(len(q), lambda size: self._context.noise(position, size)))

    @property
    def _said(self) -> str:
        """The model's text after the verified text."""
        return self._translation.draft_text(self._begun.tokens)[self._agreed_own :]

    def _translate(self) -> None:
        """Make the draft of the model's text."""
        said = self._said
        tokens = self._translation.target_tokens(said, self._verified)
        self._place = len(tokens or ())
        if tokens is not None:
            if self._end is None:
                tokens = tokens[:-1]
            elif (end := self._translation.end_token(self._end, self._ends)) is not None:
                tokens = [*tokens, end]
        self._draft = tokens


class Worth:
    """Whether drafting is worth the robot's energy.

    Not if fewer than 16 of the last 256 tokens came from drafts. Every 16th reply is drafted all the same, to see
    whether that has changed.
    """

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self._rested = 0

    def begin(self) -> bool:
        """Whether to draft the reply that begins."""
        if not self._rests:
            return True
        self._rested += 1
        return self._rested % _TRY_AGAIN == 0

    def learn(self, accepted: int, gained: int) -> None:
        """Of ``gained`` tokens, ``accepted`` came from drafts."""
        self._recent.extend([True] * accepted + [False] * (gained - accepted))

    def explain(self) -> str:
        """What was found, for a log; "" while drafting goes on."""
        if not self._rests:
            return ""
        return (
            f"drafting rests: {sum(self._recent)} of the last {_RECENT} tokens came from drafts; it is tried again in "
            f"every {_TRY_AGAIN}th reply"
        )

    @property
    def _rests(self) -> bool:
        return len(self._recent) == _RECENT and sum(self._recent) < _FEW


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(first), len(second))
    return next((place for place in range(most) if first[place] != second[place]), most)
