# SPDX-License-Identifier: Apache-2.0
"""Every figure in the tables of docs/modes.md is in benchmarks/*.json, and the page names every mode."""

from __future__ import annotations

import json
import re
from typing import Any

from pages import DOCS, ROOT, text_of

from dsd_ros.decoding.modes import PRESETS
from dsd_ros.vlm.loading import model_fingerprint

PAGE = text_of(DOCS / "modes.md")


def report(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))


def table_behind(name: str) -> list[list[str]]:
    """Rows of the first table after the mention of a benchmark's file."""
    rest = PAGE[PAGE.index(f"../benchmarks/{name}") :]
    block = re.search(r"\n((?:\|[^\n]*\|\n)+)", rest)
    assert block, name
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in block[1].splitlines()]
    return rows[2:]


def test_seconds_are_those_measured() -> None:
    for name in ("modes-go2.json", "modes-sampled.json"):
        measured = {row["label"]: row for row in report(name)["rows"]}
        rows = table_behind(name)
        assert len(rows) > 4
        for label, *figures in rows:
            row = measured[label.strip("`")]
            miss = "" if row["miss_rate"] is None else f"{100 * row['miss_rate']:.1f} %"
            said = [f"{row['seconds_per_reply']:.1f}", f"{row['speedup']:.2f}", f"{row['tau']:.2f}"]
            assert figures == [*said, miss], label


def test_bytes_and_overhead_are_those_measured() -> None:
    measured = {row["label"]: row for row in report("wire.json")["rows"]}
    for label, *figures in table_behind("wire.json"):
        row = measured[label.strip("`")]
        up, down = row["bytes_up_per_token"], row["bytes_down_per_token"]
        assert figures == [f"{up:.1f}", f"{down:.1f}", f"{row['tau']:.2f}"], label
    measured = {row["transport"]: row for row in report("overhead.json")["rows"]}
    for label, *figures in table_behind("overhead.json"):
        row = measured[label.strip("`")]
        assert figures == [f"{row['median_ms']:.2f} ms", f"{row['p95_ms']:.2f} ms"], label
    best = next(row for row in report("best.json")["rows"] if row["label"] == "best")
    said = f"{best['tokens_per_second']:.1f} tokens a second, {best['tau']:.1f} a round"
    assert said in PAGE


def test_reports_are_of_the_models_that_ship() -> None:
    shipped = {role: model_fingerprint(ROOT / "models" / role) for role in ("draft", "target")}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        found = report(path.name)
        if not isinstance(found, dict) or found.get("model") == "text":  # a list of reports, or of a model of text
            continue
        for role, fingerprint in found.get("models", {}).items():
            assert fingerprint == shipped.get(role, fingerprint), f"{path.name} was measured with another {role}"


def test_the_page_names_every_mode() -> None:
    assert {name for name in PRESETS if f"`{name}`" in PAGE} == set(PRESETS)
