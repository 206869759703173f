# SPDX-License-Identifier: Apache-2.0
"""A language model that recites a text in the tokens of its tokenizer, and tokenizers of different kinds.

Behind whatever has been said it goes on with the text from that many characters on, and ends there. Two
of them with different tokenizers say the same text in different tokens.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from table_model import _Tokens
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence

ENGLISH = (
    "The red chair is ahead on the left, behind the wooden table. Action: turn left 15 degrees\n"
    "The silver bottle is not in sight; it's probably behind me. Action: turn right 45 degrees\n"
    "The yellow box stands right in front, quite close. Action: forward 25 cm\n"
)
GERMAN = (
    "Der rote Stuhl steht vorne links hinter dem Holztisch. Aktion: 15 Grad nach links drehen\n"
    "Die silberne Flasche ist nirgends zu sehen. Aktion: 45 Grad nach rechts drehen\n"
    "Theoretisch reicht das: ahead, chairs, boxes, turning.\n"
)


def byte_level(text: str = ENGLISH, size: int = 400, end: str = "<|im_end|>", nfc: bool = False):
    """A byte-level BPE like those of Qwen and Llama 3, trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end, "<|only in " + end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def metaspace(text: str = GERMAN, size: int = 400):
    """A BPE over characters with a space in front of words and bytes for what is rare, as Llama 2's."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    trained.train_from_iterator([text], trainer)
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    merges = [tuple(pair) for pair in _merges(trained)]
    vocab = {name: index for index, name in enumerate([*names, *learnt])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


class RecitingModel:
    """``text`` said in the tokens of ``tokenizer``, whose token ``end`` ends it."""

    def __init__(self, tokenizer: Tokenizer, text: str, end: str = "<|im_end|>", max_length: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.max_length = max_length
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = frozenset({tokenizer.token_to_id(end)})
        self.num_layers = 1
        self.device = torch.device("cpu")
        self.processors = None
        self.batches = True
        self.name = self.fingerprint = "reciter"
        self.exits = None
        self.passes = 0
        self._vocabulary = Vocabulary(tokenizer.to_str())
        self.tokenizer_fingerprint = self._vocabulary.tokenizer_fingerprint

    def prefill(self, image: np.ndarray | None, instruction: str, history=()) -> Sequence:
        return Sequence(self, _Tokens([0]), 0, 0, self._behind([]))

    def open(self, image: np.ndarray | None, instruction: str, history=()) -> Sequence:
        return self.prefill(image, instruction, history)

    def forward_tokens(self, tokens, cache, rope_delta, rows, on_layer=None) -> torch.Tensor:
        if cache.length + len(tokens) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens")
        self.passes += 1
        cache.ids.extend(tokens)
        said, ends = cache.ids[1:], range(cache.length - rows, cache.length)
        return torch.stack([self._behind(said[:end]) for end in ends])

    def decode_text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _behind(self, said: list[int]) -> torch.Tensor:
        vocabulary = self._vocabulary
        heard, whole = vocabulary.decode(said)
        rest = self.text[len(heard) :]
        tokens = [*(vocabulary.encode_after(rest) if heard else vocabulary.encode(rest)), min(self.eos_token_ids)]
        if tokens[: len(said) - whole] == said[whole:]:  # it is within a character
            tokens = tokens[len(said) - whole :]
        row = torch.zeros(self.vocab_size)
        row[tokens[0]] = 5.0
        return row
