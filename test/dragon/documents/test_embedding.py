# SPDX-License-Identifier: Apache-2.0
"""The packaged all-MiniLM-L6-v2: published weights, and known properties of its embeddings."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest

from dsd_ros.dragon.documents import embedding
from dsd_ros.dragon.documents.embedding import MAX_TOKENS, EmbeddingError, SentenceEncoder, packaged_model

# sentence-transformers/all-MiniLM-L6-v2 as its authors published it.
PUBLISHED = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


def test_the_weights_are_the_published_ones():
    weights = (packaged_model() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == PUBLISHED


def test_paraphrases_are_nearer_than_other_sentences(encoder):
    pairs = [
        ("A man is eating food.", "A man is eating a piece of bread."),
        ("The girl is carrying a baby.", "A young woman holds an infant."),
        ("Where can I park my car?", "Is there a parking place here?"),
    ]
    rows = encoder.encode([text for pair in pairs for text in pair])
    cosines = rows @ rows.T
    for row in range(len(rows)):
        others = [cosines[row, column] for column in range(len(rows)) if column // 2 != row // 2]
        assert cosines[row, row ^ 1] > 0.45 and max(others) < 0.3


def test_rows_are_of_length_one_and_do_not_depend_on_their_company(encoder):
    texts = ["The Viola chair is red.", "Short.", "The lift carries eight persons. " * 4] * 11
    rows = encoder.encode(texts)  # more than one batch, of mixed lengths
    assert rows.shape == (33, encoder.dimension) and rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    for row, text in zip(rows[:3], texts, strict=False):
        np.testing.assert_allclose(encoder.encode([text])[0], row, atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.dimension)


def test_text_beyond_the_models_length_does_not_count(encoder):
    words = "word " * 300
    assert encoder.count_tokens(words) > MAX_TOKENS
    one, other = encoder.encode([f"{words} red", f"{words} green"])
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_missing_or_damaged_model_is_named_with_the_remedy(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(packaged_model() / name, folder)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(EmbeddingError, match="holds no embedding model that can be read"):
        SentenceEncoder(folder)
    monkeypatch.setattr(embedding, "PACKAGE", "no_such_package")
    with pytest.raises(EmbeddingError, match="--no-deps -r requirements/rag-model.txt"):
        SentenceEncoder()
