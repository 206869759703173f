"""`dsd completion`: what a shell needs so that Tab completes commands, options and their values."""

from __future__ import annotations

import argparse
import os
import shlex

from dsd_ros.cli.shared import EXIT_DONE

SUMMARY = "print what makes Tab complete dsd in a shell"
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """Once and for all:
  bash  echo 'eval "$(dsd completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(dsd completion zsh)"' >> ~/.zshrc    (after compinit)
  fish  dsd completion fish > ~/.config/fish/completions/dsd.fish"""
    parser.add_argument("shell", choices=SHELLS, help="the shell it is for")
    parser.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["dsd", "dsd-lab"], shell=args.shell))
    return EXIT_DONE


def asked() -> list[str] | None:
    """The words typed so far where a shell asks what could follow; else None."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    line = os.environ.get("COMP_LINE", "")
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quote is still open
        return line.split()[1:]


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell the shell what could follow, and end the process."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    argcomplete.autocomplete(parser)
