# SPDX-License-Identifier: Apache-2.0
"""What a verifier, a bag, a document or another program says cannot control the terminal; `~` means home everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from in_process import dsd

from dsd_ros.bringup.processes import ProcessGroup
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.wire.channel import LinkClosed

EVIL = "\x1b]0;owned\x07\x1b[2J \x9b31m\u202e http://u:hunter2@h/"
BAGS = Path(__file__).parents[1] / "bags"


@pytest.mark.parametrize("error", [LinkClosed, ValueError, lambda s: VerifierRefused(s, "code")])
def test_an_error_is_shown_as_text(capsys, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error(EVIL)

    monkeypatch.setattr("dsd_ros.cli.main.parse", fail)
    code, out, err = dsd(capsys, "doctor")
    assert code in (2, 3) and not out
    assert "\\x1b]0;owned" in err
    assert err.rstrip("\n").isprintable() and "hunter2" not in err
    assert error is ValueError or str(error(EVIL)).isprintable()  # wherever it goes


def test_what_a_child_prints_is_shown_as_text(capfd):
    with ProcessGroup() as group:
        child = group.start("child", ["printf", r"\033[2Jone\007\ttwo\n"])
        child.process.wait(30)
        child.reader.join(30)
    assert capfd.readouterr().out == "[child] \\x1b[2Jone\\x07\ttwo\n"


def test_documents_are_listed_as_text(capsys, tmp_path):
    (tmp_path / "a\x1b[2Jb.md").write_text("# Chairs \x1b]0;owned\x07\n\nThe red chair is by the door.\x1b[31m\n")
    store = tmp_path / "store"
    for words in (
        ("add", tmp_path / "a\x1b[2Jb.md"), ("list",), ("search", "where is the red chair?"), ("remove", "no\x1b[2J"),
    ):  # fmt: skip
        _, out, err = dsd(capsys, "documents", words[0], "--store", store, *words[1:])
        text = (out + err).replace("\n", "").replace("\t", "")
        assert text.isprintable(), ascii(text)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_home_is_expanded_in_flags_and_bags(capsys, home):
    shutil.copytree(BAGS / "straight", home / "bag")
    code, _, err = dsd(capsys, "inspect", "~/bag", "--json=~/run.json")
    assert code == 0, err
    assert (home / "run.json").is_file()
    _, _, err = dsd(capsys, "documents", "list", "--store=~/store")
    assert (home / "store").is_dir(), err
    code, _, err = dsd(capsys, "decode", "--instruction", "x", "--image=~/none.png")
    assert code == 2 and str(home / "none.png") in err


@pytest.mark.parametrize(
    "words",
    [
        ("decode", "--instruction", "x", "--image=~nobody-of-that-name/a.png"), ("inspect", "~nobody-of-that-name/bag"),
        ("decode", "--instruction", "find the red can", "--verifier=wss://h:1", "--ca-file=~nobody-of-that-name/ca.pem",
         "--image", str(BAGS.parents[1] / "docs" / "images" / "view.png")),
    ],
)  # fmt: skip
def test_a_home_that_is_none_is_a_sentence(capsys, words):
    code, out, err = dsd(capsys, *words)
    assert code == 2 and not out
    assert "~nobody-of-that-name" in err and "write the path in full" in err and err.count("\n") == 1
