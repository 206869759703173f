# SPDX-License-Identifier: Apache-2.0
"""A robot's half of the protocol, message by message, for tests of the verifier."""

from __future__ import annotations

import queue

import numpy as np

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    Draft,
    DraftTokens,
    Observation,
    Outcome,
    RefusalCode,
    SessionReply,
    SessionRequest,
    VerifiedTokens,
)
from dsd_ros.wire.pictures import encode_picture

IMAGE = np.full((2, 2, 3), 1, np.uint8)
PNG = encode_picture(IMAGE)


class Robot:
    """Speaks to an engine message by message."""

    numbers = iter(range(1, 1 << 30))

    def __init__(self, engine: VerifierEngine, peer: object = None) -> None:
        self.engine, self.peer = engine, peer or object()
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.session, self.ticket = 0, b""

    def send(self, message) -> bool:
        return self.engine.submit(message, self.inbox.put, self.peer)

    def get(self, timeout: float = 10.0):
        return self.inbox.get(timeout=timeout)

    def final(self, number: int, reply: int = 1):
        """The final outcome of a round (or a refusal of it), and the early outcomes of it on the way."""
        early = []
        while True:
            message = self.get()
            if (message.reply, message.round) != (reply, number):
                continue
            if isinstance(message, Outcome) and not message.is_final:
                early.append(message)
            elif isinstance(message, Outcome) or message.code != RefusalCode.ASSUMPTION_FAILED:
                return message, early

    def silent(self, seconds: float = 0.1) -> bool:
        try:
            self.inbox.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def request(self, **changes) -> SessionRequest:
        model = self.engine.model
        values = dict(
            request=next(self.numbers), protocol_version=PROTOCOL_VERSION, mode="dsd",
            tokenizer_fingerprint=model.tokenizer_fingerprint, vocab_size=model.vocab_size,
            temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=512,
        )  # fmt: skip
        return SessionRequest(**(values | changes))

    def open(self, **changes) -> SessionReply:
        self.send(self.request(**changes))
        reply = self.get()
        self.session, self.ticket = reply.session, reply.ticket
        return reply

    def observe(self, reply: int = 1, **changes) -> None:
        values = dict(session=self.session, reply=reply, instruction="go", height=2, width=2, encoding="png", image=PNG)
        self.send(Observation(**(values | changes)))

    def tell(self, start: int = 0, tokens=(), stream: int = 1, reply: int = 1) -> None:
        """Mode stream: what was drafted from position ``start`` on; without tokens, ask for those from there on."""
        self.send(DraftTokens(self.session, reply, stream, start, list(tokens)))

    def verified(self, reply: int = 1, known: list[int] | None = None) -> list[int]:
        """Mode stream: the tokens after ``known``, to the end of the reply; each message begins where it should."""
        tokens = list(known or ())
        while True:
            message = self.get()
            assert (type(message), message.session, message.reply) == (VerifiedTokens, self.session, reply)
            assert message.at <= len(tokens) and message.accepted <= min(message.drafted, len(message.tokens))
            held = tokens[message.at :]
            assert held[: len(message.tokens)] == message.tokens[: len(held)]
            tokens += message.tokens[len(held) :]
            if message.ended:
                return tokens

    def draft(self, number: int = 1, confirmed: int = 0, tokens=(), reply: int = 1, **rest) -> None:
        self.send(Draft(self.session, reply, number, confirmed, list(tokens), **rest))
