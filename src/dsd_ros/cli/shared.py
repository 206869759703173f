# SPDX-License-Identifier: Apache-2.0
"""What several commands share: exit codes, interruptions, the link to a verifier, and results as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsd_ros.addresses import check_verifier_address
from dsd_ros.cli.arguments import STDOUT, engine_option, flag, model_option, model_path, tokenizer_option
from dsd_ros.options import check_options
from dsd_ros.vlm.settings import ModelSettings

if TYPE_CHECKING:
    from dsd_ros.edge.engine import DraftEngine
    from dsd_ros.edge.vocabulary import Vocabulary
    from dsd_ros.vlm.model import VisionLanguageModel
    from dsd_ros.wire.channel import Channel
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


@dataclass(frozen=True)
class PairFlags:
    """The robot's draft, and the target where no verifier is named."""

    draft: str = model_option("draft")
    device: str = flag(ModelSettings.device, "of the draft: cpu, cuda or cuda:N")
    draft_engine: str = engine_option()
    target: str = model_option("target")
    target_tokenizer: str = tokenizer_option()

    def load_draft(self, prompt: str = "") -> VisionLanguageModel | DraftEngine:
        """The draft, or what asks its engine. ModelError."""
        from dsd_ros.edge.engine import load_draft

        settings = ModelSettings(model_path(self.draft, "draft"), device=self.device, prompt=prompt)
        return load_draft(settings, self.draft_engine)

    def load_vocabulary(self) -> Vocabulary | None:
        """The target's, if it is named. ModelError."""
        from dsd_ros.edge.vocabulary import Vocabulary

        return Vocabulary.load(self.target_tokenizer) if self.target_tokenizer else None

    @contextlib.contextmanager
    def links(self, to: VerifierFlags, prompt: str = "") -> Iterator[Callable[[], Channel]]:
        """What opens a link: to the verifier, or to a target in this process, which is loaded. ModelError."""
        if to.verifier:
            yield to.channel
            return
        from dsd_ros.cloud.engine import VerifierEngine
        from dsd_ros.vlm.loading import load_model
        from dsd_ros.wire.channel import LocalChannel

        with VerifierEngine(load_model(ModelSettings(model_path(self.target, "target"), prompt=prompt))) as engine:
            yield partial(LocalChannel, engine)


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
