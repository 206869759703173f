# SPDX-License-Identifier: Apache-2.0
"""A language model given by a table, for statistics that a neural one is too slow for.

The next token's logits depend on the two tokens before it, so that joint distributions are known exactly
and a draft that is not rolled back shows. It advances through the package's own ``Sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch

from dsd_ros.decoding.generation import LogitsProcessor, TokenOptions
from dsd_ros.decoding.tree import node_depths
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import PromptPart, Sequence


class _Tokens:
    """Stands where a Qwen2-VL keeps keys and values: cropping and copying work alike."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """As if each token took a kilobyte."""
        return 1000 * len(self.ids)

    @length.setter
    def length(self, value: int) -> None:
        del self.ids[value:]

    def copy(self) -> _Tokens:
        return _Tokens(list(self.ids))

    def keep(self, start: int, rows: list[int]) -> None:
        self.ids[start:] = [self.ids[start + row] for row in rows]


class TableModel:
    """``vocab_size`` tokens, ``padding`` further ids that never occur, the last token ends a reply."""

    def __init__(
        self,
        seed: int = 0,
        vocab_size: int = 8,
        padding: int = 0,
        noise: float = 0.0,
        spread: float = 1.2,
        ends: bool = True,
        max_length: int = 512,
        period: int = 0,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """``noise`` perturbs the logits of ``seed``'s table, which makes a draft of a target.

        With a ``period`` the reply forgets what came before every so many tokens: each period is then
        an independent draw of the same joint distribution. ``options``: of generation_config.json.
        """
        self.options = options
        real = np.random.default_rng(seed).normal(0, spread, (vocab_size,) * 3)
        real += noise * np.random.default_rng(seed + 1).normal(0, 1, real.shape)
        if not ends:
            real[..., -1] = -np.inf
        self.table = torch.from_numpy(real.astype(np.float32))
        self.vocab_size = vocab_size + padding
        self.eos_token_ids = frozenset({vocab_size - 1})
        self.max_length = max_length
        self.period = period
        self.num_layers = 1
        self.device = torch.device("cpu")
        self.processors: int | None = None
        self.batches = True
        self.name = f"table-{seed}"
        self.fingerprint = f"table-{seed}-{noise}"
        self.tokenizer_fingerprint = f"letters-{vocab_size}"

    def prefill(self, image: np.ndarray | None, instruction: str, history=()) -> Sequence:
        sequence = self.open(image, instruction, history)
        sequence.read()
        return sequence

    def open(self, image: np.ndarray | None, instruction: str, history=()) -> Sequence:
        prompt = self.prompt(image, instruction, history)
        ids = torch.tensor([[[token] for token in prompt]])
        sequence = Sequence(self, _Tokens([]), prompt[-1], 0, None, PromptPart(ids, (ids, ids)))
        if options := TokenOptions.read(self.options):
            sequence.processor = LogitsProcessor(options, self.eos_token_ids, prompt)
        return sequence

    def prompt(self, image: np.ndarray | None, instruction: str, history=()) -> list[int]:
        """The pictures' first pixels and the lengths of the texts choose the start of the reply."""
        size = len(self.table)
        first = 0 if image is None else int(image.flat[0])
        for number, (earlier, action) in enumerate(history, 2):
            first += number * int(earlier.flat[0]) + len(action)
        return [first % size, len(instruction) % size]

    def begin(self) -> Sequence:
        """A sequence of nothing; what is appended first stands for the prompt, two tokens or more."""
        return Sequence(self, _Tokens([]), 0, 0, torch.empty(0))

    def forward_tokens(self, tokens, cache, rope_delta, rows, on_layer=None) -> torch.Tensor:
        if cache.length + len(tokens) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens; ask for a shorter reply")
        if on_layer is not None:
            on_layer(0, torch.zeros((rows, 1)))
        cache.ids.extend(tokens)
        ids = cache.ids
        return torch.stack([self._behind(ids[:end]) for end in range(len(ids) - rows + 1, len(ids) + 1)])

    def forward_tree(self, feed, on_layer=None) -> torch.Tensor:
        text, depths = feed.past + feed.text, node_depths(feed.parents)
        if text + max(depths, default=0) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens; ask for a shorter reply")
        ids = feed.cache.ids
        ids.extend(() if feed.prompt is None else feed.prompt.hidden.flatten().tolist())
        ids.extend(feed.tokens)
        if not feed.rows:
            return torch.empty((0, self.vocab_size))
        paths: list[list[int]] = []
        for node, parent in enumerate(feed.parents):
            paths.append((paths[parent] if parent >= 0 else ids[:text]) + [ids[text + node]])
        wanted = paths[feed.held :]
        if feed.text:
            wanted = [ids[:text], *wanted]
        return torch.stack([self._behind(path) for path in wanted])

    def _behind(self, ids: list[int]) -> torch.Tensor:
        """The logits after all of a prompt's two tokens and a reply's."""
        size = len(self.table)
        # Tokens of this period, after the two that stand for the prompt.
        said = (len(ids) - 2) % self.period if self.period else len(ids) - 2
        return self._row(*[i % size for i in [*ids[:2], *ids[len(ids) - said :]][-2:]])

    def forward_batch(self, feeds, on_layer=None) -> list[torch.Tensor]:
        if any(feed.past + feed.text + max(node_depths(feed.parents), default=0) > self.max_length for feed in feeds):
            raise ContextError(f"{self.name} holds {self.max_length} tokens; ask for a shorter reply")
        if on_layer is not None:
            on_layer(0, torch.zeros((sum(len(feed.tokens) for feed in feeds), 1)))
        return [self.forward_tree(feed) for feed in feeds]

    def decode_text(self, tokens: list[int]) -> str:
        return "".join(chr(97 + t) for t in tokens if t not in self.eos_token_ids)

    def _row(self, before: int, last: int) -> torch.Tensor:
        row = torch.full((self.vocab_size,), -torch.inf)
        row[: len(self.table)] = self.table[before, last]
        return row


def joint_distribution(model: TableModel, image, instruction: str, settings, length: int) -> np.ndarray:
    """P(first ``length`` tokens) of the model alone, an array of ``length`` axes; needs ends=False."""
    from dsd_ros.decoding.sampling import transform

    size = len(model.table)
    rows = transform(model.table, settings).double().numpy()  # P(next | before, last)
    sequence = model.prefill(image, instruction)
    joint = transform(sequence.next_logits(), settings).double().numpy()[:size]
    last = sequence._cache.ids[-1]
    if length > 1:
        joint = joint[:, None] * rows[last]
    for _ in range(length - 2):
        joint = joint[..., None] * rows.reshape((1,) * (joint.ndim - 2) + rows.shape)
    return joint
