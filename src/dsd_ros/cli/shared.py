"""What several commands share: exit codes, the default models, and results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from dsd_ros.paths import models_directory

EXIT_DONE = 0
EXIT_GOAL_MISSED = 1
EXIT_BAD_INPUT = 2
EXIT_LINK = 3
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

STDOUT = Path("-")


class CommandError(Exception):
    """A command cannot go on: one sentence, and the exit code that is its own."""

    def __init__(self, sentence: object, exit_code: int) -> None:
        super().__init__(str(sentence))
        self.exit_code = exit_code


def add_model(parser: argparse.ArgumentParser, flag: str, role: str) -> None:
    parser.add_argument(
        flag, metavar="MODEL", default="", help=f"directory or hub id of the {role} model (default: the shipped one)"
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


def add_json(parser: argparse.ArgumentParser, what: str = "the figures", alone: bool = True) -> None:
    """``--json [FILE]``; not ``alone`` where words without a flag follow, which would be taken for FILE."""
    options: dict[str, Any] = {"nargs": "?", "const": STDOUT} if alone else {}
    without = "without FILE, or with -" if alone else "with -"
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help=f"write {what} as JSON; {without}: print that in place of the text",
        **options,
    )


def output_file(text: str) -> Path:
    """A file that can be made, as an argument's type: better known before hours of work than after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


class _LeftOut(io.TextIOBase):
    """Takes the text that JSON is printed in place of."""

    def __init__(self, answers: TextIO) -> None:
        self.answers = answers

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def text_or_json(args: argparse.Namespace) -> Iterator[None]:
    """While a command runs: its text is left out where JSON is to be printed."""
    if getattr(args, "json", None) != STDOUT:
        yield
        return
    with contextlib.redirect_stdout(_LeftOut(sys.stdout)):  # type: ignore[type-var]
        yield


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(report, indent=1) + "\n"
    if path == STDOUT:
        stream = getattr(sys.stdout, "answers", sys.stdout)
        stream.write(text)
        stream.flush()
    else:
        path.write_text(text, encoding="utf-8")
