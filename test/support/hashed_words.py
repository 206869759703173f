# SPDX-License-Identifier: Apache-2.0
"""An embedding without a model: a text's words, hashed into 64 places. For tests of what stores do on disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np


class HashedWords:
    """Texts with common words are near each other. ``salt`` makes another model of it."""

    dimension = 64

    def __init__(self, salt: str = "") -> None:
        self._salt = salt
        self.fingerprint = f"hashed words {salt}"
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.encoded += texts
        rows = np.full((len(texts), self.dimension), 1e-3, np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text.casefold()):
                digest = hashlib.sha256((self._salt + word).encode()).digest()
                row[digest[0] % self.dimension] += 1.0
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def count_tokens(self, text: str) -> int:
        return len(text.split())
