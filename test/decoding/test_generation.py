# SPDX-License-Identifier: Apache-2.0
"""The options of generation_config.json change logits as transformers' own processors do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_transformers import processors
from hypothesis import given, strategies as st

from dsd_ros.decoding.generation import LogitsProcessor, TokenOptions, processed

SIZE = 9  # tokens, of which the last is padding
ENDS = [2, 7]
tokens = st.integers(0, SIZE - 2)
words = st.lists(tokens, min_size=1, max_size=3)
penalties = st.sampled_from([0.7, 1.05, 1.3, 3.0])
OPTIONS = {
    "sequence_bias": st.lists(st.tuples(words, st.floats(-5, 5)).map(list), min_size=1, max_size=4),
    "encoder_repetition_penalty": penalties,
    "repetition_penalty": penalties,
    "no_repeat_ngram_size": st.integers(0, 4),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(words, min_size=1, max_size=4),
    "min_length": st.integers(0, 12),
    "min_new_tokens": st.integers(0, 6),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.1, 2.0])).map(list),
    "suppress_tokens": st.lists(st.integers(0, SIZE + 3), max_size=4),
    "begin_suppress_tokens": st.lists(tokens, max_size=4),
}


@given(
    st.fixed_dictionaries({}, optional=OPTIONS),
    st.lists(tokens, min_size=1, max_size=10),
    st.lists(st.lists(tokens, max_size=8), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_rows_are_transformers(config, prompt, replies, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(replies), SIZE)).astype(np.float32))
    logits[:, -1] = -torch.inf
    before = logits.clone()
    options = TokenOptions.read(config) or TokenOptions()
    found = LogitsProcessor(options, ENDS, prompt).process(logits, replies)
    assert torch.equal(logits, before)
    stock = processors(config, ENDS, prompt)
    for row, reply, changed in zip(logits, replies, found, strict=True):
        assert torch.equal(changed, stock(reply, row))


def test_rows_of_a_tree_follow_their_paths():
    """Ids that are no token of the target, as a robot may draft them, are nothing to it."""
    config = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 2}
    processor, stock = LogitsProcessor(TokenOptions(**config), ENDS, [1, 3, 4]), processors(config, ENDS, [1, 3, 4])
    logits = torch.linspace(-2, 2, SIZE).expand(5, SIZE)
    rows = processed(logits, processor, None, [3], [5, 4, SIZE + 70, 5], [-1, -1, 0, 1])
    paths = [], [5], [4], [5, SIZE + 70], [4, 5]
    for row, path, changed in zip(logits, paths, rows, strict=True):
        assert torch.equal(changed, stock([3, *path], row))
    # The rows of the last level alone, as a draft grows.
    assert torch.equal(processed(logits[:2], processor, None, [3], [5, 4, 0, 5], [-1, -1, 0, 1])[1], rows[4])


def test_options_that_leave_no_token_do_not_count():
    processor = LogitsProcessor(TokenOptions(suppress_tokens=(*range(SIZE),)), ENDS, [1])
    logits = torch.zeros(1, SIZE)
    assert torch.equal(processed(logits, processor, None, []), logits)


def test_what_is_off_or_no_option():
    assert TokenOptions.read({"repetition_penalty": 1.0, "min_length": 0, "suppress_tokens": None, "top_k": 3}) is None
    for config, sentence in (
        ({"repetition_penalty": 0}, "> 0.*repetition_penalty"),
        ({"repetition_penalty": "much"}, "Expected `float`, got `str`.*repetition_penalty"),
        ({"bad_words_ids": [[3], []]}, r"length >= 1.*bad_words_ids\[1"),
        ({"sequence_bias": {"(3,)": 1.0}}, "sequence_bias"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TokenOptions.read(config)
