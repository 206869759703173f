# SPDX-License-Identifier: Apache-2.0
"""A client written from docs/protocol.md alone works with the verifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from table_model import TableModel
from websockets.sync.client import connect

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings

LONGEST = 24  # tokens of a reply
OBSERVATION, DRAFT_TOKENS, VERIFIED_TOKENS, DRAFT, OUTCOME, SESSION_CLOSE = 3, 4, 5, 6, 7, 9


class Client:
    """A robot that knows the page and nothing of the package: MessagePack arrays over a websocket."""

    def __init__(self, url: str, mode: str, model: TableModel) -> None:
        headers = {"Authorization": "Bearer correct-horse"}
        self.dial = lambda: connect(url, additional_headers=headers, compression=None, close_timeout=0.2, proxy=None)
        self.request = [
            1, 77, 10, mode, model.tokenizer_fingerprint, model.vocab_size, 1.0, 0, 1.0, 42, LONGEST,
        ]  # fmt: skip
        self.link = self.dial()
        self.session, self.ticket, self.stream = 0, b"", 1
        self.tokens: list[int] = []
        self.open()

    def open(self) -> None:
        self.send([*self.request, self.ticket])
        tag, request, session, error, *fields = self.receive()
        assert (tag, request, error) == (2, 77, "") and self.session in (0, session)
        self.session, self.ticket = session, fields[5]

    def resume(self) -> None:
        self.link.close()
        self.link = self.dial()
        self.open()

    def close(self) -> None:
        self.send([SESSION_CLOSE, self.session])
        self.link.close()

    def send(self, message: list[Any]) -> None:
        self.link.send(msgspec.msgpack.encode(message))

    def receive(self) -> list[Any]:
        message: list[Any] = msgspec.msgpack.decode(self.link.recv(timeout=20))
        return message

    def observe(self) -> None:
        self.send([OBSERVATION, self.session, 7, "go", 2, 2, "rgb8", bytes(12), bytes(self.tokens) or None])

    # ---------------------------------------------------------------------------- the stream

    def draft(self, start: int, tokens: list[int]) -> None:
        self.send([DRAFT_TOKENS, self.session, 7, self.stream, start, bytes(tokens)])

    def ask(self) -> None:
        self.stream += 1
        self.send([DRAFT_TOKENS, self.session, 7, self.stream, len(self.tokens)])

    def verified(self) -> tuple[int, list[int], int, bool]:
        """Position, tokens, how many of them were drafted, and whether they end the reply."""
        kind, session, reply, at, tokens, *rest = self.receive()
        assert (kind, session, reply) == (VERIFIED_TOKENS, self.session, 7)
        accepted, _, _, ended = rest + [None] * (4 - len(rest))  # what has its default is nil, or left out
        return at, list(tokens), accepted or 0, bool(ended)

    def follow(self, at: int, tokens: list[int]) -> None:
        known = len(self.tokens)
        if at > known:
            self.ask()
            return
        assert self.tokens[at : at + len(tokens)] == tokens[: known - at]
        self.tokens += tokens[known - at :]

    def finish(self) -> list[int]:
        """Take what comes until the reply has ended."""
        while True:
            at, tokens, _, ended = self.verified()
            self.follow(at, tokens)
            if ended and at + len(tokens) == len(self.tokens):
                return self.tokens


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TableModel]]:
    """Address and model of a verifier that asks for the token "correct-horse"."""
    token = tmp_path_factory.mktemp("verifier") / "token"
    token.write_text("correct-horse\n")
    model = TableModel(1, ends=False)
    settings = VerifierSettings(port=0, token_file=str(token))
    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        yield server.url, model


@pytest.fixture(scope="module")
def alone(verifier: tuple[str, TableModel]) -> list[int]:
    """The reply of the target alone (mode ar), of which one message got lost."""
    url, model = verifier
    client = Client(url, "ar", model)
    client.observe()
    client.follow(*client.verified()[:2])
    client.verified()  # lost: the next one shows a gap
    reply = client.finish()
    client.close()
    assert len(reply) == LONGEST
    return reply


def test_a_stream_gives_the_reply_of_the_target_alone(verifier: tuple[str, TableModel], alone: list[int]) -> None:
    url, model = verifier
    client = Client(url, "stream", model)
    client.draft(3, [*alone[3:5], (alone[5] + 1) % model.vocab_size])  # in any order, and before the observation
    client.draft(0, alone[:3])
    client.observe()
    at, tokens, accepted, ended = client.verified()
    assert (at, tokens, accepted, ended) == (0, alone[:6], 5, False)
    client.follow(at, tokens)
    client.stream += 1  # the sixth was drafted differently
    client.draft(6, alone[6:8])
    client.resume()  # the link broke: what was on its way is lost
    client.ask()
    assert client.finish() == alone
    client.ask()
    assert client.verified() == (LONGEST, [], 0, True)
    client.close()


def test_another_session_goes_on_with_a_reply(verifier: tuple[str, TableModel], alone: list[int]) -> None:
    url, model = verifier
    client = Client(url, "stream", model)
    client.tokens = alone[:9]
    client.ask()
    kind, session, reply, stream, code, *_ = client.receive()
    assert (kind, session, reply, stream, code) == (8, client.session, 7, client.stream, "no-observation")
    client.observe()
    assert client.verified()[:2] == (9, alone[9:10])
    client.follow(9, alone[9:10])
    assert client.finish() == alone
    client.close()


def test_rounds_verify_drafts_by_their_distributions(verifier: tuple[str, TableModel]) -> None:
    url, model = verifier
    client = Client(url, "dsd", model)
    client.observe()
    random = np.random.default_rng(5)
    evidence = np.full(3 * model.vocab_size, 1 / model.vocab_size, "<f4").tobytes()

    def final(number: int) -> tuple[int, int]:
        """The number of accepted tokens, and the next token."""
        kind, session, reply, round_, _, accepted, following, *_ = client.receive()
        assert (kind, session, reply, round_) == (OUTCOME, client.session, 7, number)
        return accepted, following

    for number in range(1, 6):
        draft = random.integers(0, model.vocab_size, 3).tolist()
        message = [DRAFT, client.session, 7, number, len(client.tokens), bytes(draft), evidence]
        client.send(message)
        accepted, following = final(number)
        if number == 3:  # as if its outcome had got lost, with the link
            client.resume()
            client.send(message)
            assert final(number) == (accepted, following)
        client.tokens += [*draft[:accepted], following]
    assert len(client.tokens) >= 5
    client.close()
