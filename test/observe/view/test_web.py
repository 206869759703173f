# SPDX-License-Identifier: Apache-2.0
"""The live page: local unless configured otherwise, whole for whoever comes late, and readable in a real browser."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, browser, find_browser
from views_sample import sample_reply, sample_stream, share

from dsd_ros.addresses import is_loopback
from dsd_ros.observe.view import web
from dsd_ros.observe.view.events import memory_event, reply_event, stats_event, step_event
from dsd_ros.observe.view.figures import Figures, ReplyFigures
from dsd_ros.observe.view.state import ShownMemory, ShownStep

BAGS = Path(__file__).parents[2] / "bags"
SKY = (40, 120, 200)  # of the picture shown, RGB
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
SIZES = [("stream", 1280, 800), ("fsd", 390, 844)]
HELD = {"on": True, "causes": ["OBSTACLE"], "sentences": ["A chair is 0.3 m ahead."]}
FREE = {"on": False, "causes": [], "sentences": []}
ARRIVED = {"outcome": "ARRIVED", "sentence": "The target is reached.", "good": True}
# Every text that a person sees, with the contrast of its colour against what lies beneath (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const light = c => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const under = e => { let found = [255, 255, 255]; const layers = [];
    for (; e; e = e.parentElement) layers.push([...parse(getComputedStyle(e).backgroundColor), 1].slice(0, 4));
    for (const [r, g, b, a] of layers.reverse()) found = found.map((v, n) => v * (1 - a) + [r, g, b][n] * a);
    return found; };
  const poor = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || e.closest("script,style,title,[hidden]")) continue;
    count++;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(under(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push(e.tagName + " " + walker.currentNode.textContent.slice(0, 30) + " " + ratio.toFixed(2));
  }
  return [count, poor];
})()"""
COLOURS = """(() => {
  const c = document.querySelector("canvas"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return new Set([...Array(d.length / 4).keys()].map(i => d[4 * i] << 16 | d[4 * i + 1] << 8 | d[4 * i + 2])).size;
})()"""
LABELS = """(() => {
  const stage = document.querySelector(".stage").getBoundingClientRect();
  const shown = [...document.querySelectorAll(".stage span:not([hidden])")];
  const boxes = shown.map(e => e.getBoundingClientRect());
  const covered = boxes.reduce((sum, b) => sum + b.width * b.height, 0);
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  const within = b => b.left >= stage.left && b.right <= stage.right && b.top >= stage.top && b.bottom <= stage.bottom;
  return {names: shown.map(e => e.textContent), covered: covered / (stage.width * stage.height),
    inside: boxes.every(within), apart: boxes.every((a, n) => boxes.slice(n + 1).every(b => apart(a, b)))};
})()"""


def test_only_the_loopback_is_local():
    names = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.7", "a.example")
    assert [is_loopback(name) for name in names] == [True] * 3 + [False] * 3


@contextlib.contextmanager
def served(feed: web.PageFeed, port: int = 0) -> Iterator[web.WebServer]:
    with web.WebServer(feed, "127.0.0.1", port) as server:
        yield server


def events_of(server: web.WebServer, until: str, after: str = "") -> list[dict[str, Any]]:
    """What a browser gets, up to the first event of a kind."""
    found = []
    with urllib.request.urlopen(f"{server.page()}events?after={after}", timeout=20) as stream:
        event = ""
        for line in stream:
            name, _, value = line.decode().strip().partition(": ")
            if name == "id":
                event = value
            elif name == "data":
                found.append(json.loads(value) | {"id": event})
                if found[-1]["k"] == until:
                    return found
    raise AssertionError("the stream has ended")


def test_the_server_listens_on_its_address_alone_and_ends():
    feed = web.PageFeed(16)
    with served(feed) as server:
        assert server.page() == f"http://127.0.0.1:{server.port}/"
        assert server.page("robot") == f"http://robot:{server.port}/"
        assert b"<html" in urllib.request.urlopen(server.page(), timeout=10).read()
        with pytest.raises(OSError):  # another of this machine's own addresses
            socket.create_connection(("127.0.0.2", server.port), timeout=5.0).close()
        stream = urllib.request.urlopen(f"{server.page()}events", timeout=10)
    while stream.read(1 << 16):  # the open stream ends with the server
        pass
    with pytest.raises(OSError):
        urllib.request.urlopen(server.page(), timeout=5)


def test_a_taken_port_is_replaced_and_an_address_of_others_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, served(web.PageFeed(16), taken.getsockname()[1]) as server:
        assert server.port != taken.getsockname()[1]
    with pytest.raises(web.ViewError, match=r"192\.0\.2\.1"):
        web.WebServer(web.PageFeed(16), "192.0.2.1", 0)


def test_another_site_does_not_read_what_is_local():
    with served(web.PageFeed(16)) as server:
        for path in ("", "events"):
            asked = urllib.request.Request(server.page() + path, headers={"Host": f"evil.example:{server.port}"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(asked, timeout=10)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.page() + "../../etc/passwd", timeout=10)


def test_the_feed_knows_whether_a_browser_is_connected():
    def until(watched: bool) -> None:
        deadline = time.monotonic() + 30.0
        while feed.watched != watched:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    feed = web.PageFeed(16)
    with served(feed) as server:
        until(False)
        with urllib.request.urlopen(f"{server.page()}events", timeout=10) as stream:
            stream.read(10)
            until(True)
        until(False)


def test_a_late_browser_gets_the_past_and_one_that_returns_what_it_missed():
    feed = web.PageFeed(16)
    feed.add("world", [1], fixed=True)
    feed.add("world", [], fixed=True)  # only the newest of its kind counts
    for number in range(3):
        feed.add("pose", [number, 0, 0], at=number)
        feed.picture(np.zeros((8, 8, 3), np.uint8), at=number)
    with served(feed) as server:
        first = events_of(server, "beat")
        assert [e["k"] for e in first] == ["hello", "world", *["pose", "view"] * 3, "beat"]
        assert first[1]["v"] == [] and [e["t"] for e in first if e["k"] == "pose"] == [0, 1, 2]
        feed.add("end", ARRIVED)
        again = events_of(server, "beat", after=first[-1]["id"])
        assert [e["k"] for e in again] == ["hello", "end", "beat"]
        assert first[0]["v"]["run"] == again[0]["v"]["run"]
        assert len(events_of(server, "beat", after="other-7")) == len(first) + 1  # of another server: all of it


def test_what_is_kept_is_bounded_and_pictures_do_not_push_out_the_rest(monkeypatch):
    feed = web.PageFeed(16)
    feed.add("step", {"n": 1})
    noise = np.random.default_rng(0).integers(0, 255, (600, 600, 3), np.uint8)
    for number in range(80):
        feed.picture(noise, at=number)
    with served(feed) as server:
        found = events_of(server, "beat")
    pictures = [e for e in found if e["k"] == "view"]
    assert found[1]["k"] == "step"
    assert pictures[-1]["t"] == 79 and 10 < len(pictures) < 80
    assert sum(len(e["v"]) for e in pictures) <= 12 << 20


def test_a_slow_browser_gets_the_newest_picture_only():
    feed = web.PageFeed(16)
    stream = feed.stream("")
    next(stream)
    feed.picture(np.zeros((8, 8, 3), np.uint8), at=0.0)
    assert next(stream).count(b'"view"') == 1
    for number in range(9):
        feed.picture(np.zeros((8, 8, 3), np.uint8), at=float(number))
        feed.add("pose", [number, 0, 0])
    part = next(stream)
    while b'"beat"' in part:
        part = next(stream)
    assert part.count(b'"view"') == 1 and part.count(b'"pose"') == 9
    feed.close()
    assert list(stream) == []


@contextlib.contextmanager
def heard(feed: web.PageFeed) -> Iterator[None]:
    """A robot that is there meanwhile."""
    stop = threading.Event()

    def hear() -> None:
        while not stop.wait(0.2):
            feed.heard(time.monotonic())

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def sample_feed(mode: str = "stream") -> web.PageFeed:
    """A run under way: everything that the page can show."""
    feed = web.PageFeed(16)
    walls = [((0, y, 0.15), (6.1, 0.1, 0.3)) for y in (-3, 3)] + [((x, 0, 0.15), (0.1, 6.1, 0.3)) for x in (-3, 3)]
    things = [
        {"kind": "walls", "box": True, "at": at, "size": size, "rgb": [178, 173, 158], "label": ""}
        for at, size in walls
    ]
    for number, name in enumerate(("silver can", "black can", "white bottle", "blue chair")):  # close to each other
        things.append({"kind": "things", "box": False, "at": [1.6, 0.2 * number, 0.2], "size": [0.2, 0.2, 0.4],
                       "rgb": [90, 90, 200], "label": name})  # fmt: skip
    things.append({"kind": "goal", "box": False, "at": [2, -1, 0.01], "size": [0.9, 0.9, 0.02], "rgb": [9, 9, 9],
                   "label": "silver bottle"})  # fmt: skip
    feed.add("world", things, fixed=True)
    figures = Figures()
    for number in range(1, 4):
        at = 3.0 * number
        feed.add("pose", [0.4 * number, 0, 0.1], at=at - 1)
        feed.picture(np.full((224, 336, 3), SKY[::-1], np.uint8), at=at - 1)
        more = {"verify_round_seconds": 0.02, "bytes_up": 17_100, "bytes_down": 900}
        if mode == "fsd":
            more |= {"tau": 4.75, "link_delay_seconds": 0.004, "miss_rate": 0.2, "predrafts_used": 3}
        else:
            more |= {"draft_share": 0.6, "sooner": 1.4}
        figures.add_reply(ReplyFigures(mode, "dds", 38, 8, seconds=0.2 + 0.1 * number, **more))
        feed.add("reply", reply_event(sample_reply() if mode == "fsd" else sample_stream(), number), at=at)
        feed.add("stats", stats_event(figures), at=at)
        step = ShownStep(
            number, f"forward {25 * number} cm", 0.25 * number, 0.0, True, (0.4 * number, 0.0, 0.1), took=3.0
        )
        feed.add("step", step_event(step), at=at)
        feed.add(
            "log", {"level": "warn" if number == 2 else "", "name": "draft_node", "text": f"reply {number} <b>"}, at=at
        )
    feed.add("link", {"ok": True, "text": f"session open, mode {mode}", "gone": False}, at=3.0)
    told = (
        ("It is the Viola.", "owner.md, robot"),
        ("The Viola is silver <b>.", "things.md, cloud"),
        ("Go: find it", ""),
    )
    feed.add("memory", memory_event(ShownMemory("bring me to the bottle I like", told, "find it")), at=1.0)
    feed.add("hold", HELD, at=4.0)
    feed.add("hold", FREE, at=5.5)
    return feed


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Page]:
    with browser(str(find_browser())) as page:
        page.call("Network.enable")
        page.call("Runtime.enable")
        yield page
        page.value("0")
        assert not [event for event in page.events if event["method"] == "Runtime.exceptionThrown"]


@needs_browser
@pytest.mark.parametrize(("mode", "width", "height"), SIZES)
def test_a_browser_shows_all_of_it_readably_and_asks_nobody_else(shared_browser, mode, width, height):
    page, before, feed = shared_browser, len(shared_browser.requests()), sample_feed(mode)
    of_mode = {
        "stream": (
            "60 % of the tokens came from drafts: replies were about 1.4 times", "passes per token",
            "as fast as the target alone (estimate)", "Reply, pass by pass",
        ),
        "fsd": ("tokens per round (tau)", "T_c, one way", "drafted ahead", "Reply, round by round"),
    }  # fmt: skip
    needed = {
        "stream": {"T_q, one pass in the target", "T_q, target"},
        "fsd": {"tokens per round (tau)", "tau", "miss rate"},
    }
    with heard(feed), served(feed) as server:
        page.open(server.page(), width, height, phone=width < 400)
        page.until("document.querySelectorAll('#steps button').length === 4 && document.querySelector('.stage .goal')")
        page.until("document.getElementById('picture').naturalWidth === 336")
        text = page.value("document.body.innerText")
        for word in (
            "find the silver bottle", "Action: forward 75 cm", "tokens from drafts", *of_mode[mode],
            "held for 1.5 s", "OBSTACLE: A chair is 0.3 m ahead.", "reply 2 <b>", f"session open, mode {mode}",
            "Memory, asked: bring me to the bottle I like", "from owner.md, robot",
            "The Viola is silver <b>.", "from things.md, cloud",
        ):  # fmt: skip
            assert word in text, word
        page.until("document.querySelector('#run .explained')")
        means = page.value("[...document.querySelectorAll('.explained')].map(e => [e.textContent, e.title])")
        assert needed[mode] <= {name for name, title in means if len(title) > 30}
        for word in (*(of_mode.keys() - {mode}), *(of_mode["fsd"] if mode == "stream" else of_mode["stream"])):
            assert word not in text, word
        # Tokens are text in their colours, and the picture has no text drawn on it.
        kinds = page.value("[...document.querySelectorAll('#tokens span')].map(e => [e.textContent, e.className])")
        wanted = (
            [["box ", "rejected ahead"], ["I ", "accepted"]] if mode == "fsd" else [["and ", "rejected"], ["I ", "own"]]
        )
        assert all(each in kinds for each in wanted)
        count, poor = page.value(CONTRAST)
        assert count > 80 and not poor
        labels = page.value(LABELS)
        assert labels["inside"] and labels["apart"] and labels["covered"] < 0.15
        assert "goal: silver bottle" in labels["names"] and len(labels["names"]) >= 4
        # Nothing is cut: no part is wider than the window, and every row of the table is whole.
        assert page.value("document.documentElement.scrollWidth") == width
        assert page.value("[...document.querySelectorAll('#figures td, #figures th, #steps button')]"
                          ".every(e => e.scrollWidth <= e.clientWidth + 1)")  # fmt: skip
        assert page.value("document.querySelectorAll('#figures tr').length") == (12 if mode == "fsd" else 10)
        assert page.value(COLOURS) > 50  # shaded solids
        assert share(page.screenshot(), SKY, 20) > 0.05
        asked = page.requests()[before:]
        assert len(asked) >= 2
        assert all(url.startswith((server.page(), "data:")) for url in asked), asked
        page.open("about:blank", width, height)


@needs_browser
def test_a_browser_goes_back_in_time_and_returns(shared_browser):
    page, feed = shared_browser, sample_feed()
    with heard(feed), served(feed) as server:
        page.open(server.page(), 1280, 800)
        page.until("document.querySelectorAll('#steps button').length === 4")
        assert page.value("document.getElementById('live').getAttribute('aria-pressed')") == "true"
        page.value("document.querySelectorAll('#steps button')[0].click()")
        page.until("document.getElementById('action').textContent === 'Action: forward 25 cm'")
        page.until("document.querySelector('#steps .now').textContent.includes('forward 25 cm')")
        page.until("document.getElementById('clock').textContent === '3.0 s of 9.0 s'")
        assert "not at the present" in page.value("document.getElementById('alarm').textContent")
        page.value("goTo(4.5)")
        page.until("document.getElementById('alarm').textContent === 'Held: A chair is 0.3 m ahead.'")
        page.value("document.getElementById('live').click()")
        page.until("document.getElementById('action').textContent === 'Action: forward 75 cm'")
        page.value("document.getElementById('tilt').click(); document.getElementById('nearer').click()")
        page.until("document.getElementById('tilt').textContent === 'In 3D'")
        page.value("document.getElementById('play').click()")
        page.until("shownAt > 0.2 && shownAt < 9")
        page.open("about:blank", 1280, 800)


@needs_browser
def test_before_the_first_reply_the_page_shows_none(shared_browser):
    page, feed = shared_browser, sample_feed()
    with heard(feed), served(feed) as server:
        page.open(server.page(), 1280, 800)
        page.until("document.querySelectorAll('#figures tr').length > 2 && document.querySelector('#lanes i')")
        page.value("goTo(0)")
        page.until("document.getElementById('tokens').textContent === 'No reply yet.'")
        left = "document.querySelectorAll('#figures tr, #lanes *, #log time, #tokens span, #steps .now').length"
        assert page.value(left) == 0 and page.value("document.getElementById('legend').hidden")
        assert page.value("document.getElementById('action').textContent") == ""
        page.open("about:blank", 1280, 800)


@needs_browser
def test_start_up_and_a_clean_end_are_no_faults_and_time_counts_from_the_goal(shared_browser):
    page, feed, lost = shared_browser, web.PageFeed(16), {"on": True, "causes": ["LINK_LOST"], "sentences": ["Lost."]}
    facts = "document.getElementById('facts').innerText"
    with heard(feed), served(feed) as server:
        page.open(server.page(), 1280, 800)
        feed.add("end", {"outcome": "", "sentence": "", "good": False}, at=0.5)
        for at, held in ((1.0, HELD), (9.0, lost)):
            feed.add("hold", held, at=at)
        page.until("document.getElementById('alarm').textContent === 'Starting: Lost.'")
        assert page.value(facts) == "starting"
        feed.add("hold", FREE, at=28.0)
        feed.add("step", step_event(ShownStep(1, "stop", 0.0, 0.0, True, (0.0, 0.0, 0.0), took=2.0)), at=30.0)
        feed.add("hold", HELD, at=31.0)
        feed.add("end", ARRIVED, at=40.0)
        feed.add("hold", lost, at=41.0)
        feed.add("link", {"ok": False, "text": "closed: code 1001", "gone": False}, at=41.0)
        page.until(f"{facts}.includes('run ended after 12.0 s')")
        assert "session closed" in page.value(facts) and "LINK LOST" not in page.value(facts)
        steps = page.value("[...document.querySelectorAll('#steps button')].map(e => [...e.children].slice(0, 2)"
                           ".map(c => c.textContent).join(' '))")  # fmt: skip
        assert steps == ["-27.0 s starting, 27.0 s", "2.0 s 1. stop", "3.0 s held for 9.0 s", "12.0 s ARRIVED"]
        page.until("document.querySelector('#run').innerText.includes('once')")
        page.open("about:blank", 1280, 800)


@needs_browser
def test_a_finished_run_looks_finished_and_a_lost_connection_unmistakable(shared_browser):
    page, feed = shared_browser, sample_feed()
    alarm = "document.getElementById('alarm').hidden ? '' : document.getElementById('alarm').textContent"
    facts = "document.getElementById('facts').innerText"
    with contextlib.ExitStack() as robot, served(feed) as server:
        robot.enter_context(heard(feed))
        port = server.port
        page.open(server.page(), 1280, 800)
        page.until("document.getElementById('age').textContent.endsWith('s old')")
        assert page.value("document.getElementById('outcome').hidden") and page.value(alarm) == ""
        waits = {"ok": False, "text": "waiting for the verifier: no answer", "gone": False, "waits": True}
        feed.add("link", waits, at=9.2)
        page.until(f"({alarm}) === 'Waiting for the verifier: no answer'")
        chip = "[...document.querySelectorAll('#facts li')].find(e => e.textContent.startsWith('waiting for'))"
        for amber in (chip, "document.getElementById('alarm')"):
            assert page.value(f"getComputedStyle({amber}).backgroundColor") == "rgb(255, 241, 194)"
        assert page.value(CONTRAST)[1] == []
        feed.add("link", {"ok": False, "text": "link lost: no answer", "gone": False}, at=9.5)
        page.until(f"({alarm}) === 'Link to the verifier: link lost: no answer'")
        assert "LINK LOST" in page.value(facts)
        assert page.value("getComputedStyle(document.getElementById('alarm')).backgroundColor") == "rgb(180, 35, 24)"
        feed.add("link", {"ok": True, "text": "session open again", "gone": False}, at=10.0)
        page.until(f"({alarm}) === ''")
        robot.close()
        page.until(f"({alarm}).startsWith('Nothing heard from the robot for')")
        assert page.value("document.body.classList.contains('stale')")
        feed.add("end", ARRIVED, at=11.0)
        page.until("document.getElementById('outcome').textContent === 'ARRIVED: The target is reached.'")
        page.until(f"({alarm}) === ''")
        page.until(f"{facts}.includes('session closed')")
        assert page.value("document.getElementById('age').textContent") == "ended"
        assert "run ended after 11.0 s" in page.value(facts)
        assert page.value("document.title").startswith("ARRIVED")
        assert page.value(CONTRAST)[1] == []
    page.until(f'({alarm}).startsWith("The page\'s server has ended")')
    assert "ARRIVED" in page.value("document.getElementById('outcome').textContent")
    # A server that returns, as after a restart, is found again; what it does not know is forgotten.
    with served(web.PageFeed(16), port) as server:
        assert server.port == port
        page.until("document.getElementById('outcome').hidden && lastTime === 0 && everHeard")
        assert page.value("document.getElementById('instruction').textContent") == "Waiting for the robot"
        assert "No reply yet." in page.value("document.body.innerText")
        page.open("about:blank", 1280, 800)


@needs_browser
def test_a_real_robots_map_has_no_room(shared_browser):
    page, feed = shared_browser, web.PageFeed(16)
    for number in range(20):
        feed.add("pose", [0.1 * number, 0.05 * number, 0.3], at=0.2 * number)
    with served(feed) as server:
        page.open(server.page(), 390, 844, phone=True)
        page.until("kinds.pose && drawnMap")
        page.until(f"{COLOURS} > 30")  # the Go2, its path, a grid
        assert page.value(LABELS)["names"] == []
        page.open("about:blank", 390, 844)
