# SPDX-License-Identifier: Apache-2.0
"""The link over the vendor's SDK: the pipes to its process, and what that process refuses to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsd_ros.robot.driver import DriverError, FaultCause, wait_until
from dsd_ros.robot.go2 import sdk_process
from dsd_ros.robot.go2.driver import Go2Driver
from dsd_ros.robot.go2.protocol import ServiceRequest, SportApi
from dsd_ros.robot.go2.sdk_link import SdkError, SdkLink

STANDIN = Path(__file__).parent / "sdk_standin.py"


@pytest.fixture
def pair():
    link = SdkLink(program=STANDIN)
    driver = Go2Driver(link)
    link.attach(driver)
    assert wait_until(lambda: driver.state() is not None, 60.0)
    yield link, driver
    driver.close(0.2)
    link.close()


def test_the_driver_works_through_the_pipes_and_garbage_is_ignored(pair):
    link, driver = pair
    assert link.versions == {"standin": "1"}
    driver.balance()
    assert wait_until(lambda: (driver.move(0.0, 0.0, 0.5), driver.state().yaw_rate > 0.2)[1], 20.0)
    assert driver.fault() is None
    driver.stop()
    assert not driver.moving


def test_a_hanging_process_blocks_nothing_and_its_end_is_reported(pair):
    link, driver = pair
    ended = []
    link.on_end = ended.append
    os.kill(link._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    request = ServiceRequest(1, SportApi.STOP_MOVE, "x" * 3000)
    assert not all(link.send("sport", request) for _ in range(100))  # the pipe is full
    assert time.monotonic() - began < 5.0
    with pytest.raises(DriverError):
        driver.stop(0.2)

    def out_of_touch():
        return driver.fault() is not None and driver.fault().cause is FaultCause.NO_STATE

    assert wait_until(out_of_touch, 20.0)
    os.kill(link._process.pid, signal.SIGKILL)
    assert wait_until(lambda: ended == ["The SDK's process ended with exit code -9."], 20.0)
    assert not link.send("sport", ServiceRequest(2, SportApi.STOP_MOVE))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ("""print('{"error": "out of order"}')""", "out of order"),
        ("import time; time.sleep(60)", "not ready after 1 s"),
    ],
)
def test_a_process_that_cannot_work_is_quoted(tmp_path, program, sentence):
    path = tmp_path / "program.py"
    path.write_text(program)
    with pytest.raises(SdkError, match=sentence):
        SdkLink(program=path, start_timeout=1.0 if "sleep" in program else 30.0)


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(SdkError, match="/no/such/python"):
        SdkLink(python="/no/such/python")


def test_a_missing_sdk_is_named():
    if importlib.util.find_spec("unitree_sdk2py") is not None:
        pytest.skip("the SDK is installed here")
    with pytest.raises(SdkError, match="unitree_sdk2py is not installed"):
        SdkLink()


@pytest.mark.parametrize(
    ("version", "interface", "allowed"),
    [("0.10.2", "eth0", True), ("11.0.1", "eth0", False), ("11.0.1", "", False), ("11.0.1", "lo", True)],
)  # fmt: skip
def test_cyclone_11_is_refused_on_a_network(monkeypatch, version, interface, allowed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    if allowed:
        assert sdk_process.check_versions(interface)["cyclonedds"] == version
    else:
        with pytest.raises(RuntimeError, match=r"crashes the 0\.10 peers"):
            sdk_process.check_versions(interface)


PROGRAM = """
import sys
from dsd_ros.robot.go2 import sdk_process
sdk_process.check_versions = lambda _: {}
sdk_process.Carrier.open = lambda *_: None
sdk_process.Carrier.send = lambda self, *request: self.write(sent=request)
sdk_process.main(0, "")
"""


@pytest.mark.parametrize(("line", "code"), [("", 0), ("no JSON\n", 1), ('["sport"\n', 1)])
def test_the_robot_is_stopped_whatever_ends_the_input(line, code):
    move = ["sport", 7, int(SportApi.MOVE), "{}", False]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(move) + "\n" + line,
        capture_output=True,
        text=True,
        timeout=60,
    )
    ready, first, *stops = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, ready, first) == (code, {"ready": {}}, {"sent": move})
    assert [stop["sent"][2] for stop in stops] == [SportApi.STOP_MOVE] * 3
