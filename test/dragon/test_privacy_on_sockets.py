# SPDX-License-Identifier: Apache-2.0
"""No text of a side's documents is in the bytes of real connections, recorded by a tap between robot and cloud."""

from __future__ import annotations

import pytest
from leak_watch import OTHERS, OWN, QUESTION, TOKENS, Documents, Watch
from table_model import TableModel
from tcp_tap import TcpTap, unmasked
from tiny_text import make_tiny_text

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.server import DragonServer, WithDocuments
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.messages import PROTOCOL_VERSION, Question, QuestionEnd, QuestionReply
from dsd_ros.wire.websocket import WebsocketChannel


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(ModelSettings(str(make_tiny_text(tmp_path_factory.mktemp("text"), seed=9, kind="qwen2"))))


@pytest.fixture
def tap(model):
    """Between a robot and a real server with the general documents."""
    service = DragonServer(model, Documents(OTHERS))
    with (
        WithDocuments(VerifierEngine(TableModel(4, 12)), service) as both,
        VerifierServer(both, VerifierSettings(port=0)) as server,
        TcpTap(server.url) as made,
    ):
        yield made


def watched(streams, model, documents) -> Watch:
    """The bytes as they are on the wire, and behind the masks."""
    watch = Watch(model, documents)
    for stream in streams:
        watch.take(bytes(stream))
        watch.take(unmasked(stream))
    return watch


def test_the_documents_stay_on_their_sides_of_a_socket(model, tap):
    for temperature in (0.0, 1.0):
        settings = AggregationSettings(temperature=temperature, seed=4, max_tokens=6, attempts=20)
        cuts = [2]

        def cut(_text: str, tokens: list[int], cuts: list[int] = cuts) -> None:
            if cuts and len(tokens) >= cuts[0]:
                cuts.clear()
                tap.cut()

        with WebsocketChannel(tap.url) as channel:
            with DragonClient(channel, model, Documents(OWN), settings) as session:
                answer = session.answer(QUESTION, on_token=cut)
            assert answer.statistics.cloud_documents == len(OTHERS)
            assert channel.bytes_up < sum(map(len, tap.up))
    up, down = watched(tap.up, model, OWN), watched(tap.down, model, OTHERS)
    assert QUESTION.encode() in up.seen and b"GET / HTTP/1.1" in up.seen
    assert min(len(up.seen), len(down.seen)) > 3_000 and len(tap.up) >= 2
    assert model.name.encode() in down.seen
    assert up.leaks() == [] and down.leaks() == []


def test_a_leak_planted_on_the_socket_is_found(model, tap):
    ids = model.tokenizer.encode(OWN[0], add_special_tokens=False).ids[2 : 2 + TOKENS]
    question = Question(
        1, 0, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, QUESTION, 2, 0.0, 0, 1, 16, 64, 4,
        "device", [], ids,
    )  # fmt: skip
    with WebsocketChannel(tap.url) as channel:
        channel.reconnect()
        channel.send(question)
        assert isinstance(channel.receive(20.0), (QuestionReply, QuestionEnd))
    assert watched(tap.up, model, OWN).leaks()
    assert not watched(tap.down, model, OTHERS).leaks()
