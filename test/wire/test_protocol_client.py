# SPDX-License-Identifier: Apache-2.0
"""A client written from docs/protocol.md alone works with the verifier."""

from __future__ import annotations

import hmac
import secrets
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

TOKEN = b"correct-horse"
TAG_AT = {3: 11, 4: 11, 5: 10, 7: 2}  # where the tag stands in an Observation, a Draft, an Outcome and a SessionClose


def mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"dsd_ros " + label + b"\0" + b"".join(parts), "sha256")


def tag_of(key: bytes, label: bytes, number: int, fields: list[Any]) -> bytes:
    head = number.to_bytes(4, "little")
    return head + mac(key, label, head, msgspec.msgpack.encode([*fields, b""]))[:16]


def content(message: list[Any]) -> list[Any]:
    """All fields of a message without its tag, in the order of the ROS message."""
    kind, *fields = message
    fields += [None] * (TAG_AT[kind] - 1 - len(fields))
    if kind == 3:
        fields[7:] = [], 0, []
    elif kind == 4:
        *name, tokens, evidence, parents, resampled, assumed, rounds = fields
        fields = [
            *name,
            list(tokens),
            evidence or b"",
            parents or b"",
            assumed or b"",
            list(resampled or b""),
            rounds or 0,
            False,  # without_exits
        ]
    elif kind == 5:
        *name, following, compute_us, confidence, is_final = fields
        row = isinstance(following, bytes)
        fields = [*name, 0 if row else following, (confidence or 0) / 65535, is_final is not False, compute_us or 0]
        fields.append(following if row else b"")
    return [kind, *fields]


class Client:
    """A robot that knows the page and nothing of the package: MessagePack arrays over a websocket."""

    def __init__(self, url: str, mode: str, model: TableModel, proof: str = "") -> None:
        headers = {"Authorization": "Bearer correct-horse"}
        self.dial = lambda: connect(url, additional_headers=headers, compression=None, proxy=None)
        self.request = [
            1, 77, 9, mode, model.tokenizer_fingerprint, model.vocab_size, 1.0, 0, 1.0, 42,
        ]  # fmt: skip
        self.rest = [False, [], "priority", 0.0, proof]
        self.link = self.dial()
        self.session, self.ticket = 0, b""
        self.open()

    def open(self) -> None:
        ours = secrets.token_bytes(16)
        fields = [*self.request, self.ticket, *self.rest, ours]
        self.link.send(msgspec.msgpack.encode([*fields, tag_of(TOKEN, b"open", 0, fields)]))
        answer = msgspec.msgpack.decode(self.link.recv(timeout=20))
        tag, request, session, error, *_, ticket, _, _, _, theirs, _ = answer
        assert (tag, request, error, ticket) == (2, 77, "", b"") and self.session in (0, session)
        self.key = mac(TOKEN, b"session", ours, theirs, session.to_bytes(4, "little"))
        self.session, self.ticket = session, mac(self.key, b"ticket")[:16]
        self.sent, self.received = 0, set[int]()
        self.check(answer)

    def resume(self) -> None:
        self.link.close()
        self.link = self.dial()
        self.open()

    def send(self, message: list[Any]) -> None:
        self.sent += 1
        tag = tag_of(self.key, b"up", self.sent, content(message))
        padding = [None] * (TAG_AT[message[0]] - len(message))
        self.link.send(msgspec.msgpack.encode([*message, *padding, tag]))

    def receive(self) -> list[Any]:
        message = msgspec.msgpack.decode(self.link.recv(timeout=20))
        self.check(message)
        return message[:-1]

    def check(self, message: list[Any]) -> None:
        """The tag holds, and its number has not come before."""
        *fields, tag = message
        number = int.from_bytes(tag[:4], "little")
        fields = fields if fields[0] == 2 else content(fields)
        assert tag == tag_of(self.key, b"down", number, fields) and number not in self.received
        self.received.add(number)

    def observe(self) -> None:
        self.send([3, self.session, 7, "go", 2, 2, "rgb8", bytes(12)])

    def final(self, number: int) -> tuple[int, int | bytes]:
        """The number of accepted tokens, and the next token or the target's distribution there."""
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
    p[[packed >> (width * i) & ((1 << width) - 1) for i in range(count)]] = np.frombuffer(data[-4 * count :], "<f4")
    return p


TREE = b"\0\0\1\2"  # two children of the root, each with one of its own


def drafted(proof: str, size: int, parents: bytes) -> tuple[list[int], bytes | None]:
    """A draft by a q that is the same for all eight tokens wherever it stands, and what proves it; what is
    kept of the truncated one are the first four tokens."""
    rows = 1 + len({byte for byte in parents if byte}) if parents else 3
    chosen = np.random.default_rng(5).integers(0, 4, len(parents) or 3).tolist()
    brought = {
        "full": np.full(rows * size, 1 / size, "<f4").tobytes(),
        "split": bytes.fromhex("000ee0000ee0" if parents else "000ee0000e"),
        "truncated": b"\x02" + rows * (b"\x03\x00" + b"\x88\x06" + 4 * b"\x00\x3c"),
    }
    return chosen, brought.get(proof)


def path_to(last: int, parents: bytes) -> list[int]:
    """The nodes down to the one that an outcome names, numbered from 1."""
    path = []
    while last:
        path.append(last)
        last = parents[last - 1]
    return path[::-1]


def gone_on(
    data: bytes, size: int, at: int, draft: list[int], parents: bytes, random: np.random.Generator
) -> list[int]:
    """What the robot adds after node ``at``, whose first child is rejected; nodes are numbered from 1."""
    q = np.full(size, 1 / size)
    if not parents:
        rows, others = {at: unpacked(data, size)}, []
    else:
        under: dict[int, list[int]] = {}
        for node, parent in enumerate(parents, 1):
            under.setdefault(parent, []).append(node)
        others = under[at][1:]
        left = sorted([*others, *(leaf for node in others for leaf in under.get(node, []))])
        rows = {}
        for node in (at, *left):
            end = 4 + int.from_bytes(data[:4], "little")
            rows[node], data = unpacked(data[4:end], size), data[end:]
        assert not data
    # 1/8 is what q is rounded up to.
    w = np.maximum(0, rows[at] - q * np.minimum(1, rows[at] / 0.125))
    added: list[int] = []
    while True:
        w = w / w.sum()
        if not others:
            return [*added, int(random.choice(size, p=w))]
        node, *others = others
        token = draft[node - 1]
        if random.random() < w[token] / q[token]:
            added.append(token)
            w, others = rows[node].astype(float), under.get(node, [])
        else:
            w = np.maximum(0, w - q)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """Address and model of a verifier that asks for the token "correct-horse"."""
    token = tmp_path_factory.mktemp("verifier") / "token"
    token.write_text("correct-horse\n")
    model = TableModel(1, ends=False)
    settings = VerifierSettings(port=0, token_file=str(token))
    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        yield server.url, model


@pytest.mark.parametrize("parents", [b"", TREE], ids=["sequence", "tree"])
@pytest.mark.parametrize("mode", [name for name, preset in PRESETS.items() if preset.drafts])
def test_a_client_written_from_the_page_decodes_a_reply(verifier, mode, parents):
    url, model = verifier
    client = Client(url, mode, model)
    client.observe()
    proof, random = PRESETS[mode].proof.value, np.random.default_rng(3)
    tokens: list[int] = []
    owed: list[int] = []
    rejected = 0
    for number in range(1, 10):
        draft, brought = drafted(proof, model.vocab_size, parents)
        message = [4, client.session, 7, number, len(tokens), varints(draft)]
        if owed:
            message += [brought, parents or None, varints(owed)]
        elif parents:
            message += [brought, parents]
        elif brought:
            message += [brought]
        client.send(message)
        accepted, following = client.final(number)
        if number == 3:  # as if its outcome had got lost, with the link
            client.resume()
            client.send(message)
            assert client.final(number) == (accepted, following)
        path = path_to(accepted, parents) if parents else range(1, accepted + 1)
        tokens += [draft[node - 1] for node in path]
        owed = []
        if isinstance(following, bytes):
            rejected += 1
            size = model.vocab_size
            owed = gone_on(following, size, accepted, draft, parents, random)
        tokens += owed or [following]
    assert (rejected > 0) == (proof == "split")
    assert len(tokens) >= 9
    if proof == "coupled":
        # What the target draws alone, in rounds without a draft.
        alone = Client(url, "ar", model, proof)
        alone.observe()
        alone.send([4, alone.session, 7, 1, 0, b"", None, None, None, None, len(tokens)])
        assert [alone.final(n + 1)[1] for n in range(len(tokens))] == tokens
        alone.link.close()
    client.send([7, client.session])
    client.link.close()
