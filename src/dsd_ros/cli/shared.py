# SPDX-License-Identifier: Apache-2.0
"""What several commands share: exit codes, interruptions, the link to a verifier, and results as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsd_ros.addresses import check_verifier_address
from dsd_ros.cli.arguments import STDOUT, flag
from dsd_ros.options import check_options

if TYPE_CHECKING:
    from dsd_ros.wire.websocket import WebsocketChannel

EXIT_DONE = 0
EXIT_GOAL_MISSED = 1
EXIT_BAD_INPUT = 2
EXIT_LINK = 3
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


class CommandError(Exception):
    """A command cannot go on: one sentence, and an exit code."""

    def __init__(self, sentence: object, exit_code: int) -> None:
        super().__init__(str(sentence))
        self.exit_code = exit_code


@dataclass(frozen=True)
class VerifierFlags:
    """The address of a verifier, and the credentials for it."""

    verifier: str = flag(
        "",
        "ws://host:port or wss://host:port of a verifier (default: one in this process)",
        check=check_verifier_address,
    )
    token_file: str = flag("", "file with the bearer token for the verifier", metavar="FILE")
    ca_file: str = flag("", "certificate to trust for wss://", metavar="FILE")

    def __post_init__(self) -> None:
        check_options(self)

    def channel(self) -> WebsocketChannel:
        """A link that has not dialled yet."""
        from dsd_ros.wire.channel import read_token
        from dsd_ros.wire.websocket import WebsocketChannel

        token = partial(read_token, self.token_file) if self.token_file else None
        return WebsocketChannel(self.verifier, token=token, ca_file=self.ca_file or None)


@contextlib.contextmanager
def interruption() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set while a command runs; in the main thread."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


_answers: list[TextIO] = []  # where JSON goes while the text is left out


@contextlib.contextmanager
def text_or_json(args: object) -> Iterator[None]:
    """Leave out the text of a command that is to print JSON."""
    if getattr(args, "json", None) != STDOUT:
        yield
        return
    _answers.append(sys.stdout)
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        _answers.pop()


def write_json(path: Path | None, report: Any) -> None:
    """Write ``report`` where ``--json`` says."""
    if path is None:
        return
    text = json.dumps(report, indent=1) + "\n"
    if path == STDOUT:
        print(text, end="", file=_answers[-1] if _answers else sys.stdout, flush=True)
    else:
        path.write_text(text, encoding="utf-8")
