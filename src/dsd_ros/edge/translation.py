# SPDX-License-Identifier: Apache-2.0
"""Drafts for a target with another tokenizer: the draft model's text, tokenized as the target would.

The robot holds both tokenizers, so only the target's tokens travel. A target that is greedy, or draws with shared
noise, keeps only its own tokens, so a bad translation costs time and changes nothing. Like universal assisted
generation in Hugging Face transformers, but texts are aligned by characters instead of windows of tokens, and the draft
model's cache is kept as far as its text holds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.modes import Proof, Shape
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.decoding.tree_growth import GrownTree
from dsd_ros.edge.ahead import Ahead
from dsd_ros.edge.draft_model import Drafting, DraftModel, DraftStep, ModelDraft
from dsd_ros.edge.proposer import RoundDraft
from dsd_ros.edge.tuner import Tuner
from dsd_ros.edge.vocabulary import Piece, Transcript, Vocabulary, context_of
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_STEP_BACK = 16  # tokens back to the beginning of a word, at most
_UNSETTLED = 4  # so many tokens beyond those wanted, the first ones are taken to be final
_STEPS_PER_TOKEN = 8  # draft tokens for one of the target's, at most


def check_translatable(settings: DecodeSettings) -> None:
    """ValueError for settings under which drafts cannot be translated.

    Probabilities over one vocabulary prove nothing about tokens of another. A tree would need a text for each branch.
    Guesses, and rounds in flight that rest on them, rank the target's tokens by the draft's probabilities.
    """
    if settings.adapts:
        return  # it chooses what can be translated, or the target alone
    proven = settings.sampling.greedy or settings.proven_by is Proof.COUPLED
    if not (proven and settings.shaped_by is Shape.SEQUENCE):
        raise ValueError(
            "the draft's tokenizer is not the target's, and between two tokenizers drafts are translated "
            "only with temperature 0 or proof coupled, and shape sequence; use these, or a draft model that shares "
            "the target's tokenizer"
        )
    if settings.predrafts and (settings.predraft_source == "guesses" or settings.pipeline_depth > 1):
        raise ValueError(
            "the draft's tokenizer is not the target's, and a translated draft has no probabilities of the target's "
            "tokens to guess outcomes by; use predraft_source exits and pipeline_depth 1, or mode dsd"
        )


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
        self._longer = self._recut = 0  # how often a text grew, and how often that changed its earlier tokens

    @property
    def looks_ahead(self) -> bool:
        """Whether to draft a word to its end: worth it if the draft's tokens are often parts of the target's.

        Otherwise the last token is mostly right as it is, and another pass of the draft model costs more.
        """
        return 5 * self._recut > self._longer

    def learn(self, before: list[Piece], after: list[Piece]) -> None:
        """Compare the tokens of a text with those after it grew."""
        if before and after != before:
            self._longer += 1
            self._recut += after[: len(before)] != before

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
        self._length = self._left = 0  # tokens that are wanted, and passes of the draft model that are left for them
        self._pieces: list[Piece] | None = None

    def fork(self) -> TranslatedReply:
        """An independent copy."""
        twin = copy.copy(self)
        twin.sequence, twin._verified, twin._own = self.sequence.fork(), self._verified.fork(), self._own.fork()
        return twin

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

    def want(self, length: int) -> None:
        """Begin a draft of up to ``length`` tokens of the target."""
        self._length, self._left = length, _STEPS_PER_TOKEN * (length + 1)
        self._pieces = self._said_in_pieces()

    @property
    def satisfied(self) -> bool:
        """Whether the draft needs no further pass of the draft model."""
        pieces = self._pieces
        return pieces is None or self._end is not None or not self._left or self._suffices(pieces, self._length)

    @property
    def place(self) -> int:
        """How many tokens of the target the draft has, so far."""
        return len(self._pieces or ())

    @property
    def ended(self) -> bool:
        """Whether the draft model has ended its text."""
        return self._end is not None

    def draft(self) -> list[int]:
        """The text in the target's tokens, without the last one while it may still change."""
        pieces = self._said_in_pieces()
        if pieces is None:
            return []
        return self._tokens(pieces, len(pieces) + 1) if self.ended else [piece.token for piece in pieces[:-1]]

    @property
    def drafted(self) -> list[int]:
        """The draft, in tokens of the target."""
        return self._tokens(self._pieces, self._length)

    def take(self, token: int) -> None:
        """Add the draft model's next token."""
        self._left -= 1
        if token in self.translation.draft_ends:
            self._end = token
            return
        self.sequence.append([token])
        self._own.append([token])
        before, self._pieces = self._pieces, self._said_in_pieces()
        if before is not None and self._pieces is not None:
            self.translation.learn(before, self._pieces)

    def _suffices(self, pieces: list[Piece], length: int) -> bool:
        """Whether there are ``length`` tokens that more text is unlikely to change."""
        if self.translation.looks_ahead and len(pieces) < length + _UNSETTLED:
            return _settled(self._said, pieces) >= length
        return len(pieces) >= length

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

    def _tokens(self, pieces: list[Piece] | None, length: int) -> list[int]:
        tokens = [piece.token for piece in pieces or ()]
        begun = self._verified.pending and not self._said
        if self._end is not None and pieces is not None and not begun:
            end = self.translation.end_token(self._end, self._ends)
            tokens += [end] if end is not None else []
        tokens = tokens[:length]
        ends = [place for place, token in enumerate(tokens, 1) if token in self._ends]
        return tokens[: ends[0]] if ends else tokens

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


class TranslatedDraft(ModelDraft):
    """One round's draft in the target's tokens, grown by a token of the draft model at a time."""

    def __init__(
        self, drafting: Drafting, number: int, prefix: list[int], reply: TranslatedReply, able: bool = True
    ) -> None:
        super().__init__(drafting, number, prefix, reply.sequence, able)
        self.reply = reply
        if not self.complete:
            reply.want(self.depth)
            self._close()

    @property
    def vocab_size(self) -> int:
        """Of the target: any of its tokens has a text."""
        return self.reply.target_size

    def step(self) -> DraftStep:
        """One more token of the draft model."""
        return DraftStep(self.sequence, [], [])

    def take(self, logits: torch.Tensor | None) -> None:
        """Add the token that the step's ``logits`` (1, V) give; None: the context is full."""
        if logits is None:
            self.able = False  # the target may hold more: it goes on without drafts
            self._close(full=True)
            return
        self.reply.take(self._chosen(logits[0]))
        self._close()

    def next_draft(self, accepted: int, next_token: int, fork: bool) -> Self:
        """The draft of the next round after an outcome, yet to be made; ``fork`` leaves this one's text as it is."""
        gained = self.tokens_of(accepted, next_token)
        reply = self.reply.fork() if fork else self.reply
        reply.verified(gained)
        return type(self)(self.drafting, self.number + 1, [*self.prefix, *gained], reply, self.able)

    def _chosen(self, logits: torch.Tensor) -> int:
        """The draft model's next token: its likeliest, or what the shared noise selects, token by token of one text."""
        sampling, context = self.drafting.sampling, self.context
        if sampling.greedy:
            return int(logits.argmax())
        q = transform(logits, sampling)
        position = context.start + self.reply.place
        noise = self.reply.translation.noise_of(len(q), lambda size: context.noise(position, size))
        return choose(q, noise)

    def _close(self, full: bool = False) -> None:
        if full or self.reply.satisfied:
            tokens = self.reply.drafted
            self._grown = GrownTree(TokenTree.chain(tokens), (-1,) * len(tokens))


class _Translates(DraftModel):
    """What both proposers below do: begin a reply in two vocabularies."""

    translation: Translation

    def _first(self, drafting: Drafting, sequence: Sequence) -> ModelDraft:
        return TranslatedDraft(drafting, 1, [], self.translation.begin(sequence, drafting.eos_token_ids))


class Translating(_Translates):
    """Proposes the draft model's text in the tokens of a target with another tokenizer."""

    def __init__(
        self, model: VisionLanguageModel, settings: DecodeSettings, tuner: Tuner | None, translation: Translation
    ) -> None:
        super().__init__(model, settings, tuner)
        self.translation = translation


class TranslatingAhead(_Translates, Ahead):
    """The same, drafting the next round after the outcomes that early exits name."""

    def __init__(
        self,
        model: VisionLanguageModel,
        settings: DecodeSettings,
        send_ahead: Callable[[RoundDraft], None],
        translation: Translation,
    ) -> None:
        super().__init__(model, dataclasses.replace(settings, predraft_source="exits"), None, send_ahead)
        self.translation = translation


def _settled(text: str, pieces: list[Piece]) -> int:
    """How many tokens precede the text's last word, which may still grow."""
    for index in range(len(pieces) - 1, 0, -1):
        start = pieces[index].start
        if start > 0 and pieces[index - 1].start != start and _begins_word(text, start):
            return index
    return 0


def _begins_word(text: str, place: int) -> bool:
    before, here = text[place - 1], text[place]
    if before.isspace() or here.isspace():
        return not before.isspace()  # a space belongs to the word after it
    return before.isalnum() != here.isalnum()


def _common(one: Items[object], other: Items[object]) -> int:
    """The length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _missing(special: dict[int, str], elsewhere: dict[int, str]) -> frozenset[int]:
    names = set(elsewhere.values())
    return frozenset(token for token, name in special.items() if name not in names)
