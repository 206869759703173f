"""A model, draft or target, behind one small interface; its decoder layers are run one by one.

Running the layers by hand gives every sequence its own explicit M-RoPE positions (the transformers
model remembers the last request's offset, so interleaved sequences would mix silently) and lets a
caller look at each layer's hidden states while deeper layers have not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsd_ros.vlm.backbones import TextBackbone
from dsd_ros.vlm.cache import BatchCache, KeyValueCache
from dsd_ros.vlm.errors import ContextError, ImageError
from dsd_ros.vlm.images import ImageProcessor
from dsd_ros.vlm.layers import LeanLayer, Rotations, lean_rotations, rms_norm
from dsd_ros.vlm.pace import Pace, PacedPass
from dsd_ros.vlm.prompts import PromptTemplate
from dsd_ros.vlm.sequence import Feed, LayerHook, Sequence, TreeFeed
from dsd_ros.vlm.trees import TreeLayout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dsd_ros.vlm.exits import ExitAdapters


class VisionLanguageModel:
    """A loaded model with all it needs to be asked; made by ``loading.load_model``.

    Some read text alone: they have no ``images`` and refuse a picture. ``hf`` is the transformers
    model, in evaluation mode. The object keeps no state of any sequence, so sequences may be
    interleaved at will, each used by one thread at a time. ``pace`` holds its forward passes to given
    times; None, as made, lets them run.
    """

    def __init__(
        self,
        backbone: TextBackbone,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        *,
        name: str,
        eos_token_ids: frozenset[int],
        fingerprint: str,
        tokenizer_fingerprint: str,
    ) -> None:
        self.hf = backbone.hf
        self.pace: Pace | None = None
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.fingerprint = fingerprint
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.exits: ExitAdapters | None = None
        text = backbone.config
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.max_length: int = text.max_position_embeddings
        # Some configurations leave the head size out, others write null.
        self._head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._key_value_heads: int = text.num_key_value_heads
        # Rows behind the tokenizer's last token are padding of the matrix: they stand for nothing.
        self._tokens = tokenizer.get_vocab_size(with_added_tokens=True)
        self._backbone = backbone
        self._language = backbone.language
        self._layers = list(self._language.layers)
        self._lean = all(LeanLayer.fits(layer) for layer in self._layers)
        if self._lean:
            self._layers = [LeanLayer(layer) for layer in self._layers]
        self._device = self._language.embed_tokens.weight.device
        self._dtype = self._language.embed_tokens.weight.dtype
        self._table = self._rotations(min(self.max_length, 1024))

    @property
    def device(self) -> torch.device:
        """Where the model's tensors are."""
        return self._device

    @property
    def reads_pictures(self) -> bool:
        """Whether it can be shown any."""
        return self._backbone.reads_pictures

    @property
    def images(self) -> ImageProcessor:
        """How pictures are prepared; ImageError for a model that reads text alone."""
        return self._backbone.images

    def prompt_tokens(self, instruction: str, image_tokens: int, past: Tokens[tuple[int, str]] = ()) -> list[int]:
        """Token ids of the whole prompt, see ``PromptTemplate.render``; PromptError when it cannot be used."""
        text = self.template.render(instruction, image_tokens, past)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode_text(self, tokens: Tokens[int]) -> str:
        """The text of reply tokens, without special tokens and padding ids."""
        known = [token for token in tokens if 0 <= token < self._tokens]
        return self.tokenizer.decode(known, skip_special_tokens=True)

    @torch.inference_mode()
    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Tokens[tuple[np.ndarray, str]] = ()
    ) -> Sequence:
        """Read an image (RGB uint8, (height, width, 3), or None) and an instruction; start a reply.

        ``history``: pictures of earlier steps, of any size each, with the action taken then, oldest first.
        Raises ImageError, PromptError, or ContextError when the prompt leaves no room for a reply.
        """
        clock = self._clock()
        if history and (image is None or not self.reads_pictures):
            raise ImageError(
                f"{self.name} reads text alone; ask it without earlier pictures"
                if not self.reads_pictures
                else "earlier pictures are given without a present one; give one, or no history"
            )
        pictures = [self._backbone.look(earlier, again=True) for earlier, _ in history]
        past = [(seen.tokens, action) for seen, (_, action) in zip(pictures, history, strict=True)]
        if image is not None:
            pictures.append(self._backbone.look(image, again=bool(history)))
        ids = self.prompt_tokens(instruction, pictures[-1].tokens if pictures else 0, past)
        if len(ids) >= self.max_length:
            remedy = "a shorter instruction or a smaller image" if not past else "fewer of them"
            raise ContextError(
                f"the prompt takes {len(ids)} tokens{f' with {len(past)} earlier pictures' * bool(past)} "
                f"and {self.name} holds {self.max_length}; use {remedy}"
            )
        prompt = self._backbone.read(torch.tensor([ids], device=self._device), pictures)
        cache = KeyValueCache(self.num_layers, self._key_value_heads, self._head_size, self._dtype, self._device)
        # Room for a reply as well, so that short replies never move the cache.
        cache.reserve(min(len(ids) + 128, self.max_length))
        rotations = self._turn(prompt.hidden, prompt.positions)
        hidden = self._run_layers(prompt.hidden, rotations, cache, None, clock)
        cache.length = len(ids)
        return Sequence(self, cache, ids[-1], prompt.rope_delta, self.head(hidden[0, -1:])[0])

    def begin(self) -> Sequence:
        """A sequence of nothing yet, for text given as token ids; append some before asking for logits."""
        cache = KeyValueCache(self.num_layers, self._key_value_heads, self._head_size, self._dtype, self._device)
        return Sequence(self, cache, 0, 0, torch.empty(0, device=self._device))

    @torch.inference_mode()
    def forward_tokens(
        self, tokens: Tokens[int], cache: KeyValueCache, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Feed text tokens behind a cache; logits (rows, vocabulary) float32 of the last ``rows``.

        ``rope_delta`` is the distance between a token's M-RoPE position and its place in the cache.
        """
        clock = self._clock()
        past, count = cache.length, len(tokens)
        self._check_room(past + count)
        cache.reserve(past + count)
        hidden = self._language.embed_tokens(torch.tensor([tokens], device=self._device))
        start = past + rope_delta
        cos, sin = self._text_rotations(start + count)
        rotations = cos[:, start : start + count], sin[:, start : start + count]
        mask = None
        if count > 1 and past > 0:
            mask = torch.ones((count, past + count), dtype=torch.bool, device=self._device)
            mask = mask.tril_(past)[None, None]
        hook = None
        if on_layer is not None:
            hook = partial(_last_rows, on_layer, rows)
        hidden = self._run_layers(hidden, rotations, cache, mask, clock, hook)
        logits = self.head(hidden[0, -rows:])
        cache.length = past + count  # last, so that a pass that fails has fed nothing
        return logits

    @torch.inference_mode()
    def forward_tree(self, feed: TreeFeed, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Feed pending text and new nodes of a tree in one pass; logits (feed.rows, vocabulary).

        A node attends to the text, its ancestors and itself, from the position of its depth.
        """
        clock = self._clock()
        cache, past, count = feed.cache, feed.cache.length, len(feed.tokens)
        layout = self._tree_layout(feed)
        cache.reserve(past + count)
        hidden = self._language.embed_tokens(torch.tensor([feed.tokens], device=self._device))
        cos, sin = self._text_rotations(layout.end + feed.rope_delta)
        positions = torch.from_numpy(layout.positions + feed.rope_delta).to(self._device)
        rotations = cos[:, positions], sin[:, positions]
        mask = torch.from_numpy(layout.mask).to(self._device)[None, None]
        hook = None
        if on_layer is not None:
            hook = partial(_last_rows, on_layer, feed.rows)
        hidden = self._run_layers(hidden, rotations, cache, mask, clock, hook)
        logits = self.head(hidden[0, -feed.rows :])
        cache.length = past + count
        return logits

    @torch.inference_mode()
    def forward_trees(self, feeds: list[TreeFeed]) -> list[torch.Tensor]:
        """What ``forward_tree`` gives for each feed, in one pass over caches of their own each.

        Raises ContextError before any cache is touched when one of them would grow too long.
        """
        clock = self._clock(len(feeds))
        layouts = [self._tree_layout(feed) for feed in feeds]
        counts = [len(feed.tokens) for feed in feeds]
        most = max(counts)
        cache = BatchCache([feed.cache for feed in feeds], counts)
        # Rows short of tokens repeat their last: what comes of those columns is never looked at.
        tokens = [feed.tokens + feed.tokens[-1:] * (most - len(feed.tokens)) for feed in feeds]
        mask = np.zeros((len(feeds), most, cache.past + most), np.bool_)
        positions = np.zeros((len(feeds), most), np.int64)
        for index, (feed, layout, count) in enumerate(zip(feeds, layouts, counts, strict=True)):
            columns = slice(cache.past - feed.cache.length, cache.past + count)
            mask[index, :count, columns] = layout.mask
            mask[index, count:, columns] = layout.mask[-1]
            positions[index, :count] = layout.positions + feed.rope_delta
        hidden = self._language.embed_tokens(torch.tensor(tokens, device=self._device))
        cos, sin = self._text_rotations(int(positions.max()) + 1)
        places = torch.from_numpy(positions).to(self._device)
        rotations = cos[0][places], sin[0][places]
        allowed = torch.from_numpy(mask).to(self._device)[:, None]
        hidden = self._run_layers(hidden, rotations, cache, allowed, clock)
        wanted = [hidden[i, n - f.rows : n] for i, (f, n) in enumerate(zip(feeds, counts, strict=True))]
        logits = self.head(torch.cat(wanted))
        cache.commit()
        return list(logits.split([feed.rows for feed in feeds]))

    def _tree_layout(self, feed: TreeFeed) -> TreeLayout:
        layout = TreeLayout.of(feed.parents, feed.held, feed.past, feed.text)
        # A tree may be wider than the context is long: what counts is how deep it goes.
        self._check_room(layout.end)
        return layout

    @torch.inference_mode()
    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Feed each cache its tokens in one pass; logits (batch, vocabulary) float32 behind each.

        ``on_layer`` is given all hidden states (batch, most tokens of a feed, hidden size). Raises ContextError
        before any cache is touched when one of them would grow too long; no cache has grown when the hook raises.
        """
        clock = self._clock(len(feeds))
        for feed in feeds:
            self._check_room(feed.cache.length + len(feed.tokens))
        device = self._device
        counts = [len(feed.tokens) for feed in feeds]
        most = max(counts)
        lengths = [feed.cache.length for feed in feeds]
        starts = [feed.cache.length + feed.rope_delta for feed in feeds]
        # Rows short of tokens repeat their last: what comes of those columns is never looked at.
        rows = [feed.tokens + feed.tokens[-1:] * (most - len(feed.tokens)) for feed in feeds]
        hidden = self._language.embed_tokens(torch.tensor(rows, device=device))
        cos, sin = self._text_rotations(max(starts) + most)
        steps = torch.arange(most, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + steps
        rotations = cos[0][positions], sin[0][positions]
        cache = BatchCache([feed.cache for feed in feeds], counts)
        mask = None
        if most > 1 or min(lengths) < cache.past:
            # (batch, 1, most, past + most): behind the padding in front, up to the row's own column.
            columns = torch.arange(cache.past + most, device=device)
            padding = cache.past - torch.tensor(lengths, device=device)
            mask = (columns >= padding[:, None, None]) & (columns <= cache.past + steps[:, None])
            mask = mask[:, None]
        hidden = self._run_layers(hidden, rotations, cache, mask, clock, on_layer)
        last = torch.tensor(counts, device=device) - 1
        logits = self.head(hidden[torch.arange(len(feeds), device=device), last])
        cache.commit()
        return logits

    def _run_layers(
        self,
        hidden: torch.Tensor,
        rotations: Rotations,
        cache: KeyValueCache | BatchCache,
        mask: torch.Tensor | None,
        clock: PacedPass | None,
        on_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Hidden states (batch, n, hidden size) through all layers; ``mask`` None means causal.

        ``on_layer`` is given all of the hidden states. The caller advances the cache's length.
        """
        for index, layer in enumerate(self._layers):
            hidden = layer(
                hidden, attention_mask=mask, past_key_values=cache, use_cache=True, position_embeddings=rotations
            )
            if clock is not None:
                clock.layer_done(index + 1)
            if on_layer is not None:
                on_layer(index, hidden)
        return hidden

    def _clock(self, batch: int = 1) -> PacedPass | None:
        """The clock of a pass that begins now, where a pace is set."""
        return None if self.pace is None else self.pace.begin(self.num_layers, batch)

    def _check_room(self, length: int) -> None:
        if length > self.max_length:
            raise ContextError(
                f"prompt and reply would take {length} tokens and {self.name} holds "
                f"{self.max_length}; ask for a shorter reply or use a smaller image"
            )

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: hidden (n, hidden size) to logits (n, vocabulary) float32.

        Padding rows of the vocabulary, which stand for no token, get minus infinity.
        """
        logits = self.hf.lm_head(rms_norm(self._language.norm, hidden)).float()
        if self._tokens < self.vocab_size:
            logits[:, self._tokens :] = -torch.inf
        return logits

    def _text_rotations(self, length: int) -> Rotations:
        """Cosines and sines of text positions, (1, length or more, ..., head size).

        Text has the same position in all axes there are, so its rotations come from a table.
        """
        table = self._table
        if length > table[0].shape[1]:
            table = self._table = self._rotations(max(length, 2 * table[0].shape[1]))
        return table

    def _rotations(self, length: int) -> Rotations:
        """Cosines and sines (1, length, ..., head size) of the text positions 0 to length - 1."""
        with torch.inference_mode():
            positions = torch.arange(length, device=self._device)[None]
            like = torch.empty(0, dtype=self._dtype, device=self._device)
            return self._turn(like, positions)

    def _turn(self, like: torch.Tensor, positions: torch.Tensor) -> Rotations:
        """Cosines and sines of a backbone's positions, as this model's layers take them."""
        rotations = self._backbone.rotations(like, positions)
        return lean_rotations(rotations) if self._lean else rotations


def _last_rows(hook: LayerHook, rows: int, index: int, hidden: torch.Tensor) -> None:
    """Show a hook the last rows of hidden states (1, n, hidden size)."""
    hook(index, hidden[0, -rows:])
