# SPDX-License-Identifier: Apache-2.0
"""The `dsd` command: finds the command's module, parses its arguments, and turns errors into exit codes.

A module is imported only when its command is called, so that `dsd doctor` runs where other commands cannot.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NoReturn

try:
    from cyclopts import (
        App,
        CycloptsError,
        Group,
        MissingArgumentError,
        Parameter,
        UnknownOptionError,
        UnusedCliTokensError,
    )  # fmt: skip
except ModuleNotFoundError as error:
    sys.exit(f"dsd: {error} in {sys.executable}; activate the virtual environment that has it (docs/install.md)")

from dsd_ros.cli import shared
from dsd_ros.cli.arguments import with_json_value
from dsd_ros.cli.terminal import paint
from dsd_ros.shown import shown

_EXIT_CODES = (
    "Exit codes: 0 done, 1 goal not reached or a bag not whole, 2 bad input, 3 link or verifier failed, 70 a defect, "
    "130 interrupted, 141 the output's reader has gone."
)
_MEANT = {"--gamma": "--draft-length", "--window": "--draft-length"}  # of decode, as papers and other programs say it
_BEFORE = ("--debug", "--online")  # flags of every command that may also come before its name


@dataclass(frozen=True)
class CommandLine:
    """A command line of several commands, each a module of ``package`` with a function or App ``command``."""

    name: str
    description: str
    package: str
    commands: tuple[str, ...]

    @cached_property
    def app(self) -> App:
        """The commands. A command's module is imported when the command is called, or all are listed."""
        app = App(
            name=self.name,
            help=self.description,
            help_epilogue=_EXIT_CODES,
            help_format="markdown",
            version=version,
            group_arguments=Group("Arguments", sort_key=0),
            group_parameters=Group("Parameters", sort_key=0),
            default_parameter=Parameter(negative_iterable=(), negative_none=(), allow_repeating=True),
        )
        for place, name in enumerate(self.commands):
            app.command(f"{self.package}.{name}:command", name=name, sort_key=place)
        app.register_install_completion_command(
            "completion", help="Make Tab complete this command in your shell.", sort_key=len(self.commands)
        )
        return app


DSD = CommandLine(
    "dsd",
    "Distributed speculative decoding for on-robot VLM control.",
    "dsd_ros.cli",
    ("demo", "decode", "serve", "advise", "ask", "verifier", "record", "replay", "inspect", "documents", "doctor"),
)


def main(argv: Sequence[str] | None = None, program: CommandLine = DSD) -> int:
    """Run one command of ``program`` and return its exit code, listed in ``dsd --help``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        if "--online" in argv:
            os.environ["HF_HUB_OFFLINE"] = "0"  # services set it
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        command, bound = parse(argv, program)
        with shared.text_or_json(next(iter(bound.arguments.values()), None)):
            code = command(*bound.args, **bound.kwargs) or shared.EXIT_DONE
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
        code, sentence = _exit_code_and_sentence(error, program)
        print(f"{paint(f'{program.name}:', 'red', sys.stderr)} {shown(sentence)}", file=sys.stderr)
        return code


def parse(argv: Sequence[str], program: CommandLine = DSD) -> tuple[Callable[..., int | None], Any]:
    """The command that ``argv`` names and its bound arguments; raises ValueError or CycloptsError."""
    first = list(takewhile(_BEFORE.__contains__, argv))
    words = with_json_value([*argv[len(first) :], *first])
    chain, apps, _ = program.app.parse_commands(list(takewhile(lambda one: not one.startswith("-"), words)))
    if apps[-1].default_command is None:
        if len(words) == len(chain) + len(first):
            known = ", ".join(name for name in apps[-1] if not name.startswith("-"))
            raise ValueError(f"name a COMMAND after '{' '.join((program.name, *chain))}': {known}")
        apps[-1].resolved_commands()  # its --help shows their own lines
    command, bound, _ = program.app.parse_args(words, print_error=False, exit_on_error=False)
    return command, bound


def run(program: CommandLine = DSD) -> NoReturn:
    """The installed command: runs ``main`` and ends the process at once, since unloading torch takes a second."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed, as services may start: else the next file would take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < 20:  # consoles without a size; the table of options would never end
        os.environ.pop("COLUMNS", None)
    try:
        code = main(program=program)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = shared.EXIT_INTERRUPTED
    except BrokenPipeError:
        code = shared.EXIT_PIPE
    os._exit(code)


def _exit_code_and_sentence(error: Exception, program: CommandLine) -> tuple[int, str]:
    """An error's exit code and its sentence, on one line."""
    if type(error) is ImportError and isinstance(error.__cause__, ImportError):
        error = error.__cause__  # cyclopts could not import a command's module
    if isinstance(error, CycloptsError):
        return shared.EXIT_BAD_INPUT, _usage_sentence(error, program)
    sentence = " ".join(str(error).split())
    if isinstance(error, shared.CommandError):
        return error.exit_code, sentence
    if "dsd_ros.wire.channel" in sys.modules:
        from dsd_ros.wire.channel import LinkError

        if isinstance(error, LinkError):
            return shared.EXIT_LINK, sentence + _verifier_remedy(error, sentence)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(("dsd_ros", "dsd_lab")):
        return (
            shared.EXIT_BAD_INPUT,
            f"this needs the Python package {error.name}, which is not installed; 'dsd doctor' says how to get it",
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return shared.EXIT_BAD_INPUT, f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError)):
        hub = "; --online allows it" if sentence.endswith("HF_HUB_OFFLINE forbids downloading") else ""
        return shared.EXIT_BAD_INPUT, sentence + hub
    return (
        shared.EXIT_DEFECT,
        f"this is a defect of dsd itself: {type(error).__name__}: {sentence}; --debug shows where, please report it",
    )


def _verifier_remedy(error: BaseException | None, sentence: str) -> str:
    """The command that starts a verifier, where nothing listens at the address that an error names."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__
    port = re.search(r"://\S+:(\d+)", sentence)
    return f"; start one there: dsd verifier --port {port[1]}" if error is not None and port else ""


def _usage_sentence(error: CycloptsError, program: CommandLine) -> str:
    """The error of cyclopts as one sentence, with the command that lists what is valid."""
    error.verbose = False
    unknown = [word.partition("=")[0] for word in error.unused_tokens or () if word.startswith("--")]
    if isinstance(error, UnknownOptionError):
        unknown = [str(error.token.keyword)]
    meant = [_MEANT[word] for word in unknown if word in _MEANT and "decode" in (error.command_chain or ())]
    if meant:
        text = f"unknown option: {unknown[0]}; did you mean {meant[0]}?"
    elif isinstance(error, MissingArgumentError) and error.argument and not (error.keyword or error.argument.tokens):
        name, what = error.argument.name, error.argument.parameter.help
        text = f"unknown option: {unknown[0]}" if unknown else f"{name} is missing: {what}"
        if error.argument.field_info.kind is not error.argument.field_info.KEYWORD_ONLY:  # a word, not a flag
            text = f"name {error.argument.parameter.metavar or name.lstrip('-').upper()}: {what}"
    elif isinstance(error, UnusedCliTokensError):
        text = f"'{(error.unused_tokens or [''])[0]}' is one word too many"
    else:
        text = " ".join(str(error).split()).partition(" Available commands")[0].rstrip(".")
    text = text.replace('"', "'")
    text = re.sub(r"[Uu]nable to convert (.*) into (int|float)$", r"\1 is no number", text)
    text = re.sub(r"(^|[.?] )([A-Z])", lambda found: found[1] + found[2].lower(), text).replace(". ", "; ")
    where = " ".join((program.name, *(error.command_chain or ()), "--help"))
    return f"{text}{'' if text.endswith('?') else ';'} '{where}' lists what there is"


def version() -> str:
    """The versions of the package and of its protocol."""
    from dsd_ros import __version__
    from dsd_ros.wire.messages import PROTOCOL_VERSION

    return f"dsd_ros {__version__}, protocol {PROTOCOL_VERSION}"
