# SPDX-License-Identifier: Apache-2.0
"""Writes docs/papers.md; `dsd-lab papers` and `dsd-lab figures` run it."""

from __future__ import annotations

from pathlib import Path

from dsd_lab.report import shipped
from dsd_lab.reproduce import dragon, dssd, fsd, tslt
from dsd_lab.reproduce.table import PRINTED, Reports

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


def write_page(root: Path) -> str:
    """docs/papers.md for the repository at ``root``."""
    reports = Reports(root / "benchmarks", shipped(root))
    parts = [PRINTED["page"]["head"]]
    for short, title, tables in PAPERS:
        parts.append(f'## {short}\n\n"{title}"\n')
        parts += [table.render() for table in tables(reports)]
    return "\n".join(parts)
