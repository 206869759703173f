"""One reply in the making: tokens, their keys and values, and where a next forward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.errors import SequenceError
from dsd_ros.vlm.trees import HangingTree

if TYPE_CHECKING:
    from dsd_ros.vlm.model import VisionLanguageModel

LayerHook = Callable[[int, torch.Tensor], None]


class Feed(NamedTuple):
    """What one sequence brings to a forward pass.

    tokens: those not in the cache yet, 1 or more. rope_delta: the distance between a token's
    M-RoPE position and its place in the cache.
    """

    tokens: list[int]
    cache: KeyValueCache
    rope_delta: int


class TreeFeed(NamedTuple):
    """What one sequence brings to a pass that hangs nodes of a tree behind it.

    tokens: pending text, perhaps none, and then the new nodes', 1 or more in all. parents: of all
    the tree's nodes, -1 for the root's children, each before its own; the first ``held`` are the
    cache's last rows already. rope_delta: as of ``Feed``.
    """

    tokens: list[int]
    cache: KeyValueCache
    rope_delta: int
    parents: list[int]
    held: int

    @property
    def text(self) -> int:
        """How many of the tokens are text."""
        return len(self.tokens) - (len(self.parents) - self.held)

    @property
    def past(self) -> int:
        """How many tokens of text are in the cache."""
        return self.cache.length - self.held

    @property
    def rows(self) -> int:
        """How many logits are wanted: behind each new node, and behind the text if there is any."""
        return len(self.parents) - self.held + (self.text > 0)


class Sequence:
    """A prompt with its reply so far, made by ``VisionLanguageModel.prefill`` or ``begin``; for one thread.

    Tokens are fed lazily: ``append`` only notes them, and the next ``next_logits`` or ``verify``
    takes them along. Every position is explicit, so sequences of one model may be advanced in any
    order. Returned logits belong to the sequence: read them, do not change them in place.

    A tree of tokens may hang behind the last token (``verify_tree``, ``grow_tree``). It is no part
    of the reply: ``keep_path`` makes a path of it one, and whatever else changes the reply, or needs
    a pass, drops it.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        cache: KeyValueCache,
        last_prompt_token: int,
        rope_delta: int,
        prompt_logits: torch.Tensor,
    ) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.prompt_length = cache.length
        self._cache = cache
        self._last_prompt_token = last_prompt_token
        self._rope_delta = rope_delta
        self._prompt_logits = prompt_logits
        # Logits known from the last pass: row i stands behind reply token number _rows_start + i.
        self._rows = prompt_logits.unsqueeze(0)
        self._rows_start = 0
        self._tree = HangingTree()

    def append(self, tokens: Tokens[int]) -> None:
        """Extend the reply; SequenceError for a token the model does not have."""
        tokens = self._checked(tokens)
        self._drop_tree()
        self.tokens.extend(tokens)

    def next_logits(self, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Logits (vocabulary,) float32 behind all tokens; runs a forward pass only if it must.

        ``on_layer`` as of ``verify``, in such a pass.
        """
        known = self.known_logits()
        return self._advance(0, on_layer)[-1] if known is None else known

    def verify(self, draft: Tokens[int], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Append ``draft``; return the logits in front of it and behind each of its tokens.

        One pass; pending tokens ride along. Returns (len(draft) + 1, vocabulary) float32.
        ``on_layer(index, hidden)`` is called after each decoder layer, while deeper layers have not
        run yet, with hidden states (len(draft) + 1, hidden size) of the same rows, before the final
        norm. If the pass fails (ContextError, or an error of the hook) the draft is taken back.
        """
        draft = self._checked(draft)
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
        """Hang a tree of tokens behind the reply; return the logits in front of it and behind each node.

        ``parents`` names each node's parent by its index, -1 for children of the last token; parents
        come first. One pass; pending tokens ride along. Returns (nodes + 1, vocabulary) float32.
        ``on_layer`` is called as by ``verify``. A pass that fails leaves no tree, and the reply as it
        was. ContextError when tokens and depth exceed the context, whatever the number of nodes.
        """
        tokens, parents = self._checked(tokens), _checked_parents(parents, len(tokens), 0)
        self._drop_tree()
        if on_layer is not None and self._fed == len(self.tokens):
            self._step_back()
        feed = self.tree_feed(tokens, parents)
        if feed is None:
            return self.next_logits().unsqueeze(0)
        rows = self.model.forward_tree(feed, on_layer)
        self.note_tree(feed, rows)
        return rows if feed.text else torch.cat([self.next_logits().unsqueeze(0), rows])

    def grow_tree(self, tokens: Tokens[int], parents: Tokens[int]) -> torch.Tensor:
        """Add nodes to the tree that hangs behind the reply; return the logits behind each of them.

        ``parents`` as of ``verify_tree``, where nodes are counted through all calls; so a tree of
        depth L costs L passes, with ``next_logits`` for the first level. Returns (new nodes,
        vocabulary) float32. A pass that fails leaves the tree as it was.
        """
        feed = self.tree_feed(tokens, parents)
        if feed is None:
            return self.next_logits().new_empty((0, self.model.vocab_size))
        return self.note_tree(feed, self.model.forward_tree(feed))

    def keep_path(self, path: Tokens[int]) -> None:
        """Make the nodes of a path, from a child of the last token down, part of the reply.

        The rest of the tree is dropped, with its keys and values; no forward pass. An empty path
        drops all of it. SequenceError for what is no path of the tree that hangs here.
        """
        tree, before = self._tree, len(self.tokens)
        above = -1
        for node in path:
            if not 0 <= node < len(tree.tokens) or tree.parents[node] != above:
                raise SequenceError(
                    f"{list(path)} is no path down the tree of {len(tree.tokens)} nodes behind this "
                    "sequence; name a child of the last token and each one's child in turn"
                )
            above = node
        if not path:
            self._drop_tree()
            return
        self._cache.keep(self.prompt_length + before, path)
        self._rows = torch.stack([tree.rows[0], *(tree.rows[node + 1] for node in path)])
        self._rows_start = before
        self.tokens.extend(tree.tokens[node] for node in path)
        self._tree = HangingTree()

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens of the reply, 0 to all of them; no forward pass."""
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
        """An independent copy: from here on neither notices what becomes of the other."""
        twin = object.__new__(Sequence)
        twin.__dict__.update(self.__dict__)
        twin.tokens = list(self.tokens)
        twin._cache = self._cache.copy()
        return twin

    # What ``next_logits_together`` and ``grow_trees_together`` need for a pass over several sequences.

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
        """What the next forward pass has to be given."""
        self._drop_tree()
        fed = self._fed
        pending = self.tokens[fed:] if fed >= 0 else [self._last_prompt_token, *self.tokens]
        return Feed(pending, self._cache, self._rope_delta)

    def note_row(self, logits: torch.Tensor) -> None:
        """Keep the logits (vocabulary,) of a pass that has fed all pending tokens."""
        self._rows, self._rows_start = logits.unsqueeze(0), len(self.tokens)

    def tree_feed(self, tokens: Tokens[int], parents: Tokens[int]) -> TreeFeed | None:
        """What the pass of ``grow_tree`` has to be given; None where there is nothing to feed."""
        tree = self._tree
        tokens = self._checked(tokens)
        parents = _checked_parents(parents, len(tokens), len(tree.tokens))
        text: list[int] = []
        if not tree.tokens and self.known_logits() is None:
            text = self.feed().tokens
        if not text and not tokens:
            return None
        parents = [*tree.parents, *parents]
        return TreeFeed(text + tokens, self._cache, self._rope_delta, parents, len(tree.tokens))

    def note_tree(self, feed: TreeFeed, rows: torch.Tensor) -> torch.Tensor:
        """Keep a pass' logits (feed.rows, vocabulary); return those behind the new nodes."""
        tree, text = self._tree, feed.text
        if text:
            self.note_row(rows[0])
            rows = rows[1:]
        if len(rows):
            front = tree.rows or (self._known_row(len(self.tokens)),)
            tokens = (*tree.tokens, *feed.tokens[text:])
            self._tree = HangingTree(tokens, tuple(feed.parents), (*front, *rows))
        return rows

    @property
    def _fed(self) -> int:
        """How many reply tokens are in the cache; -1: not even the last token of the prompt."""
        return self._cache.length - self.prompt_length - len(self._tree.tokens)

    def _known_row(self, length: int) -> torch.Tensor | None:
        if length == 0:
            return self._prompt_logits
        index = length - self._rows_start
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def _step_back(self) -> None:
        """Forget the last position, so that the next pass computes it, and its logits, again."""
        self._drop_tree()
        self._cache.length -= 1

    def _drop_tree(self) -> None:
        if self._tree.tokens:
            self._cache.length -= len(self._tree.tokens)
            self._tree = HangingTree()

    def _advance(self, draft_length: int, on_layer: LayerHook | None) -> torch.Tensor:
        """Feed what is pending; return logits of the last ``draft_length + 1`` positions."""
        rows = self.model.forward_tokens(*self.feed(), draft_length + 1, on_layer)
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
        raise SequenceError(f"{count} nodes of a tree need as many parents, not {len(parents)}")
    for node, parent in enumerate(parents, held):
        if not -1 <= parent < node:
            raise SequenceError(
                f"node {node} of a tree names parent {parent}; use -1 for the last token, or a node in front of it"
            )
    return parents
