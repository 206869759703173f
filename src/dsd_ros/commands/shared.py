"""What several commands share: exit codes, the default models, and writing JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsd_ros.paths import models_directory

EXIT_DONE = 0
EXIT_GOAL_MISSED = 1
EXIT_BAD_INPUT = 2
EXIT_LINK = 3
EXIT_INTERRUPTED = 130


def add_model(parser: argparse.ArgumentParser, flag: str, role: str) -> None:
    parser.add_argument(
        flag,
        metavar="MODEL",
        default="",
        help=f"directory or hub id of the {role} model (default: the shipped one)",
    )


def add_target_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-tokenizer",
        metavar="DIR_OR_FILE",
        default="",
        help="the target's model directory or tokenizer.json, where the draft has another tokenizer",
    )


def model_path(given: str, role: str) -> str:
    return given or str(models_directory() / role)


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
