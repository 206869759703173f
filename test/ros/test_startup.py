# SPDX-License-Identifier: Apache-2.0
"""A quick import spares the cycle collector what it imported, and imports nothing that is not used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest

from dsd_ros.startup import import_later

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
assert quick_import("torch") is sys.modules["torch"]
assert gc.isenabled() and not runs, runs
assert gc.get_freeze_count() > 100_000
gc.unfreeze()
quick_import("torch")  # it is there already
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
"""
    run = subprocess.run([sys.executable, "-c", program, tiny_pair[0]], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_model_is_loaded_without_what_it_does_not_use_and_torchs_compiler_works_on(tiny_pair) -> None:
    program = """
import sys
from pathlib import Path
from dsd_ros.vlm.loading import ModelSettings, load_model

load_model(ModelSettings(path=Path(sys.argv[1])))
unused = ("scipy.optimize", "torch.distributed.tensor", "torch._dynamo.convert_frame", "torch._inductor", "pandas")
assert not [name for name in unused if name in sys.modules], [name for name in unused if name in sys.modules]
import torch
made = torch.compile(lambda x: x + 1, backend="eager")
assert made(torch.ones(1)).item() == 2 and "torch._dynamo.convert_frame" in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program, tiny_pair[0]], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_a_package_that_is_imported_later_runs_once_for_all_threads(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "dsd_test_late"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import time; time.sleep(0.2); runs = globals().get('runs', 0) + 1; mark = real = 2"
    )
    (folder / "part.py").write_text("value = 3")
    (folder / "other.py").write_text("from dsd_test_late import real")
    monkeypatch.syspath_prepend(tmp_path)
    import_later("dsd_test_late", "part", mark=1)
    import_later("dsd_test_none")
    try:
        package = importlib.import_module("dsd_test_late")
        assert importlib.import_module("dsd_test_late.part").value == 3 and package.mark == 1
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda _: importlib.import_module("dsd_test_late.other").real, range(8))
            assert [*found, *pool.map(lambda _: package.real, range(8))] == [2] * 16
        assert (package.mark, package.runs) == (2, 1)
        with pytest.raises(AttributeError):
            package.missing  # noqa: B018
    finally:
        for name in ("dsd_test_late", "dsd_test_late.part", "dsd_test_late.other"):
            sys.modules.pop(name, None)
    assert "dsd_test_none" not in sys.modules


@pytest.mark.parametrize(("node", "own"), [("navigation_node", ""), ("simulator_node", ""), ("go2_node", "own.xml")])
def test_a_node_announces_itself_until_those_that_are_there_announce_themselves(monkeypatch, node, own) -> None:
    """Without multicast they find it by that alone; see config/discovery.xml."""
    program = f"""
import os
from types import SimpleNamespace
from dsd_ros.ros import entry
entry.quick_import = lambda name: SimpleNamespace(main=lambda: print(*(os.environ.get(one) for one in entry._PROFILES)))
entry._start("{node}")
"""
    for variable in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"):
        monkeypatch.delenv(variable, raising=False)
    if own:
        monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", own)
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
