# SPDX-License-Identifier: Apache-2.0
"""A tiny training of a pair that kills itself with SIGKILL at a moment; run by runpy with globals of its own.

`root`: folder with cache/ and out/. `moment`: (when, end of a path, how often): "before" or "after" a file is
swapped in for that time, "rename": when the old model directory is gone and the new one not yet there; None: to
the end. `log`: a file that gets a line for every file swapped in. `overrides`: settings.
"""

import os
import signal
from pathlib import Path

import torch

from dsd_lab.train.pair import train_pair
from dsd_lab.train.settings import TrainSettings


def tiny(root, **overrides):
    return TrainSettings(**{
        "out": root / "out", "cache": root / "cache", "size": "small", "worlds": 2,
        "workers": 1, "threads": 1, "batch": 4, "live_batch": 4, "vision_steps": 4, "language_steps": 4,
        "joint_steps": 3, "draft_steps": 4, "exit_steps": 3, "dagger_rounds": 1, "dagger_worlds": 1,
        "draft_worlds": 1, "distilled": 8, "exit_worlds": 1, "exits": False, "save_seconds": 0.0,
        "evaluate": False, "smoke": True, **overrides,
    })  # fmt: skip


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def main(root, moment, log, overrides):
    torch.set_num_threads(1)
    when, end, count = moment or ("", "", 0)
    replace, rename = os.replace, Path.rename

    def met(path):
        nonlocal count
        count -= str(path).endswith(end)
        return bool(end) and str(path).endswith(end) and count == 0

    def replaced(source, target):
        here = when != "rename" and met(target)
        if here and when == "before":
            die()
        replace(source, target)
        with Path(log).open("a") as file:
            file.write(f"{target}\n")
        if here and when == "after":
            die()

    def renamed(self, target):
        if when == "rename" and met(target):
            die()
        return rename(self, target)

    os.replace, Path.rename = replaced, renamed
    train_pair(tiny(root, **overrides))


if "root" in globals():
    main(root, moment, log, overrides)  # noqa: F821
