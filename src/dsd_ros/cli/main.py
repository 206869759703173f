# PYTHON_ARGCOMPLETE_OK
"""The `dsd` command: parses, dispatches to the modules beside this one, and turns errors into exit codes.

A command's arguments are built only when it is called, so that `dsd doctor` runs where nothing else does.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from dsd_ros.cli import completion, shared
from dsd_ros.cli.parsing import Parser, Version, add_common


@dataclass(frozen=True)
class Program:
    """A command line of several commands, each a module of ``package`` (SUMMARY, add_arguments)."""

    name: str
    description: str
    package: str
    commands: tuple[str, ...]
    moved: tuple[str, ...] = ()  # commands that the laboratory has now


DSD = Program(
    "dsd",
    "Distributed speculative decoding for on-robot VLM control.",
    "dsd_ros.cli",
    ("demo", "decode", "ask", "verifier", "record", "replay", "inspect", "documents", "doctor", "completion"),
    moved=("bench", "theory", "train", "evaluate"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None, program: Program = DSD) -> int:
    """Run one command of ``program`` and return its exit code, listed in ``dsd --help``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        command = next((word for word in argv if not word.startswith("-")), "")
        if command in program.moved:
            raise ValueError(
                f"'dsd {command}' is 'dsd-lab {command}' now; the laboratory is installed by 'make setup' "
                "or 'pip install ./src/dsd_lab'"
            )
        args = build_parser(argv, program).parse_args(argv)
        os.environ.setdefault("HF_HUB_OFFLINE", "0" if args.online else "1")
        with shared.text_or_json(args):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return shared.EXIT_INTERRUPTED
    except BrokenPipeError:  # e.g. the reader was `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return shared.EXIT_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, sentence = _exit_code_and_sentence(error)
        from dsd_ros.cli.terminal import paint

        print(f"{paint(f'{program.name}:', 'red', sys.stderr)} {sentence}", file=sys.stderr)
        return code


def run(program: Program = DSD) -> NoReturn:
    """The installed command: ``main``, then the end of the process.

    Leaving the interpreter would unload torch for a second, which a Ctrl-C should not wait for.
    """
    try:
        words = completion.asked()
        if words is not None:
            completion.answer(build_parser(words, program))
        code = main(program=program)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = shared.EXIT_INTERRUPTED
    except BrokenPipeError:
        code = shared.EXIT_PIPE
    os._exit(code)


def _exit_code_and_sentence(error: Exception) -> tuple[int, str]:
    """An error's exit code and its sentence, on one line."""
    sentence = " ".join(str(error).split())
    if isinstance(error, shared.CommandError):
        return error.exit_code, sentence
    if "dsd_ros.wire.channel" in sys.modules:
        from dsd_ros.wire.channel import LinkError

        if isinstance(error, LinkError):
            return shared.EXIT_LINK, sentence
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("dsd_"):
        return (
            shared.EXIT_BAD_INPUT,
            f"this takes the Python package {error.name}, which is not installed; 'dsd doctor' says how to get it",
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return shared.EXIT_BAD_INPUT, f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError)):
        return shared.EXIT_BAD_INPUT, sentence
    return (
        shared.EXIT_DEFECT,
        f"a defect of dsd's own: {type(error).__name__}: {sentence}; --debug shows where, please report it",
    )


def build_parser(argv: Sequence[str], program: Program = DSD) -> Parser:
    """The parser for ``argv``: every command with its help, and the arguments of those named in it."""
    parser = Parser(
        prog=program.name,
        description=program.description,
        epilog=f"'{program.name} COMMAND --help' tells of a command. Exit codes: 0 done, 1 goal not reached, "
        "2 bad input, 3 link or verifier failed, 70 a defect, 130 interrupted, 141 nobody reads the output.",
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in program.commands:
        module = importlib.import_module(f"{program.package}.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=_sentence(module.SUMMARY))
        if name in argv:
            module.add_arguments(command)
    add_common(parser)
    return parser


def _sentence(summary: str) -> str:
    return summary[:1].upper() + summary[1:] + "."
