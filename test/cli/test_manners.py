# SPDX-License-Identifier: Apache-2.0
"""`dsd` at a terminal and in a script: errors, --debug, --json, --version, colours, progress, completion."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from in_process import dsd

from dsd_lab.cli.main import LAB
from dsd_ros import __version__
from dsd_ros.cli import main, shared, terminal
from dsd_ros.wire.messages import PROTOCOL_VERSION

DSD_LAB = [sys.executable, "-m", "dsd_lab.cli"]
FORMULA = ("papers", "formula")
PROGRAMS = {"dsd": main.DSD, "dsd-lab": LAB}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_version_names_protocol_and_commit(capsys):
    code, out, _ = dsd(capsys, "--version")
    assert code == 0
    known = rf"dsd_ros {re.escape(__version__)}, protocol {PROTOCOL_VERSION}(, commit [0-9a-f]{{10,}}(-dirty)?)?\n"
    assert re.fullmatch(known, out)


def every_app(app: App) -> Iterator[App]:
    """An app and all below it."""
    yield app
    for name, below in app.resolved_commands().items():
        if not name.startswith("-"):
            yield from every_app(below)


def test_neither_help_nor_completion_loads_models_or_ros():
    program = (
        "import sys; from dsd_lab.cli.main import LAB; from dsd_ros.cli.main import DSD, main\n"
        "[program.app.generate_completion(shell='bash') for program in (DSD, LAB)]\n"
        "main(['--help']); main(['demo', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rclpy', 'mujoco', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_needs_only_what_a_cloud_has():
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('rclpy', 'rosbags', 'cv2', 'mujoco', 'dsd_lab'))\n"
        "from dsd_ros.cli.main import DSD, main\n"
        "DSD.app.generate_completion(shell='bash')\n"
        "sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "verifier" in done.stdout, done.stderr


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_command_and_option_says_what_it_is_for(program):
    silent = []
    for app in every_app(program.app):
        assert app.help, app.name
        if app.default_command is not None:
            options = app.assemble_argument_collection(parse_docstring=True)
            silent += [f"{app.name} {one.name}" for one in options if one.parse and one.show and not one.parameter.help]
    assert not silent


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("dsd decod", "did you mean 'decode'?"),
        ("dsd-lab bench wirre", "did you mean 'wire'?"),
        ("dsd-lab bench fleet --robts 3", "did you mean --robots?"),
        ("dsd-lab bench fleet --replies two", "'two'"),
        ("dsd-lab bench fleet more", "'more'"),
        ("dsd-lab papers formula api_cost draft_in=1", "target_in"),
        ("dsd-lab papers formula --json no/such/folder/x.json", "make it first"),
        ("dsd-lab papers formula --json .", "is a folder"),
        ("dsd-lab bench fleet --replies", "--replies"),
        ("dsd completion tcsh", "tcsh"),
        ("dsd decode --instruction x --mode fds", "did you mean 'fsd'?"),
        ("dsd doctor --role clod", "did you mean 'cloud'?"),
        ("dsd demo fallbak:=return", "did you mean 'fallback'?"),
        ("dsd demo fallback:=retrun", "did you mean 'return'?"),
        ("dsd demo --seeed 3", "did you mean --seed?"),
        ("dsd replay no-such-bag", "name the folder that `dsd record`"),
        ("dsd", "COMMAND"),
        ("dsd-lab train", "COMMAND"),
    ],
)
def test_a_slip_is_one_line_with_the_remedy(capsys, line, named):
    name, *words = line.split()
    code, out, err = dsd(capsys, *words, program=PROGRAMS[name])
    assert (code, out) == (shared.EXIT_BAD_INPUT, "")
    assert err.startswith("dsd") and err.count("\n") == 1 and named in err


@pytest.mark.parametrize("line", ["--debug {} {}", "{} --debug {}", "{} {} --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(capsys, line):
    words = line.format(*FORMULA).split()
    code, _, err = dsd(capsys, *words, "predict", program=LAB)
    assert code == shared.EXIT_BAD_INPUT
    assert "Traceback" in err and err.splitlines()[-1].startswith("dsd-lab: ")


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (KeyError("tokens"), shared.EXIT_DEFECT, "KeyError"),
        (RuntimeError("two\nlines"), shared.EXIT_DEFECT, "two lines"),
        (ModuleNotFoundError("No module", name="rclpy"), shared.EXIT_BAD_INPUT, "dsd doctor"),
        (FileNotFoundError(2, "No such file or directory", "x.png"), shared.EXIT_BAD_INPUT, "x.png: no such"),
        (shared.CommandError("the nodes are gone", shared.EXIT_LINK), shared.EXIT_LINK, "the nodes"),
        (KeyboardInterrupt(), shared.EXIT_INTERRUPTED, ""),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_is_one_line_without_a_traceback(capsys, monkeypatch, error, code, named):
    def fail() -> int:
        raise error

    monkeypatch.setattr(LAB.app["papers"]["formula"], "default_command", fail)
    found, out, err = dsd(capsys, *FORMULA, program=LAB)
    assert (found, out) == (code, "")
    assert "Traceback" not in err and err.count("\n") == (1 if named else 0) and named in err


def test_an_interruption_while_a_command_loads_is_one_too(capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(App, "parse_args", interrupted)
    assert dsd(capsys, *FORMULA, program=LAB) == (shared.EXIT_INTERRUPTED, "", "")


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen([*DSD_LAB, *FORMULA], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == shared.EXIT_PIPE


def test_json_takes_the_place_of_the_text_or_goes_to_a_file(capsys, tmp_path):
    file = tmp_path / "formulas.json"
    _, text, _ = dsd(capsys, *FORMULA, "--json", file, program=LAB)
    assert "api_cost draft_in draft_out" in text
    for options in (["--json"], ["--json", "-"]):
        code, out, err = dsd(capsys, *FORMULA, *options, program=LAB)
        assert (code, err) == (0, "")
        assert json.loads(out) == json.loads(file.read_text())


def test_colours_are_for_terminals_and_no_color_is_honoured(capsys, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert terminal.paint("ok", "green", Terminal()) == "\x1b[32mok\x1b[0m"
    assert terminal.paint("ok", "green", io.StringIO()) == "ok"
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.paint("ok", "green", Terminal()) == "ok"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.paint("ok", "green", Terminal()) == "ok"
    assert "\x1b" not in "".join(dsd(capsys, "nothing")[1:])


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_for_terminals(monkeypatch, stream, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream())
    with terminal.Progress() as bar:
        bar.step(4, "one of\nfour")
        bar.to(0.5, "half")
    said = sys.stderr.getvalue()
    assert ("one of four" in said) == shown and bool(said) == shown


def test_progress_of_hours_is_logged_now_and_then(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with terminal.Progress() as bar:
        for clock[0], share in ((130, 0.1), (161, 0.2), (219, 0.3), (4161, 1.2)):
            bar.to(share, "joint\nstep")
    assert sys.stderr.getvalue() == " 20% joint step [0:01:01]\n100% joint step [1:07:41]\n"


@pytest.fixture(scope="session")
def shell(tmp_path_factory):
    """A folder with the commands and their completion codes for bash."""
    folder = tmp_path_factory.mktemp("shell")
    for name, package in (("dsd", "dsd_ros"), ("dsd-lab", "dsd_lab")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {package}.cli "$@"\n')
        (folder / name).chmod(0o755)
        (folder / f"{name}.bash").write_text(PROGRAMS[name].app.generate_completion(shell="bash"))
    return folder


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("dsd-lab tr", ["train"]),
        ("dsd-lab eval", ["evaluate"]),
        ("dsd-lab bench wi", ["wire"]),
        ("dsd decode --instr", ["--instruction"]),
        ("dsd decode --mode ds", ["dsd", "dssd"]),
        ("dsd demo --mode coup", ["coupled"]),
        ("dsd demo --transport w", ["websocket"]),
        ("dsd completion z", ["zsh"]),
        ("dsd decode --onl", ["--online"]),
    ],
)
def test_tab_completes_in_bash(shell, line, wanted):
    name, words = line.split()[0], line.split()
    script = (
        f'source "{shell}/{name}.bash"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; '
        f"COMP_POINT={len(line)}; $(complete -p {name} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {name} {words[-1]} "
        f'{words[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == wanted, done.stderr


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_code(capsys, name):
    code, out, _ = dsd(capsys, "completion", name)
    assert (code == 0 and "dsd" in out and "--instruction" in out) or (name == "fish" and "-l instruction" in out)


def test_the_installed_command_prints_code_that_bash_reads(shell):
    path = f"{shell}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", 'eval "$(dsd-lab completion bash)"; complete -p dsd-lab'],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(Path(main.__file__).parents[2])},
    )
    assert "-F" in done.stdout, done.stderr
