# SPDX-License-Identifier: Apache-2.0
"""The bench of vLLM: its drafters here, and all of it with a real vLLM (`make test-engine`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from in_process import dsd_lab
from stepped import Unhurried

from dsd_lab.bench.engine import WAYS, Reciter, ReciterSession
from dsd_lab.bench.scenes import PATIENT_LINK
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

PYTHON = Path(os.environ.get("DSD_VLLM_VENV", Path(__file__).resolve().parents[3] / ".venv-vllm")) / "bin" / "python"


def test_a_robot_that_recites_gets_the_targets_own_reply(tiny_pair):
    target, settings = load_model(ModelSettings(tiny_pair[0])), DecodeSettings(mode="stream", max_tokens=24)
    picture = np.zeros((56, 56, 3), np.uint8)
    with VerifierEngine(Unhurried(target)) as engine, LocalChannel(engine) as channel:
        with EdgeSession(channel, None, DecodeSettings(mode="ar", max_tokens=24)) as session:
            said = session.decode(picture, "go").tokens
        accepted = []
        for wrong in (0, 1):
            reciter = Reciter([[(token + wrong) % target.vocab_size for token in said]])
            with ReciterSession(channel, target, settings, PATIENT_LINK, reciter=reciter) as session:
                reply = session.decode(picture, "go")
            assert reply.tokens == said
            accepted.append(sum(record.accepted for record in reply.records))
    assert accepted[0] > accepted[1] == 0


@pytest.mark.engine
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: make vllm-venv")
def test_every_way_gives_vllms_own_replies_and_a_perfect_draft_few_steps(tmp_path, capsys):
    small = json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 29})
    flags = ["--clients", "1,3", "--replies", "2", "--repeats", "1", "--engine-python", PYTHON, "--engine-args", small]
    code, out, err = dsd_lab(capsys, "bench", "engine", *flags, "--json", tmp_path / "report.json")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exact"] and "every reply is vLLM's own" in out
    rows = {(row["clients"], row["who"]): row for row in report["rows"]}
    assert len(rows) == 2 * len(WAYS)
    assert all(row["tokens_per_second"] > 0 and row["first_ms"] > 0 for row in rows.values())
    assert rows[1, "robots, a perfect draft"]["steps"] < 8 < rows[1, "robots, a useless draft"]["steps"]
