# SPDX-License-Identifier: Apache-2.0
"""A pool's processes end with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

POOL = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from dsd_lab.workers import begin_worker
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), begin_worker, (HEEDS,))
    print(pool.submit(os.getpid).result(), flush=True)
    input()
"""


@pytest.mark.parametrize("heeds", [True, False])
def test_workers_do_not_outlive_a_killed_run(tmp_path: Path, heeds: bool) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL.replace("HEEDS", str(heeds)))
    run = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdin is not None
    worker = int(run.stdout.readline())
    ended = os.pidfd_open(worker)  # readable once the process has ended
    if not heeds:
        os.kill(worker, signal.SIGINT)
        assert not select.select([ended], [], [], 0.5)[0]
    run.kill()
    run.wait()
    assert select.select([ended], [], [], 30.0)[0]
    os.close(ended)
    run.stdin.close()
    run.stdout.close()
