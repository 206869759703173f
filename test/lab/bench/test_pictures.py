# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from tiny_models import make_tiny_model

from dsd_lab.bench.pictures import measure_pictures, render
from dsd_lab.bench.profiles import load_profile
from dsd_lab.report import BenchError
from dsd_ros.limits import ENCODINGS


def test_every_encoding_and_size_is_measured(tmp_path):
    make_tiny_model(tmp_path / "model", seed=1)
    path = str(tmp_path / "model")
    report = measure_pictures(load_profile("loopback"), 2, (640, 360), path, path)
    assert [row["encoding"] for row in report["rows"]] == [*ENCODINGS, *ENCODINGS]
    rows = {(row["encoding"], row["size"]): row for row in report["rows"]}
    for row in rows.values():
        assert row["prepare_ms"] > 0 and 0 < row["first_age_s"] <= row["last_age_s"]
    for encoding in ENCODINGS:
        assert rows[encoding, 0]["bytes"] < 0.5 * rows[encoding, 640]["bytes"]
    assert rows["rgb8", 640]["bytes"] > 640 * 360 * 3
    assert "2 pictures of 640 x 360, link loopback" in render(report)


def test_what_cannot_be_measured_is_named():
    for images, sides, sentence in ((0, (640, 360), "images"), (1, (10, 360), "sides 10x360")):
        with pytest.raises(BenchError, match=sentence):
            measure_pictures(load_profile("loopback"), images, sides, "", "")
