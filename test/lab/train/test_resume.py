# SPDX-License-Identifier: Apache-2.0
"""A training killed repeatedly with SIGKILL ends with the weights of an undisturbed one, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsd_lab.train.data import world_frames
from dsd_lab.train.frames import save_shard
from dsd_lab.train.stages import read_progress
from dsd_lab.train.tokenizer import train_tokenizer
from dsd_lab.worlds.phrases import all_instructions
from dsd_lab.worlds.situations import Situation, Split

SCRIPT = Path(__file__).parents[2] / "support" / "killed_run.py"
PRELOADED = ["dsd_lab.train.pair", "dsd_ros.vlm.loading", "transformers.models.qwen2_vl.modeling_qwen2_vl"]
Moment = tuple[str, str, int]


def start(root: Path, moment: Moment | None, **overrides: Any) -> Any:
    """A training in a process of its own, which shares what has been imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    space = {"root": root, "moment": moment, "log": root / "log", "overrides": overrides}
    root.mkdir(exist_ok=True)
    process = context.Process(target=runpy.run_path, args=(str(SCRIPT), space))
    process.start()
    return process


def run(root: Path, moment: Moment | None, **overrides: Any) -> None:
    process = start(root, moment, **overrides)
    process.join(300)
    assert process.exitcode == (-signal.SIGKILL if moment else 0), moment


def weights(root: Path) -> dict[str, bytes]:
    """The files' tensors; the order of the texts in front of them may differ."""
    found = {}
    for path in sorted((root / "out").rglob("*.safetensors")):
        data = path.read_bytes()
        found[f"{path.parent.name}/{path.name}"] = data[8 + int.from_bytes(data[:8], "little") :]
    assert {"target/model.safetensors", "draft/model.safetensors"} <= found.keys()
    return found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with few pictures and a tokenizer, so that nothing is rendered but roll-outs."""
    cache = tmp_path_factory.mktemp("pictures") / "cache"
    images, labels = world_frames(1_000_000, 8, situation=Situation.PLAIN, split=Split.TRAINING)
    save_shard(cache / "train" / "shard00000", images, labels)
    replies = [text for frame in labels for _, text in frame.replies]
    train_tokenizer([*replies, *all_instructions()[::50]]).save(str(cache / "tokenizer.json"))
    return cache


QUICK: list[Moment] = [
    ("before", "vision.safetensors", 3),
    ("rename", "out/target", 1),  # the old model is gone, the new one not yet there
    ("after", "draft.safetensors", 2),
]


def test_a_run_killed_in_its_stages_ends_with_the_same_weights(pictures: Path, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        shutil.copytree(pictures, tmp_path / name / "cache")
    run(tmp_path / "whole", None)
    for moment in QUICK:
        run(tmp_path / "killed", moment)
    run(tmp_path / "killed", None)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    for path in (tmp_path / "killed" / "cache").glob("*.safetensors"):
        progress = read_progress(path)
        assert {"step", "loss", "right", "minutes", "after"} <= progress.keys()


@pytest.mark.slow
def test_a_run_killed_around_every_file_it_writes_ends_with_the_same_weights(tmp_path: Path) -> None:
    """While rendering, too, and while the exits are trained; some 60 kills."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, None, exits=True)
    process = start(killed, None, exits=True)
    while not list((killed / "cache" / "train").glob("*.npy")):  # whole or in part
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ends: list[str] = []
    for line in (whole / "log").read_text().splitlines():
        parts = Path(line).relative_to(whole).parts
        # Folders that are named by what they build upon have other names in the killed run.
        end = "/".join(parts[-2:]) if not any("-" in part for part in parts[1:-1]) else parts[-1]
        if end not in ends:
            ends.append(end)
    assert len(ends) > 12
    for end in ends:
        for when in ("before", "after"):
            process = start(killed, (when, end, 1), exits=True)
            process.join(300)
            # What was finished before an earlier kill is not written again.
            assert process.exitcode in (-signal.SIGKILL, 0), (when, end)
    for name in ("target", "draft"):
        run(killed, ("rename", f"out/{name}", 1), exits=True)
    run(killed, None, exits=True)
    assert weights(killed) == weights(whole)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
