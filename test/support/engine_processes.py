# SPDX-License-Identifier: Apache-2.0
"""Processes as vLLM starts them, each of which calls the plug-in: `engine_processes.py FOLDER [CAUSE]`.

An engine and its worker, whose ids are printed; or, with a CAUSE, an engine that fails for it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys

from dsd_ros.cloud.vllm import DIRECTORY, register

SPAWN = multiprocessing.get_context("spawn")


def engine(cause: str) -> None:
    register()
    if not cause:
        process = SPAWN.Process(target=worker)
        process.start()
        process.join()
        return
    try:
        raise ValueError(cause)
    except ValueError:
        logging.getLogger("vllm.v1.worker").exception("a worker has failed")
    try:
        raise RuntimeError("see above")
    except RuntimeError:
        logging.getLogger("vllm.v1.engine").exception("so has the engine")


def worker() -> None:
    register()
    print(os.getppid(), os.getpid(), flush=True)
    signal.pause()


if __name__ == "__main__":
    register()  # does nothing in the verifier itself
    os.environ[DIRECTORY] = sys.argv[1]
    verifiers = SPAWN.Process(target=engine, args=("".join(sys.argv[2:]),))
    verifiers.start()
    verifiers.join()
