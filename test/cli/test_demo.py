# SPDX-License-Identifier: Apache-2.0
"""`dsd demo`: the whole system finds the silver bottle, reports it truthfully, and ends on request."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from dsd_ros.bringup.processes import ProcessGroup
from dsd_ros.bringup.systems import DEMO_SEED
from dsd_ros.cli import main
from dsd_ros.cli.demo_run import DemoReport, DemoSettings, _close_bag, _Stage, run_demo
from dsd_ros.cli.story import Story
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run

STEP_KEYS = {
    "observation_age_s", "reasoning", "action", "tokens", "rounds", "tau", "seconds", "step_seconds",
    "standing_seconds", "bytes_up", "bytes_down", "pose", "draft_round_seconds", "verify_round_seconds", "cost_ratio",
    "link_delay_seconds", "sync_seconds", "draft_share", "passes_per_token", "sooner", "miss_rate", "mean_exit",
    "exits", "predrafts_used", "predrafts_wasted", "peak_memory", "threads", "verified", "retracing",
}  # fmt: skip
RUN = """
import json, socket, sys
from pathlib import Path
from dsd_lab.links.proxy import LinkProxy, Way
from dsd_ros.cli.demo_run import DemoSettings, run_demo
from dsd_ros.cli.shared import CommandError

given = json.loads(sys.argv[1])
more, relay = given.pop("arguments", {}), None
if given.pop("relayed", False):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    relay = LinkProxy(address)
    more |= {"verifier": relay.url, "verifier_port": str(address[1])}
report = Path(given.pop("report")) if "report" in given else None
limit = given.pop("time_limit", 180.0)
try:
    code = run_demo(DemoSettings(**given), more, report, limit)
except CommandError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
if relay is not None:
    print("relayed", *(relay.carried[way] for way in Way))
    relay.close()
sys.exit(code)
"""


def start(**settings) -> subprocess.Popen:
    """run_demo in a process of its own; `relayed`: with a relay in front of the verifier."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", RUN, json.dumps({"headless": True} | settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "telepathy"}, "unknown mode 'telepathy'"),
        ({"instruction": "  "}, "instruction is empty"),
        ({"instruction": "find happiness"}, "names nothing"),
        ({"arguments": {"wings": "2"}}, "has no argument 'wings'"),
        ({"arguments": {"namespace": "go2"}}, "is set by the demo itself"),
        ({"report": "/does/not/exist/report.json"}, "there is no folder"),
        ({"record": "/"}, "exists already"),
        ({"arguments": {"verifier": "ws://127.0.0.1:1"}}, "over dds none is dialled"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(capsys, settings, sentence):
    more = settings.pop("arguments", {})
    report = Path(settings.pop("report")) if "report" in settings else None
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run_demo(DemoSettings(**settings), more, report)
    assert capsys.readouterr() == ("", "")


def test_a_missing_model_ends_it_with_a_sentence(ros_domain, tmp_path):
    command = [sys.executable, "-m", "dsd_ros.cli", "demo", "--headless", "--json", "-"]
    command += ["--draft", str(tmp_path / "nothing"), "view:=false"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    report = json.loads(run.stdout)  # and nothing else is there
    assert report["reached"] is False and report["message"] in run.stderr
    assert "Traceback" not in run.stderr


def test_a_word_after_json_is_no_file(capsys):
    assert main.main(["demo", "--json", "fallback:=return"]) == 2
    assert "put --json last" in capsys.readouterr().err


def test_on_a_terminal_the_live_page_outlives_the_run_and_a_recorder_that_fails_ends_nothing(
    ros_domain, tiny_pair, tmp_path
):
    target, draft = map(str, tiny_pair)
    (tmp_path / "file").write_text("")
    ours, theirs = pty.openpty()
    settings = {"target": target, "draft": draft, "time_limit": 0.5, "record": str(tmp_path / "file" / "bag")}
    run = subprocess.Popen(
        [sys.executable, "-u", "-c", RUN, json.dumps(settings)],
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,  # the terminal is the test's own
        env={key: value for key, value in os.environ.items() if "DISPLAY" not in key},
    )
    os.close(theirs)
    with open(ours, errors="replace") as terminal:  # noqa: PTH123  # a descriptor
        said = []
        for line in terminal:
            said.append(line)
            if "Ctrl-C ends" in line:
                break
        page = re.search(r"live page at (http://[\w.:]+)", "".join(said))
        assert page is not None, "".join(said)
        output = "".join(said)
        assert "nothing is recorded: record_node has ended" in output and "not reached after" in output, output
        assert "REACHED" not in output and f"bag: {tmp_path}/file/bag: " in output
        children = children_of(run.pid)
        assert len(children) == 1  # the view; nothing else goes on
        assert b"<html" in urlopen(page[1], timeout=30).read().lower()
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 1, "".join(said)
    assert not any(alive(pid) for pid in children)


RECORDER = """
import signal, sys, time
def end(*_):
    time.sleep(0.2)
    print("[ERROR] [1.0] [record_node]: The bag is not whole: no room", "[INFO] [1.0] [record_node]: bye", sep="\\n")
    sys.exit(1)
signal.signal(signal.SIGINT, end)
print("[INFO] [1.0] [record_node]: up", flush=True)
time.sleep(60)
"""


def test_the_bag_is_closed_before_the_result_and_its_loss_is_named(capsys):
    story = Story()
    with ProcessGroup(story.hear, story.news) as group:
        said = threading.Event()
        recorder = group.start("record_node", [sys.executable, "-c", RECORDER], on_line=lambda _: said.set())
        assert said.wait(30)
        loss = _close_bag("runs/one", _Stage(group, threading.Event(), story))
        assert not recorder.running and loss == "The bag is not whole: no room"
    story.end(DemoReport(reached=True), "runs/one", loss)
    assert capsys.readouterr().out.splitlines()[-1] == "  bag: runs/one: The bag is not whole: no room"


def test_an_interruption_ends_everything(ros_domain, tiny_pair):
    target, draft = map(str, tiny_pair)
    run = start(target=target, draft=draft, transport="websocket", verbose=True)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if "listening on" in line:
            break
    children = children_of(run.pid)
    assert len(children) >= 4
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    output = "".join(lines) + run.communicate(timeout=20)[0]
    assert time.monotonic() - began < 10.0
    assert run.returncode == 130, output
    assert "Traceback" not in output
    assert not any(alive(pid) for pid in children)


@pytest.mark.parametrize(
    ("transport", "mode"), [("dds", "dsd"), pytest.param("websocket", "fsd", marks=pytest.mark.slow)]
)
def test_the_shipped_pair_finds_the_silver_bottle(ros_domain, tmp_path, transport, mode):
    report_path, bag, relayed = tmp_path / "report.json", tmp_path / "bag", transport == "websocket"
    run = start(
        transport=transport, mode=mode, report=str(report_path), relayed=relayed,
        arguments={"record": str(bag)},
    )  # fmt: skip
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    report = json.loads(report_path.read_text())
    assert report["reached"] is True and report["outcome"] == "ARRIVED"
    assert report["distance_m"] <= 0.6 and report["collisions"] == 0
    assert (report["mode"], report["transport"], report["seed"]) == (mode, transport, DEMO_SEED)
    assert report["seconds"] > 0
    assert report["steps"][-1]["action"] == "stop"
    for number, step in enumerate(report["steps"], 1):
        assert set(step) == STEP_KEYS
        assert 0 <= step["observation_age_s"] < 5.0
        assert step["verified"] and not step["retracing"]
        assert 0 < step["standing_seconds"] <= step["step_seconds"] + 0.01
        assert step["tokens"] > 5 and step["rounds"] > 0
        assert step["bytes_up"] > 0 and step["bytes_down"] > 0
        assert step["tau"] == pytest.approx(step["tokens"] / step["rounds"], abs=0.01)
        assert step["peak_memory"] > 0 and step["threads"] > 0
        assert step["draft_round_seconds"] > 0
        assert f"step {number:2}: {step['action']}" in output
    # In a step of few rounds the whole pass may outrun every exit.
    assert any(step["mean_exit"] > 0 for step in report["steps"]) == (mode == "fsd")
    assert "REACHED" in output and "Traceback" not in output
    carried = re.search(r"^relayed (\d+) (\d+)$", output, re.MULTILINE)
    assert (carried is not None) == relayed
    if carried is not None:
        assert int(carried[1]) > 1000 and int(carried[2]) > 1000
    recorded = read_run(open_bag(bag))  # whole, from the first reply on
    told = [(step["reasoning"], step["action"], step["tokens"]) for step in report["steps"]]
    assert [(s.text.partition(" Action: ")[0], s.action, s.stats["tokens"]) for s in recorded.steps] == told
    assert recorded.ends[-1][1].startswith("ARRIVED") and not recorded.bag.notes
