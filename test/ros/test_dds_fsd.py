# SPDX-License-Identifier: Apache-2.0
"""fsd over real DDS: the target's tokens, with exits and rounds in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import rclpy
from ros_rig import picture
from tiny_models import make_tiny_model

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import PATIENT_LINK
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model

INSTRUCTION = "find the silver bottle"
LENGTH = 16


@pytest.fixture
def channel(rig):
    made = DdsChannel(rig.node)
    yield made
    made.close()


def alone(target, image) -> list[int]:
    """What the target says greedily by itself."""
    sequence = target.prefill(image, INSTRUCTION)
    while len(sequence.tokens) < LENGTH:
        sequence.append([int(sequence.next_logits().argmax())])
        if sequence.tokens[-1] in target.eos_token_ids:
            break
    return sequence.tokens


def test_fsd_over_topics_gives_the_targets_tokens(rig, channel, tmp_path, tiny_pair):
    directory = make_tiny_model(tmp_path / "target", seed=5, layers=3)
    target = load_model(ModelSettings(str(directory)))
    ExitAdapters.untrained(target).save(directory, target.fingerprint)
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    rig.host("verifier_node", model__path=directory, engine__exit_share=1.0)
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    exits = 0
    ahead = {"predraft_source": "exits", "pipeline_depth": 3}
    for values in ({}, {"pipeline_depth": 3, "predraft_workers": 64}, {"predraft_source": "exits"}, ahead):
        settings = DecodeSettings(mode="fsd", max_tokens=LENGTH, **values)
        with EdgeSession(channel, draft, settings) as session:
            for seed in range(4):
                image = picture(seed)
                reply = session.decode(image, INSTRUCTION)
                assert reply.tokens == alone(target, image), f"picture {seed}, {values}"
                exits += reply.exits
    assert exits > 0


def test_robots_on_the_same_topics_get_their_own_tokens(rig, tmp_path, tiny_pair):
    """Four at once: their early outcomes share what the middleware may hold."""
    directory = make_tiny_model(tmp_path / "target", seed=5, layers=3)
    target = load_model(ModelSettings(str(directory)))
    ExitAdapters.untrained(target).save(directory, target.fingerprint)
    rig.host("verifier_node", model__path=directory, engine__exit_share=1.0)
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    wrong: list[str] = []
    exits = 0

    def drive(robot: int) -> None:
        nonlocal exits
        node = rclpy.create_node(f"robot_{robot}")
        channel = DdsChannel(node, match_timeout=30.0)
        settings = DecodeSettings(mode="fsd", max_tokens=LENGTH, predraft_source="exits")
        try:
            with EdgeSession(channel, load_model(ModelSettings(str(tiny_pair[1]))), settings, PATIENT_LINK) as session:
                for seed in range(10 * robot, 10 * robot + 6):
                    image = picture(seed)
                    reply = session.decode(image, INSTRUCTION)
                    if reply.tokens != expected[seed]:
                        wrong.append(f"robot {robot}, picture {seed}")
                    exits += reply.exits
        finally:
            channel.close()
            node.destroy_node()

    expected = {seed: alone(target, picture(seed)) for robot in range(4) for seed in range(10 * robot, 10 * robot + 6)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(drive, range(4)))
    assert not wrong and exits > 0
