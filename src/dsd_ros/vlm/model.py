# SPDX-License-Identifier: Apache-2.0
"""A model, draft or target, behind one small interface.

Decoder layers run one by one. So every sequence has explicit M-RoPE positions (the transformers model remembers only
the last request's offset and would silently mix interleaved sequences), and a caller can read a layer's hidden states
before deeper layers have run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsd_ros.decoding.constraint import Constrainer
from dsd_ros.decoding.generation import LogitsProcessor, TokenOptions
from dsd_ros.vlm.backbones import ImageProcessor, TextBackbone
from dsd_ros.vlm.cache import BatchCache, KeyValueCache
from dsd_ros.vlm.errors import ContextError, ModelError
from dsd_ros.vlm.front import check_pictures, check_prompt_length
from dsd_ros.vlm.prompts import NOT_KNOWN, PromptTemplate, prompt_ids
from dsd_ros.vlm.sequence import Feed, LayerHook, PromptPart, Sequence, TreeLayout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dsd_ros.vlm.exits import ExitAdapters

Rotations = tuple[torch.Tensor, torch.Tensor]
Deep = Tokens[tuple[slice, torch.Tensor]]  # rows of hidden states, and what is added to them after the first layers


class VisionLanguageModel:
    """A loaded model with its tokenizer and prompts; made by ``loading.load_model``.

    ``hf`` is the transformers model, in evaluation mode. A text-only model has no ``images``. The object holds no state
    of any sequence, so sequences may be interleaved freely, each used by one thread at a time.
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
        token_options: TokenOptions | None = None,
    ) -> None:
        self.hf = backbone.hf
        self.tokenizer = tokenizer
        self.constrainer = Constrainer(tokenizer)
        self.template = template
        self.name = name
        self.not_told = self._single_token(template.not_told)
        self.eos_token_ids = eos_token_ids if self.not_told is None else eos_token_ids | {self.not_told}
        self.fingerprint = fingerprint
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.token_options = token_options
        self.exits: ExitAdapters | None = None
        text = backbone.config
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.max_length: int = text.max_position_embeddings
        # Some configurations omit the head size, others write null.
        self._head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._key_value_heads: int = text.num_key_value_heads
        # Vocabulary rows after the tokenizer's last token are padding and stand for no token.
        self._tokens = tokenizer.get_vocab_size(with_added_tokens=True)
        self._backbone = backbone
        self._language = backbone.language
        self._device: torch.device = self._language.embed_tokens.weight.device
        # That its passes can run on side by side: a GPU runs them in turn. None: the processors of this process.
        self.processors: int | None = None if self._device.type == "cpu" else 1
        self.batches = True  # False: what a pass says of a sequence depends on those beside it (`quantize_on_cpu`)
        self._dtype = self._language.embed_tokens.weight.dtype
        self._table = self._rotations(min(self.max_length, 1024))

    @property
    def device(self) -> torch.device:
        """Where the model's tensors are."""
        return self._device

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts may contain pictures."""
        return self._backbone.reads_pictures

    @property
    def images(self) -> ImageProcessor:
        """The image processor; ImageError for a text-only model."""
        return self._backbone.images

    def prompt_tokens(self, instruction: str, image_tokens: int, past: Tokens[tuple[int, str]] = ()) -> list[int]:
        """Token ids of the whole prompt, see ``PromptTemplate.render``; PromptError for a text that cannot be used."""
        return prompt_ids(self.tokenizer, self.template.render(instruction, image_tokens, past))

    def decode_text(self, tokens: Tokens[int]) -> str:
        """The text of reply tokens, without special tokens and padding ids; ``not_told`` reads as NOT_KNOWN."""
        known = [token for token in tokens if 0 <= token < self._tokens and token != self.not_told]
        text: str = self.tokenizer.decode(known, skip_special_tokens=True)
        return f"{text} {NOT_KNOWN}".strip() if self.not_told in tokens else text

    def _single_token(self, text: str) -> int | None:
        """The one token of a text, None for no text; ModelError if it has several."""
        if not text:
            return None
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ModelError(
                f"{text!r}, by which {self.name} says that nothing is told, is not one token; choose another"
            )
        return int(ids[0])

    @torch.inference_mode()
    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Tokens[tuple[np.ndarray, str]] = ()
    ) -> Sequence:
        """Read a picture (RGB uint8, (height, width, 3), or None) and an instruction; start a reply.

        history: pictures of earlier steps with the action taken at each, oldest first. Raises ImageError, PromptError,
        or ContextError when the prompt leaves no room for a reply.
        """
        sequence = self.open(image, instruction, history)
        sequence.read()
        return sequence

    @torch.inference_mode()
    def open(
        self, image: np.ndarray | None, instruction: str, history: Tokens[tuple[np.ndarray, str]] = ()
    ) -> Sequence:
        """``prefill`` up to the decoder layers: the pictures' features are known, and the prompt is unread."""
        check_pictures(self.name, self.reads_pictures, image, history)
        pictures = [self._backbone.look(earlier, reuse=True) for earlier, _ in history]
        past = [(seen.tokens, action) for seen, (_, action) in zip(pictures, history, strict=True)]
        if image is not None:
            pictures.append(self._backbone.look(image, reuse=bool(history)))
        ids = self.prompt_tokens(instruction, pictures[-1].tokens if pictures else 0, past)
        check_prompt_length(self.name, self.max_length, len(ids), len(past))
        prompt = self._backbone.read(torch.tensor([ids], device=self._device), pictures)
        cache = self._new_cache()
        # Room for a reply too, so that short replies never move the cache.
        cache.reserve(min(prompt.hidden.shape[1] + 128, self.max_length))
        rotations = self._backbone.rotations(prompt.hidden, prompt.positions)
        part = PromptPart(prompt.hidden, rotations, deep=prompt.deep)
        sequence = Sequence(self, cache, ids[-1], prompt.rope_delta, None, part)
        if self.token_options is not None:
            sequence.processor = LogitsProcessor(self.token_options, self.eos_token_ids, ids, self._device)
        return sequence

    def begin(self) -> Sequence:
        """An empty sequence for text given as token ids; append some before asking for logits."""
        return Sequence(self, self._new_cache(), 0, 0, torch.empty(0, device=self._device))

    @torch.inference_mode()
    def forward_tokens(
        self, tokens: Tokens[int], cache: KeyValueCache, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Feed text tokens after a cache; logits (rows, vocabulary) float32 of the last ``rows``.

        rope_delta: a token's M-RoPE position minus its index in the cache.
        """
        past, count = cache.length, len(tokens)
        self._check_room(past + count)
        start = past + rope_delta
        cos, sin = self._text_rotations(start + count)
        rotations = cos[:, start : start + count], sin[:, start : start + count]
        mask = None
        if count > 1 and past > 0:
            mask = torch.ones((count, past + count), dtype=torch.bool, device=self._device)
            mask = mask.tril_(past)[None, None]
        return self._forward_one(self._embed(tokens), cache, rotations, mask, rows, on_layer)

    @torch.inference_mode()
    def forward_tree(self, feed: Feed, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Feed a prompt, pending text and new tree nodes in one pass; logits (feed.rows, vocabulary) float32.

        A node attends to the text, its ancestors and itself; its position follows from its depth.
        """
        layout = self._layout(feed)
        mask = None if layout.mask is None else torch.from_numpy(layout.mask).to(self._device)[None, None]
        hidden, rotations = self._inputs([feed], [layout])
        return self._forward_one(hidden, feed.cache, rotations, mask, feed.rows, on_layer, _deep([feed]))

    def _forward_one(
        self,
        hidden: torch.Tensor,
        cache: KeyValueCache,
        rotations: Rotations,
        mask: torch.Tensor | None,
        rows: int,
        on_layer: LayerHook | None,
        deep: Deep = (),
    ) -> torch.Tensor:
        """Feed one sequence; logits (rows, vocabulary) of its last tokens. A pass that fails has fed nothing."""
        length = cache.length + hidden.shape[1]
        cache.reserve(length)
        hook = None if on_layer is None else partial(_last_rows, on_layer, rows)
        hidden = self._run_layers(hidden, rotations, cache, mask, hook, deep)
        logits = self.head(hidden[0, hidden.shape[1] - rows :])
        cache.length = length
        return logits

    @torch.inference_mode()
    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
        """Feed several caches, each its own, in one pass; logits (feed.rows, vocabulary) float32 of each feed.

        All tokens go through a layer's matrices together, and each sequence attends to its own cache: nothing is
        padded or copied. ``on_layer`` gets the hidden states (all tokens, hidden size), feed after feed. ContextError,
        before any cache is touched, when one of them would grow too long; no cache grows when the hook raises.
        """
        layouts = [self._layout(feed) for feed in feeds]
        counts = [feed.length for feed in feeds]
        cache = BatchCache([feed.cache for feed in feeds], counts)
        masks = [
            (count, None if layout.mask is None else torch.from_numpy(layout.mask).to(self._device)[None, None])
            for count, layout in zip(counts, layouts, strict=True)
        ]
        hidden, rotations = self._inputs(feeds, layouts)
        hidden = self._run_layers(
            hidden, rotations, cache, masks, None if on_layer is None else partial(_first, on_layer), _deep(feeds)
        )
        wanted = [part[len(part) - feed.rows :] for feed, part in zip(feeds, hidden[0].split(counts), strict=True)]
        logits = self.head(torch.cat(wanted))
        cache.commit()
        return list(logits.split([feed.rows for feed in feeds]))

    def _embed(self, tokens: Tokens[int]) -> torch.Tensor:
        hidden: torch.Tensor = self._language.embed_tokens(
            torch.tensor([tokens], dtype=torch.int64, device=self._device)
        )
        return hidden

    def _inputs(self, feeds: list[Feed], layouts: list[TreeLayout]) -> tuple[torch.Tensor, Rotations]:
        """Hidden states (1, n, hidden size) and rotations of all that is fed, feed after feed, prompts first."""
        tokens = [token for feed in feeds for token in feed.tokens]
        if not tokens and len(feeds) == 1 and feeds[0].prompt is not None:
            return feeds[0].prompt.hidden, feeds[0].prompt.rotations
        positions = np.concatenate(
            [
                layout.positions[feed.length - len(feed.tokens) :] + feed.rope_delta
                for feed, layout in zip(feeds, layouts, strict=True)
            ]
        )
        cos, sin = self._text_rotations(int(positions.max(initial=-1)) + 1)
        places = torch.from_numpy(positions).to(self._device)
        hidden, cos, sin = self._embed(tokens), cos[:, places], sin[:, places]
        if any(feed.prompt is not None for feed in feeds):
            counts = [len(feed.tokens) for feed in feeds]
            mixed: list[tuple[torch.Tensor, ...]] = []
            for feed, *rest in zip(feeds, *(part.split(counts, 1) for part in (hidden, cos, sin)), strict=True):
                if feed.prompt is not None:
                    mixed.append((feed.prompt.hidden, *feed.prompt.rotations))
                mixed.append(tuple(rest))
            hidden, cos, sin = (torch.cat(parts, 1) for parts in zip(*mixed, strict=True))
        return hidden, (cos, sin)

    def _run_layers(
        self,
        hidden: torch.Tensor,
        rotations: Rotations,
        cache: KeyValueCache | BatchCache,
        mask: torch.Tensor | list[tuple[int, torch.Tensor | None]] | None,
        on_layer: LayerHook | None = None,
        deep: Deep = (),
    ) -> torch.Tensor:
        """Hidden states (1, n, hidden size) through all layers; ``mask`` None means causal.

        A ``BatchCache`` needs a list with each sequence's number of rows and its mask. ``on_layer`` gets
        all hidden states. The caller advances the cache's length.
        """
        for index, layer in enumerate(self._language.layers):
            hidden = layer(
                hidden, attention_mask=mask, past_key_values=cache, use_cache=True, position_embeddings=rotations
            )
            for rows, added in deep:
                if index < len(added):
                    hidden[0, rows] += added[index]
            if on_layer is not None:
                on_layer(index, hidden)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: hidden (n, hidden size) to logits (n, vocabulary) float32.

        Padding rows of the vocabulary, which stand for no token, get minus infinity. ModelError where others are not
        finite: the greatest of them would be any token.
        """
        logits: torch.Tensor = self.hf.lm_head(self._language.norm(hidden)).float()
        if not math.isfinite(logits.sum().item()):
            raise ModelError(
                f"{self.name} computes values that are not numbers; fetch its weights again, or use dtype bfloat16 or "
                "float32 if it is float16"
            )
        if self._tokens < self.vocab_size:
            logits[:, self._tokens :] = -torch.inf
        return logits

    def _new_cache(self) -> KeyValueCache:
        return KeyValueCache(self.num_layers, self._key_value_heads, self._head_size, self._dtype, self._device)

    def _layout(self, feed: Feed) -> TreeLayout:
        layout = TreeLayout.of(feed.parents, feed.held, feed.past, feed.text)
        # A tree may have more nodes than the context holds tokens: only its depth counts.
        self._check_room(layout.end)
        return layout

    def _check_room(self, length: int) -> None:
        if length > self.max_length:
            raise ContextError(
                f"prompt and reply would take {length} tokens and {self.name} holds "
                f"{self.max_length}; ask for a shorter reply or use a smaller image"
            )

    def _text_rotations(self, length: int) -> Rotations:
        """Cosines and sines (1, length or more, head size) of text positions, the same in every axis, from a table."""
        table = self._table
        if length > table[0].shape[1]:
            table = self._table = self._rotations(max(length, 2 * table[0].shape[1]))
        return table

    @torch.inference_mode()
    def _rotations(self, length: int) -> Rotations:
        """Cosines and sines (1, length, head size) of the text positions 0 to length - 1."""
        positions = torch.arange(length, device=self._device)[None]
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        return self._backbone.rotations(like, positions)


def _deep(feeds: list[Feed]) -> Deep:
    """What the prompts among these feeds add to their own rows, see ``backbones.Prompt``."""
    found, start = [], 0
    for feed in feeds:
        if feed.prompt is not None and feed.prompt.deep is not None:
            found.append((slice(start, start + feed.prompt.length), feed.prompt.deep))
        start += feed.length
    return found


def _first(hook: LayerHook, index: int, hidden: torch.Tensor) -> None:
    """Call a hook with hidden states (1, n, hidden size) as (n, hidden size)."""
    hook(index, hidden[0])


def _last_rows(hook: LayerHook, rows: int, index: int, hidden: torch.Tensor) -> None:
    """Call a hook with the last rows of hidden states (1, n, hidden size)."""
    hook(index, hidden[0, -rows:])
