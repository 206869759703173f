# SPDX-License-Identifier: Apache-2.0
"""The reader's corpus is as described; its training learns, resumes exactly and writes a loadable model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsd_lab.pair.reader import draw_errand, load_reader, mixture_answers, weighted
from dsd_lab.train.reader.corpus import FACT, GIVEN, GUESS, QUESTION_KINDS, UNKNOWN, draw_example, examples
from dsd_lab.train.reader.training import (
    SIZES,
    TOKENIZER,
    build_reader,
    draw_rows,
    encode,
    prompt_text,
    reader_loss,
    train_reader,
)
from dsd_lab.train.reader.words import draw_name, goals, relations
from dsd_lab.train.settings import ReaderSettings
from dsd_lab.train.tokenizer import EOS, train_tokenizer
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.vlm.loading import ModelSettings, load_model


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"{e.document} {e.question} {e.answer}" for e in examples(1, 300)], **TOKENIZER)


def test_equal_seeds_give_equal_examples() -> None:
    assert list(examples(3, 20)) == list(examples(3, 20)) != list(examples(4, 20))


def test_a_sure_word_stands_in_the_document_and_a_guessed_name_does_not() -> None:
    rng = random.Random(11)
    supported = lacking = 0
    for _ in range(1500):
        example = draw_example(rng)
        words = example.document.lower().replace(".", " ").split()
        for piece in example.pieces:
            word = piece.text.strip()
            if piece.weight == FACT and word not in (".", "must stay dry"):
                assert word.lower().split()[-1] in words, example
                supported += 1
            elif piece.weight == GUESS and word[:1].isupper():
                assert word.lower() not in words, example
                lacking += 1
    assert supported > 500 and lacking > 100


def test_a_document_holds_the_facts_it_is_given() -> None:
    rng = random.Random(12)
    for kind in QUESTION_KINDS[:-1]:
        both = draw_example(rng, kind, support=frozenset({"who", "what"}))
        assert not both.answer.endswith(UNKNOWN)
        assert {p.weight for p in both.pieces}.isdisjoint({GUESS, GIVEN})
    half = draw_example(rng, "bring", support=frozenset({"what"}))
    assert [p.weight for p in half.pieces].count(GIVEN) == 1  # the name teaches nothing there


def test_what_is_held_out_is_never_trained() -> None:
    assert not set(goals(True)) & set(goals(False)) and len(goals(True)) == 5
    assert not set(relations(True)) & set(relations(False)) and len(relations(True)) > 15
    rng = random.Random(13)
    assert not {draw_name(rng, True) for _ in range(200)} & {draw_name(rng, False) for _ in range(200)}


def test_losses_fall_on_the_answers_tokens(tokenizer) -> None:
    rng = random.Random(14)
    example = draw_example(rng, "bring", support=frozenset({"who", "what"}))
    ids, weights = encode(tokenizer, example)
    sure = [i for i, weight in zip(ids, weights, strict=True) if weight == FACT]
    wanted = "".join(p.text for p in example.pieces if p.weight == FACT)
    assert tokenizer.decode(sure) == wanted
    assert ids[-1] == EOS and len(ids) == len(weights)
    prompt = prompt_text(example.document, example.question)
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(prompt)


def test_the_training_arithmetic_is_transformers_own(tokenizer) -> None:
    model = build_reader(SIZES["tiny"], 3)
    rows = draw_rows(tokenizer, 0, 0, 4)[0]
    loss, _ = reader_loss(model, rows)
    logits = model(input_ids=rows.ids[:, :-1]).logits
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows.ids[:, 1:], reduction="none")
    assert loss.item() == pytest.approx((each * rows.weights).sum().item(), rel=1e-4)


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    def train(name: str, report: Callable[[str, float], None] | None = None) -> dict:
        settings = ReaderSettings(
            out=tmp_path / name, cache=tmp_path / name, smoke=True, steps=11, batch=6, save_seconds=0.0
        )
        train_reader(settings, report)
        return load_file(tmp_path / name / "reader" / "model.safetensors")

    def kill(line: str, share: float) -> None:
        raise Killed

    with pytest.raises(Killed):
        train("killed", kill)
    first, second = train("killed"), train("whole")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    # What the run writes is a model that the program loads and asks as it was trained.
    model = load_model(ModelSettings(path=tmp_path / "whole" / "reader"))
    assert not model.reads_pictures
    pieces = DocumentPrompt(model).pieces("The Viola chair is red.", "what colour is the Viola chair?")
    text = prompt_text("The Viola chair is red.", "what colour is the Viola chair?")
    assert pieces.head + pieces.tail == model.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_mixture_adds_up_its_weights(tokenizer) -> None:
    model = build_reader(SIZES["tiny"], 5).eval()
    rng = random.Random(15)
    errand = draw_errand(rng, 2, False)
    assert errand.answer.rpartition(" Go: ")[2].startswith("find the ")
    read = [*weighted(errand.device, 0.3), *weighted(errand.cloud, 0.7)]
    assert sum(one.weight for one in read) == pytest.approx(1.0)
    # A weight of one is the sequence alone, whatever else is there, and padding changes nothing.
    alone = mixture_answers(model, tokenizer, [errand.question], [[read[0]._replace(weight=1.0)]])
    silent = [one._replace(weight=0.0) for one in read[1:]]
    mixed = mixture_answers(model, tokenizer, [errand.question], [[read[0]._replace(weight=1.0), *silent]])
    assert alone == mixed


def test_bad_settings_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch must be at least 1"):
        ReaderSettings(batch=0)
    with pytest.raises(ValueError, match="size must be one of tiny, base, not 'huge'"):
        ReaderSettings(size="huge")
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:N"):
        ReaderSettings(device="tpu")
    with pytest.raises(ValueError, match="minutes must be above 0"):
        ReaderSettings(minutes=0)
    with pytest.raises(ValueError, match="dsd-lab train reader"):
        load_reader(tmp_path)
