# SPDX-License-Identifier: Apache-2.0
"""llama-server in a process of its own: the one inside the package xllamacpp, with a model written as GGUF.

with LlamaServer(text, vision) as server:  # files of `dsd-lab export gguf`
    server.url
    server.kill(); server.start()          # again, at the same address
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

SLOTS, CONTEXT = 1, 2048


class LlamaServer:
    """Started by ``start``; ``pause`` and ``go_on`` stop and continue its process, so that it hangs."""

    def __init__(self, text: Path, vision: Path | None = None) -> None:
        self._files = [str(text), str(vision or "")]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, wait: bool = True) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, __file__, str(self.port), *self._files]
        self._process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while wait:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1.0).close()
                return
            except OSError:
                assert self._process.poll() is None, "llama-server has ended"
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def readable(directory: Path) -> Path:
    """``directory`` of a tiny model, with a tokenizer as llama.cpp reads it: it has a merge."""
    file = directory / "tokenizer.json"
    value = json.loads(file.read_text())
    words = value["model"]["vocab"]
    words |= {token["content"]: token["id"] for token in value["added_tokens"]}
    words["ab"] = len(words)
    value["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(value))
    return directory


def main(port: str, text: str, vision: str) -> None:
    """Serve until killed."""
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = text
    params.mmproj.path = vision
    params.port = int(port)
    params.n_ctx, params.n_parallel = CONTEXT, SLOTS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.verbosity = int(os.environ.get("LLAMA_VERBOSITY", "0"))
    server = Server(params)
    assert server.listening_address
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
