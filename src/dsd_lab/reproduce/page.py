# SPDX-License-Identifier: Apache-2.0
"""Writes docs/papers.md; `dsd-lab papers` runs it."""

from __future__ import annotations

import json
from pathlib import Path

from dsd_lab.reproduce import dragon, dssd, fsd, tslt
from dsd_lab.reproduce.table import Reports
from dsd_ros.vlm.loading import model_fingerprint

PAPERS = (
    ("FSD", "Fast and Cost-effective Speculative Edge-Cloud Decoding with Early Exits", fsd.tables),
    (
        "DSSD",
        "DSSD: Efficient Edge-Device LLM Deployment and Collaborative Inference via Distributed Split Speculative "
        "Decoding",
        dssd.tables,
    ),
    ("TSLT", "Fast Collaborative Inference via Distributed Speculative Decoding", tslt.tables),
    (
        "DRAGON",
        "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance",
        dragon.tables,
    ),
)
_HEAD = """# The papers, row by row

Every table and figure of the four papers. `dsd-lab papers` writes this page from its formulas and the reports under
`benchmarks/`; do not edit it.

* **the paper**: the figure that it prints.
* **its formula**: what the paper's own formula gives for the paper's own setting.
* **ours**: a formula or simulation of ours, where the paper's says something else or nothing.
* **measured here**: from a report of this project, to which the cell links. A report of other weights than those that
  ship is not shown.
* **agreement, or why not**: how the others differ from the paper's figure, computed, and why.

Several values in a cell, apart by slashes, are the cells of a row of the paper's table. [theory.md](theory.md)
explains the formulas; [benchmarks](../benchmarks/README.md) has the commands of the reports.
`dsd-lab papers measure STUDY` makes `papers-STUDY.json`, for the studies `cost`,
`tslt`, `text`, `batch` and `queues`.
"""


def write_page(root: Path) -> str:
    """docs/papers.md for the repository at ``root``."""
    models = root / "models"
    shipped = {role: model_fingerprint(models / role) for role in ("draft", "target")}
    reports = Reports(root / "benchmarks", shipped, json.loads((models / "figures.json").read_text(encoding="utf-8")))
    parts = [_HEAD]
    for short, title, tables in PAPERS:
        parts.append(f'## {short}\n\n"{title}"\n')
        parts += [table.render() for table in tables(reports)]
    return "\n".join(parts)
