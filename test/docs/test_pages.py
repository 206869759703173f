# SPDX-License-Identifier: Apache-2.0
"""Links resolve, commands parse, and blocks marked `bash run` run as written."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CoercionError, CycloptsError, MissingArgumentError
from every import every
from pages import DOCS, PAGES, ROOT, Command, all_commands, anchors, inline_commands, links, text_of

from dsd_lab.cli.main import LAB
from dsd_ros.bringup.systems import values_of
from dsd_ros.cli.main import DSD, main, parse

COMMANDS = all_commands()
PROGRAMS = {"dsd": DSD, "dsd-lab": LAB}
BY_NAME = {page.name: page for page in PAGES}


@every(PAGES)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}: no such heading"


def test_every_page_is_in_the_readme() -> None:
    listed = {target.partition("#")[0] for target in links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= listed


def test_the_front_door_is_small() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 150 and len(list(DOCS.glob("*.md"))) <= 16


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / t).resolve() for page in PAGES for t in links(page)}
    said = "".join(map(text_of, PAGES))
    for picture in (DOCS / "images").iterdir():
        assert picture in shown or f"images/{picture.name}" in said, picture.name


def of(*start: str) -> Iterator[Command]:
    return (command for command in COMMANDS if command.words[: len(start)] == start)


@every({*of("dsd"), *of("dsd-lab")})
def test_dsd_understands_its_command(command: Command) -> None:
    argv = [re.sub(r"^N$", "1", word) for word in command.words[1:]]
    parse(argv, PROGRAMS[command.words[0]])


def refusal(command: Command) -> str:
    """Why the parser refuses an inline command for what it says; what it leaves out is left to the reader."""
    argv = [re.sub(r"^N$", "1", word).replace("HOST:PORT", "host:1") for word in command.words[1:]]
    try:
        parse(argv, PROGRAMS[command.words[0]])
    except MissingArgumentError:  # said before what is unknown
        _, apps, _ = PROGRAMS[command.words[0]].app.parse_commands(argv)
        known = {name for one in apps[-1].assemble_argument_collection() for name in one.names}
        return ", ".join(word for word in argv if word.startswith("--") and word not in known)
    except (CycloptsError, ValueError) as error:
        names = not argv or argv[-1] in ("--debug", "--online") or "name a COMMAND after" in str(error)
        placeholder = isinstance(error, CoercionError) and any(word.isupper() for word in argv)
        return "" if names or placeholder else str(error)
    return ""


@every(PAGES)
def test_commands_in_prose_are_understood(page: Path) -> None:
    refused = {str(command): why for command in inline_commands(page) if (why := refusal(command))}
    assert not refused


@every(["dsd-lab theory dssd", "dsd decode --gama 4", "dsd verifier --backend other", "dsd documents lend"])
def test_a_command_that_is_not_there_is_refused(line: str) -> None:
    assert refusal(Command("page", tuple(line.split()), run=False))


# Launch files of other packages that a page starts, with the arguments that they declare.
OTHERS_ARGUMENTS = {
    ("go2_robot_sdk", "robot.launch.py"): {"rviz2", "nav2", "slam", "foxglove", "joystick", "teleop"},
    ("nav2_bringup", "navigation_launch.py"): {"params_file", "use_sim_time", "namespace"},
    ("foxglove_bridge", "foxglove_bridge_launch.xml"): {"port", "address"},
}


@every(set(of("ros2", "launch")))
def test_launch_arguments_exist(command: Command) -> None:
    package, file, *rest = command.words[2:]
    given = dict(word.split(":=", 1) for word in rest if ":=" in word)
    if (package, file) in OTHERS_ARGUMENTS:
        assert given.keys() <= OTHERS_ARGUMENTS[package, file]
        return
    assert package == "dsd_ros" and (ROOT / "launch" / file).is_file()
    if "params_file" in given:  # the reader's own
        given["params_file"] = str(ROOT / "config" / "navigation.yaml")
    values_of(file.removesuffix(".launch.py"), given)


def test_other_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in of("make"):
        wanted = {word for word in command.words[1:] if "=" not in word}
        assert wanted <= targets, str(command)
    for command in COMMANDS:
        name, *rest = command.words
        if name in ("python", "python3") and rest[:1] == ["-m"] and rest[1].startswith("dsd_ros"):
            assert importlib.util.find_spec(rest[1]), str(command)
            if rest[1] == "dsd_ros.bringup.processes":
                values_of(rest[2], dict(w.split(":=", 1) for w in rest[3:] if ":=" in w))


def test_there_are_commands_to_test() -> None:
    assert len(list(of("dsd"))) > 25 and len(list(of("ros2", "launch"))) > 4
    assert sum(command.run for command in COMMANDS) >= 4


RUN = [command for command in COMMANDS if command.run]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_quick_commands_run_as_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert command.words[0] in PROGRAMS, f"{command}: only the project's commands are run"
    try:
        code = main(list(command.words[1:]), PROGRAMS[command.words[0]])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    assert capsys.readouterr().out.strip()
