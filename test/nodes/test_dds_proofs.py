"""Sampled by shared noise over real DDS: ar, drafts and drafts ahead say the same, token by token."""

from __future__ import annotations

from ros_rig import picture

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.nodes.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model


def test_coupled_over_topics_gives_the_targets_tokens(rig, tiny_pair):
    rig.start("verifier_node", model__path=tiny_pair[0])
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    channel = DdsChannel(rig.node)
    replies = []
    try:
        for values in ({"mode": "ar"}, {"mode": "coupled"}, {"mode": "fsd", "pipeline_depth": 2}):
            settings = DecodeSettings(
                proof="coupled", temperature=1.0, seed=2, max_tokens=16, **values
            )
            with EdgeSession(channel, draft, settings) as session:
                replies.append([session.decode(picture(n), "go").tokens for n in range(4)])
    finally:
        channel.close()
    assert replies[0] == replies[1] == replies[2]
    assert len(set(map(tuple, replies[0]))) == 4
