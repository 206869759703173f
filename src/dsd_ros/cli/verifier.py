# SPDX-License-Identifier: Apache-2.0
"""`dsd verifier`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from dsd_ros.cli.arguments import arguments, flag, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE
from dsd_ros.cloud.settings import BackendSettings, DocumentSettings, VerifierSettings
from dsd_ros.dragon.settings import ServiceSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.paths import documents_directory
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import PROMPT_HELP, ModelSettings

if TYPE_CHECKING:
    from dsd_ros.cloud.rounds import GeneratingTarget
    from dsd_ros.cloud.server import Served
    from dsd_ros.vlm.model import VisionLanguageModel

_log = logging.getLogger(__name__)


@arguments
class VerifierArguments:
    model: str = model_option("target")
    device: str = flag(default=ModelSettings.device, text="cpu, cuda or cuda:N")
    dtype: str = flag(default=ModelSettings.dtype, text="float32, bfloat16 or float16")
    prompt: str = flag(default="", text=PROMPT_HELP, metavar="NAME_OR_FILE")
    serving: VerifierSettings = part(VerifierSettings, "Serving")
    backend: BackendSettings = part(BackendSettings, "Engine")
    documents: DocumentSettings = part(DocumentSettings, "Documents")
    answers: ServiceSettings = part(ServiceSettings, "Answers")
    log: LogSettings = part(LogSettings, "Log")


def command(args: VerifierArguments = VerifierArguments()) -> int:
    """Serve the target model to robots over a websocket.

    Prints one line with the address it listens on, and one with the address of its metrics if it has any; then serves
    until SIGINT or SIGTERM.
    """
    quick_import("torch")
    from dsd_ros.cloud.server import run_verifier

    path = model_path(args.model, "target")
    model = ModelSettings(path, device=args.device, dtype=args.dtype, prompt=args.prompt)
    with logging_to_stderr(args.log):
        run_verifier(_engine(args, model), args.serving)
    return EXIT_DONE


@contextmanager
def _engine(args: VerifierArguments, model: ModelSettings) -> Iterator[Served]:
    """What answers robots, with documents where there are some."""
    from dsd_ros.cloud.engine import VerifierEngine

    folder, documents = documents_directory(args.documents.documents, "cloud"), None
    if folder is not None:
        from dsd_ros.dragon.server import Documents

        _log.info("loading documents %s", folder)
        documents = Documents.load(folder, model, args.documents.text_model)
    _log.info("loading target %s", model.path)
    with _target(model, args.backend) as target:

        def verifier() -> VerifierEngine:
            return VerifierEngine(target, args.serving)

        with verifier() if documents is None else documents.serve(verifier, args.answers) as engine:
            yield engine


@contextmanager
def _target(model: ModelSettings, backend: BackendSettings) -> Iterator[GeneratingTarget | VisionLanguageModel]:
    """The target, in this process or in an engine."""
    from dsd_ros.vlm.loading import load_front, load_model

    if backend.backend == "local":
        yield load_model(model)
        return
    from dsd_ros.cloud.vllm.engine import ignored_options
    from dsd_ros.cloud.vllm.target import VllmTarget

    front = load_front(model)
    if front.token_options is not None and (ignored := ignored_options(front.token_options)):
        names = ", ".join(ignored)
        _log.warning("backend vllm does not follow %s of %s/generation_config.json", names, front.directory)
    with closing(VllmTarget(front, backend, model.dtype)) as target:
        yield target
