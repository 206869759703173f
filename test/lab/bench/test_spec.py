# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench spec` and text models in `dsd-lab bench modes`, with tiny random Llamas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import dsd_lab
from text_pair import GREEDY, text_pair

from dsd_lab.bench import spec
from dsd_lab.bench.harness import Decoding
from dsd_lab.bench.spec import TASKS, chosen, read_questions
from dsd_lab.figures.pages import Pages
from dsd_lab.report import BenchError

# In Spec-Bench's format; its own questions are not copied here.
QUESTIONS = [
    (1, "writing", ["Write a line about a robot dog.", "Now make it rhyme."]),
    (2, "translation", ["Translate German to English: Der Hund schläft."]),
    (3, "summarization", ["Summarize: The dog ran. " + "It ran on and on. " * 12]),
    (4, "qa", ["Who built the first robot dog?"]),
    (5, "math_reasoning", ["A dog has 4 legs. How many have 3 dogs?"]),
    (6, "rag", ["The dock is in room 5.\n\nWhere is the dock?"]),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    return text_pair(tmp_path_factory.mktemp("llamas"))


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "question.jsonl"
    records = [{"question_id": n, "category": c, "turns": t, "reference": ["none"]} for n, c, t in QUESTIONS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(capsys, pair, questions, tmp_path, *more):
    file = tmp_path / "spec.json"
    code, out, err = dsd_lab(
        capsys, "bench", "spec", "--questions", questions, *pair, "--max-tokens", "12", "--cache", tmp_path / "cache",
        "--json", file, *more,
    )  # fmt: skip
    return code, out, err, json.loads(file.read_text()) if file.exists() else None


def test_every_mode_answers_every_task_with_the_targets_tokens(capsys, pair, questions, tmp_path):
    code, out, err, report = run(capsys, pair, questions, tmp_path, "--modes", GREEDY)
    assert code == 0, err
    assert report["exact"] and report["questions"]["of"] == "another file"
    assert [row["label"] for row in report["rows"]] == GREEDY.split()
    for row in report["rows"]:
        assert list(row["tasks"]) == [*TASKS, "Overall"]
        assert 12 < row["tasks"]["MT-bench"]["tokens"] <= 24  # two turns
        low, high = row["tasks"]["Overall"]["speedup_95"]
        assert low <= row["tasks"]["Overall"]["speedup"] <= high
    ar, dsd, fsd, *_ = report["rows"]
    assert ar["tasks"]["Overall"]["speedup"] == ar["tasks"]["Overall"]["tau"] == 1.0
    assert 1.0 < dsd["tasks"]["Overall"]["tau"] == fsd["tasks"]["Overall"]["tau"] <= 5.0
    for task in fsd["tasks"].values():
        assert 0.0 <= task["miss_rate"] <= 1.0 and 1.0 <= task["mean_exit"] <= 2.0
    assert dsd["tasks"]["QA"]["miss_rate"] is None
    assert "#MAT" in out and "Summarization" in out and "6 of 6 questions (another file)" in out
    pages = Pages(tmp_path)
    assert pages.rendered("spec") == "Not measured with the present code yet."
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "spec.json").rename(tmp_path / "benchmarks" / "spec.json")
    shown = pages.rendered("spec")
    assert "| method | MT-bench | Translation | Summarization | QA | Math | RAG | #MAT | tokens/s | overall |" in shown
    assert f"| `dsd` | {dsd['tasks']['MT-bench']['speedup']:.2f}x |" in shown
    assert shown.count("| `dsd` |") == 2 and "6 of 6 questions, temperature 0" in shown


def test_robot_and_verifier_have_a_process_each_and_read_the_same_conversations(capsys, pair, questions, tmp_path):
    options = ("--modes", "ar stream dsd", "--transport", "process")
    code, _, err, report = run(capsys, pair, questions, tmp_path, *options)
    assert code == 0, err  # each mode's tokens are those of ar, in the second turn as well
    assert report["transport"] == "process" and report["rows"][0]["tasks"]["Overall"]["questions"] == 6


def test_held_times_are_reported_as_if_they_had_not_been_scaled(capsys, pair, questions, tmp_path):
    options = ("--modes", "ar", "--profile", "rtx-a100", "--per-category", "1", "--max-tokens", "4")
    code, _, err, report = run(capsys, pair, questions, tmp_path, *options, "--time-scale", "0.02")
    assert code == 0, err
    overall = report["rows"][0]["tasks"]["Overall"]
    assert overall["tokens_per_second"] < 1 / 0.442  # a pass of the target
    assert overall["target_ms"] > 441


def test_our_own_questions_are_in_all_of_spec_benchs_tasks(pair, tmp_path):
    questions, _ = read_questions(spec.OWN_QUESTIONS)
    assert len(questions) == 80 and {question.task for question in questions} == set(TASKS)
    categories = [json.loads(line)["category"] for line in spec.OWN_QUESTIONS.read_text().splitlines()]
    turns = {q.number: len(q.turns) for q in questions}
    assert all(turns[q.number] == (2 if q.task == "MT-bench" else 1) for q in questions)
    assert all(categories.count(name) == 2 for name in TASKS["MT-bench"])
    assert max(sum(map(len, question.turns)) for question in questions) < 600
    report = spec.measure(flags(pair, None, tmp_path, per_category=1), lambda done, text: None)
    assert report["questions"]["of"] == "ours" and report["questions"]["count"] == 80


def test_an_interrupted_run_asks_only_what_is_left(capsys, pair, questions, tmp_path, monkeypatch):
    asked, ask = [], spec._Run.ask

    def counted(self, question, say):
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(question.number)
        return ask(self, question, say)

    monkeypatch.setattr(spec._Run, "ask", counted)
    with pytest.raises(KeyboardInterrupt):
        spec.measure(flags(pair, questions, tmp_path), lambda done, text: None)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(kept.read_text() + '[5, {"cut')  # killed while writing
    monkeypatch.setattr(spec._Run, "ask", lambda self, q, say: asked.append(q.number) or ask(self, q, say))
    report = spec.measure(flags(pair, questions, tmp_path), lambda done, text: None)
    assert asked == [1, 2, 3, 4, 5, 6] and not any((tmp_path / "cache").iterdir())
    assert report["rows"][0]["tasks"]["Overall"]["questions"] == 6


def flags(pair, questions, tmp_path, **more):
    """Modes ar and dsd; ``pair``: as the command line has it."""
    return spec.Flags(
        questions=questions, model=pair[1], draft=pair[3], modes="ar dsd", decoding=Decoding(max_tokens=4),
        cache=tmp_path / "cache", **more,
    )  # fmt: skip


def test_other_tokens_end_the_run(capsys, pair, questions, tmp_path, monkeypatch):
    honest = spec.decode

    def wrong(channel, draft, decode, scene, **options):
        reply = honest(channel, draft, decode, scene, **options)
        if decode.mode == "dsd":
            reply.tokens[0] += 1
        return reply

    monkeypatch.setattr(spec, "decode", wrong)
    code, _, err, _ = run(capsys, pair, questions, tmp_path, "--modes", "ar,dsd")
    assert code == 2 and "are not the target's" in err


def test_earlier_turns_are_in_the_prompt(pair, questions, tmp_path, monkeypatch):
    seen = []
    honest = spec._Run._reply

    def noted(self, decode, messages, seed):
        seen.append([role for role, _ in messages])
        return honest(self, decode, messages, seed)

    monkeypatch.setattr(spec._Run, "_reply", noted)
    spec.measure(flags(pair, questions, tmp_path, per_category=1), lambda done, text: None)
    assert seen.count(["user", "assistant", "user"]) == 2  # the second turn, in two modes


def test_a_file_that_is_not_the_benchmark_is_refused_with_where_to_get_it(tmp_path):
    for content, said in [
        (None, "hemingkx/Spec-Bench"),
        ("", "holds no questions"),
        ("nonsense\n", "line 1 is no question"),
        ('{"question_id": 1, "category": "poems", "turns": ["a"]}\n', "line 1 is no question"),
        ('{"question_id": 1, "category": "qa", "turns": []}\n', "without text"),
        ('{"question_id": 1, "category": "qa", "turns": ["a"]}\n' * 2, "question 1 twice"),
    ]:
        path = tmp_path / "question.jsonl"
        if content is not None:
            path.write_text(content)
        with pytest.raises(BenchError, match=said) as caught:
            read_questions(path)
        assert "github.com/hemingkx/Spec-Bench" in str(caught.value)


def test_a_share_is_spread_over_each_task():
    questions = [spec.Question(n, task, ("a",)) for n, task in enumerate(t for t in TASKS for _ in range(80))]
    assert [q.number for q in chosen(questions, 2)][:4] == [0, 40, 80, 120]
    assert len(chosen(questions, 0)) == len(questions)
