# SPDX-License-Identifier: Apache-2.0
"""A tiny text model with exits and its draft, as flags of `dsd-lab bench`, and the modes that they are tried in."""

from __future__ import annotations

from pathlib import Path

from tiny_text import make_tiny_text

from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model

GREEDY = "ar dsd fsd dsd:shape=budget fsd:pipeline_depth=3"
EVERY_PROOF = (
    "ar coupled fsd:proof=coupled coupled:shape=budget fsd:proof=coupled+shape=budget+pipeline_depth=2 "
    "dsd fsd dssd tslt mc-dsd mc-tslt"
)


def text_pair(folder: Path) -> list[str]:
    """Make both in ``folder``; the flags that name them."""
    target = make_tiny_text(folder / "target", max_positions=1024)
    model = load_model(ModelSettings(str(target), threads=1))
    ExitAdapters.untrained(model).save(target, model.fingerprint)
    return ["--model", str(target), "--draft", str(make_tiny_text(folder / "draft", noise=0.05, max_positions=1024))]
