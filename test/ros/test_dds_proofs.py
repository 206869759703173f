# SPDX-License-Identifier: Apache-2.0
"""Replies over real DDS: greedy and coupled equal the reference, the others equal a run in one process."""

from __future__ import annotations

from by_reference import coupled_reply, greedy_reply
from ros_rig import picture

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

NOISE = {"proof": "coupled", "temperature": 1.0}
TREE, BUDGET = {"shape": "expansion"}, {"shape": "budget"}
MODES = [{"mode": mode} for mode in PRESETS]
MORE = [{"mode": "fsd", "pipeline_depth": 2}, {"mode": "coupled"} | TREE, {"mode": "coupled"} | BUDGET]


def test_every_mode_over_topics_gives_the_tokens_it_should(rig, tiny_pair):
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    target, draft = (load_model(ModelSettings(str(path))) for path in tiny_pair[:2])
    ends = target.eos_token_ids
    topics = DdsChannel(rig.node)

    def run(channel, replies, **values) -> list[list[int]]:
        settings = DecodeSettings(seed=2, max_tokens=16, **values)
        with EdgeSession(channel, draft, settings) as session:
            return [session.decode(picture(n), "go").tokens for n in range(replies)]

    try:
        wanted = [greedy_reply(target, draft, picture(n), "go", 16, ends) for n in range(2)]
        for values in MODES + MORE:
            assert run(topics, 2, **values) == wanted, values
        chosen = DecodeSettings(mode="coupled", seed=2, max_tokens=16, temperature=1.0)
        wanted = [coupled_reply(target, draft, picture(n), "go", chosen, n + 1, ends) for n in range(3)]
        assert len(set(map(tuple, wanted))) == 3
        for values in MODES + MORE:
            assert run(topics, 3, **values | NOISE) == wanted, values
        # Other proofs draw other tokens: those that they draw in one process, which are held against the reference.
        for values in ({"mode": "dssd"}, {"mode": "tslt"}, {"mode": "dssd"} | TREE, {"mode": "mc-tslt"}):
            with VerifierEngine(target) as engine, LocalChannel(engine) as here:
                assert run(topics, 4, temperature=1.0, **values) == run(here, 4, temperature=1.0, **values)
    finally:
        topics.close()
