# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab figures`: what is measured, what is skipped, and that a failure loses nothing."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import dsd_lab
from tiny_models import make_tiny_model

from dsd_lab.bench.profiles import ROBOT, load_profile
from dsd_lab.figures import runs as runs_module
from dsd_lab.figures.runs import CURRENT, Run, load_runs, make_figures, measure, minutes_of, select, state_of
from dsd_lab.report import BenchError, code_digest, command_line, header, machine, shipped

CODE = ["dsd_lab/report.py"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a model, two pages and no reports."""
    make_tiny_model(tmp_path / "models" / "draft", seed=1)
    for folder in ("benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# Top\n")
    (tmp_path / "benchmarks" / "README.md").write_text("# Reports\n")
    return tmp_path


def reported(run: Run, root: Path, **changed: object) -> str:
    report = {
        "command": run.command,
        "code": {"of": CODE, "digest": code_digest(CODE)},
        "models": {"draft": {"name": "draft", "fingerprint": shipped(root)["draft"]}},
    }
    (root / "benchmarks" / f"{run.name}.json").write_text(json.dumps(report | changed))
    return ""


def test_a_report_of_present_weights_code_and_command_is_current(root: Path) -> None:
    run, ships = Run("one", "dsd-lab bench overhead", 1), shipped(root)
    assert state_of(run, ships, root) == "is not there"
    reported(run, root)
    assert state_of(run, ships, root) == CURRENT
    assert "another command" in state_of(replace(run, command="dsd-lab bench modes"), ships, root)
    assert "another draft" in state_of(run, ships | {"draft": "f" * 32}, root)
    reported(run, root, models={"layer": {"name": "layer.safetensors", "fingerprint": "0" * 32}})
    assert state_of(run, ships, root) == CURRENT
    layer = root / "models" / "draft-smollm2" / "layer.safetensors"
    layer.parent.mkdir()
    layer.write_bytes(b"trained anew")
    assert "another layer" in state_of(run, shipped(root), root)
    reported(run, root, models={"both": {"name": "SmolLM2.gguf", "fingerprint": "0" * 32}})
    assert state_of(run, ships, root) == CURRENT  # a model that does not ship
    reported(run, root, code={"of": CODE, "digest": "0"})
    assert "earlier code" in state_of(run, ships, root)
    (root / "benchmarks" / "one.json").write_text("{")
    assert "no JSON" in state_of(run, ships, root)


def test_a_failure_ends_nothing_and_the_next_start_goes_on_there(root: Path) -> None:
    runs = {name: Run(name, f"dsd-lab bench {name}", 2) for name in ("first", "second", "third")}
    said: list[str] = []
    asked: list[str] = []
    broken = {"second"}

    def ask(run: Run, folder: Path) -> str:
        asked.append(run.name)
        return "exit code 2" if run.name in broken else reported(run, folder)

    assert make_figures([], root=root, runs=runs, say=said.append, ask=ask) == ["second: exit code 2"]
    assert asked == ["first", "second", "third"]
    assert said[3] == "3 to measure, about 6 minutes on two idle cores"
    broken.clear()
    assert make_figures([], root=root, runs=runs, say=said.append, ask=ask) == []
    assert asked[3:] == ["second"]
    said.clear()
    assert make_figures([], root=root, runs=runs, say=said.append, ask=ask) == []
    assert asked[4:] == [] and said[-1] == "nothing to measure"
    assert make_figures(["third"], again=True, root=root, runs=runs, say=said.append, ask=ask) == []
    assert asked[4:] == ["third"]


def test_all_figures_are_measured_within_an_hour() -> None:
    runs = load_runs().values()
    assert {run.kind for run in runs} == {"timed", "held", "counted"}
    assert minutes_of(runs) <= 58  # of the hour


def test_two_counted_reports_are_measured_at_once_after_the_others(root: Path) -> None:
    kinds = {"one": "counted", "first": "timed", "two": "counted", "held": "held"}
    both, asked = threading.Barrier(2, timeout=60), list[str]()
    runs = {name: Run(name, f"dsd-lab bench {name}", 2, kind) for name, kind in kinds.items()}

    def ask(run: Run, folder: Path) -> str:
        asked.append(run.name)
        if run.kind == "counted":
            both.wait()  # else it would wait for ever
        return reported(run, folder)

    assert make_figures([], root=root, runs=runs, say=lambda line: None, ask=ask) == []
    assert asked[:2] == ["first", "held"] and set(asked[2:]) == {"one", "two"} and minutes_of(runs.values()) == 6


def test_a_run_s_kind_is_that_of_its_report() -> None:
    """A profile with times of its own holds the models to them; a report at real speed names none."""
    for run in load_runs().values():
        words = run.words
        if words[:2] in (["bench", "modes"], ["bench", "spec"]):
            usual = ROBOT if words[1] == "modes" else "loopback"
            profile = words[words.index("--profile") + 1] if "--profile" in words else usual
            assert (run.kind == "held") is load_profile(profile).paced, run.name


def test_runs_are_chosen_by_name_or_by_beginning() -> None:
    runs = load_runs()
    assert select(runs, []) == list(runs.values())
    assert [run.name for run in select(runs, ["overhead", "fleet*"])] == ["overhead", "fleet"]
    with pytest.raises(BenchError, match="no report 'x'; name some of overhead"):
        select(runs, ["x"])


def test_a_report_is_replaced_only_by_one_that_was_measured(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "benchmarks" / "one.json"
    path.write_text("before")
    writes = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{}'); sys.exit(int(sys.argv[1]))"
    monkeypatch.setattr(runs_module, "_PROGRAM", [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert measure(Run("one", "dsd-lab 0", 1), root) == "exit code 3" and path.read_text() == "before"
    monkeypatch.setattr(runs_module, "_PROGRAM", [sys.executable, "-c", writes])
    assert measure(Run("one", "dsd-lab 0", 1), root) == "" and json.loads(path.read_text()).keys() == {"took_s"}
    assert "ended with exit code 1" in measure(Run("one", "dsd-lab 1", 1), root)


def test_a_header_says_what_was_measured_and_names_no_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/x/dsd-lab", "bench", "--draft", str(root / "models"), "--json", "/tmp/x"])
    found = header("tea", CODE, draft=str(root / "models" / "draft"), target="ab" * 16)
    assert found["command"] == "dsd-lab bench --draft models" and found["torch"]
    assert found["models"]["draft"] == {"name": "draft", "fingerprint": shipped(root)["draft"]}
    assert found["models"]["target"] == {"name": "", "fingerprint": "ab" * 16}
    assert re.fullmatch(r"[0-9a-f]{12}|", found["tree"])  # none outside a checkout
    assert found["code"] == {"of": CODE, "digest": code_digest(CODE)}
    assert re.search(r", \d+ cores, \d+ GiB, Linux", machine()) and isinstance(found["dirty"], bool)
    assert command_line(["dsd-lab", "a b", "--plot=/x/y.png", "--target=/srv/m"]) == "dsd-lab 'a b' --target=m"
    assert (
        command_line(["-c", "bench", "soak"])
        == command_line(["/x/dsd_lab/cli/__main__.py", "bench", "soak"])
        == "dsd-lab bench soak"
    )


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ('"""Other words."""\n\n\ndef f():  # why\n    return 1\n', True),
        ('"""Words."""\n\n\ndef f():\n    """Docs."""\n    return 2\n', False),
    ],
)
def test_docstrings_and_comments_are_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, same: bool
) -> None:
    def digest(content: str, folder: Path) -> str:
        (folder / "room").mkdir(parents=True)
        (folder / "room" / "module.py").write_text(content)
        monkeypatch.setattr("dsd_lab.report.SOURCE", folder)
        assert code_digest(["room"]) == code_digest(["room", "room/module.py"])
        return code_digest(["room"])

    before = digest('"""Words."""\n\n\ndef f():\n    """Docs."""\n    return 1\n', tmp_path / "before")
    assert (digest(text, tmp_path / "after") == before) is same


def test_only_says_what_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dsd_lab(capsys, "figures", "--dry-run", "--again", "overhead")
    assert code == 0 and out.startswith("overhead: ") and "to measure, about" in out, err
    code, _, err = dsd_lab(capsys, "figures", "nothing")
    assert code == 2 and "there is no report 'nothing'" in err and err.count("\n") == 1
