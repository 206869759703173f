# SPDX-License-Identifier: Apache-2.0
"""What every test gets: one thread per process, no network look-ups, and ROS domains that don't meet."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HOME", tempfile.gettempdir())  # rcl refuses to log without a home
# Each process of pytest has a cache directory of its own. Those of pip and matplotlib stay: they are slow to fill.
_CACHE = tempfile.TemporaryDirectory(prefix="dsd_ros_test_cache_")
os.environ.setdefault("PIP_CACHE_DIR", str(Path(os.environ["HOME"]) / ".cache" / "pip"))
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "dsd_ros_test_matplotlib"))
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the package anew
sys.dont_write_bytecode = False  # each of pytest's processes would rewrite the tests' assertions anew

# Nodes run in folders of their own: a relative path would give them another tree's code.
if paths := os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))

gc.disable()  # while tests are collected; what that creates lasts, and is exempt from later collections

# No example has to be quick: machines are busy.
settings.register_profile("dsd", deadline=None)
settings.load_profile("dsd")

SMOKE_ROOMS = {"architecture", "decoding", "edge", "wire", "navigation", "vlm"}
SMOKE_TESTS = {"test_greedy_says_what_the_reference_says"}  # of test/exactness


@pytest.fixture
def ros_domain(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A ROS domain id that no other test on this machine has now; in the environment, for rclpy and for children."""
    from dsd_ros.bringup.processes import DOMAINS, domain_is_free
    from dsd_ros.ros.transport import use_udp

    folder = Path(tempfile.gettempdir()) / f"dsd_ros_test_domains_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for domain in random.sample(DOMAINS, len(DOMAINS)):
        with (folder / str(domain)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            if not domain_is_free(domain):
                continue
            monkeypatch.setenv("ROS_DOMAIN_ID", str(domain))
            environment = {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
            use_udp(environment)
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            yield domain
            return
    pytest.fail(f"all ROS domains from {DOMAINS[0]} to {DOMAINS[-1]} are taken by other tests")


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Directories of a tiny target and of a draft that often, not always, agrees with it."""
    from tiny_models import make_tiny_model

    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny_model(folder / "target", seed=5, vocab_rows=272)
    return target, make_tiny_model(folder / "draft", seed=5, noise=0.15)


@pytest.fixture
def rig(ros_domain, tmp_path):
    """A node of the test's own in a domain of its own, and the processes it starts."""
    from ros_rig import Rig

    with Rig(tmp_path) as made:
        yield made


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What run side by side: files."""
    for item in items:
        nodes = "ros_domain" in getattr(item, "fixturenames", ())
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
        if room == "exactness":
            item.add_marker(pytest.mark.exactness)
        quick = room in SMOKE_ROOMS or (room == "exactness" and item.name.split("[")[0] in SMOKE_TESTS)
        if nodes:
            item.add_marker(pytest.mark.system)
        elif quick and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.smoke)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, for tests with real nodes mostly wait; at most --maxprocesses."""
    return (os.cpu_count() or 2) + 1
