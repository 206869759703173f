# SPDX-License-Identifier: Apache-2.0
"""A quick import spares the cycle collector what it imported."""

from __future__ import annotations

import subprocess
import sys

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
