"""`dsd verifier`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dsd_ros.cli.flags import add_settings, settings_from
from dsd_ros.cli.shared import EXIT_DONE, add_model, model_path
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.paths import documents_directory

SUMMARY = "serve the target model to robots over a websocket"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.cloud.settings import DocumentSettings, VerifierSettings
    from dsd_ros.dragon.settings import ServiceSettings

    parser.epilog = (
        "Prints one line with the address it listens on, and one with that of its metrics where there are any; "
        "then serves until SIGINT or SIGTERM."
    )
    add_settings(parser, VerifierSettings)
    add_settings(parser, DocumentSettings)
    add_settings(parser, ServiceSettings)
    add_settings(parser, LogSettings)
    add_model(parser, "--model", "target")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    parser.set_defaults(run=_verifier)


def _verifier(args: argparse.Namespace) -> int:
    from dsd_ros.cloud.engine import VerifierEngine
    from dsd_ros.cloud.server import run_verifier
    from dsd_ros.cloud.settings import DocumentSettings, VerifierSettings
    from dsd_ros.vlm.loading import ModelSettings, load_model

    settings = settings_from(args, VerifierSettings)
    asked = settings_from(args, DocumentSettings)
    model = ModelSettings(model_path(args.model, "target"), device=args.device, dtype=args.dtype)
    with logging_to_stderr(settings_from(args, LogSettings)):
        folder = documents_directory(asked.documents, "cloud")
        if folder is None:
            run_verifier(VerifierEngine(load_model(model), settings), settings)
            return EXIT_DONE
        from dsd_ros.dragon.opening import Documents
        from dsd_ros.dragon.settings import ServiceSettings

        reader = replace(model, path=model_path(asked.text_model, "reader"))
        documents = Documents.load(folder, reader)
        target = load_model(model)
        service = settings_from(args, ServiceSettings)
        run_verifier(documents.serve(lambda: VerifierEngine(target, settings), service), settings)
    return EXIT_DONE
