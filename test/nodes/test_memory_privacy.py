# SPDX-License-Identifier: Apache-2.0
"""No text of the robot's documents is in what its memory node publishes, in the serialized samples of any topic."""

from __future__ import annotations

import importlib

import pytest
from builtin_interfaces.msg import Duration
from leak_watch import OTHERS, OWN, QUESTION, WORDS, Watch
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_rig import Rig, repeating
from tiny_text import make_tiny_text

from dsd_msgs.srv import Ask
from dsd_ros.ros.dds_channel import AGGREGATION, DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.messages import PROTOCOL_VERSION, Question

NODE = "memory_node"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return make_tiny_text(tmp_path_factory.mktemp("reader"), seed=9, kind="qwen2")


def message_type(name: str) -> type:
    """Of "package/msg/Name"."""
    package, _, kind = name.split("/")
    return getattr(importlib.import_module(f"{package}.msg"), kind)


class TopicTap:
    """Hands the CDR samples of every topic that some nodes publish to a watch."""

    def __init__(self, rig: Rig, watch: Watch, *nodes: str) -> None:
        self.counts: dict[str, int] = {}
        for node in nodes:
            for topic, types in rig.node.get_publisher_names_and_types_by_node(node, "/"):
                if topic in self.counts:
                    continue
                self.counts[topic] = 0
                offers = rig.node.get_publishers_info_by_topic(topic)
                reliable = all(offer.qos_profile.reliability == ReliabilityPolicy.RELIABLE for offer in offers)
                profile = QoSProfile(depth=2000)
                if not reliable:
                    profile.reliability = ReliabilityPolicy.BEST_EFFORT
                rig.node.create_subscription(
                    message_type(types[0]), topic, self._taker(topic, watch), profile, raw=True
                )

    def _taker(self, topic: str, watch: Watch):
        def take(sample: bytes) -> None:
            self.counts[topic] += 1
            watch.take(sample)

        return take


def test_what_the_memory_node_publishes_holds_nothing_of_its_documents(rig, tiny_pair, reader, tmp_path):
    for side, texts in (("robot", OWN), ("cloud", OTHERS)):
        (tmp_path / side).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / side / f"{number}.md").write_text(f"{text}.\n")
    model = load_model(ModelSettings(str(reader)))
    rig.host(
        NODE, model__path=reader, documents=tmp_path / "robot", answer__max_tokens=6,
        answer__temperature=1.0,
    )  # fmt: skip
    rig.host("verifier_node", model__path=tiny_pair[0], text_model=reader, documents=tmp_path / "cloud")
    rig.until_active(NODE)
    rig.until_active("verifier_node")
    watch = Watch(model, OWN)
    tap = TopicTap(rig, watch, NODE, f"_{NODE}_link")
    assert {f"/{topic}" for topic in AGGREGATION.up.values()} < set(tap.counts)
    for topic in tap.counts:
        rig.until(lambda topic=topic: rig.node.count_publishers(topic))

    def answered():
        """An answer, once the robot has proposed: while it aggregates, as it may to the end, it does not."""
        answer = rig.call(Ask, "dsd/ask", Ask.Request(question=QUESTION, timeout=Duration(sec=40)), 60.0)
        return answer if tap.counts["/dsd/proposal_up"] else None

    answer = rig.until(answered, what="a proposal of the robot's")
    assert answer.stats.documents == len(OWN) and answer.stats.cloud_documents == len(OTHERS)
    assert answer.stats.tokens == 6
    rig.until(lambda: tap.counts["/dsd/question"] and QUESTION.encode() in watch.seen)
    assert watch.leaks() == []
    assert not any(f"{number}.md".encode() in watch.seen for number in range(len(OWN)))  # nor their names
    assert {(each.side, each.document) for each in answer.sources} <= {
        (side, f"{n}.md") for side in (1, 2) for n in (0, 1)
    }

    # What is planted on these very topics is found.
    channel = DdsChannel(rig.node, match_timeout=30.0, topics=AGGREGATION)
    rig.at_end(channel.close)
    before = tap.counts["/dsd/question"]
    planted = Question(
        9, 0, PROTOCOL_VERSION, "t", 8, " ".join(OWN[1].split()[2 : 2 + WORDS]), 2, 0.0, 0, 1,
        2, 8, 4, "device",
    )  # fmt: skip
    with repeating(lambda: channel.send(planted)):  # the tap may be found later than the verifier
        rig.until(lambda: tap.counts["/dsd/question"] > before)
    assert watch.leaks()
