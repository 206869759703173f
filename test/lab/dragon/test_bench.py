# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench dragon` and `dragon-lm` with tiny models: consistent figures, and their sources."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hashed_words import HashedWords
from tiny_text import make_tiny_text

from dsd_lab.bench.pace import Pace
from dsd_lab.dragon import METHODS, bench as dragon_bench
from dsd_lab.dragon.bench import MEASURED, DragonBench, draw_dragon, link_profile, measure_dragon, render
from dsd_lab.dragon.corpus import Passages, read_corpus
from dsd_lab.dragon.lm import LmSetting, Scorer, draw_lm, measure_lm, mixture_of, render as render_lm, score_window
from dsd_lab.dragon.recorded import RecordedModel, Rows
from dsd_lab.dragon.settings import VARIANTS, variants_named
from dsd_lab.report import BenchError
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import LocalMixture
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.sequence import next_logits_together

torch.set_num_threads(1)
DOCUMENTS = [Retrieved("a", "The chair is red.", 0.4), Retrieved("b", "It rains.", -0.2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_tiny_text(tmp_path_factory.mktemp("tiny"), seed=3, max_positions=512)
    return load_model(ModelSettings(str(directory)))


def test_what_is_recorded_is_what_the_model_says(model):
    rows = Rows(model)
    recorded = RecordedModel(rows, "device")
    asking = DocumentPrompt(model)
    real = LocalMixture(model, asking, "what colour?", DOCUMENTS, 0.0)
    again = LocalMixture(recorded, asking, "what colour?", DOCUMENTS, 0.0)
    for tokens in ([], [5], [5, 9, 7], [5, 8], [5, 9, 7, 4], []):
        for mixture in (real, again):
            mixture.follow(tokens)
        one, other = real.next(), again.next()
        assert torch.allclose(one.p, other.p, atol=1e-5) and one.log_weight == other.log_weight
    computed = rows.computed
    again.follow([5, 9, 7])
    again.next()
    assert rows.computed == computed  # made once
    with pytest.raises(ContextError):
        again.follow([5] * 600)
        again.next()


def test_recorded_passes_take_their_time(model):
    recorded = RecordedModel(Rows(model), "device")
    recorded.pace, recorded.reading_s = Pace(0.07, 0.7), 0.01
    sequences = [recorded.begin(), recorded.begin()]
    for sequence in sequences:
        sequence.append([5, 6, 7])
    began = time.monotonic()
    next_logits_together(sequences)
    # 0.07 s, a tenth more for the second sequence, and 0.01 for each of four tokens beyond the first.
    assert time.monotonic() - began >= 0.07 + 0.007 + 0.04
    assert recorded.passes == 1


def test_the_corpus_keeps_its_test_apart(model):
    def count(text: str) -> int:
        return len(text.split())

    corpus = read_corpus(count, 48)
    assert len(corpus.passages) > 300 and len(corpus.held_out) > 5
    assert max(map(count, corpus.passages)) <= 48
    held_out = " ".join(corpus.held_out)
    assert not [text for text in corpus.passages if text in held_out and len(text) > 120]
    encoder = HashedWords()
    texts = ["red chairs", "blue tables", "red tables"]
    found = Passages(encoder, texts).retrieve("red chairs", 2)
    assert [d.text for d in found] == ["red chairs", "red tables"]
    assert found[0].relevance == pytest.approx(20.0, rel=1e-4)


FAST = DragonBench(
    questions=1, trips_ms=(0.0, 40.0), device_ms=4.0, cloud_ms=1.0, device_read_ms=0.0,
    cloud_read_ms=0.0, max_tokens=6,
)  # fmt: skip


def test_a_bench_of_every_method(model, tmp_path, monkeypatch):
    monkeypatch.setattr("dsd_lab.dragon.bench.read_corpus", few_passages)
    report = measure_dragon(FAST, model, HashedWords())
    json.dumps(report, allow_nan=False)
    rows = {(row["variant"], row["trip_ms"]): row for row in report["rows"]}
    assert {row["method"] for row in report["rows"]} == {*METHODS} - {"cloud"}  # as crcg-cloud
    assert len(rows) == 2 * len(MEASURED)
    for (variant, trip), row in rows.items():
        assert row["tokens"] == 6
        assert row["per_token_ms"] == pytest.approx(row["total_ms"] / 6)
        assert 0 < row["first_token_ms"] <= row["total_ms"]
        silent = row["method"] in ("device", "crcg")
        assert (row["bytes_down_per_token"] == 0) == silent, (variant, trip)
        if not silent:  # the trip is there, and only once where nothing is aggregated
            assert row["total_ms"] >= 0.8 * trip
    full, sparse = rows["drdg-tw, full", 0.0], rows["drdg-tw", 0.0]
    assert full["bytes_down_per_token"] > 4 * model.vocab_size
    assert sparse["bytes_down_per_token"] < full["bytes_down_per_token"]
    assert rows["drdg-tw", 40.0]["decode_ms"] >= 0.8 * 40
    assert rows["drcg-kv", 0.0]["bytes_down_per_token"] > rows["drcg-text", 0.0]["bytes_down_per_token"]
    # All that is exact and greedy gives the same words.
    texts = {a["variant"]: a["text"] for a in report["answers"]}
    assert texts["dragon"] == texts["dragon, full"] == texts["drdg-tw"] == texts["drdg-tw, full"] == texts["drcg-kv"]
    assert texts["drdg-sw"] == texts["drdg-sw, full"]
    assert "drdg-sw, full" in render(report) and report["reached"]
    draw_dragon(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def few_passages(count_tokens, size):
    return read_corpus(lambda text: len(text.split()), 24)._replace(
        passages=[
            f"A passage about the {thing} of Python." for thing in ("with", "for", "try", "list", "global", "def")
        ]
    )


def test_variants_beyond_the_usual_are_named(model, monkeypatch):
    """Algorithm 1 with each side's own noise, and questions as they are asked."""
    monkeypatch.setattr(dragon_bench, "read_corpus", few_passages)
    names = ["device", "dragon, independent"]
    bench = replace(FAST, questions=1, trips_ms=(0.0,), as_asked=True)
    report = measure_dragon(bench, model, HashedWords(), variants_named(names, ()))
    assert {row["variant"] for row in report["rows"]} == set(names) and report["reached"] == {}
    assert VARIANTS["dragon, independent"].settings(seed=3).randomness == "independent"
    assert variants_named([], MEASURED) is MEASURED
    with pytest.raises(BenchError, match="there is no variant 'dragons'; name some of dragon; "):
        variants_named(["dragons"], ())


def test_links_are_as_long_as_they_are_called():
    profile = link_profile(300.0, 40.0)
    assert profile.delay_up_s + profile.delay_down_s == pytest.approx(0.002 + 0.8 * 0.3)
    assert 2 * profile.jitter_s == pytest.approx(0.4 * 0.3)  # and so a fifth more or less
    for wrong in (
        {"questions": 0}, {"trips_ms": ()}, {"trips_ms": (math.nan,)}, {"device_ms": -1.0}, {"mbps": math.inf},
        {"time_scale": 0.0}, {"max_tokens": 1}, {"documents": 0},
    ):  # fmt: skip
        with pytest.raises(BenchError):
            DragonBench(**wrong)


def test_perplexity_is_of_the_mixture(model):
    setting = LmSetting(windows=2, window=16, passage=8, context=40, documents=(0, 1, 2))
    window = [7 + i % 40 for i in range(16)]
    scorer = Scorer(model, window, setting)
    ours, theirs = (DOCUMENTS, [Retrieved("c", "The table is blue.", 0.9), Retrieved("d", "Go.", 0.1)])
    found = score_window(scorer, ours, theirs, setting.documents)
    assert all(len(row) == 14 for rows in found.values() for row in rows)
    for method in ("crcg", "drcg", "dragon"):
        assert np.allclose(found[method][0], found["none"][0])
    # The two sides' mixture is that of all their documents in one place.
    everything = [(scorer.with_document(d.text), d.relevance) for d in ours + theirs]
    whole, _ = mixture_of(everything, scorer.alone())
    assert np.allclose(np.exp(found["dragon"][2]), whole)
    # And a token's probability is what the model gives it.
    sequence = model.begin()
    sequence.append([min(model.eos_token_ids), *window[:2]])
    p = torch.softmax(sequence.next_logits().double(), 0)
    assert math.exp(scorer.alone()[0]) == pytest.approx(float(p[window[2]]), rel=1e-4)


def test_a_bench_of_perplexity(model, tmp_path):
    setting = LmSetting(windows=2, window=16, passage=200, context=300, documents=(0, 1))
    seen: list[int] = []
    report = measure_lm(setting, model, HashedWords(), lambda done, text: seen.append(done))
    assert seen == [0.5, 1.0]
    with pytest.raises(BenchError, match="allow passages of more tokens"):
        measure_lm(replace(setting, passage=9), model, HashedWords())
    json.dumps(report, allow_nan=False)
    assert len(report["rows"]) == 8 and all(row["perplexity"] > 1 for row in report["rows"])
    none = {row["perplexity"] for row in report["rows"] if row["method"] == "none"}
    assert len(none) == 1
    assert "drcg" in render_lm(report)
    draw_lm(report, tmp_path / "lm.png")
    every = measure_lm(replace(setting, windows=0, documents=(0,)), model, HashedWords())
    assert every["windows"] > 2 and len(every["rows"]) == 4
    for wrong in ({"windows": 1}, {"window": 8}, {"context": 100}, {"documents": (2, 1)}, {"documents": ()}):
        with pytest.raises(BenchError):
            LmSetting(**wrong)
