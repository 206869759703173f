"""Sampled replies over real DDS, by every proof, token by token as without a link."""

from __future__ import annotations

from ros_rig import picture

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel


def test_every_proof_over_topics_gives_the_tokens_it_should(rig, tiny_pair):
    rig.start("verifier_node", model__path=tiny_pair[0])
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    topics = DdsChannel(rig.node)

    def run(channel, **values) -> list[list[int]]:
        settings = DecodeSettings(temperature=1.0, seed=2, max_tokens=16, **values)
        with EdgeSession(channel, draft, settings) as session:
            return [session.decode(picture(n), "go").tokens for n in range(4)]

    try:
        alone = run(topics, mode="ar", proof="coupled")
        assert len(set(map(tuple, alone))) == 4
        assert run(topics, mode="coupled") == alone
        assert run(topics, mode="coupled", shape="budget") == alone
        assert run(topics, mode="fsd", proof="coupled", pipeline_depth=2) == alone
        # Other proofs draw other tokens: those that they draw in one process.
        target = load_model(ModelSettings(str(tiny_pair[0])))
        tree = {"shape": "expansion"}
        for values in ({"mode": "dssd"}, {"mode": "tslt"}, {"mode": "dssd"} | tree, {"mode": "mc-tslt"}):
            with VerifierEngine(target) as engine, LocalChannel(engine) as here:
                assert run(topics, **values) == run(here, **values)
    finally:
        topics.close()
