# SPDX-License-Identifier: Apache-2.0
"""How well the shipped reader reads: from one document, and from a mixture of sequences that read one each."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsd_lab.pair.held_out import drawn_questions, read_all
from dsd_lab.report import render_template
from dsd_lab.train.reader.adapter import train_adapter
from dsd_lab.train.reader.corpus import (
    FACT as SURE,
    QUESTION_KINDS,
    UNKNOWN,
    Fact,
    Piece,
    answer_pieces,
    ask_words,
    distractor,
    draw_ask,
    draw_example,
    draw_name,
    draw_value,
    write_document,
)
from dsd_lab.train.reader.training import prompt_text, train_reader
from dsd_lab.train.settings import ReaderSettings
from dsd_lab.train.stages import Report
from dsd_lab.train.tokenizer import EOS

_LONGEST = 64  # tokens of an answer
_SEED = 7_000_000  # of questions that no training draws


class Read(NamedTuple):
    """A document that one sequence of a mixture reads, and its weight in it."""

    document: str
    weight: float


@dataclass(frozen=True)
class Errand:
    """A question such as "bring me to the chair I like": the device knows the name, the cloud the colour."""

    question: str
    answer: str
    device: tuple[tuple[str, float], ...]
    cloud: tuple[tuple[str, float], ...]


def load_reader(folder: Path) -> tuple[Any, Any]:
    """A model directory as (transformers model in float32, tokenizers.Tokenizer)."""
    from tokenizers import Tokenizer
    from transformers import Qwen2ForCausalLM

    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no model: train one with `dsd-lab train reader`.")
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def mixture_answers(model: Any, tokenizer: Any, questions: Sequence[str], read: Sequence[Sequence[Read]]) -> list[str]:
    """The greedy answers to questions, each from the mixture of the sequences that read its documents."""
    rows = [
        tokenizer.encode(prompt_text(one.document, question), add_special_tokens=False).ids
        for question, documents in zip(questions, read, strict=True)
        for one in documents
    ]
    owner = torch.tensor([n for n, documents in enumerate(read) for _ in documents])
    weights = torch.tensor([one.weight for documents in read for one in documents]).double()
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    said: list[list[int]] = [[] for _ in questions]
    past = None
    for _ in range(_LONGEST):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        past = out.past_key_values
        probabilities = weights[:, None] * out.logits[:, -1].double().softmax(-1)
        mixed = torch.zeros(len(questions), probabilities.shape[1], dtype=torch.float64)
        chosen = mixed.index_add_(0, owner, probabilities).argmax(-1)
        for tokens, token in zip(said, chosen.tolist(), strict=True):
            if EOS not in tokens:
                tokens.append(token)
        if all(EOS in tokens for tokens in said):
            break
        ids, positions = chosen[owner][:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(ids)), 1)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]


def single_accuracy(model: Any, tokenizer: Any, kind: str, count: int, held_out: bool = True) -> float:
    """Share of answers that are word for word right, from one document of up to five facts."""
    rng = random.Random(f"{_SEED} {kind}")
    asked = [draw_example(rng, kind, held_out=held_out, support=frozenset({"who", "what"})) for _ in range(count)]
    right = 0
    for first in range(0, count, 64):
        some = asked[first : first + 64]
        said = mixture_answers(model, tokenizer, [e.question for e in some], [[Read(e.document, 1.0)] for e in some])
        right += sum(a == e.answer for a, e in zip(said, some, strict=True))
    return right / count


def draw_errand(rng: random.Random, documents: int, held_out: bool, spread: float = 0.3, others: int = 2) -> Errand:
    """A question whose two facts lie on two sides, with ``documents`` on each, and up to ``others`` useless facts.

    The relevance of the document that matters is about 1 higher, give or take ``spread``.
    """
    ask = draw_ask(rng, "bring", held_out)
    name = draw_name(rng, held_out)
    colour = draw_value(rng, "colour", ask.thing, held_out)
    who = Fact(ask.thing, name, ask.relation)
    what = Fact(ask.thing, name, about="colour", value=colour)
    known = [who, what]

    def side(fact: Fact) -> tuple[tuple[str, float], ...]:
        found = []
        for number in range(documents):
            facts = [] if number else [fact]
            for _ in range(rng.randint(1 if number else 0, max(others, 1 if number else 0))):
                facts.append(distractor(rng, ask, known, {name}))
                known.append(facts[-1])
            relevance = (0.0 if number else 1.0) + rng.gauss(0.0, spread)
            found.append((write_document(rng, facts), relevance))
        return tuple(found)

    pieces = answer_pieces(ask, Piece(name, SURE), Piece(colour, SURE))
    answer = "".join(piece.text for piece in pieces)
    return Errand(ask_words(rng, ask, name), answer, side(who), side(what))


def weighted(documents: Sequence[tuple[str, float]], share: float, even: bool = False) -> list[Read]:
    """One side's documents by the softmax of their relevances (or evenly), ``share`` in all."""
    raised = [1.0 if even else math.exp(relevance) for _, relevance in documents]
    return [Read(document, share * one / sum(raised)) for (document, _), one in zip(documents, raised, strict=True)]


def errand_figures(
    model: Any,
    tokenizer: Any,
    count: int,
    documents: int,
    *,
    eta: float = 0.5,
    even: bool = False,
    held_out: bool = True,
    alone: bool = True,
    others: int = 2,
) -> dict[str, float]:
    """Shares of errands that end in the right instruction, with both stores and, if ``alone``, with each of them."""
    rng = random.Random(f"{_SEED} errands {documents} {others}")
    errands = [draw_errand(rng, documents, held_out, others=others) for _ in range(count)]
    names = ("both", "device", "cloud") if alone else ("both",)
    found = dict.fromkeys((*names, *(f"{name}_unknown" for name in names[1:])), 0)
    for first in range(0, count, 50):
        some = errands[first : first + 50]
        for sides in names:
            read = []
            for errand in some:
                device = weighted(errand.device, eta if sides == "both" else 1.0, even)
                cloud = weighted(errand.cloud, 1 - eta if sides == "both" else 1.0, even)
                read.append([*device, *cloud] if sides == "both" else device if sides == "device" else cloud)
            said = mixture_answers(model, tokenizer, [e.question for e in some], read)
            for errand, text in zip(some, said, strict=True):
                found[sides] += text.rpartition(" Go: ")[2] == errand.answer.rpartition(" Go: ")[2]
                if sides != "both":
                    found[f"{sides}_unknown"] += text.endswith(UNKNOWN)
    return {name: value / count for name, value in found.items()}


def train_and_evaluate_reader(settings: ReaderSettings, report: Report | None = None) -> dict[str, Any]:
    """Train the reader, measure it where the settings ask for that, and write its card."""
    if settings.model == "smollm2":
        training = train_adapter(settings, report, partial(check_reader, questions=4 if settings.smoke else 48))
        folder = settings.resolved().out / "reader-smollm2"
        about = {"training": training, "settings": settings, "cpu": platform.machine()}
        card = render_template("pair/reader_smollm2.md", **about)
        (folder / "README.md").write_text(card)
        return training
    training = train_reader(settings, report)
    settings = settings.resolved()
    if not settings.evaluate:
        return training
    folder = settings.out / "reader"
    figures = evaluate_reader(folder, report=report)
    (folder / "README.md").write_text(render_card(figures, training))
    return training | {"evaluation": figures}


def check_reader(folder: Path, questions: int = 48) -> dict[str, Any]:
    """How a reader in training does: drawn questions on two sides, answered by the product's own mixture."""
    from dsd_ros.dragon.documents.embedding import EmbeddingError, SentenceEncoder
    from dsd_ros.vlm.loading import load_model
    from dsd_ros.vlm.settings import ModelSettings

    try:
        encoder = SentenceEncoder()
    except EmbeddingError:
        encoder = None  # every document is then as relevant as any other
    figures = read_all(load_model(ModelSettings(str(folder))), drawn_questions(_SEED, questions), encoder)
    return {name: figures[name] for name in ("all", "needs both", "needs none") if name in figures}


def evaluate_reader(
    folder: Path, questions: int = 100, errands: int = 500, *, report: Report | None = None
) -> dict[str, Any]:
    """The figures of the card: by kind of question, and errands with one to three documents a side."""
    report = report or (lambda line, share: None)
    model, tokenizer = load_reader(folder)
    figures: dict[str, Any] = {"questions": questions, "errands": errands, "single": {}, "mixture": []}
    for n, kind in enumerate(QUESTION_KINDS):
        report(f"questions: {kind}", 0.5 * n / len(QUESTION_KINDS))
        seen, held_out = (single_accuracy(model, tokenizer, kind, questions, held_out) for held_out in (False, True))
        figures["single"][kind] = {"trained": seen, "held_out": held_out}
    fewer = max(1, errands * 2 // 5)
    settings = (
        (1, 0, 0.5, False, True), (1, 2, 0.5, False, True), (1, 2, 0.3, False, False),
        (1, 2, 0.7, False, False), (2, 2, 0.5, False, False), (3, 2, 0.5, False, True),
        (3, 2, 0.5, True, False),
    )  # fmt: skip
    for n, (documents, others, eta, even, alone) in enumerate(settings):
        report(f"errands: {documents} documents a side, eta {eta}", 0.5 + 0.5 * n / len(settings))
        count = errands if n < 2 else fewer
        found = errand_figures(model, tokenizer, count, documents, eta=eta, even=even, alone=alone, others=others)
        figures["mixture"].append(
            {"documents": documents, "others": others, "eta": eta, "even": even, "errands": count, **found}
        )
    return figures


def render_card(figures: dict[str, Any], training: dict[str, Any]) -> str:
    """The model card, from the figures of training and evaluation."""
    return render_template("pair/reader.md", f=figures, training=training, unknown=UNKNOWN, cpu=platform.machine())
