# SPDX-License-Identifier: Apache-2.0
"""The emulated link around real topics: the same tokens, and no faster than the link allows."""

from __future__ import annotations

import threading

from ros_rig import picture

from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model


def test_a_slow_link_round_topics(rig, tiny_pair):
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    rig.start("verifier_node", model__path=tiny_pair[0])
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    replies = []
    threads = threading.active_count()
    for link in (LinkProfile(), LinkProfile(0.03, 0.03, 0.01, 1e6, 1e6)):
        with (
            EmulatedChannel(DdsChannel(rig.node), link) as channel,
            EdgeSession(channel, draft, DecodeSettings(mode="fsd", max_tokens=8)) as session,
        ):
            replies.append(session.decode(picture(1), "find the silver bottle"))
    assert replies[0].tokens == replies[1].tokens
    assert all(record.wait_seconds >= 0.06 for record in replies[1].records)
    assert threading.active_count() <= threads
