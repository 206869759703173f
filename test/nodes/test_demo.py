"""`dsd demo`: the whole system finds the silver bottle, says so truthfully, and ends when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ros_rig import GoalClient, OdometryRig

from dsd_msgs.msg import NavAction
from dsd_ros.navigation.run import RunOutcome
from dsd_ros.nodes import qos
from dsd_ros.nodes.bringup import DEMO_SEED
from dsd_ros.nodes.demo import DemoSettings, run_demo

STEP_KEYS = {
    "observation_age_s", "reasoning", "action", "tokens", "rounds", "tau", "seconds", "step_seconds",
    "standing_seconds", "bytes_up",
    "bytes_down", "pose", "draft_round_seconds", "verify_round_seconds", "cost_ratio",
    "link_delay_seconds", "sync_seconds", "miss_rate", "mean_exit", "exits", "predrafts_used",
    "predrafts_wasted", "peak_memory", "threads", "verified", "retracing",
}  # fmt: skip
RUN = (
    "import json, sys; from dsd_ros.nodes.demo import DemoSettings, run_demo; "
    "sys.exit(run_demo(DemoSettings(**json.loads(sys.argv[1]))))"
)


def start(**settings) -> subprocess.Popen:
    """run_demo in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", RUN, json.dumps({"headless": True} | settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "telepathy"}, "unknown mode 'telepathy'"),
        ({"transport": "pigeon"}, "choose from dds, websocket"),
        ({"instruction": "  "}, "instruction is empty"),
        ({"instruction": "bottle " * 10_000}, "at most 2000"),
        ({"instruction": "find happiness"}, "names nothing"),
        ({"seed": -1}, "seed must not be negative"),
        ({"json_path": "-"}, "goes into a file"),
        ({"arguments": {"wings": "2"}}, "has no argument 'wings'"),
        ({"arguments": {"fallback": "fly"}}, "choose from stop, draft_only, return"),
        ({"arguments": {"domain": "7"}}, "is for the demo itself to set"),
        ({"json_path": "/does/not/exist/report.json"}, "does not exist"),
        ({"arguments": {"record": "/"}}, "is there already"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(capsys, settings, sentence):
    assert run_demo(DemoSettings(**settings)) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.out == ""


def test_a_missing_model_ends_it_with_a_sentence(ros_domain, tmp_path):
    report = tmp_path / "report.json"
    run = start(draft_model=str(tmp_path / "nothing"), json_path=str(report))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 2, output
    assert "there is no model directory" in output and "Traceback" not in output
    assert json.loads(report.read_text())["reached"] is False


def test_an_interruption_ends_everything(ros_domain, tiny_pair):
    target, draft = map(str, tiny_pair)
    run = start(target_model=target, draft_model=draft, transport="websocket")
    lines = []
    for line in run.stdout:
        lines.append(line)
        if "listening on" in line:
            break
    with open(f"/proc/{run.pid}/task/{run.pid}/children") as file:
        children = [int(pid) for pid in file.read().split()]
    assert len(children) >= 4
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    output = "".join(lines) + run.communicate(timeout=20)[0]
    assert time.monotonic() - began < 5.0
    assert run.returncode == 130, output
    assert "Traceback" not in output
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("transport", "mode", "arguments"),
    [
        ("dds", "dsd", {}),
        ("websocket", "ar", {}),
        ("dds", "fsd", {}),
        ("websocket", "fsd", {"look_ahead": "0.4"}),
    ],
    ids=["dds-dsd", "websocket-ar", "dds-fsd", "websocket-fsd-ahead"],
)
def test_the_shipped_pair_finds_the_silver_bottle(ros_domain, tmp_path, transport, mode, arguments):
    report_path = tmp_path / "report.json"
    run = start(transport=transport, mode=mode, json_path=str(report_path), arguments=arguments)
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
        assert (step["draft_round_seconds"] > 0) == (mode != "ar")
        assert (step["mean_exit"] > 0) == (mode == "fsd")
        assert f"step {number:2}: {step['action']}" in output
    assert "REACHED" in output and "Traceback" not in output


def test_a_verifier_that_dies_on_the_way_is_a_named_end(rig):
    odometry = OdometryRig(rig)
    actions = []
    rig.node.create_subscription(NavAction, "nav_action", actions.append, qos.STATE)
    client = GoalClient(rig)
    rig.start("simulator_node", instruction="find the silver bottle")
    rig.start("supervisor_node")
    rig.start("navigation_node", run__decode_timeout_s=8.0)
    verifier = rig.start("verifier_node")
    rig.start("draft_node", link__response_timeout_s=0.5, link__attempts=3)
    rig.until_active()
    rig.until(lambda: client.ready() and odometry.samples)
    handle = client.send()
    rig.until(lambda: actions, what="the first action")
    verifier.process.send_signal(signal.SIGKILL)
    verifier.process.wait()
    _, answer = client.result(handle)()
    assert answer.outcome in (RunOutcome.LINK_LOST, RunOutcome.DECODE_TIMEOUT), answer.message
    assert answer.message
    count = len(odometry.samples)
    rig.until(lambda: len(odometry.samples) > count + 2)
    assert abs(odometry.velocity.vx) < 0.03 and abs(odometry.velocity.wz) < 0.03
