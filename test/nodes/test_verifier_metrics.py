# SPDX-License-Identifier: Apache-2.0
"""A verifier_node's metrics as an operator's Prometheus fetches them, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
from urllib.request import urlopen

import pytest
from ros_rig import picture

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model


def test_rounds_over_topics_are_counted_and_sigint_ends_the_node(rig, tiny_pair):
    target, draft = tiny_pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    child = rig.start("verifier_node", model__path=target, metrics_port=port)
    rig.until(lambda: any("loaded, verifying" in line for line in rig.lines))

    def counted() -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = re.findall(r"^(dsd_verifier_\S+) (\S+)$", answer.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    assert counted().get('dsd_verifier_rounds_total{mode="dsd"}', 0.0) == 0.0
    channel = DdsChannel(rig.node)
    rig.at_end(channel.close)
    settings = DecodeSettings(mode="dsd", max_tokens=8)
    model = load_model(ModelSettings(str(draft)))
    with EdgeSession(channel, model, settings) as session:
        reply = session.decode(picture(1), "find the silver bottle")
    assert reply.rounds > 0
    rig.until(
        lambda: counted().get('dsd_verifier_rounds_total{mode="dsd"}') == reply.rounds,
        what="as many rounds counted as there were",
    )
    rig.until(  # of the topics: taken into the metrics once a second
        lambda: sum(n for name, n in counted().items() if "_bytes" in name) >= reply.bytes_up, what="bytes"
    )
    with socket.create_connection(("127.0.0.1", port)):  # a client that sends nothing
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(30) == 0, "\n".join(rig.lines[-20:])
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    with socket.create_server(("127.0.0.1", port)):
        pass  # it was given back
