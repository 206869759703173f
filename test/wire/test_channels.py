# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

from dsd_ros.wire.channel import Backoff, LinkClosed, LinkRefused, LinkTimeout, LocalChannel, bearer, read_token
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Refusal, SessionClose
from dsd_ros.wire.websocket import WebsocketChannel

MESSAGE = SessionClose(1)
ANSWER = Refusal(0, 1, 2, "code", "sentence")


class Echo:
    """An engine that answers everything alike."""

    def __init__(self) -> None:
        self.open = True
        self.gone: list = []

    def submit(self, message, reply, peer) -> bool:
        if self.open:
            reply(ANSWER)
        return self.open

    def disconnect(self, peer) -> None:
        self.gone.append(peer)


def test_a_local_channel_counts_and_carries():
    closed = []
    with LocalChannel(Echo(), on_close=lambda: closed.append(1)) as channel:
        channel.send(MESSAGE)
        assert channel.receive(1) == ANSWER
        assert (channel.bytes_up, channel.bytes_down) == (len(encode(MESSAGE)), len(encode(ANSWER)))
        with pytest.raises(LinkTimeout):
            channel.receive(0.01)
    channel.close()
    assert closed == [1]
    for action in (lambda: channel.send(MESSAGE), lambda: channel.receive(0)):
        with pytest.raises(LinkClosed):
            action()


def test_reconnecting_drops_what_was_under_way():
    engine = Echo()
    with LocalChannel(engine) as channel:
        channel.send(MESSAGE)
        channel.reconnect()
        assert len(engine.gone) == 1
        with pytest.raises(LinkTimeout):
            channel.receive(0.01)
        engine.open = False
        with pytest.raises(LinkClosed):
            channel.send(MESSAGE)


def test_no_listener_is_a_closed_link():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    channel = WebsocketChannel(f"ws://127.0.0.1:{port}", connect_timeout=2)
    with pytest.raises(LinkClosed, match="is down"):
        channel.send(MESSAGE)
    with pytest.raises(LinkClosed, match="cannot be reached"):
        channel.reconnect()
    channel.close()


def test_closing_while_another_thread_receives():
    """The receiver is told, whatever it waits for."""
    with served(lambda connection: connection.recv()) as port:
        channel = WebsocketChannel(f"ws://127.0.0.1:{port}")
        channel.reconnect()
        outcome = []

        def receive() -> None:
            try:
                channel.receive(20)
            except LinkClosed as error:
                outcome.append(error)

        receiver = threading.Thread(target=receive)
        receiver.start()
        time.sleep(0.05)
        channel.close()
        receiver.join(10)
        assert len(outcome) == 1
        with pytest.raises(LinkClosed):
            channel.reconnect()


@contextmanager
def served(handle, **options):
    """The port of a websocket at whose other end ``handle`` is called for each connection."""
    from websockets.sync.server import serve

    with serve(handle, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join(10)


def test_a_token_is_read_for_each_dial_and_a_link_that_worked_outlives_refusals(tmp_path):
    file, right = tmp_path / "token", ["old"]
    file.write_text("old\n")

    def guard(connection, request):
        shown = request.headers["Authorization"] == bearer(right[0])
        return None if shown else connection.respond(401, "another token\n")

    def handle(connection):
        connection.send(encode(ANSWER))
        connection.recv()

    with served(handle, process_request=guard) as port:
        with WebsocketChannel(f"ws://127.0.0.1:{port}", token=partial(read_token, file)) as channel:
            for changed in ("old", "new"):
                file.write_text(f"{changed}\n")
                right[0] = changed
                channel.reconnect()
                assert channel.receive(5) == ANSWER
            right[0] = "newer"
            with pytest.raises(LinkClosed, match="refused the token"):
                channel.reconnect()
            file.unlink()
            with pytest.raises(LinkClosed, match="cannot be read"):
                channel.reconnect()
        with WebsocketChannel(f"ws://127.0.0.1:{port}", token="old") as channel, pytest.raises(LinkRefused):
            channel.reconnect()


@pytest.mark.parametrize(("frames", "kind"), [((b"\xff",), LinkRefused), ((encode(ANSWER), b"\xff"), LinkClosed)])
def test_an_undecodable_frame_is_final_only_as_the_first_of_a_connection(frames, kind):
    def handle(connection):
        for frame in frames:
            connection.send(frame)
        connection.recv()

    with served(handle) as port, WebsocketChannel(f"ws://127.0.0.1:{port}") as channel:
        for _ in range(2):  # dialled again, it goes as before
            channel.reconnect()
            for _ in frames[1:]:
                assert channel.receive(5) == ANSWER
            with pytest.raises(kind):
                channel.receive(5)


def test_backoff_doubles_is_bounded_and_jitters():
    backoff = Backoff(first=0.1, longest=1.0)
    delays = [backoff.next_delay() for _ in range(60)]
    for number, delay in enumerate(delays):
        nominal = min(1.0, 0.1 * 2**number)
        assert nominal / 2 <= delay <= nominal
    assert len({round(delay, 6) for delay in delays[10:]}) > 10
    backoff.reset()
    assert backoff.next_delay() <= 0.1
