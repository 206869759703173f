"""A client written from docs/protocol.md alone against the verifier: what the page says is enough."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from table_model import TableModel
from websockets.sync.client import connect

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.modes import PRESETS


class Client:
    """A robot that knows the page and nothing of the package: MessagePack arrays over a websocket."""

    def __init__(self, url: str, mode: str, model: TableModel, proof: str = "") -> None:
        headers = {"Authorization": "Bearer correct-horse"}
        self.dial = lambda: connect(url, additional_headers=headers, compression=None, proxy=None)
        self.request = [
            1, 77, 3, mode, model.tokenizer_fingerprint, model.vocab_size, 1.0, 0, 1.0, 42,
        ]  # fmt: skip
        self.rest = [False, [], "priority", 0.0, proof]
        self.link = self.dial()
        self.session, self.ticket = 0, b""
        self.open()

    def open(self) -> None:
        self.send([*self.request, self.ticket, *self.rest])
        tag, request, session, error, *_, ticket = self.receive()
        assert (tag, request, error) == (2, 77, "") and self.session in (0, session)
        assert self.ticket in (b"", ticket)
        self.session, self.ticket = session, ticket

    def resume(self) -> None:
        self.link.close()
        self.link = self.dial()
        self.open()

    def send(self, message: list[Any]) -> None:
        self.link.send(msgspec.msgpack.encode(message))

    def receive(self) -> list[Any]:
        return msgspec.msgpack.decode(self.link.recv(timeout=20))

    def observe(self) -> None:
        self.send([3, self.session, 7, "go", 2, 2, "rgb8", bytes(12)])

    def final(self, number: int) -> tuple[int, int | bytes]:
        """How many tokens hold, and the one behind them or the target's distribution there."""
        tag, session, reply, round_, _, accepted, following, *rest = self.receive()
        assert (tag, session, reply, round_) == (5, self.session, 7, number)
        assert len(rest) < 3 or rest[2] is not False
        return accepted, following


def varints(ids: list[int]) -> bytes:
    """Ids of less than 128."""
    return bytes(ids)


def unpacked(data: bytes, size: int) -> np.ndarray:
    """A distribution that came down, (size,)."""
    if data[0] == 0:
        return np.frombuffer(data, "<f4", offset=1)
    count, width = int.from_bytes(data[1:5], "little"), max(1, (size - 1).bit_length())
    packed = int.from_bytes(data[5 : -4 * count], "little")
    p = np.zeros(size, np.float32)
    p[[packed >> (width * i) & ((1 << width) - 1) for i in range(count)]] = np.frombuffer(
        data[-4 * count :], "<f4"
    )
    return p


def drafted(proof: str, size: int) -> tuple[list[int], bytes | None]:
    """A draft of three by a q that is the same for all eight tokens, and what proves it; what is kept of the
    truncated one are the first four tokens."""
    chosen = np.random.default_rng(5).integers(0, 4, 3).tolist()
    brought = {
        "full": np.full(3 * size, 1 / size, "<f4").tobytes(),
        "split": 3 * b"\x00\x3e",
        "truncated": b"\x02" + 3 * (b"\x03\x00" + b"\x88\x06" + 4 * b"\x00\x3c"),
    }
    return chosen, brought.get(proof)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """Address and model of a verifier that asks for the token "correct-horse"."""
    token = tmp_path_factory.mktemp("verifier") / "token"
    token.write_text("correct-horse\n")
    model = TableModel(1, ends=False)
    settings = VerifierSettings(port=0, token_file=str(token))
    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        yield server.url, model


@pytest.mark.parametrize("mode", [name for name, preset in PRESETS.items() if preset.drafts])
def test_a_client_written_from_the_page_decodes_a_reply(verifier, mode):
    url, model = verifier
    client = Client(url, mode, model)
    client.observe()
    proof = PRESETS[mode].proof.value
    tokens: list[int] = []
    owed: list[int] = []
    for number in range(1, 7):
        draft, brought = drafted(proof, model.vocab_size)
        message = [4, client.session, 7, number, len(tokens), varints(draft)]
        if owed:
            message += [brought, None, varints(owed)]
        elif brought:
            message += [brought]
        client.send(message)
        accepted, following = client.final(number)
        if number == 3:  # as if its outcome had got lost, with the link
            client.resume()
            client.send(message)
            assert client.final(number) == (accepted, following)
        owed = []
        if isinstance(following, bytes):
            p = unpacked(following, model.vocab_size)
            # 1/8 is what it is rounded up to.
            following = int(np.argmax(p - 1 / model.vocab_size * np.minimum(1, p / 0.125)))
            owed = [following]
        tokens += [*draft[:accepted], following]
    assert len(tokens) >= 6
    if proof == "coupled":
        # What the target draws alone, in rounds without a draft.
        alone = Client(url, "ar", model, proof)
        alone.observe()
        alone.send([4, alone.session, 7, 1, 0, b"", None, None, None, None, len(tokens)])
        assert [alone.final(n + 1)[1] for n in range(len(tokens))] == tokens
        alone.link.close()
    client.send([7, client.session])
    client.link.close()
