# SPDX-License-Identifier: Apache-2.0
"""vLLM as the target. Nothing here is imported unless backend vllm is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
from pathlib import Path

DIRECTORY = "DSD_ENGINE_DIRECTORY"  # environment of the engine's processes: a folder for what they and we exchange
CAUSE = "cause"  # there: why the engine has failed
REQUEST = "dsd"  # of ``SamplingParams.extra_args``: session, reply, and how many of its tokens are in the prompt


def register() -> None:
    """vLLM's plug-in (entry point group ``vllm.general_plugins``), which each of its processes calls.

    A process of an engine ends with the one that started it, however that ends, and leaves word why it fails.
    """
    directory, parent = os.environ.get(DIRECTORY), multiprocessing.parent_process()
    if directory is None or parent is None:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not parent.is_alive():
        os._exit(1)
    logging.getLogger("vllm").addHandler(_FirstFailure(Path(directory) / CAUSE))


def sentence_of(error: BaseException) -> str:
    """An error in one line. Of what pydantic reports about vLLM's arguments, the first thing that is wrong."""
    if callable(found := getattr(error, "errors", None)):
        error = ValueError(found()[0]["msg"].removeprefix("Value error, "))
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _FirstFailure(logging.Handler):
    """Writes the first error with a traceback into a file: those after it are its consequences."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), self._path.open("x", encoding="utf-8") as file:
                file.write(sentence_of(error))
