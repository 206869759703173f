# SPDX-License-Identifier: Apache-2.0
"""The web view: local unless configured otherwise, and rendered correctly in a browser."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from browser import browser, find_browser
from PIL import Image
from views_sample import sample_overlay, sample_reply, share

from dsd_ros.observe.view import web
from dsd_ros.observe.view.figures import Figures, ReplyFigures
from dsd_ros.observe.view.overlay import OverlayPainter
from dsd_ros.observe.view.state import ShownStep
from dsd_ros.observe.view.timeline import draw_board
from dsd_ros.observe.view.typeset import ACCEPTED, OWN, PAPER

needs_rerun = pytest.mark.skipif(not web.available(), reason="rerun-sdk is not installed (requirements/view.txt)")
SKY = (40, 120, 200)  # of the picture shown, RGB
GOAL = (220, 60, 200)
_PATIENCE_S = 240.0


@pytest.mark.parametrize(
    ("bind", "local"),
    [
        ("127.0.0.1", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("10.0.0.7", False), ("a.example", False),
    ],
)  # fmt: skip
def test_only_the_loopback_is_local(bind, local):
    assert web.is_local(bind) == local


def test_the_map_has_ahead_up_and_left_left():
    assert web._on_map([(1.0, 0.0), (0.0, 2.0)]).tolist() == [[0.0, -1.0], [-2.0, 0.0]]


def test_without_rerun_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(web, "available", lambda: False)
    with pytest.raises(web.ViewError, match=r"requirements/view\.txt"):
        web.WebServer("127.0.0.1", 0, 0, 64)


def test_a_taken_port_is_replaced():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = web._free_ports("127.0.0.1", port, 0)
    assert port not in (first, second) and first != second


def test_an_address_of_others_is_refused():
    with pytest.raises(web.ViewError, match=r"192\.0\.2\.1"):
        web._free_ports("192.0.2.1", 0)


@needs_rerun
def test_the_server_listens_on_its_address_alone_and_ends_with_its_owner():
    with web.WebServer("127.0.0.1", 0, 0, 64) as server:
        for port in (server.web_port, server.data_port):
            socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
            with pytest.raises(OSError):  # another of this machine's own addresses
                socket.create_connection(("127.0.0.2", port), timeout=5.0).close()
        assert server.page().startswith(f"http://127.0.0.1:{server.web_port}/?url=rerun%2Bhttp")
        assert f"10.0.0.7%3A{server.data_port}" in server.page("10.0.0.7")
    assert not server.alive()


@needs_rerun
def test_the_server_knows_whether_a_browser_is_connected():
    def until(watched: bool) -> None:
        deadline = time.monotonic() + 30.0
        while server.watched() != watched:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with web.WebServer("127.0.0.1", 0, 0, 64) as server:
        address = ("127.0.0.1", server.data_port)
        until(False)
        with socket.create_connection(address):  # as its owner's
            until(False)
            with socket.create_connection(address):
                until(True)
            until(False)


@needs_rerun
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_the_server_ends_with_its_killed_owner():
    code = (
        "from dsd_ros.observe.view.web import WebServer\nimport time\n"
        "server = WebServer('127.0.0.1', 0, 0, 64)\nprint(server.pid, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def served():
    """A server that shows the sample, and the function that sends it once more."""
    with web.WebServer("127.0.0.1", 0, 0, 64) as server:
        view = web.WebView(server.data_url)
        painter = OverlayPainter(400, bgr=True)
        picture = np.empty((224, 336, 3), np.uint8)
        picture[:] = SKY[::-1]
        figures = Figures()
        figures.add_reply(ReplyFigures("fsd", "dds", 38, 8, 4.75, 0.21, 0.16, 0.02, 0.004, 0.2, 17_100, 900))
        view.world([web.MapObject(2.0, 0.5, 0.5, GOAL, "goal"), web.MapObject(1.0, 3.0, 0.1, PAPER, "", (2.0, 0.05))])
        number = 0

        def send() -> None:
            nonlocal number
            number += 1
            view.picture(painter.frame(picture, sample_overlay(), panel=False))
            view.board(draw_board(sample_reply()))
            view.figures(figures, True)
            view.robot((0.01 * number, 0.0, 0.2))
            view.path([(0.01 * step, 0.0, 0.0) for step in range(number)])
            view.intention(ShownStep(1, "forward 75 cm", 0.75, 0.0, True, (0.0, 0.0, 0.2)))

        yield server, send
        view.close()


@pytest.mark.slow
@needs_rerun
@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("name", "width", "height"), [("desk", 1280, 800), ("phone", 390, 844)])
def test_a_browser_shows_all_four_views(served, name, width, height):
    server, send = served
    for _ in range(3):
        send()
    deadline = time.monotonic() + _PATIENCE_S
    with browser(str(find_browser())) as page:
        page.open(server.page(), width, height, phone=name == "phone")
        while True:
            time.sleep(1.0)
            shot = page.screenshot()
            found = {
                "picture": share(shot, SKY, 20) > 0.05,
                "board": share(shot, PAPER, 10) > 0.05,
                "goal": share(shot, GOAL, 40) > 0.001,
                "accepted": share(shot, ACCEPTED, 40) > 0.0003,
                "own": share(shot, OWN, 40) > 0.0003,
            }
            if all(found.values()):
                break
            if os.environ.get("DSD_SCREENSHOTS"):
                Image.fromarray(shot).save(Path(os.environ["DSD_SCREENSHOTS"]) / f"{name}-early.png")
            assert time.monotonic() < deadline, f"not to be seen: {[k for k, v in found.items() if not v]}"
        assert server.watched()
    assert shot.shape[:2] == ((844 * 2, 390 * 2) if name == "phone" else (800, 1280))
    # Each of the four has a part of the page of its own: the picture's columns and rows do not fill it.
    rows, columns = np.nonzero(np.abs(shot.astype(int) - SKY).max(axis=-1) <= 20)
    assert np.ptp(rows) < 0.6 * shot.shape[0]
    assert np.ptp(columns) > 0.3 * shot.shape[1]
    if os.environ.get("DSD_SCREENSHOTS"):
        Image.fromarray(shot).save(Path(os.environ["DSD_SCREENSHOTS"]) / f"{name}.png")
