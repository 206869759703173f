# SPDX-License-Identifier: Apache-2.0
"""Searches everything that leaves a side for pieces of documents, and documents that no answer quotes."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from dsd_ros.decoding.packing import id_bits
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.wire.messages import Message, Proposal, Verdict

QUESTION = "what does she like"
WORDS, TOKENS, CHARACTERS = 8, 8, 24
OWN = [
    "my daughter hid the green ball behind the third shelf of the cellar on a rainy monday",
    "the spare key of the garden house lies below the broken pot next to the old pear tree",
]
OTHERS = [
    "the building closes at nine in the evening and the lift does not go down to its cellar",
    "every chair of the large hall is made of oak and none of them may stand in the rain",
]


class Watch:
    """Looks for pieces of some documents in bytes: words, characters, and ids as each packing writes them."""

    def __init__(self, model, documents) -> None:
        self.seen = bytearray()
        self.drafts: list[Proposal | Verdict] = []
        self._lock = threading.Lock()
        self._needles: set[bytes] = set()
        self._bits: list[str] = []
        width = id_bits(model.vocab_size)
        for text in documents:
            words = text.split()
            for part in itertools.chain(
                (" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)),
                (text[i : i + CHARACTERS] for i in range(len(text) - CHARACTERS + 1)),
            ):
                for form in (part, part.upper(), part.title()):
                    self._needles |= {form.encode(), form.encode("utf-16-le")}
            ids = list(model.tokenizer.encode(text, add_special_tokens=False).ids)
            assert len(ids) >= TOKENS
            for i in range(len(ids) - TOKENS + 1):
                some = ids[i : i + TOKENS]
                for kind in ("<u2", ">u2", "<u4", ">u4", "<i8", ">i8"):
                    self._needles.add(np.asarray(some, kind).tobytes())
                self._needles.add(b"".join(map(_varint, some)))
                self._needles.add(b"".join(map(_messagepack, some)))
                if max(some) < 256:
                    self._needles.add(bytes(some))
                bits = np.unpackbits(np.frombuffer(packed(some, width), np.uint8), bitorder="little")[: TOKENS * width]
                self._bits.append("".join(map(str, bits)))

    def note(self, message: Message) -> None:
        """Keep a draft or a verdict, to be looked at as a message."""
        if isinstance(message, Proposal | Verdict):
            self.drafts.append(message)

    def take(self, data: bytes) -> None:
        with self._lock:
            self.seen += data + b"\0\0\0\0"  # two messages are no run

    def leaks(self) -> list[bytes | str]:
        """What of the documents is in what was seen; the bits at any offset."""
        data = bytes(self.seen)
        stream = "".join(map(str, np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")))
        found: list[bytes | str] = [needle for needle in self._needles if needle in data]
        return found + [bits for bits in self._bits if bits in stream]


def _varint(token: int) -> bytes:
    out = bytearray()
    while token > 127:
        out.append(token & 127 | 128)
        token >>= 7
    return bytes([*out, token])


def _messagepack(token: int) -> bytes:
    if token < 128:
        return bytes([token])
    return b"\xcc" + bytes([token]) if token < 256 else b"\xcd" + token.to_bytes(2, "big")


def packed(ids: list[int], width: int) -> bytes:
    """As ``pack_ids`` writes them, in the text's order."""
    values = sum(token << (width * place) for place, token in enumerate(ids))
    return values.to_bytes((len(ids) * width + 7) // 8, "little")


class Documents:
    """Finds all it has; its documents have names that are no words of theirs."""

    def __init__(self, texts) -> None:
        self._texts = texts
        self.names = [f"{text.split()[0]}-{len(text)}.md" for text in texts]

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        return [Retrieved(t, t, float(-n), self.names[n]) for n, t in enumerate(self._texts[:count])]
