# SPDX-License-Identifier: Apache-2.0
"""Limits that rooms share which must not import each other."""

MAX_INSTRUCTION_CHARS = 2000  # of an instruction or a question
MAX_CHAT_BYTES = 1 << 18  # of a conversation as it travels
MAX_SIDE = 8192  # pixels of a picture
MAX_PIXELS = 1 << 24  # of a picture
MAX_HISTORY = 8  # earlier pictures of an observation
LOSSLESS = ("png", "rgb8")  # encodings of pictures on the wire that keep every pixel
ENCODINGS = (*LOSSLESS, "jpeg", "webp")
_PADDING = 1024  # LM head rows without a token; an eighth of the vocabulary is allowed besides


def largest_vocabulary(vocab_size: int) -> int:
    """The largest vocabulary of a model that shares the tokenizer of one with ``vocab_size`` LM head rows.

    Two such models differ by padding alone. A peer that names a larger one must not make this side allocate for it.
    """
    return vocab_size + _PADDING + vocab_size // 8
