# SPDX-License-Identifier: Apache-2.0
"""`dsd ask`, with both halves in this process, and with a verifier that has documents."""

from __future__ import annotations

import json
import shutil

import pytest
from in_process import dsd
from table_model import TableModel
from tiny_text import make_tiny_text

from dsd_ros import paths
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.dragon.server import Documents, ServiceSettings
from dsd_ros.shown import LINES, shown
from dsd_ros.vlm.loading import ModelSettings

QUESTION = "which chair do I like?"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return make_tiny_text(tmp_path_factory.mktemp("reader"), seed=3, kind="qwen2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    for side, text in (("own", "The chair I like is the Viola."), ("general", "The Viola is red.")):
        (root / side).mkdir()
        (root / side / "facts.md").write_text(text)
    return root / "own", root / "general"


def ask(capsys, reader, *options):
    return dsd(
        capsys, "ask", QUESTION, "--model", reader, "--cloud-model", reader, "--max-tokens", "9", *options
    )  # fmt: skip


def test_the_answer_is_printed_as_text_and_as_json(capsys, reader, folders, tmp_path):
    own, general = folders
    report = tmp_path / "answer.json"
    here = ("--robot-documents", own, "--cloud-documents", general)
    code, out, err = ask(capsys, reader, *here, "--json", report)
    assert code == 0, err
    told = json.loads(report.read_text())
    assert out.rstrip("\n") == shown(told["text"], keep=LINES).rstrip("\n") and told["question"] == QUESTION
    assert 1 <= len(told["tokens"]) <= 9 and len(told["token_seconds"]) == len(told["tokens"])
    assert told["device_documents"] == 1 and told["cloud_documents"] == 1
    assert told["bytes_up"] > 0 and told["bytes_down"] > 0 and told["attempts"] == 1
    assert f"{len(told['tokens'])} tokens in" in err and err.count("\n") == 1 + len(told["sources"])
    assert told["sources"] and isinstance(told["known"], bool)
    for source in told["sources"]:
        assert source["document"] == "facts.md" and source["sentence"] in told["text"]
        owner = {"device": "the robot", "cloud": "the cloud"}[source["side"]]
        assert f"<- facts.md of {owner}" in err

    # The answer is the same again, and another without the documents.
    code, out, _ = ask(capsys, reader, *here, "--json", "-")
    assert code == 0 and json.loads(out)["tokens"] == told["tokens"]
    none = ("--robot-documents", "", "--cloud-documents", "")
    code, out, _ = ask(capsys, reader, *none, "--json", "-")
    other = json.loads(out)
    assert code == 0 and other["device_documents"] == other["cloud_documents"] == 0


def test_a_verifier_without_documents_says_so(capsys, reader, folders):
    settings = VerifierSettings(port=0)
    with VerifierEngine(TableModel(1, ends=False), settings) as engine, VerifierServer(engine, settings) as server:
        code, out, err = ask(capsys, reader, "--robot-documents", folders[0], "--verifier", server.url)
    assert code == 3 and out == "" and "started without documents" in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--robot-documents", "/does/not/exist"), "no folder of documents /does/not/exist"),
        (("--window", "0"), "window is 0"),
        (("--on-loss", "smoke"), "choose from: 'fail', 'alone'"),
        (("--model", "/does/not/exist"), "no model directory"),
    ],
)
def test_what_cannot_be_used_is_said_on_one_line(capsys, reader, options, sentence):
    code, out, err = ask(capsys, reader, *options)
    assert code == 2 and out == "" and sentence in err and err.count("\n") == 1


@pytest.fixture
def readers(reader, tmp_path, monkeypatch):
    """Both shipped readers: the small one is tiny, the other an adapter whose base is not there."""
    shutil.copytree(reader, tmp_path / "models" / "reader")
    (tmp_path / "models" / paths.READER).mkdir()
    monkeypatch.setattr(paths, "share_directory", lambda: tmp_path)


def add_base() -> None:
    """Put an empty base model where ``make setup`` makes the one of the larger reader."""
    weights = paths.models_directory() / paths.READER_BASE / "model.safetensors"
    weights.parent.mkdir()
    weights.touch()


def test_without_its_base_the_small_reader_answers_and_says_so_once(capsys, readers, folders):
    here = ("--robot-documents", folders[0], "--cloud-documents", folders[1], "--max-tokens", "5")
    code, out, err = dsd(capsys, "ask", QUESTION, *here)
    note = f"answers are those of the small reader; for better ones, {paths.READER_INSTALL}"
    assert code == 0 and out and err.count(note) == 1 and err.count("\n") == 2 + err.count("  <- ")
    named = dsd(capsys, "ask", QUESTION, *here, "--model", paths.shipped_model("reader"))
    assert named[:2] == (code, out) and "small reader" not in named[2]
    # With it, it is the adapter that is loaded: this one is empty, which is said.
    add_base()
    code, _, err = dsd(capsys, "ask", QUESTION, *here)
    assert paths.shipped_model("reader").name == paths.READER and paths.reader_note() == ""
    assert code == 2 and "small reader" not in err and paths.READER in err


def test_a_verifier_with_both_readers_answers_each_robot_with_its_own(capsys, readers, folders, caplog):
    small = str(paths.shipped_model("reader"))
    assert Documents.load(folders[1], ModelSettings("target")).others == () and "small reader" in caplog.text
    add_base()
    shutil.copytree(small, paths.models_directory() / paths.READER, dirs_exist_ok=True)
    documents = Documents.load(folders[1], ModelSettings("target"))
    assert documents.model.name == paths.READER and [one.name for one in documents.others] == ["reader"]
    documents.model.tokenizer_fingerprint = "another"
    settings = VerifierSettings(port=0)
    engine = documents.serve(lambda: VerifierEngine(TableModel(1, ends=False), settings), ServiceSettings())
    here = ask(capsys, small, "--robot-documents", folders[0], "--cloud-documents", folders[1])
    with engine, VerifierServer(engine, settings) as server:
        there = ask(capsys, small, "--robot-documents", folders[0], "--verifier", server.url)
    assert there[:2] == here[:2] and there[0] == 0
    # A robot whose tokenizer neither of them has is refused, with the remedy.
    documents.others = ()
    engine = documents.serve(lambda: VerifierEngine(TableModel(1, ends=False), settings), ServiceSettings())
    with engine, VerifierServer(engine, settings) as server:
        code, _, err = ask(capsys, small, "--robot-documents", folders[0], "--verifier", server.url)
    assert code == 3 and f"that of the cloud's {paths.READER} (another); give both sides the same text model" in err
    assert f"or on both, {paths.READER_INSTALL}" in err
