# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

from in_process import dsd_lab
from tiny_models import make_tiny_model

from dsd_ros.limits import ENCODINGS


def test_every_encoding_and_size_is_measured(tmp_path, capsys):
    path, file = make_tiny_model(tmp_path / "model", seed=1), tmp_path / "pictures.json"
    pair = ("--draft", path, "--target", path, "--profile", "loopback", "--height", "360")
    code, out, err = dsd_lab(capsys, "bench", "pictures", *pair, "--images", "2", "--width", "640", "--json", file)
    assert code == 0, err
    report = json.loads(file.read_text())
    assert [row["encoding"] for row in report["rows"]] == [*ENCODINGS, *ENCODINGS]
    rows = {(row["encoding"], row["size"]): row for row in report["rows"]}
    for row in rows.values():
        assert row["prepare_ms"] > 0 and 0 < row["first_age_s"] <= row["last_age_s"]
    for encoding in ENCODINGS:
        assert rows[encoding, 0]["bytes"] < 0.5 * rows[encoding, 640]["bytes"]
    assert rows["rgb8", 640]["bytes"] > 640 * 360 * 3
    assert "2 pictures of 640 x 360, link loopback" in out
    for options, sentence in ((["--images", "0"], "images"), (["--width", "10"], "sides 10x360")):
        code, _, err = dsd_lab(capsys, "bench", "pictures", *pair, *options)
        assert code == 2 and sentence in err
