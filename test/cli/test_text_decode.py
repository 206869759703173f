# SPDX-License-Identifier: Apache-2.0
"""`dsd decode` with text-only models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from in_process import dsd
from PIL import Image
from tiny_text import make_tiny_text


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    make_tiny_text(folder / "target", seed=1)
    make_tiny_text(folder / "draft", seed=1, noise=0.08)
    return ["--draft", folder / "draft", "--target", folder / "target"]


def replies(capsys, pair, *options):
    code, out, err = dsd(
        capsys, "decode", *pair, "--instruction", "name a colour", "--max-tokens", "9", "--json", *options
    )  # fmt: skip
    assert code == 0, err
    return json.loads(out)["tokens"]


def test_a_text_is_answered_without_a_picture(capsys, pair):
    alone = replies(capsys, pair, "--mode", "ar")
    assert len(alone) == 9 and replies(capsys, pair, "--mode", "dsd") == alone
    assert replies(capsys, pair, "--mode", "coupled", "--shape", "budget") == alone


def test_what_is_asked_must_fit_the_models(capsys, pair, tmp_path):
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(tmp_path / "a.png")
    code, _, err = dsd(capsys, "decode", *pair, "--instruction", "look", "--image", tmp_path / "a.png")
    assert code == 2 and "reads text alone; ask it without a picture" in err
    code, _, err = dsd(capsys, "decode", "--instruction", "look")
    assert code == 2 and "no picture is named; give --image" in err and err.count("\n") == 1
