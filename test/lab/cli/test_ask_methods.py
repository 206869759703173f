# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab ask --method`: the baselines need a cloud of their own; what DRAGON's benches refuse."""

from __future__ import annotations

import json

import pytest
from in_process import dsd_lab
from tiny_text import make_tiny_text


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("sides")
    reader = make_tiny_text(root / "reader", seed=3)
    for side, text in (("own", "The chair I like is the Viola."), ("general", "The Viola is red.")):
        (root / side).mkdir()
        (root / side / "facts.md").write_text(text)
    return (
        "which chair?", "--model", reader, "--cloud-model", reader, "--max-tokens", "4",
        "--robot-documents", root / "own", "--cloud-documents", root / "general", "--json", "-",
    )  # fmt: skip


@pytest.mark.slow  # two stores and their embedding model are loaded
def test_a_method_is_asked_as_any_other(capsys, options):
    # What each of them answers: test/rag/test_baselines.py.
    code, out, err = dsd_lab(capsys, "ask", *options, "--method", "drcg-kv")
    assert code == 0, err
    told = json.loads(out)
    assert len(told["tokens"]) == 4 and told["cloud_documents"] == told["device_documents"] == 1
    assert told["bytes_down"] > 10_000 and "accepted drafts" not in err


def test_comparisons_want_no_verifier(capsys, options):
    more = ("--method", "drcg-text", "--verifier", "ws://127.0.0.1:1")
    code, _, err = dsd_lab(capsys, "ask", *options, *more)
    assert code == 2 and "leave out --verifier" in err


def test_what_cannot_be_measured_is_said(capsys):
    for words in [
        ("dragon", "--trips", "far"),
        ("dragon", "--questions", "0"),
        ("dragon-lm", "--documents", "4,2"),
        ("dragon-lm", "--windows", "1"),
    ]:
        code, _, err = dsd_lab(capsys, "bench", *words)
        assert code == 2 and err.count("\n") == 1, err
