# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md is what `dsd-lab papers` writes, its formulas are computed, and stale reports show no figure."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from dsd_lab.cli.main import main
from dsd_lab.papers import dragon_simulator, proofs, theory
from dsd_lab.reproduce import dragon, dssd, fsd, tslt
from dsd_lab.reproduce.table import NOT_YET, PRINTED, Measured, Reports, Row, Table

ROOT = Path(__file__).resolve().parents[3]
PAPERS = (fsd, dssd, tslt, dragon)
NOTHING = Reports(ROOT / "no-such-folder", {}, {"training": {"dagger": [{"met": {"reached": 1.0}}]}})


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "--out", str(tmp_path / "papers.md")]) == 0
    assert "is written" in capsys.readouterr().out
    written = (tmp_path / "papers.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), "run dsd-lab papers"


def test_no_formula_or_measurement_is_typed_in() -> None:
    """The columns beside the paper's own are never written as numbers."""
    for rows in PRINTED["rows"].values():
        assert all(row.keys() <= {"name", "paper", "form", "why", "compare"} for row in rows)
    computed = {"formula", "ours", "measured"}
    for paper in PAPERS:
        columns: list[ast.expr] = []
        for node in ast.walk(ast.parse(Path(paper.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row":
                columns += [*node.args[2:5], *(k.value for k in node.keywords if k.arg in computed)]
            elif isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                columns += [value for key, value in zip(keys, node.values, strict=True) if key in computed]
        for column in columns:
            parts = column.elts if isinstance(column, ast.Tuple) else [column]
            typed = all(isinstance(part, ast.Constant) and part.value is not None for part in parts)
            assert not typed, f"{paper.__name__}:{column.lineno}"


def formulas(paper: Any) -> dict[str, list[str]]:
    """The cells of the formula and ours columns, by table."""
    return {table.title: [cell for row in table.rows for cell in row.cells()[2:4]] for table in paper.tables(NOTHING)}


@pytest.mark.parametrize(
    ("paper", "module", "function", "tables"),
    [
        (fsd, theory, "api_cost", {"Table 1: API cost"}),
        (fsd, theory, "predict", {"Figure 1: where draft and target run", "Tables 3 and 4: notation and latency",
                                  "Table 6: speed-ups by benchmark", "Table 8: the robot"}),
        (fsd, theory, "fsd_speedup", {"Figure 6: equation 9"}),
        (dssd, proofs, "dssd_comm_seconds", {"Table 1: communication time",
                                             "Table 2: communication, OPT-125M to 6.7B"}),
        (dssd, theory, "expected_tokens", {"Table 2: communication and speed-up, OPT-125M to 13B",
                                           "Table 3: heterogeneous devices",
                                           "Section 4.2: the draft length"}),
        (tslt, proofs, "distributions", {"Table 1: settings"}),
        (dragon, dragon_simulator, "speedup", {"Figure 4, Theorem 6.2: equation 9"}),
    ],
)  # fmt: skip
def test_another_formula_gives_another_column(
    paper: Any, module: Any, function: str, tables: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, right = formulas(paper), getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args, **given: _halved(right(*args, **given)))
    after = formulas(paper)
    changed = {title for title in before if before[title] != after[title]}
    assert tables <= changed, f"{', '.join(tables - changed)} take no account of {function}"


def _halved(found: Any) -> Any:
    if isinstance(found, (int, float)):
        return found / 2
    return type(found)(**{name: value / 2 for name, value in vars(found).items()})


def test_without_reports_the_page_says_that_nothing_is_measured() -> None:
    for paper in PAPERS:
        for table in paper.tables(NOTHING):
            for row in table.rows:
                if row.measured.link.endswith("figures.json"):
                    continue
                assert row.measured.text in ("", NOT_YET, "no GPU here", "1, by definition") or row.name == "threads"
                assert not row.measured.link
            assert table.render().startswith("### ")


def test_a_report_of_other_weights_is_not_shown(tmp_path: Path) -> None:
    for name, models in (
        ("own", {"draft": "d", "target": "t"}),
        ("other", {"draft": "x", "target": "t"}),
        ("old", None),
    ):
        report = {
            "rows": [{"label": "dsd", "tau": 3.0}],
            **({} if models is None else {"models": {role: {"fingerprint": mark} for role, mark in models.items()}}),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    reports = Reports(tmp_path, {"draft": "d", "target": "t"}, {})

    def tau(report: Any) -> float:
        return float(report["rows"][0]["tau"])

    assert reports.figures("own", tau) == Measured(3.0, "../benchmarks/own.json")
    for name in ("other", "old"):
        shown = reports.figures(name, tau)
        assert shown.values is None and shown.text == "not measured with the present weights"
    assert reports.figures("none", tau).text == NOT_YET
    assert reports.figures("own", lambda r: r["rows"][5]["tau"]).text == NOT_YET


def test_verdicts_are_computed() -> None:
    row = Row("", (2.0, 4.0), (2.001, 4.0), 3.0, Measured((1.0, 5.0)))
    assert row.verdict() == "formula equal, ours +50 %, measured -50 to +25 %"
    assert Row("", 1.0, 20.0).verdict() == "formula 20-fold"
    assert Row("", "a curve", 1.0).verdict() == "" and Row("", 1.0, 2.0, compare=False).verdict() == ""


def test_columns_that_nothing_uses_are_left_out() -> None:
    shown = Table("T", [Row("a", 1.0, 1.0)]).render()
    assert "| the paper | its formula | agreement" in shown and "measured" not in shown
