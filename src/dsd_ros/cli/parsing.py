"""How `dsd` reads its command line: an error is one sentence with the remedy, not a page of usage."""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsd_ros import __version__

_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)'")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<given>.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse's, with short errors that name what was probably meant."""

    def error(self, message: str) -> NoReturn:
        if self._subparsers is not None and (found := _CHOICE.search(message)):
            known = list(commands_of(self))
            message = f"'{found['given']}' is none of {', '.join(known)}{_meant(found['given'], known)}"
        self.exit(2, f"{self.prog}: {message}; '{self.prog} --help' tells of all there is.\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        found, left = self.parse_known_args(given, namespace)
        if left:
            leaf = leaf_of(self, given)
            flags = [flag for action in leaf._actions for flag in action.option_strings]
            word = left[0].partition("=")[0]
            if word.startswith("-"):
                leaf.error(f"there is no {word}{_meant(word, flags)}")
            leaf.error(f"'{word}' is one word too many")
        return found


def _meant(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def leaf_of(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``argv`` names."""
    for word in argv:
        parser = commands_of(parser).get(word, parser)
    return parser


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all below it."""
    yield parser
    for below in commands_of(parser).values():
        yield from every_parser(below)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The flags every command takes, before its name or behind it."""
    for one in every_parser(parser):
        absent = False if one is parser else argparse.SUPPRESS
        one.add_argument("--debug", action="store_true", default=absent, help="show an error's traceback")
        one.add_argument(
            "--online", action="store_true", default=absent, help="allow downloading a model named by its hub id"
        )


class Version(argparse.Action):
    """``--version``: found out only when asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "nargs": 0, "help": "versions of dsd and of its protocol"})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version())
        parser.exit()


def version() -> str:
    """Version, protocol version, and the commit where this is a checkout."""
    from dsd_ros.wire.messages import PROTOCOL_VERSION

    commit = _commit(Path(__file__).resolve().parents[2])
    return f"dsd_ros {__version__}, protocol {PROTOCOL_VERSION}" + (f", commit {commit}" if commit else "")


def _commit(root: Path) -> str:
    """The commit of a checkout at ``root``, with -dirty behind it where files differ; else ""."""
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
