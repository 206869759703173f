# SPDX-License-Identifier: Apache-2.0
"""`dsd` at a terminal and in a script: errors, --debug, --json, --version, colours, progress, completion."""

from __future__ import annotations

import io
import json
import os
import shlex
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


def test_the_version_names_the_protocol(capsys):
    assert dsd(capsys, "--version")[:2] == (0, f"dsd_ros {__version__}, protocol {PROTOCOL_VERSION}\n")


def every_app(app: App) -> Iterator[App]:
    """An app and all below it."""
    yield app
    for name, below in app.resolved_commands().items():
        if not name.startswith("-"):
            yield from every_app(below)


@pytest.mark.parametrize(("words", "offline"), [(["--version"], "1"), (["--online", "--version"], "0")])
def test_online_wins_over_a_service_that_is_offline(capsys, monkeypatch, words, offline):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main.main(words)
    assert os.environ["HF_HUB_OFFLINE"] == offline


def test_help_and_completion_need_only_what_a_cloud_has_and_load_no_model():
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('rclpy', 'rosbags', 'cv2', 'mujoco', 'dsd_lab'))\n"
        "from dsd_ros.cli.main import DSD, main\n"
        "DSD.app.generate_completion(shell='bash')\n"
        "main(['--help']); main(['demo', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "verifier" in done.stdout, done.stderr


def test_help_has_what_is_needed_first_and_the_rest_in_groups(capsys):
    _, out, _ = dsd(capsys, "decode", "--help")
    titles = ["Parameters", "what to tell", "Decoding", "--draft-length", "Verifier", "--ca-file", "Of every command"]
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    _, out, _ = dsd(capsys, "demo", "--help")
    assert "--instruction" in out and "--draft-engine" in out  # of settings that have no title


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
        ("dsd-lab bench fleet more", "'more'"),
        ("dsd-lab papers formula api_cost draft_in=1", "target_in"),
        ("dsd-lab papers formula --json no/such/folder/x.json", "make it first"),
        ("dsd decode --instruction x --mode fds", "did you mean 'fsd'?"),
        ("dsd demo fallbak:=return", "did you mean 'fallback'?"),
        ("dsd replay no-such-bag", "name the folder that `dsd record`"),
        ("dsd decode --gamma 4", "did you mean --draft-length?"),
        ("dsd decode --instruction x --window=4", "did you mean --draft-length?"),
        ("dsd decode --bogus 4", "unknown option: --bogus"),
        ("dsd decode --image x.png", "--instruction is missing: what to tell the robot"),
        ("dsd decode --instruction x --seed abc", "'abc' is no number"),
        ("dsd decode --instruction x --image no-such.png", "the picture no-such.png does not exist"),
        ("dsd replay", "name BAG: folder of a bag"),
        ("dsd ask ''", "the question is empty; ask one"),
        ("dsd documents add /nowhere", "there is no file /nowhere"),
        ("dsd verifier --token-file /no/token", "write one: openssl rand -hex 32 > /no/token"),
        ("dsd", "COMMAND"),
        ("dsd-lab train", "COMMAND"),
    ],
)
def test_a_slip_is_one_line_with_the_remedy(capsys, line, named):
    name, *words = shlex.split(line)
    code, out, err = dsd(capsys, *words, program=PROGRAMS[name])
    assert (code, out) == (shared.EXIT_BAD_INPUT, "")
    assert err.startswith("dsd") and err.count("\n") == 1 and named in err


@pytest.mark.parametrize("line", ["--debug {} {}", "{} {} --debug"])
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


@pytest.mark.parametrize("words", ["decode --help", "decode --instruction x --image no-such.png"])
@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_service_or_a_console_without_streams_or_size_is_no_defect(words, streams):
    command = f"exec {sys.executable} -m dsd_ros.cli {words} {streams}"
    console = {"COLUMNS": "0", "PYTHONWARNINGS": "error", "LC_ALL": "C"}
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env=os.environ | console)
    assert run.returncode == (0 if "--help" in words else 2), run.stderr
    assert "Traceback" not in run.stderr and "defect" not in run.stderr
    assert run.stdout or "--help" not in words or ">&-" in streams


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


def test_tab_completes_in_bash(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    code, out, _ = dsd(capsys, "completion", "--shell", "bash")
    (script,) = (path for path in tmp_path.rglob("dsd") if path.is_file())
    assert code == 0 and str(script) in out and "dsd completion" in (tmp_path / ".bashrc").read_text()
    for line, wanted in {
        "dsd decode --instr": ["--instruction"], "dsd decode --mode ds": ["dsd", "dssd"],
        "dsd demo --transport w": ["websocket"], "dsd docu": ["documents"],
    }.items():  # fmt: skip
        words = line.split()
        program = (
            f'source "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; '
            f"COMP_POINT={len(line)}; $(complete -p dsd | sed 's/.*-F \\([^ ]*\\).*/\\1/') dsd {words[-1]} "
            f'{words[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == wanted, done.stderr
