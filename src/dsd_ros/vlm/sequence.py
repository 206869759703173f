# SPDX-License-Identifier: Apache-2.0
"""One reply in progress: its tokens, KV cache and token tree; and passes over several replies at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Tokens
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.generation import processed
from dsd_ros.decoding.tree import ancestor_mask, node_depths
from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.errors import SequenceError

if TYPE_CHECKING:
    from dsd_ros.decoding.constraint import Constraint
    from dsd_ros.decoding.generation import LogitsProcessor
    from dsd_ros.vlm.model import VisionLanguageModel

LayerHook = Callable[[int, torch.Tensor], None]  # (layer from 0, its hidden states), while deeper layers have not run


class PromptPart(NamedTuple):
    """Embedded tokens of a prompt that no pass has fed yet: the rest of the prompt, or the beginning of that rest.

    hidden: (1, n, hidden size). rotations: cosines and sines (1, n, head size). ends: whether the prompt ends here.
    deep: (layers, n, hidden size) or None, see ``backbones.Prompt``.
    """

    hidden: torch.Tensor
    rotations: tuple[torch.Tensor, torch.Tensor]
    ends: bool = True
    deep: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.hidden.shape[1]

    def part(self, start: int, count: int) -> PromptPart:
        """``count`` tokens from ``start``."""
        cos, sin = self.rotations
        place = slice(start, start + count)
        deep = None if self.deep is None else self.deep[:, place]
        return PromptPart(self.hidden[:, place], (cos[:, place], sin[:, place]), start + count >= self.length, deep)


class Feed(NamedTuple):
    """What one sequence contributes to a forward pass: its prompt, pending text, new nodes of a token tree.

    It is one token or more. rope_delta: a text token's M-RoPE position minus its index in the cache. parents: of every
    node of the tree, -1 for the root's children, each parent before its children; the first ``held`` nodes already are
    the last rows of the cache. Nothing follows a prompt that does not end.
    """

    tokens: list[int]  # text, then nodes
    cache: KeyValueCache
    rope_delta: int
    parents: list[int] = []  # never changed
    held: int = 0
    prompt: PromptPart | None = None

    @property
    def length(self) -> int:
        """How many tokens are fed, the prompt's included."""
        return len(self.tokens) + (self.prompt.length if self.prompt is not None else 0)

    @property
    def text(self) -> int:
        """How many of them are no nodes."""
        return self.length - (len(self.parents) - self.held)

    @property
    def past(self) -> int:
        """How many text tokens are in the cache."""
        return self.cache.length - self.held

    @property
    def rows(self) -> int:
        """Rows of logits that the pass returns: one after the text, if there is any, and one per new node.

        There is none after a prompt that does not end.
        """
        if self.prompt is not None and not self.prompt.ends:
            return 0
        return len(self.parents) - self.held + (self.text > 0)


@dataclass(frozen=True)
class CachedTree:
    """A token tree whose keys and values are the last rows of a sequence's cache.

    rows: logits (vocabulary,) before the tree, then after each node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    rows: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class TreeLayout:
    """Attention mask and positions of a pass over ``text`` tokens and new tree nodes, n in all.

    mask: (n, past + held + n) bool, True where a row attends; None for one token after the others, and for text that
    begins the sequence, which is causal. positions: (n,) int64 from the start of the sequence; siblings share one.
    end: the first position after the text and the whole tree.
    """

    mask: np.ndarray | None
    positions: np.ndarray
    end: int

    @classmethod
    def of(cls, parents: Tokens[int], held: int, past: int, text: int) -> TreeLayout:
        """Lay out ``text`` tokens after ``past`` others, and a tree whose first ``held`` nodes are in the cache.

        Held nodes are the end of the cache, so with any of them ``text`` must be 0.
        """
        nodes = len(parents)
        first = past + text  # the tree's first column
        if not nodes and (not past or text == 1):
            return cls(None, np.arange(past, first), first)
        mask = np.zeros((text + nodes - held, first + nodes), np.bool_)
        mask[:text, :first] = np.tri(text, first, past, dtype=np.bool_)
        mask[text:, :first] = True
        mask[text:, first:] = ancestor_mask(parents)[held:]
        depths = node_depths(parents)
        positions = np.empty(len(mask), np.int64)
        positions[:text] = np.arange(past, first)
        positions[text:] = np.array(depths[held:], np.int64) + (first - 1)
        return cls(mask, positions, first + max(depths, default=0))


class Sequence:
    """A prompt and its reply so far, made by ``VisionLanguageModel.prefill``, ``open`` or ``begin``. For one thread.

    ``append`` only records tokens; the next ``next_logits`` or ``verify`` feeds them. The sequences of one model may be
    advanced in any order. Returned logits belong to the sequence: do not modify them. A prompt that is still ``unread``
    is fed by the next pass, or by ``read``.

    A token tree may be attached after the last token (``verify_tree``, ``grow_tree``). ``keep_path`` moves one of its
    paths into the reply; any other change of the reply, or a pass over it, drops the tree.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        cache: KeyValueCache,
        last_prompt_token: int,
        rope_delta: int,
        prompt_logits: torch.Tensor | None,
        prompt: PromptPart | None = None,
    ) -> None:
        """``prompt``: what the cache does not hold yet; ``prompt_logits`` is None then."""
        self.model = model
        self.tokens: list[int] = []
        # See ``constrained``; forks share them.
        self.processor: LogitsProcessor | None = None
        self.constraint: Constraint | None = None
        self.prompt_length = cache.length if prompt is None else prompt.length
        self._cache = cache
        self._last_prompt_token = last_prompt_token
        self._rope_delta = rope_delta
        self._prompt = prompt
        self._prompt_logits = prompt_logits
        # Logits of the last pass: row i follows the first _rows_start + i reply tokens.
        self._rows = torch.empty(0)
        self._rows_start = 0
        self._tree = CachedTree()

    @property
    def unread(self) -> int:
        """How many tokens of the prompt no pass has fed yet."""
        return 0 if self._prompt is None else self.prompt_length - self._cache.length

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory that the KV cache takes."""
        return self._cache.nbytes

    def read(self, count: int | None = None) -> None:
        """Feed the next ``count`` tokens of the prompt, all of them by default, in a pass of its own."""
        if self._prompt is not None:
            feed = self.prompt_feed(self.unread if count is None else count)
            self.record(feed, self.model.forward_tree(feed))

    def append(self, tokens: Tokens[int]) -> None:
        """Extend the reply; SequenceError for a token outside the vocabulary."""
        tokens = self._checked(tokens)
        self._drop_tree()
        self.tokens.extend(tokens)

    def next_logits(self, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Logits (vocabulary,) float32 after all tokens; runs a forward pass only when needed.

        ``on_layer`` is called as by ``verify``, if there is a pass.
        """
        self.read()
        known = self.known_logits()
        return self._advance(0, on_layer)[-1] if known is None else known

    def verify(self, draft: Tokens[int], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Append ``draft`` and return the logits before it and after each of its tokens, in one pass.

        Returns (len(draft) + 1, vocabulary) float32. Pending tokens are fed in the same pass. After each decoder layer,
        before deeper ones run, ``on_layer(index, hidden)`` gets the hidden states (len(draft) + 1, hidden size) of the
        same rows. If the pass fails (ContextError, or an error in the hook), the draft is removed again.
        """
        draft = self._checked(draft)
        self.read()
        self._drop_tree()
        before = len(self.tokens)
        first_row = None
        if self._fed == before:
            first_row = self._known_row(before) if on_layer is None else None
            if first_row is None:
                self._step_back()
            elif not draft:
                return first_row.unsqueeze(0)
        self.tokens.extend(draft)
        try:
            if first_row is None:
                return self._advance(len(draft), on_layer)
            rows = torch.cat([first_row.unsqueeze(0), self._advance(len(draft) - 1, None)])
        except BaseException:
            del self.tokens[before:]
            raise
        self._rows, self._rows_start = rows, before
        return rows

    def verify_tree(self, tokens: Tokens[int], parents: Tokens[int], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Attach a token tree to the reply and return the logits before it and after each node, in one pass.

        parents: each node's parent by index, -1 for the children of the last token; parents come first. Returns
        (nodes + 1, vocabulary) float32. Pending tokens are fed in the same pass, and ``on_layer`` is called as by
        ``verify``. After a failed pass there is no tree and the reply is unchanged. ContextError when tokens and tree
        depth exceed the context.
        """
        self.read()
        feed = self.whole_tree_feed(tokens, parents, on_layer is not None)
        if feed is None:
            return self.next_logits().unsqueeze(0)
        return self.record_tree(feed, self.model.forward_tree(feed, on_layer))

    def grow_tree(self, tokens: Tokens[int], parents: Tokens[int]) -> torch.Tensor:
        """Add nodes to the attached tree and return the logits (new nodes, vocabulary) float32 after each.

        parents: as for ``verify_tree``; nodes are numbered across all calls. A tree of depth L costs L passes, with
        ``next_logits`` for the first level. A failed pass leaves the tree unchanged.
        """
        self.read()
        feed = self.tree_feed(tokens, parents)
        if feed is None:
            return self.next_logits().new_empty((0, self.model.vocab_size))
        return self.record(feed, self.model.forward_tree(feed))

    def constrained(self, logits: torch.Tensor, nodes: int = 0) -> torch.Tensor:
        """Logits after the tree's last ``nodes`` nodes, or after all tokens, as options and constraint leave them."""
        tree = self._tree if nodes else CachedTree()
        return processed(logits, self.processor, self.constraint, self.tokens, tree.tokens, tree.parents)

    def keep_path(self, path: Tokens[int]) -> None:
        """Move the nodes of a path, from a child of the last token down, into the reply; no forward pass.

        The rest of the tree is dropped; an empty path drops all of it. SequenceError for anything that is not a path of
        the attached tree.
        """
        tree, before = self._tree, len(self.tokens)
        above = -1
        for node in path:
            if not 0 <= node < len(tree.tokens) or tree.parents[node] != above:
                raise SequenceError(
                    f"{list(path)} is not a path of the {len(tree.tokens)}-node tree attached to this sequence; "
                    "name a child of the last token, then a child of each node before"
                )
            above = node
        if not path:
            self._drop_tree()
            return
        self._cache.keep(self.prompt_length + before, path)
        self._rows = torch.stack([tree.rows[0], *(tree.rows[node + 1] for node in path)])
        self._rows_start = before
        self.tokens.extend(tree.tokens[node] for node in path)
        self._tree = CachedTree()

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens of the reply; no forward pass."""
        if not 0 <= length <= len(self.tokens):
            raise SequenceError(
                f"cannot keep {length} tokens of a reply of {len(self.tokens)}; "
                f"give a length from 0 to {len(self.tokens)}"
            )
        self._drop_tree()
        del self.tokens[length:]
        if self._fed > length:
            self._cache.length = self.prompt_length + length

    def fork(self) -> Sequence:
        """An independent copy; later changes to either do not affect the other."""
        twin = object.__new__(Sequence)
        twin.__dict__.update(self.__dict__)
        twin.tokens = list(self.tokens)
        twin._cache = self._cache.copy()
        return twin

    def known_logits(self) -> torch.Tensor | None:
        """What ``next_logits`` returns if it needs no forward pass, else None."""
        length = len(self.tokens)
        if self._fed != length:
            return None
        known = self._known_row(length)
        if known is None:
            self._step_back()
        return known

    def feed(self) -> Feed:
        """What the next forward pass must be fed."""
        self._drop_tree()
        if self._prompt is not None:
            return self.prompt_feed(self.unread)._replace(tokens=list(self.tokens))
        fed = self._fed
        pending = self.tokens[fed:] if fed >= 0 else [self._last_prompt_token, *self.tokens]
        return Feed(pending, self._cache, self._rope_delta)

    def prompt_feed(self, count: int) -> Feed:
        """The next ``count`` tokens of a prompt that is still unread, at least one."""
        assert self._prompt is not None
        return Feed([], self._cache, self._rope_delta, prompt=self._prompt.part(self._cache.length, max(1, count)))

    def tree_feed(self, tokens: Tokens[int], parents: Tokens[int]) -> Feed | None:
        """What the pass of ``grow_tree`` must be fed; None if there is nothing to feed."""
        tree = self._tree
        tokens = self._checked(tokens)
        parents = _checked_parents(parents, len(tokens), len(tree.tokens))
        text: list[int] = []
        prompt = None
        if not tree.tokens and self.known_logits() is None:
            text, *_, prompt = self.feed()
        if not text and not tokens and prompt is None:
            return None
        return Feed(text + tokens, self._cache, self._rope_delta, [*tree.parents, *parents], len(tree.tokens), prompt)

    def whole_tree_feed(self, tokens: Tokens[int], parents: Tokens[int], heard: bool) -> Feed | None:
        """What the pass of ``verify_tree`` must be fed, with ``heard`` also the row before the tree if it is known."""
        tokens, parents = self._checked(tokens), _checked_parents(parents, len(tokens), 0)
        self._drop_tree()
        if heard and self._fed == len(self.tokens):
            self._step_back()
        return self.tree_feed(tokens, parents)

    def record(self, feed: Feed, rows: torch.Tensor) -> torch.Tensor:
        """Record a pass' logits (feed.rows, vocabulary); return those after the new nodes."""
        if feed.prompt is not None:
            if not feed.prompt.ends:
                return rows
            self._prompt = None
        if feed.text:
            # Tokens that were appended to a prompt may still be pending.
            self._rows_start = self._cache.length - self.prompt_length - len(feed.parents)
            self._rows, rows = rows[:1], rows[1:]
            if self._rows_start == 0:
                self._prompt_logits = self._rows[0]
        if len(rows):
            tree = self._tree
            known = self._known_row(len(self.tokens))
            assert known is not None or tree.rows
            before = tree.rows or (known,)
            tokens = (*tree.tokens, *feed.tokens[len(tree.tokens) - len(feed.parents) :])
            self._tree = CachedTree(tokens, tuple(feed.parents), (*before, *rows))
        return rows

    def record_tree(self, feed: Feed, rows: torch.Tensor) -> torch.Tensor:
        """Record the pass of a whole tree; logits (nodes + 1, vocabulary) before it and after each node."""
        self.record(feed, rows)
        return rows if feed.text else torch.cat([self.next_logits().unsqueeze(0), rows])

    @property
    def _fed(self) -> int:
        """How many reply tokens are in the cache; negative if part of the prompt is not."""
        return self._cache.length - self.prompt_length - len(self._tree.tokens)

    def _known_row(self, length: int) -> torch.Tensor | None:
        if length == 0:
            return self._prompt_logits
        index = length - self._rows_start
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def _step_back(self) -> None:
        """Remove the last position from the cache, so that the next pass computes its logits again."""
        self._drop_tree()
        self._cache.length -= 1

    def _drop_tree(self) -> None:
        if self._tree.tokens:
            self._cache.length -= len(self._tree.tokens)
            self._tree = CachedTree()

    def _advance(self, draft_length: int, on_layer: LayerHook | None) -> torch.Tensor:
        """Feed what is pending; return the logits of the last ``draft_length + 1`` positions."""
        feed = self.feed()
        rows = self.model.forward_tokens(feed.tokens, feed.cache, feed.rope_delta, draft_length + 1, on_layer)
        self._rows, self._rows_start = rows, len(self.tokens) - draft_length
        return rows

    def _checked(self, tokens: Tokens[int]) -> list[int]:
        tokens = [int(token) for token in tokens]
        size = self.model.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise SequenceError(
                    f"token {token} is not in the vocabulary of {self.model.name} "
                    f"(0 to {size - 1}); draft and target must share a tokenizer"
                )
        return tokens


def _checked_parents(parents: Tokens[int], count: int, held: int) -> list[int]:
    parents = [int(parent) for parent in parents]
    if len(parents) != count:
        raise SequenceError(f"a tree of {count} nodes needs as many parents, not {len(parents)}")
    for node, parent in enumerate(parents, held):
        if not -1 <= parent < node:
            raise SequenceError(
                f"node {node} of a tree names parent {parent}; use -1 for the last token, or an earlier node"
            )
    return parents


def next_logits_together(sequences: list[Sequence], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
    """Logits (vocabulary,) float32 after all tokens of each sequence of one model, in one pass.

    Each result equals that sequence's own ``next_logits`` up to rounding. Sequences may have different lengths and
    numbers of pending tokens, and one may be listed twice. A batch of eight costs an edge device little more than one
    sequence (FSD, Table 9).

    ``on_layer`` is called after each decoder layer. If it raises, or a sequence is too long for the model
    (ContextError), all sequences are as before.
    """
    waiting = list({id(sequence): sequence for sequence in sequences if sequence.known_logits() is None}.values())
    if len(waiting) > 1:
        feeds = [sequence.feed() for sequence in waiting]
        for sequence, feed, rows in zip(waiting, feeds, waiting[0].model.forward_batch(feeds, on_layer), strict=True):
            sequence.record(feed, rows)
    return [sequence.next_logits(on_layer) for sequence in sequences]


def grow_trees_together(
    growths: Tokens[tuple[Sequence, Tokens[int], Tokens[int]]], on_layer: LayerHook | None = None
) -> list[torch.Tensor]:
    """``Sequence.grow_tree`` for several (sequence, tokens, parents) of one model, in one pass.

    Each result equals that sequence's own up to rounding. ``on_layer`` is called after each decoder layer.
    SequenceError (also for a sequence listed twice), ContextError, or what ``on_layer`` raises; none has grown then.
    """
    if len({id(sequence) for sequence, _, _ in growths}) < len(growths):
        raise SequenceError("a sequence can grow only one level of its tree per pass; list each sequence once")
    feeds = [(sequence, sequence.tree_feed(tokens, parents)) for sequence, tokens, parents in growths]
    several = [feed for _, feed in feeds if feed is not None]
    if len(several) > 1:
        found = iter(feeds[0][0].model.forward_batch(several, on_layer))
    else:
        found = iter([feeds[0][0].model.forward_tree(feed, on_layer) for feed in several])
    return [
        sequence.grow_tree([], []) if feed is None else sequence.record(feed, next(found)) for sequence, feed in feeds
    ]


class PromptChunk(NamedTuple):
    """The next ``length`` tokens of a sequence's unread prompt, to be fed along with trees of other sequences."""

    sequence: Sequence
    length: int


class TreeCheck(NamedTuple):
    """A token tree to attach to a sequence, as for ``Sequence.verify_tree``.

    heard: hidden states of its rows are wanted, so its first row must be computed in the pass.
    """

    sequence: Sequence
    tokens: Tokens[int]
    parents: Tokens[int]
    heard: bool = False


def verify_trees_together(
    checks: Tokens[TreeCheck],
    on_layer: Callable[[int, list[torch.Tensor]], object] | None = None,
    chunks: Tokens[PromptChunk] = (),
) -> list[torch.Tensor]:
    """``Sequence.verify_tree`` for several sequences of one model, in one pass that also reads ``chunks`` of prompts.

    Each result (nodes + 1, vocabulary) equals that sequence's own up to rounding; a draft without branches is a tree,
    too. What is unread of a check's own prompt is fed in the same pass. ``on_layer(index, hidden)`` gets the hidden
    states (rows, hidden size) of each check that is ``heard``. If the pass fails, no reply has changed, no tree is
    attached and no prompt is read.
    """
    feeds = [check.sequence.whole_tree_feed(check.tokens, check.parents, check.heard) for check in checks]
    fed = [feed for feed in feeds if feed is not None]
    heard = [check.heard for check, feed in zip(checks, feeds, strict=True) if feed is not None]
    ends = list(accumulate(feed.length for feed in fed))
    places = [slice(end - feed.rows, end) for feed, end, wanted in zip(fed, ends, heard, strict=True) if wanted]

    def hook(index: int, hidden: torch.Tensor) -> None:
        if on_layer is not None:
            on_layer(index, [hidden[place] for place in places])

    parts = [chunk.sequence.prompt_feed(chunk.length) for chunk in chunks]
    several = [*fed, *parts]
    model = (checks[0] if checks else chunks[0]).sequence.model
    found = iter(model.forward_batch(several, hook) if several else ())
    results = [
        sequence.next_logits().unsqueeze(0) if feed is None else sequence.record_tree(feed, next(found))
        for (sequence, *_), feed in zip(checks, feeds, strict=True)
    ]
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.sequence.record(part, next(found))
    return results
