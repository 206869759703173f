# SPDX-License-Identifier: Apache-2.0
"""A quick import spares the cycle collector what it imported."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

TRY = """
import gc, sys
from dsd_ros.startup import quick_import

runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
try:
    quick_import("dsd_ros.no_such_module")
except ModuleNotFoundError:
    pass
assert gc.isenabled()
gc.unfreeze()
gc.collect()
runs.clear()
assert quick_import("asyncio") is sys.modules["asyncio"]
assert gc.isenabled() and not runs, runs
assert gc.get_freeze_count() > 0
gc.unfreeze()
quick_import("asyncio")  # it is there already
assert gc.get_freeze_count() == 0
gc.disable()
quick_import("wave")
assert not gc.isenabled() and gc.get_freeze_count() == 0
"""


def test_an_import_without_the_collector() -> None:
    run = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_nodes_model_is_loaded_without_the_collector_and_it_works_on(tiny_pair) -> None:
    program = """
import gc, sys
from pathlib import Path
from dsd_ros.vlm.loading import ModelSettings, load_model

load_model(ModelSettings(path=Path(sys.argv[1])))
assert "transformers" in sys.modules and gc.isenabled() and gc.get_freeze_count() > 200_000, gc.get_freeze_count()
assert "scipy.optimize" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program, tiny_pair[0]], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("node", "own"), [("navigation_node", ""), ("simulator_node", ""), ("go2_node", "own.xml")])
def test_a_node_announces_itself_until_those_that_are_there_announce_themselves(monkeypatch, node, own) -> None:
    """Without multicast they find it by that alone; see config/discovery.xml."""
    program = f"""
import os
from types import SimpleNamespace
from dsd_ros.ros import entry
entry.quick_import = lambda name: SimpleNamespace(main=lambda: print(*(os.environ.get(one) for one in entry.PROFILES)))
entry._start("{node}")
"""
    for variable in ("FASTRTPS_DEFAULTPROFILES_FILE", "FASTDDS_DEFAULTPROFILES_FILE"):
        monkeypatch.delenv(variable, raising=False)
    if own:
        monkeypatch.setenv("FASTDDS_DEFAULTPROFILES_FILE", own)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    older, newer = run.stdout.split()
    if own:
        assert (older, newer) == ("None", own)
        return
    assert older == newer
    (participant,) = ElementTree.parse(newer).findall(".//{*}participant")
    (initial,) = participant.findall(".//{*}initialAnnouncements")
    seconds = int(initial.findtext("{*}count")) * int(initial.findtext("{*}period/{*}nanosec")) * 1e-9
    assert participant.get("is_default_profile") == "true" and seconds > 3.0  # Fast DDS's time between two of theirs
