# SPDX-License-Identifier: Apache-2.0
"""A side's mixture, with real tiny models, equals reading each document alone, whatever happened before."""

from __future__ import annotations

import math

import pytest
import torch
from asking import Shelf
from tiny_text import make_tiny_text

from dsd_ros.dragon.mixture import NOTHING_FOUND, KeptDocuments, LocalMixture, Preempted
from dsd_ros.dragon.prompts import MAX_DOCUMENT_CHARS, DocumentPrompt
from dsd_ros.vlm.errors import ContextError, ModelError, PromptError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.prompts import PromptTemplate

torch.set_num_threads(1)
SHELF = Shelf(("The chair is a red one, with four legs.", 0.3), ("A table.", -0.2), ("It rains.", 0.1))
QUESTION = "what colour is the chair?"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_tiny_text(tmp_path_factory.mktemp("text"), seed=3, kind="qwen2")
    return load_model(ModelSettings(str(directory)))


def by_hand_alone(model, text: str, tokens: list[int], temperature: float = 1.0):
    """One document in a sequence of its own."""
    sequence = model.begin()
    pieces = DocumentPrompt(model).pieces(text, QUESTION)
    sequence.append([*pieces.head, *pieces.tail, *tokens])
    return torch.softmax(sequence.next_logits().double() / temperature, 0)


def shares():
    return torch.softmax(torch.tensor([d.relevance for d in SHELF.documents], dtype=torch.float64), 0)


def by_hand(model, tokens: list[int], temperature: float = 1.0):
    """The documents one after the other."""
    rows = [by_hand_alone(model, document.text, tokens, temperature) for document in SHELF.documents]
    return sum(w * row for w, row in zip(shares(), rows, strict=True))


def mixture_of(model, **changes) -> LocalMixture:
    values = dict(temperature=0.0, kept=None) | changes
    return LocalMixture(model, DocumentPrompt(model), QUESTION, SHELF.documents, **values)


def close(found, expected) -> bool:
    return bool(torch.allclose(found.double(), expected, atol=1e-5))


def test_the_mixture_is_the_weighted_mean_of_its_documents(model):
    mixture = mixture_of(model, temperature=0.7)
    found = mixture.next()
    assert found.p.dtype == torch.float32 and abs(float(found.p.sum()) - 1) < 1e-5
    assert close(found.p, by_hand(model, [], temperature=0.7))
    relevances = [d.relevance for d in SHELF.documents]
    assert found.log_weight == pytest.approx(math.log(sum(map(math.exp, relevances))))
    for tokens in ([5], [5, 9], [5, 9, 7], [5, 9], [5, 8, 7, 6], [], [5, 9, 7, 4]):  # wherever the answer goes
        mixture.follow(tokens)
        assert close(mixture.next().p, by_hand(model, tokens, temperature=0.7))
    assert mixture.passes == 8


def test_documents_are_read_once(model):
    kept = KeptDocuments()
    mixture_of(model, kept=kept).next()
    assert len(kept) == 3
    again = mixture_of(model, kept=kept)
    fed: list[int] = []
    forward = model.forward_batch

    def counted(feeds, on_layer=None):
        fed.extend(len(feed.tokens) for feed in feeds)
        return forward(feeds, on_layer)

    model.forward_batch = counted
    try:
        again.follow([5])
        assert close(again.next().p, by_hand(model, [5]))
    finally:
        del model.forward_batch
    tail = len(DocumentPrompt(model).pieces("A table.", QUESTION).tail)
    assert fed == [tail + 1] * 3  # the question and a token: no document
    again.follow([5, 6])
    assert close(mixture_of(model, kept=kept).next().p, by_hand(model, []))  # what is kept is as it was


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(model):
    sizes = [len(DocumentPrompt(model).pieces(d.text, QUESTION).head) for d in SHELF.documents]
    kept = KeptDocuments(sizes[1] + sizes[2])
    mixture_of(model, kept=kept).next()
    assert kept.tokens == sizes[1] + sizes[2] and len(kept) == 2
    assert kept.find(model, DocumentPrompt(model).pieces(SHELF.documents[0].text, "x?").head) is None
    nothing = KeptDocuments(0)
    mixture_of(model, kept=nothing).next()
    assert len(nothing) == nothing.tokens == 0


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_pass_given_up_between_layers_leaves_all_as_it_was(model, at):
    mixture = mixture_of(model)
    mixture.follow([5, 9])
    asked = iter(range(100))
    with pytest.raises(Preempted):
        mixture.next(lambda: next(asked) == at)
    assert close(mixture.next().p, by_hand(model, [5, 9]))
    mixture.follow([5, 9, 7])
    with pytest.raises(Preempted):
        mixture.next(lambda: True)
    mixture.follow([5, 2])
    assert close(mixture.next().p, by_hand(model, [5, 2]))


def test_without_documents_the_question_alone_is_asked(model):
    mixture = LocalMixture(model, DocumentPrompt(model), QUESTION, [], 0.0)
    found = mixture.next()
    sequence = model.begin()
    sequence.append([token for piece in DocumentPrompt(model).pieces("", QUESTION) for token in piece])
    assert close(found.p, torch.softmax(sequence.next_logits().double(), 0))
    assert found.log_weight == NOTHING_FOUND.relevance


def test_documents_are_cut_to_leave_room_for_the_answer(model):
    mixture = mixture_of(model)
    tail = len(DocumentPrompt(model).pieces("", QUESTION).tail)
    mixture.reserve(model.max_length - tail - 30)
    mixture.next()
    assert mixture.context <= tail + 31
    with pytest.raises(ContextError, match="shorter answer"):
        mixture_of(model).reserve(model.max_length - 3)


def test_a_prompt_is_cut_where_its_document_ends(model):
    asking = DocumentPrompt(model)
    a, b = asking.pieces("It  is\nred.", "why?"), asking.pieces("It is red.", "how so?")
    assert a.head == b.head and a.tail != b.tail
    whole = model.template.render_text("It is red.\n\nwhy?")
    assert model.tokenizer.decode([*a.head, *a.tail], skip_special_tokens=False) == whole
    for wrong in ("<|im_end|>", "x" * (MAX_DOCUMENT_CHARS + 1), "a\x00b"):
        with pytest.raises(PromptError, match="document"):
            asking.pieces(wrong, "why?")
    with pytest.raises(PromptError):
        asking.pieces("red", "")
    with pytest.raises(ModelError, match="document"):
        PromptTemplate(document_prompt="{question}")


def test_a_document_that_does_not_tell_cannot_outvote_one_that_does(model, monkeypatch):
    tokens = [5, 9]
    plain = mixture_of(model)
    plain.follow(tokens)
    before = plain.next()
    rows = [by_hand_alone(model, document.text, tokens) for document in SHELF.documents]
    # The token that the most relevant document finds likeliest, taken as the one by which it abstains.
    monkeypatch.setattr(model, "not_told", int(rows[0].argmax()), raising=False)
    mixture = mixture_of(model)
    mixture.follow(tokens)
    found = mixture.next()
    ends = [token for token in model.eos_token_ids if token != model.not_told]
    silent = [min(max(float(row[model.not_told] + 0.75 * row[ends].sum()), 1e-3), 1 - 1e-3) for row in rows]
    weights = [math.exp(0.25 * d.relevance) * (1 - u) / u for d, u in zip(SHELF.documents, silent, strict=True)]
    assert not model.decode_text(tokens).endswith((".", "!", "?"))  # a sentence is unfinished
    unfinished = [without(row, model.not_told, math.exp(-3.0)) for row in rows]
    expected = sum(w / sum(weights) * row for w, row in zip(weights, unfinished, strict=True))
    assert close(found.p, expected)
    assert found.log_weight == pytest.approx(math.log(sum(weights)), abs=1e-4)
    assert float(found.p[model.not_told]) < float(before.p[model.not_told])


@pytest.mark.parametrize(("said", "kept"), [("", 1.0), ("red.", 1.0), ("red! ", 1.0), ("red", math.exp(-3.0))])
def test_whoever_begins_a_sentence_is_heard_to_its_end(model, monkeypatch, said, kept):
    monkeypatch.setattr(model, "decode_text", lambda tokens: said)
    tokens = [5, 9]
    rows = [by_hand_alone(model, document.text, tokens) for document in SHELF.documents[:1]]
    monkeypatch.setattr(model, "not_told", int(rows[0].argmax()), raising=False)
    mixture = LocalMixture(model, DocumentPrompt(model), QUESTION, SHELF.documents[:1], 0.0)
    mixture.follow(tokens)
    assert close(mixture.next().p, without(rows[0], model.not_told, kept))


def without(p, token: int, kept: float):
    """p (V,) with the odds of one token times ``kept``."""
    p = p.clone()
    p[token] *= kept
    return p / p.sum()


def test_a_tokens_source_is_the_document_that_gives_most_of_its_probability(model):
    tokens = [5, 9]
    mixture = mixture_of(model)
    mixture.follow(tokens)
    found = mixture.next()
    rows = [by_hand_alone(model, document.text, tokens) for document in SHELF.documents]
    given = torch.stack([w * row for w, row in zip(shares(), rows, strict=True)])
    told = set()
    for token in range(len(found.p)):
        number, share = found.source_of(token)
        assert share == pytest.approx(float(given[:, token].max()), abs=1e-5)
        assert float(given[number - 1, token]) == pytest.approx(share, abs=1e-5)
        told.add(number)
    assert len(told) > 1  # it is not always the most relevant one
    nothing = LocalMixture(model, DocumentPrompt(model), QUESTION, [], 0.0)
    assert nothing.next().source_of(3)[0] == 0
