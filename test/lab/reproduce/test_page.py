# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md is what `dsd-lab papers` writes, its formulas are computed, and stale reports show no figure."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsd_lab.cli.main import main
from dsd_lab.dragon.lm import LmSetting, make_report as lm_report
from dsd_lab.papers import dragon_simulator, proofs, theory
from dsd_lab.papers.formulas import FORMULAS
from dsd_lab.report import share
from dsd_lab.reproduce import dragon, dssd, fsd, tslt
from dsd_lab.reproduce.table import HELD, NOT_YET, PRINTED, TIMED, Measured, Reports, Row, Table, estimate

ROOT = Path(__file__).resolve().parents[3]
PAPERS = (fsd, dssd, tslt, dragon)
NOTHING = Reports(ROOT / "no-such-folder", {})


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "--out", str(tmp_path / "papers.md")]) == 0
    assert "is written" in capsys.readouterr().out
    written = (tmp_path / "papers.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), "run dsd-lab figures --pages"
    assert main(["papers"]) == 0
    assert capsys.readouterr().out == written


def test_no_formula_or_measurement_is_typed_in() -> None:
    """The columns beside the paper's own are never written as numbers."""
    for rows in PRINTED["rows"].values():
        assert all(row.keys() <= {"name", "paper", "form", "why", "compare"} for row in rows)
    computed = {"formula", "ours", "simulated", "timed", "held", "counted"}
    for paper in PAPERS:
        columns: list[ast.expr] = []
        for node in ast.walk(ast.parse(Path(paper.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row":
                columns += [*node.args[2:8], *(k.value for k in node.keywords if k.arg in computed)]
            elif isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                columns += [value for key, value in zip(keys, node.values, strict=True) if key in computed]
        for column in columns:
            parts = column.elts if isinstance(column, ast.Tuple) else [column]
            typed = all(isinstance(part, ast.Constant) and part.value is not None for part in parts)
            assert not typed, f"{paper.__name__}:{column.lineno}"


def formulas(paper: Any) -> dict[str, list[str]]:
    """The cells of the formula and ours columns, by table."""
    return {table.title: [cell for row in table.rows for cell in row.cells()[2:5]] for table in paper.tables(NOTHING)}


@pytest.mark.parametrize(
    ("paper", "module", "function", "tables"),
    [
        (fsd, theory, "api_cost", {"Table 1: API cost"}),
        (fsd, theory, "predict", {"Figure 1, Tables 3 and 4: where draft and target run", "Table 6: speed-ups",
                                  "Figure 4b: draft length", "Table 8: the robot"}),
        (fsd, theory, "fsd_speedup", {"Figure 6: equation 9"}),
        (dssd, proofs, "dssd_comm_seconds", {"Table 1: communication time",
                                             "Table 2: communication, OPT-125M to 6.7B"}),
        (dssd, theory, "expected_tokens", {"Table 2: communication and speed-up, OPT-125M to 13B",
                                           "Table 3: heterogeneous devices",
                                           "Section 4.2: the link", "Section 4.2: the draft length"}),
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
                measured = [one for one in row.columns.values() if isinstance(one, Measured)]
                assert all(one == Measured(text=NOT_YET) for one in measured) and not row.links
            assert table.render().startswith("### ")


def test_a_report_of_other_weights_is_not_shown(tmp_path: Path) -> None:
    for name, marks in (
        ("own", {"draft": "d", "target": "t"}),
        ("other", {"draft": "x", "target": "t"}),
        ("old", None),
    ):
        models = {} if marks is None else {"models": {n: {"name": n, "fingerprint": f} for n, f in marks.items()}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [{"label": "dsd", "tau": 3.0}], **models}))
    reports = Reports(tmp_path, {"draft": "d", "target": "t"})

    def tau(report: Any) -> float:
        return float(report["rows"][0]["tau"])

    assert reports.figures("own", tau) == Measured(3.0, "../benchmarks/own.json")
    for name in ("other", "old"):
        shown = reports.figures(name, tau)
        assert shown.values is None and shown.text == "not measured with the present weights"
    assert reports.figures("none", tau).text == NOT_YET
    assert reports.figures("own", lambda r: r["rows"][5]["tau"]).text == NOT_YET


def test_verdicts_are_computed() -> None:
    row = Row("", (2.0, 4.0), (2.001, 4.0), 3.0, held=Measured((1.0, estimate(5.0, 9))))
    assert row.verdict() == "formula equal, ours +50 %, held -50 to +25 %"
    assert Row("", 1.0, 20.0).verdict() == "formula 20-fold"
    assert Row("", "a curve", 1.0).verdict() == "" and Row("", 1.0, 2.0, compare=False).verdict() == ""


def test_columns_that_nothing_uses_are_left_out() -> None:
    shown = Table("T", [Row("a", 1.0, 1.0)]).render()
    assert "| the paper | its formula | agreement" in shown and "held" not in shown
    assert "the paper" not in Table("T", [Row("a", None, 1.0)], cells="b / c").render()


def test_a_figure_shows_its_interval_and_how_many_were_measured() -> None:
    wide, bare = {"value": 2.0, "low": 1.0, "high": 3.0, "of": 8}, estimate(4.0, 8)
    assert Row("", held=Measured([wide, bare, None])).cells()[6] == "2.00 [1.00, 3.00] / 4.00 / -, n 8"
    assert Row("", held=Measured(wide | {"high": None})).cells()[6] == "2.00 [1.00, no bound], n 8"
    near = estimate(10.0, 3, error=1.0)
    assert near["low"] == pytest.approx(8.04, abs=0.01) and near["high"] == pytest.approx(11.96, abs=0.01)
    shown = Table("T", [Row("a", held=Measured(1.0, "../benchmarks/x.json"))]).render()
    assert "Reports: [x](../benchmarks/x.json)." in shown


def reports_of(folder: Path, **found: Any) -> Reports:
    """Reports with these contents alone, of no models."""
    for name, report in found.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps({"models": {}} | report))
    return Reports(folder, {})


def row_of(paper: Any, reports: Reports, title: str, name: str) -> Row:
    table = next(table for table in paper.tables(reports) if table.title == title)
    return next(row for row in table.rows if name in row.name)


def test_the_second_best_method_is_the_best_of_the_others(tmp_path: Path) -> None:
    setting = LmSetting(windows=4, documents=(0, 2))
    sums = {"none": -3.0, "crcg": -2.0, "drcg": -2.5, "dragon": -1.0}
    model = SimpleNamespace(name="m", fingerprint="f")
    spread = {method: [[-3.0] * 4, [p - 0.1, p + 0.1, p, p]] for method, p in sums.items()}
    spread["none"] = [[-3.0] * 4] * 2
    report = lm_report(setting, model, 9, spread)
    assert report["second"] == "crcg" and report["gain_to_second"]["value"] == pytest.approx(2.0)
    assert report["gain_to_second"]["low"] < 2.0 < report["gain_to_second"]["high"]
    row = row_of(dragon, reports_of(tmp_path, dragon_lm=report), "Figure 5: perplexity", "second-best")
    assert row.counted is not None and row.counted.values == report["gain_to_second"]
    spread["crcg"] = spread["drcg"] = [[-3.0] * 4, [-2.0, -3.6, -3.1, -3.1]]  # in some resamples they gain nothing
    assert lm_report(setting, model, 9, spread)["gain_to_second"]["high"] is None


def test_pipelines_have_the_delays_of_the_appendix() -> None:
    """A.3: Figure 13 has delays of its own."""
    assert dragon.PIPELINES["13: both rejected"] == (1.5, 1.8, 2.0, 1.0, (False, False))
    row = row_of(dragon, NOTHING, "Table 1, Figures 10 to 13: waiting times", "Figure 13")
    assert row.formula == pytest.approx(4.3) and row.simulated == pytest.approx(4.3)


def test_runs_in_the_demo_s_rooms_are_those(tmp_path: Path) -> None:
    situations = {name: {"closed_loop": share([True] * hits)} for hits, name in enumerate(("plain", "demo"), 7)}
    report = {"models": {}, "target": {"situations": situations, "all": {"closed_loop": share([False])}}}
    row = row_of(fsd, reports_of(tmp_path, pair=report), "Figure 5: the task", "demo's rooms")
    assert isinstance(row.simulated, Measured) and row.simulated.values == situations["demo"]["closed_loop"]


def test_dragon_is_compared_with_methods_that_send_the_same(tmp_path: Path) -> None:
    times = {"dragon": 100, "dragon, full": 150, "drdg-tw": 400, "drdg-tw, full": 500, "drdg-sw": 125,
             "drdg-sw, full": 300, "device": 80}  # fmt: skip
    rows = [{"variant": v, "trip_ms": 300.0, "decode_ms": ms, "per_token_ms": ms} for v, ms in times.items()]
    reports = reports_of(tmp_path, dragon_latency={"setting": {"questions": 5}, "rows": rows})
    for name, percent in (
        ("token-wise synchronisation, heads", 75), ("token-wise synchronisation, whole", 70),
        ("sequence-wise synchronisation, heads", 20), ("sequence-wise synchronisation, whole", 50),
    ):  # fmt: skip
        row = row_of(dragon, reports, "Figure 6: latency a token", f"% below {name}")
        assert row.held is not None and row.held.values == [{"value": pytest.approx(percent), "of": 5}] * 2


def answered(*speeds: float) -> Any:
    """A report of `bench spec` with these speeds of stream, dsd and fsd."""
    rows = []
    for mode, speed in zip(("stream", "dsd", "fsd"), speeds, strict=True):
        figures = {"speedup": speed, "speedup_95": [0.1, 9.0], "questions": 24, "tau": 2.5, "target_ms": 450.0}
        figures |= {"miss_rate": 0.9, "mean_exit": 27.0} if mode == "fsd" else {"miss_rate": None, "mean_exit": None}
        rows.append({"mode": mode, "tasks": {"Overall": figures}})
    return {"rows": rows}


def test_a_row_of_a_mode_on_a_machine_shows_that_mode_on_that_machine(tmp_path: Path) -> None:
    reports = reports_of(
        tmp_path, spec=answered(1.1, 1.2, 1.3), spec_jetson=answered(2.1, 2.2, 2.3), spec_rtx=answered(3.1, 3.2, 3.3)
    )
    for tens, (machine, column) in enumerate((("this machine", TIMED), ("Jetson", HELD), ("RTX", HELD)), 1):
        for ones, mode in enumerate(("stream", "dsd", "fsd"), 1):
            row = row_of(fsd, reports, "Table 6 with a pretrained pair", f"`{mode}`, {machine}")
            found = row.columns[column]
            assert isinstance(found, Measured) and found.values[0]["value"] == pytest.approx(tens + ones / 10)
            assert ("spec-" + machine.lower()) in found.link or column == TIMED
            assert row.cells()[list(row.columns).index(column) + 1].endswith("n 24 questions")
    printed = PRINTED["fsd"]["table_6"]["Vicuna 68m/7B, RTX"][-1]
    assert row.paper == [pytest.approx(printed[0] * printed[1]), *printed[2:], pytest.approx(442)]


def test_a_proof_over_a_link_shows_that_proof_over_that_link(tmp_path: Path) -> None:
    rows = [
        {"label": mode, "timed": {
            str(rate): {"speedup": number + rate, "speedup_95": [0.0, 200.0], "replies": 6} for rate in (10, 50, 100)
        }}
        for number, mode in enumerate(("ar", "dsd", "dssd", "tslt"))
    ]  # fmt: skip
    reports = reports_of(tmp_path, wire_timed={"rows": rows})
    for rate, paper in ((10, None), (50, [1.24, 2.22]), (100, [1.41, 2.31])):
        row = row_of(dssd, reports, "Table 2: end to end, SmolLM2-135M and its draft", f"{rate} Mbit/s, gamma 8")
        assert [one["value"] for one in row.timed.values] == [rate + 1, rate + 2, rate + 3] and row.paper == paper


@pytest.mark.parametrize(("fsd_speed", "said"), [(0.4, "slower than plain rounds: 90 %"), (1.2, "")])
def test_the_page_says_where_fsd_is_slower_than_plain_rounds(tmp_path: Path, fsd_speed: float, said: str) -> None:
    reports = reports_of(tmp_path, spec=answered(1.0, 0.8, fsd_speed))
    row = row_of(fsd, reports, "Table 6 with a pretrained pair", "`fsd`, this machine")
    assert row.why.startswith(said) and bool(row.why) is bool(said)
    assert row.cells()[5] == f"{fsd_speed:.2f} [0.10, 9.00] / 2.50 / 90.00 / 27.00 / 450.00, n 24 questions"


def test_what_is_held_and_what_is_timed_stand_in_their_columns() -> None:
    """A report whose passes were held to given times is not shown as timed, nor the other way round."""
    reports = Reports(ROOT / "benchmarks", {})
    shown = 0
    for paper in PAPERS:
        for row in (row for table in paper.tables(reports) for row in table.rows):
            for column in (TIMED, HELD):
                found = row.columns[column]
                if isinstance(found, Measured) and found.link:
                    report = json.loads((ROOT / "docs" / found.link).read_text(encoding="utf-8"))
                    given = report.get("draft_ms") or report.get("setting", {}).get("device_ms")
                    assert bool(given) is (column == HELD), f"{row.name} shows {found.link} as {column}"
                    shown += 1
    assert shown > 10


def test_a_text_sends_nobody_to_a_page_that_says_nothing_of_its_model() -> None:
    for title, text in PRINTED["texts"].items():
        for sentence in re.split(r"(?<=[.)]) (?=[A-Z])", text):
            for link in re.findall(r"\]\(([^)#]+)", sentence):
                for model in re.findall(r"SmolLM2|Qwen\d?|Vicuna|OPT", sentence):
                    page = (ROOT / "docs" / link).read_text(encoding="utf-8")
                    assert model in page, f"{title} sends to {link}, which has no {model}"


def test_no_formula_invents_a_machine() -> None:
    """Times of models and links are given, never defaults."""
    for name, formula in FORMULAS.items():
        for argument, parameter in inspect.signature(formula).parameters.items():
            if argument in ("t_p", "t_q", "t_c", "t_v", "c", "rate", "tau", "alpha", "r"):
                assert parameter.default in (parameter.empty, 2.5), f"{name} has a default {argument}"  # Table 1's tau


def test_theorems_are_those_of_the_papers() -> None:
    """TSLT proves 3.2 and 4.14; DRAGON 4.2 and 6.2."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src" / "dsd_lab").rglob("*.py")]
    named = {
        number
        for page in pages
        for found in re.findall(r"Theorems? ((?:\d\.\d+(?:, | and )?)+)", page.read_text(encoding="utf-8"))
        for number in re.findall(r"\d\.\d+", found)
    }
    assert named and named <= {"3.2", "4.14", "4.2", "6.2"}
