# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time

import pytest
from websockets.sync.client import connect
from websockets.sync.server import serve

from dsd_lab.links.emulation import LinkProfile
from dsd_lab.links.proxy import Conditions, LinkProxy, Way


@pytest.fixture
def echo():
    """A websocket server that says everything back, and a list of what it heard."""
    heard: list[bytes] = []

    def answer(connection) -> None:
        for message in connection:
            heard.append(message)
            connection.send(message)

    with serve(answer, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        server.heard = heard
        yield server
        server.shutdown()
        thread.join(timeout=5.0)


@pytest.fixture
def proxy(echo):
    with LinkProxy(echo.socket.getsockname()) as made:
        yield made


def dial(proxy, **options):
    return connect(proxy.url, compression=None, close_timeout=0.2, **options)


def test_bytes_pass_unchanged_both_ways(proxy, echo):
    messages = [b"", b"a", b"b" * 125, b"c" * 126, b"d" * 70_000, b"text" * 100_000]
    with dial(proxy) as client:
        for message in messages:
            client.send(message)
        assert [client.recv(timeout=10) for _ in messages] == messages
    assert echo.heard == messages
    assert proxy.accepted == 1
    assert all(proxy.carried[way] > sum(map(len, messages)) for way in Way)


def test_nothing_arrives_before_its_delay_nor_out_of_order(proxy):
    proxy.set(Conditions(LinkProfile(0.05, 0.05, jitter_s=0.05)))
    with dial(proxy, open_timeout=10) as client:
        for number in range(20):
            began = time.monotonic()
            client.send(bytes([number]))
            assert client.recv(timeout=10) == bytes([number])
            assert time.monotonic() - began >= 0.1
            if number == 2:
                break
        proxy.set(Conditions(LinkProfile(jitter_s=0.02)))
        for number in range(50):
            client.send(bytes([number]))
        assert [client.recv(timeout=10)[0] for _ in range(50)] == list(range(50))


def test_a_narrow_link_takes_its_time(proxy):
    proxy.set(Conditions(LinkProfile(rate_up_bps=400_000.0)))
    with dial(proxy, open_timeout=10) as client:
        began = time.monotonic()
        client.send(bytes(20_000))
        client.recv(timeout=10)
        assert time.monotonic() - began >= 0.4


def test_loss_shows_as_waiting_and_loses_nothing(proxy):
    with dial(proxy) as client:
        proxy.set(Conditions(loss=0.25))
        began = time.monotonic()
        for number in range(6):
            client.send(bytes([number]) * 5000)
        assert [client.recv(timeout=60)[:1] for _ in range(6)] == [bytes([n]) for n in range(6)]
        assert proxy.lost_segments > 0
        assert time.monotonic() - began >= 0.2


def test_a_cut_resets_what_is_open_and_what_is_dialled(proxy):
    with dial(proxy) as client:
        proxy.cut()
        with pytest.raises(Exception, match="no close frame"):
            client.recv(timeout=10)
        with pytest.raises((OSError, EOFError, Exception)):
            dial(proxy, open_timeout=2)
        raw = socket.create_connection((proxy.host, proxy.port))
        with raw, pytest.raises(ConnectionResetError):
            raw.settimeout(10)
            if raw.recv(1) == b"":
                raise ConnectionResetError
    proxy.restore()
    with dial(proxy) as client:
        client.send(b"again")
        assert client.recv(timeout=10) == b"again"


def test_a_silent_link_reports_nothing_and_delivers_later(proxy, echo):
    with dial(proxy) as client:
        proxy.silence()
        client.send(b"later")
        with pytest.raises(TimeoutError):
            client.recv(timeout=0.2)
        assert proxy.connections == 1 and echo.heard == []
        proxy.restore()
        assert client.recv(timeout=10) == b"later"


def test_an_injected_frame_stands_between_two_others(proxy, echo):
    with dial(proxy) as client:
        client.send(b"first")
        assert client.recv(timeout=10) == b"first"
        assert proxy.inject(Way.DOWN, b"nonsense") == 1
        assert client.recv(timeout=10) == b"nonsense"
        assert proxy.inject(Way.UP, b"x" * 300) == 1
        assert client.recv(timeout=10) == b"x" * 300  # said back, like any other
        client.send(b"last")
        assert client.recv(timeout=10) == b"last"
    assert echo.heard == [b"first", b"x" * 300, b"last"]
    assert proxy.injected == 2


def test_raw_noise_breaks_the_connection_it_is_put_on(proxy):
    with dial(proxy) as client:
        client.send(b"first")
        client.recv(timeout=10)
        proxy.inject(Way.DOWN, b"\xff" * 64, as_frame=False)
        with pytest.raises(Exception, match="1002|protocol"):
            client.recv(timeout=10)


def test_a_target_that_is_not_there_is_a_reset_and_may_come_later(echo):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    with LinkProxy(address) as proxy:
        with pytest.raises((OSError, EOFError, Exception)):
            dial(proxy, open_timeout=5)
        proxy.target = echo.socket.getsockname()
        with dial(proxy) as client:
            client.send(b"found")
            assert client.recv(timeout=10) == b"found"


def test_closing_gives_back_thread_and_port(echo):
    proxy = LinkProxy(echo.socket.getsockname())
    client = dial(proxy)
    proxy.close()
    proxy.close()
    with pytest.raises(OSError, match="closed"):
        proxy.inject(Way.UP, b"")
    client.close()
    assert not any(thread.name == "link proxy" for thread in threading.enumerate())
    with socket.create_server((proxy.host, proxy.port)):
        pass


def test_conditions_refuse_nonsense():
    for loss in [-0.1, 0.51, float("nan")]:
        with pytest.raises(ValueError, match="share of 0 to 0.5"):
            Conditions(loss=loss)
