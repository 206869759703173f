"""The `dsd` command: parses, dispatches to dsd_ros.commands, and turns errors into exit codes.

A command's arguments are built only when it is called, so that `dsd doctor` runs where nothing else does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dsd_ros import __version__
from dsd_ros.commands.shared import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_LINK

COMMANDS = (
    "demo", "decode", "verifier", "record", "replay", "inspect", "doctor", "bench", "theory", "train", "evaluate",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `dsd` command and return its exit code, listed in ``dsd --help``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(argv).parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "0" if args.online else "1")
    try:
        code: int = args.run(args)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        expected = _exit_code(error)
        if args.debug or expected is None:
            raise
        print(f"dsd: {error}", file=sys.stderr)
        return expected


def run() -> NoReturn:
    """The installed command: ``main``, then the end of the process.

    Leaving the interpreter would unload torch for a second, which a Ctrl-C should not wait for.
    """
    try:
        code = main()
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that was foreseen; None for a defect, which deserves its traceback."""
    from dsd_ros.wire.channel import LinkError

    if isinstance(error, LinkError):
        return EXIT_LINK
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError)):
        return EXIT_BAD_INPUT
    return None


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for ``argv``: every command with its help, and the arguments of those named in it."""
    parser = argparse.ArgumentParser(
        prog="dsd",
        description="Distributed speculative decoding for on-robot VLM control.",
        epilog="Exit codes: 0 done, 1 goal not reached, 2 bad input, 3 link or verifier failed, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"dsd_ros {__version__}")
    parser.add_argument("--debug", action="store_true", help="show an error's traceback")
    parser.add_argument(
        "--online", action="store_true", help="allow downloading a model named by its hub id"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"dsd_ros.commands.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        if name in argv:
            module.add_arguments(command)
    return parser


if __name__ == "__main__":
    run()
