# SPDX-License-Identifier: Apache-2.0
"""A recorded run as people see it: in the live page (`dsd inspect BAG --view`) and as an HTML report."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bag_maker import make_bag
from browser import Page, browser, find_browser

from dsd_ros.observe.bag.html_report import page as report_of
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import Run, read_run
from dsd_ros.observe.bag.shown_run import feed_of
from dsd_ros.observe.view import web
from dsd_ros.observe.view.web import PageFeed, WebServer

BAGS = Path(__file__).parents[2] / "bags"
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def faults() -> Run:
    return read_run(open_bag(BAGS / "faults"))


@pytest.fixture(scope="module")
def shown(faults) -> PageFeed:
    return feed_of(faults)


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    with browser(str(find_browser())) as page:
        page.call("Network.enable")
        yield page


def events_of(feed: PageFeed) -> dict[str, list[dict[str, Any]]]:
    stream = feed.stream("")
    found = defaultdict(list)
    for part in (next(stream), next(stream)):
        for line in part.decode().splitlines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                found[event["k"]].append(event)
    return found


def test_what_memory_answered_is_shown_with_its_sources(tmp_path, faults):
    run = read_run(make_bag(tmp_path / "bag", answer="The Tilda is silver."))
    (found,) = events_of(feed_of(run))["memory"]
    told = [["The Tilda is silver.", "things.md, cloud"], ["Go: find it", ""]]
    assert found["v"] == {"goal": "find mine", "told": told, "instruction": "", "question": ""}
    assert not any(event["v"]["told"] for event in events_of(feed_of(faults))["memory"])


def test_a_run_becomes_the_events_of_the_live_page(faults, shown):
    events = events_of(shown)
    assert events["hello"][0]["v"]["live"] is False and events["hello"][0]["v"]["title"] == "faults"
    assert [e["v"]["phrase"] for e in events["step"]] == [step.executed for step in faults.steps]
    whole = [e["v"] for e in events["reply"] if e["v"]["done"]]
    assert [reply["text"] for reply in whole] == [step.text for step in faults.steps]
    for reply, step in zip(whole, faults.steps, strict=True):
        kept = "".join(text for text, kind, _ in reply["tokens"] if kind != "rejected")
        assert kept == step.text
    assert len(events["reply"]) == sum(len(step.rounds) + 1 for step in faults.steps)  # one a pass, and the whole
    assert {why for e in events["hold"] for why in e["v"]["causes"]} == {w for s in faults.stops for w in s.causes}
    assert events["end"][-1]["v"]["outcome"] == "ARRIVED" and len(events["stats"]) == len(faults.steps)
    assert len(events["view"]) > 20 and len(events["pose"]) == len(faults.path)
    assert {False, True} <= {e["v"]["ok"] for e in events["link"]}  # it was lost, and came back
    assert any("linked to" in e["v"]["text"] for e in events["log"])
    assert [thing["label"] for thing in events["world"][0]["v"] if thing["kind"] == "goal"] == ["silver bottle"]
    rows = {name: run for name, _, run in events["stats"][-1]["v"]["rows"]}
    tokens, rounds = (sum(step.stats[name] for step in faults.steps) for name in ("tokens", "rounds"))
    drafted = sum(sum(step.stats["accepted"]) for step in faults.steps)
    assert rows["passes per token"] == f"{rounds / tokens:.2f}"
    assert rows["tokens from drafts"] == f"{100 * drafted / tokens:.0f} %"
    every = [event["t"] for kind, found in events.items() if kind not in ("hello", "beat") for event in found]
    assert min(every) >= 0.0 and max(every) <= faults.seconds + 0.001


@needs_browser
def test_a_browser_plays_a_recorded_run(shown, window):
    with WebServer(shown, "127.0.0.1", 0) as server:
        window.open(server.page(), 1280, 800)
        window.until("document.getElementById('outcome').textContent.startsWith('ARRIVED: ')")
        window.until("document.getElementById('age').textContent === 'ended'")
        window.value("goTo(8)")  # the link was cut
        window.until("document.getElementById('alarm').textContent.startsWith('Link to the verifier: ')")
        window.value("goTo(14)")
        window.until("document.getElementById('picture').naturalWidth === 336")
        shown_time = "'You are looking at ' + seconds(14 - goals[0]) + ' of ' + seconds(lastTime - goals[0]) + '.'"
        window.until(f"goals[0] > 0 && document.getElementById('alarm').textContent === {shown_time}")
        asked = window.requests()
        assert asked and all(url.startswith((server.page(), "data:")) for url in asked)
        window.open("about:blank", 1280, 800)


def test_inspect_serves_the_page_until_it_is_interrupted():
    command = [sys.executable, "-u", "-m", "dsd_ros.cli", "inspect", str(BAGS / "straight"), "--view"]
    quiet = {key: value for key, value in os.environ.items() if "DISPLAY" not in key}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "Ctrl-C" in line)
        page = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert page is not None
        with urllib.request.urlopen(f"{page[0]}events", timeout=20) as stream:
            assert b"hello" in stream.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_report_has_the_outcome_and_every_reply(faults):
    content = report_of(faults)
    body = content.split("</style>")[1]
    assert body.index("find the silver bottle") < body.index("ARRIVED: ") < body.index("<img")
    assert body.count("starting for") == 1 and body.index("starting for") < body.index("held for") < body.index(
        "ARRIVED: "
    )
    assert body.count("<details>") == body.count("<img") == len(faults.steps)
    plain = html.unescape(re.sub(r"<[^>]*>", "", body)).replace("\n", " ")
    whole = [step for step in faults.steps if not any(found["rejected"] for found in step.rounds)]
    assert whole and all(step.text.replace("\n", " ") in plain for step in whole)
    assert "verify" in body and {"accepted", "own", "rejected"} <= set(re.findall(r'<span class="(\w+)', body))


def test_a_report_says_when_on_what_and_from_which_seed_in_the_pages_colours(faults):
    content = report_of(faults)
    (line,) = re.findall(r"^recorded .*$", content, re.MULTILINE)
    assert re.search(r"recorded 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC by dsd_ros \d+\.\d+\.\d+ on Linux x86_64, ", line)
    assert line.endswith("seed of the world 24, seed of the sampling 0")
    page = Path(web.__file__).with_name("page.html").read_text()
    colours = re.findall(r"--\w+: #\w+", content)
    assert len(colours) > 6 and all(f"{colour};" in page for colour in colours)


@needs_browser
def test_nothing_of_a_report_is_cut(faults, tmp_path, window):
    file, width = tmp_path / "report.html", 390
    file.write_text(report_of(faults), encoding="utf-8")
    window.events.clear()
    window.open(file.as_uri(), width, 844, phone=True)
    window.until("document.images.length > 3 && [...document.images].every(image => image.complete)")
    window.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert window.value("document.documentElement.scrollWidth") == width
    cut = "[...document.querySelectorAll('h1, h2, p, pre.text')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert window.value(f"{cut}.map(e => e.textContent)") == []
    assert all(url.startswith(("file:", "data:")) for url in window.requests())
