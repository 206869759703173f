# SPDX-License-Identifier: Apache-2.0
"""No text of a side's documents leaves it: every byte of many answers is inspected, on sockets and DDS topics.

The answer itself leaves by design, and an answer that quotes a document says what it quotes. So the models here are
random ones, whose answers are shorter than what is looked for and quote nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from leak_watch import CHARACTERS, OTHERS, OWN, QUESTION, TOKENS, WORDS, Documents, Watch, packed
from lossy_channel import LossyChannel
from msgspec.structs import replace as changed
from rclpy.serialization import serialize_message
from tiny_text import make_tiny_text

from dsd_lab.dragon.ablations import AblationClient, AblationServer
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.packing import id_bits, pack_ids
from dsd_ros.ros.dds_channel import to_ros
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Question


class WatchedChannel(LocalChannel):
    """Every message of either direction is watched, as a websocket's frame and as a DDS topic's payload."""

    def __init__(self, engine, up: Watch, down: Watch) -> None:
        super().__init__(engine)
        self._up, self._down = up, down

    def send(self, message) -> None:
        self._up.note(message)
        self._up.take(encode(message))
        self._up.take(serialize_message(to_ros(message)))
        super().send(message)

    def receive(self, timeout: float):
        message = super().receive(timeout)
        self._down.note(message)
        self._down.take(encode(message))
        self._down.take(serialize_message(to_ros(message)))
        return message


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(ModelSettings(str(make_tiny_text(tmp_path_factory.mktemp("text"), seed=9, kind="qwen2"))))


GREEDY, SHARED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 4}
INDEPENDENT = SHARED | {"randomness": "independent"}
# The product's own, both ways round, and what the laboratory lets travel.
COMBINATIONS = [
    ("sparse", GREEDY, "device"), ("sparse", SHARED, "cloud"), ("sparse", INDEPENDENT, "device"),
    ("full", SHARED, "device"), ("full", GREEDY, "cloud"), ("lossy-nucleus", INDEPENDENT, "cloud"),
]  # fmt: skip


def test_the_documents_stay_on_their_sides(model):
    up, down = Watch(model, OWN), Watch(model, OTHERS)
    settings = AblationSettings(max_tokens=6, patience_s=0.5, attempts=50)
    own, others = Documents(OWN), Documents(OTHERS)
    attempts = answers = 0
    for (evidence, randomness, aggregator), bad in itertools.product(COMBINATIONS, (False, True)):
        chosen = replace(settings, evidence=evidence, schedule=aggregator, aggregator=aggregator, **randomness)
        with AblationServer(chosen, model, others) as service, WatchedChannel(service, up, down) as channel:
            link = LossyChannel(channel, seed=answers, loss=0.03, cut=0.03) if bad else channel
            with AblationClient(link, model, own, chosen) as session:
                answer = session.answer(QUESTION)
        answers += 1
        attempts += answer.statistics.attempts
        assert answer.statistics.device_documents == len(OWN)
        assert answer.statistics.cloud_documents == len(OTHERS)
        named = {(source.side, source.document) for source in answer.sources}
        assert named <= {("device", n) for n in own.names} | {("cloud", n) for n in others.names}
    assert attempts > answers  # links were lost, and answers went on
    assert len(up.seen) > 10_000 and len(down.seen) > 10_000
    assert QUESTION.encode() in up.seen  # this does leave, and the watch sees it
    # The names of the cloud's documents leave it; those of the device's stay, even as numbers in its messages.
    assert all(name.encode() in down.seen and name.encode() not in up.seen for name in others.names)
    assert not any(name.encode() in seen for name in own.names for seen in (up.seen, down.seen))
    assert not any(message.source or message.source_share for message in up.drafts)
    assert any(message.source and message.source_share for message in down.drafts)
    assert up.leaks() == [] and down.leaks() == []


@pytest.mark.parametrize("way", ["text", "upper case", "ids", "bits", "in the question"])
def test_a_planted_leak_is_found(model, way):
    watch = Watch(model, OWN)
    words = OWN[0].split()
    ids = list(model.tokenizer.encode(OWN[0], add_special_tokens=False).ids)
    question = Question(
        1, 0, 5, "t", model.vocab_size, QUESTION, 2, 0.0, 0, 1, 16, 8, 4,
        "device",
    )  # fmt: skip
    planted = {
        "text": " ".join(words[3 : 3 + WORDS]).encode(),
        "upper case": " ".join(words[3 : 3 + WORDS]).upper().encode(),
        "ids": encode(changed(question, answered=ids[2 : 2 + TOKENS])),
        "bits": b"\x01" + packed([1, *ids[2 : 2 + TOKENS]], id_bits(model.vocab_size)),
        "in the question": encode(changed(question, text="so " + OWN[1][5 : 5 + CHARACTERS])),
    }
    for data in (encode(question), b"noise"):
        watch.take(data)
    assert watch.leaks() == []
    watch.take(planted[way])
    assert watch.leaks()


def test_the_watch_reads_packed_ids_as_they_are_packed(model):
    ascending = [3, 7, 20, 31, 40, 77, 80, 90]
    width = id_bits(model.vocab_size)
    assert packed(ascending, width) == pack_ids(np.asarray(ascending), model.vocab_size)
