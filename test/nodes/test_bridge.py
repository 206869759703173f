# SPDX-License-Identifier: Apache-2.0
"""From DDS topics over a real websocket to a verifier in another process, and back."""

from __future__ import annotations

import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from gateway import Gateway, response
from ros_rig import picture

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LinkClosed, LinkError, bearer
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Refusal
from dsd_ros.wire.websocket import WebsocketChannel

SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"
INSTRUCTION = "find the silver bottle"
PATIENT = LinkSettings(response_timeout_s=1.0, attempts=60)


@pytest.fixture
def channel(rig):
    made = DdsChannel(rig.node)
    yield made
    made.close()


def serve(rig, model, **options):
    """A verifier process; returns it and its address."""
    addresses = []
    command = [sys.executable, str(SERVER), str(model)]
    command += [f"{key}={value}" for key, value in options.items()]
    child = rig.group.start("verifier", command, on_line=lambda line: addresses.append(line))
    line = rig.until(lambda: next((text for text in addresses if "listening on" in text), None))
    return child, line.split()[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_replies_through_the_bridge_are_the_targets(rig, channel, tiny_pair):
    target, draft = (load_model(ModelSettings(str(path))) for path in tiny_pair)
    _, url = serve(rig, tiny_pair[0])
    rig.start("bridge_node", url=url)
    replies = {}
    for mode in ("ar", "dsd"):
        settings = DecodeSettings(mode=mode, max_tokens=20)
        with EdgeSession(channel, draft, settings, PATIENT) as session:
            replies[mode] = [session.decode(picture(seed), INSTRUCTION) for seed in range(15)]
    for one, other in zip(replies["ar"], replies["dsd"], strict=True):
        assert one.tokens == other.tokens
    assert sum(sum(reply.accepted) for reply in replies["dsd"]) > 10
    sequence = target.prefill(picture(0), INSTRUCTION)
    assert replies["dsd"][0].tokens[0] == int(sequence.next_logits().argmax())


def test_the_bridge_redials_a_verifier_that_was_away(rig, channel, tiny_pair):
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    port = free_port()
    bridge = rig.start("bridge_node", url=f"ws://127.0.0.1:{port}", longest_wait_s=0.5)
    settings = DecodeSettings(max_tokens=20)
    session = EdgeSession(channel, draft, settings, PATIENT)
    server, _ = serve(rig, tiny_pair[0], port=port)  # after the bridge began to dial
    first = session.decode(picture(1), INSTRUCTION)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    hasty = EdgeSession(channel, draft, settings, LinkSettings(response_timeout_s=0.3, attempts=2))
    with pytest.raises(LinkError):
        hasty.decode(picture(1), INSTRUCTION)
    serve(rig, tiny_pair[0], port=port)
    try:
        again = session.decode(picture(1), INSTRUCTION, deadline=time.monotonic() + 30.0)
    except LinkError as error:
        raise AssertionError("\n".join(rig.lines)) from error
    assert again.tokens == first.tokens
    assert bridge.process.poll() is None


def test_a_bridge_waits_for_a_gateway_that_sends_it_away(rig, channel, tiny_pair):
    """It dials as often as the gateway allows, says why once, and is linked when the verifier is there."""
    draft = load_model(ModelSettings(str(tiny_pair[1])))
    with Gateway(response("429 Too Many Requests", "Retry-After: 1")) as gateway:
        bridge = rig.start("bridge_node", url=f"ws://127.0.0.1:{gateway.port}", longest_wait_s=0.1)
        rig.until(lambda: gateway.dialled >= 3)
    serve(rig, tiny_pair[0], port=gateway.port)
    session = EdgeSession(channel, draft, DecodeSettings(max_tokens=20), PATIENT)
    session.decode(picture(1), INSTRUCTION, deadline=time.monotonic() + 60.0)
    assert bridge.process.poll() is None
    assert sum("HTTP 429" in line for line in rig.lines) == 1, rig.lines


def test_a_link_that_is_taken_and_ended_at_once_is_no_link(rig):
    """A gateway without a verifier behind it: one sentence, not one for each attempt."""
    from websockets.sync.server import serve as accept

    taken = []
    with accept(taken.append, "127.0.0.1", 0) as gateway:
        thread = threading.Thread(target=gateway.serve_forever)
        thread.start()
        port = gateway.socket.getsockname()[1]
        bridge = rig.start("bridge_node", url=f"ws://127.0.0.1:{port}", longest_wait_s=0.1)
        rig.until(lambda: len(taken) >= 8)
        gateway.shutdown()
        thread.join(10)
    assert bridge.process.poll() is None
    assert not any("linked to" in line for line in rig.lines), rig.lines
    assert sum("WARN" in line for line in rig.lines) <= 3, rig.lines
    assert not any("WARN" in line and "no link yet" in line for line in rig.lines), rig.lines


@pytest.mark.parametrize(
    ("parameters", "code", "sentence"),
    [
        ({"url": "http://example.org"}, 2, "is not a verifier address"),
        ({"token_file": "/does/not/exist"}, 2, "token file /does/not/exist cannot be read"),
    ],
)
def test_a_bridge_that_cannot_dial_says_why(rig, parameters, code, sentence):
    child = rig.start("bridge_node", **parameters)
    rig.until(lambda: child.process.poll() is not None)
    child.reader.join(5.0)
    assert child.process.returncode == code
    assert any(sentence in line for line in rig.lines), rig.lines
    assert not any("Traceback" in line for line in rig.lines)


def test_a_wrong_token_ends_the_bridge_with_a_sentence(rig, tiny_pair, tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a" * 32)
    wrong.write_text("b" * 32)
    _, url = serve(rig, tiny_pair[0], token_file=right)
    child = rig.start("bridge_node", url=url, token_file=wrong)
    rig.until(lambda: child.process.poll() is not None)
    child.reader.join(5.0)
    assert child.process.returncode == 2  # being started again would not mend it
    assert any("token" in line and "bridge_node" in line for line in rig.lines), rig.lines
    assert not any("Traceback" in line for line in rig.lines)


def test_a_token_may_change_while_the_bridge_runs(rig, tmp_path):
    """Between the change at the verifier and that of the robot's file, /diagnostics says what is wrong."""
    from websockets.sync.server import serve as accept

    file, right = tmp_path / "token", ["old"]
    file.write_text("old\n")
    links = []

    def greet(connection):
        links.append(connection)
        connection.send(encode(Refusal(0, 0, 0, "code", "sentence")))
        connection.recv()

    def guard(connection, request):
        return None if request.headers["Authorization"] == bearer(right[0]) else connection.respond(401, "no\n")

    with accept(greet, "127.0.0.1", 0, process_request=guard) as verifier:
        thread = threading.Thread(target=verifier.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{verifier.socket.getsockname()[1]}"
        bridge = rig.host("bridge_node", url=url, token_file=file, longest_wait_s=0.1).node
        rig.until(lambda: any("linked to" in line for line in rig.lines))
        right[0] = "new"
        links[0].close()
        rig.until(lambda: any("no link: " in line and "refused the token" in line for line in rig.lines))
        file.write_text("new\n")
        rig.until(lambda: len(links) == 2)
        verifier.shutdown()
        thread.join(10)
    assert bridge.failure is None


def test_a_verifier_that_resets_every_handshake_is_a_closed_link():
    """What the bridge meets while a verifier is being restarted: each attempt must end in LinkClosed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                # Closing with unsent data discarded sends a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        port = listener.getsockname()[1]
        for _ in range(100):
            with (
                WebsocketChannel(f"ws://127.0.0.1:{port}") as channel,
                pytest.raises(LinkClosed, match="cannot be reached"),
            ):
                channel.reconnect()
        listener.shutdown(socket.SHUT_RDWR)
