# SPDX-License-Identifier: Apache-2.0
"""`dsd verifier`."""

from __future__ import annotations

from dataclasses import replace

from dsd_ros.cli.arguments import arguments, flag, model_option, model_path, part
from dsd_ros.cli.shared import EXIT_DONE
from dsd_ros.cloud.settings import DocumentSettings, VerifierSettings
from dsd_ros.dragon.settings import ServiceSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.paths import documents_directory
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import ModelSettings


@arguments
class VerifierArguments:
    serving: VerifierSettings = part(VerifierSettings)
    documents: DocumentSettings = part(DocumentSettings)
    answers: ServiceSettings = part(ServiceSettings)
    log: LogSettings = part(LogSettings)
    model: str = model_option("target")
    device: str = flag(default=ModelSettings.device, text="cpu, cuda or cuda:N")
    dtype: str = flag(default=ModelSettings.dtype, text="float32, bfloat16 or float16")


def command(args: VerifierArguments = VerifierArguments()) -> int:
    """Serve the target model to robots over a websocket.

    Prints one line with the address it listens on, and one with the address of its metrics if it has any; then serves
    until SIGINT or SIGTERM.
    """
    quick_import("torch")
    from dsd_ros.cloud.engine import VerifierEngine
    from dsd_ros.cloud.server import run_verifier
    from dsd_ros.vlm.loading import load_model

    model = ModelSettings(model_path(args.model, "target"), device=args.device, dtype=args.dtype)
    with logging_to_stderr(args.log):
        folder = documents_directory(args.documents.documents, "cloud")
        if folder is None:
            run_verifier(VerifierEngine(load_model(model), args.serving), args.serving)
            return EXIT_DONE
        from dsd_ros.dragon.server import Documents

        reader = replace(model, path=model_path(args.documents.text_model, "reader"))
        documents = Documents.load(folder, reader)
        target = load_model(model)
        engine = documents.serve(lambda: VerifierEngine(target, args.serving), args.answers)
        run_verifier(engine, args.serving)
    return EXIT_DONE
