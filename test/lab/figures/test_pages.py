# SPDX-License-Identifier: Apache-2.0
"""Blocks of pages, filled in from reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsd_lab.figures import pages as pages_module
from dsd_lab.figures.pages import Pages, interval, number
from dsd_lab.report import BenchError, geometric


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """A checkout with one report, a table and a sentence about it."""
    for folder in ("blocks", "benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(pages_module, "BLOCKS", tmp_path / "blocks")
    (tmp_path / "README.md").write_text("# Top\n\nA reply took <!-- figures: tea --><!-- /figures --> here.\n")
    (tmp_path / "benchmarks" / "README.md").write_text("<!-- figures: table -->\nold\n<!-- /figures -->\nend\n")
    (tmp_path / "blocks" / "tea.md").write_text('{{ report("tea").ms | num }} ms\n')
    (tmp_path / "blocks" / "table.md").write_text('| a |\n| --- |\n| {{ report("tea").ms | num("_.0f") }} |\n')
    (tmp_path / "benchmarks" / "tea.json").write_text(json.dumps({"ms": 1234.567}))
    return Pages(tmp_path)


def test_a_block_is_filled_in_within_a_line_or_on_lines_of_its_own(pages: Pages) -> None:
    assert {path.parent.name for path in pages.different()} == {pages.root.name, "benchmarks"}
    pages.write()
    assert "took <!-- figures: tea -->1234.57 ms<!-- /figures --> here." in (pages.root / "README.md").read_text()
    table = (pages.root / "benchmarks" / "README.md").read_text()
    assert table == "<!-- figures: table -->\n| a |\n| --- |\n| 1 235 |\n<!-- /figures -->\nend\n"
    assert not pages.different() and pages.used == {"tea": {"tea"}, "table": {"tea"}}


def test_a_block_that_cannot_be_filled_in_says_which(pages: Pages) -> None:
    for template, said in [
        ('{{ report("tea").seconds | num }}', "block tea cannot be filled in from tea"),
        ('{{ report("milk").ms }}', r"block tea shows milk\.json, which is not there; run `make figures`"),
        ("{{ nothing }}", "block tea cannot be filled in"),
        ("{% for", "block tea cannot be filled in"),
    ]:
        (pages.root / "blocks" / "tea.md").write_text(template)
        with pytest.raises(BenchError, match=said):
            pages.write()


def test_a_block_of_a_report_that_is_still_to_be_measured_says_so(pages: Pages) -> None:
    (pages.root / "blocks" / "tea.md").write_text('{{ report("spec").seconds | num }}')
    assert pages.rendered("tea") == "Not measured with the present code yet." and pages.used["tea"] == {"spec"}


def test_a_block_without_a_template_is_refused(pages: Pages) -> None:
    (pages.root / "README.md").write_text("<!-- figures: milk -->\n<!-- /figures -->\n")
    with pytest.raises(BenchError, match="block milk"):
        pages.write()


def test_figures_as_text() -> None:
    assert (number(12345.6, "_.0f"), number(0.123, ".1%"), number(None)) == ("12 346", "12.3 %", "")
    found = {"value": 0.5, "low": 0.25, "high": 0.75}
    assert interval(found) == "0.50 [0.25, 0.75]" and interval(found, ".0%") == "50 % [25, 75]"
    assert interval(found | {"low": None}) == "0.50"


def test_a_geometric_mean_and_its_interval() -> None:
    found = geometric([1.0, 2.0, 4.0])
    assert found["value"] == pytest.approx(2.0) and 1.0 <= found["low"] < 2.0 < found["high"] <= 4.0
    assert geometric([])["value"] is None and geometric([3.0])["low"] == pytest.approx(3.0)
