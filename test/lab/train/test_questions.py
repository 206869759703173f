# SPDX-License-Identifier: Apache-2.0
"""Training questions: the prompts of inference, the expert's replies, their weights and shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional

from dsd_lab.train.forward import embed, language_forward, tower_forward
from dsd_lab.train.frames import FREE_WAYS, Frame
from dsd_lab.train.language import reply_loss
from dsd_lab.train.model import SIZES, build_model
from dsd_lab.train.questions import TELLING, Questions, shares, token_weights
from dsd_lab.train.tokenizer import EOS, IMAGE, IMAGE_TOKENS, prompt_ids, train_tokenizer
from dsd_lab.train.vision import NOTHING
from dsd_lab.worlds.expert import DRAWS
from dsd_lab.worlds.phrases import all_instructions

RED, BLUE = ("chair", "red", 0.3, 1.0, 400), ("box", "blue", 0.7, 2.0, 300)
GONE = "No blue box anywhere here, so I stop. Action: stop"
SEMICOLON, COMMA = 1, 2
MARKS = (SEMICOLON, COMMA, 3)


def frame(things=(RED,), searched: bool = False) -> Frame:
    own = GONE if searched else "No blue box in view, so I look around. Action: turn left 45 degrees"
    if BLUE in things:
        own = "The blue box is right; nothing else is near it, the way is open. Action: stop"
    replies = [("blue box", own), ("red chair", "The red chair is left; fine. Action: forward 75 cm")]
    bearings = [0.1] * len(things)
    return Frame(7, (0.0, 0.0, 0.0), list(things), replies, "plain", bearings, [1.0] * FREE_WAYS, searched)


@pytest.fixture(scope="module")
def tokenizer():
    replies = [text for _, text in (*frame().replies, *frame((RED, BLUE)).replies)]
    return train_tokenizer([*[GONE, *replies] * 30, *all_instructions()[::70]])


def labels() -> list[Frame]:
    return [*(frame() for _ in range(7)), frame(searched=True), frame((RED, BLUE)), frame()]


def said(batch) -> dict[int, list[int]]:
    """The reply's tokens of each row."""
    found: dict[int, list[int]] = {}
    for place, token in zip(batch.wanted.tolist(), batch.targets.tolist(), strict=True):
        found.setdefault(place // batch.ids.shape[1], []).append(token)
    return found


def test_a_batch_asks_what_the_expert_answers_and_is_equal_for_equal_steps(tokenizer) -> None:
    questions = Questions(tokenizer, labels(), 64, seed=2)
    batch, again = questions.draw(3, 0.2), questions.draw(3, 0.2)
    assert all(torch.equal(value, getattr(again, name)) for name, value in vars(batch).items())
    assert not torch.equal(batch.pictures, questions.draw(4, 0.2).pictures)
    captions = 0
    for n, ids in said(batch).items():
        assert ids[-1] == EOS
        text = tokenizer.decode(ids[:-1])
        if text not in [reply for _, reply in questions.labels[int(batch.pictures[n])].replies]:
            captions += 1
            assert text.startswith("red chair left 1.0 m")
            assert tuple(batch.classes[n].tolist()) == NOTHING
        assert text != GONE  # one picture cannot tell
        assert int((batch.ids[n] == IMAGE).sum()) == IMAGE_TOKENS
    assert 3 < captions < 30
    assert sorted({round(weight, 3) for weight in batch.weights.tolist()}) == [0.4, 1.0, 2.0, 6.0]
    assert torch.equal(batch.telling, batch.wanted[batch.weights > TELLING])


def test_most_questions_are_about_a_pictures_first_goal(tokenizer) -> None:
    questions = Questions(tokenizer, labels(), 1000, seed=4)
    batch = questions.draw(0)
    replies = {n: tokenizer.decode(ids) for n, ids in said(batch).items()}
    box = [
        "blue box" in text.partition("in view")[0].partition(";")[0]
        for n, text in replies.items()
        if not questions.labels[int(batch.pictures[n])].searched
    ]
    # Half of them; and of the rest a third where it is not in view (as in eight of nine), half where it is.
    assert np.mean(box) == pytest.approx(0.5 + 0.5 * (0.32 * 8 + 0.5) / 9, abs=0.05)


@pytest.mark.parametrize(
    ("reply", "cheap"),
    [
        (
            "The red box is on the left, 1.4 m away; with the blue can left of it and level, the blue can is in the "
            "way, so I go round its right. Action: turn right 30 degrees",
            "; with the blue can left of it and level,",
        ),
        ("The red box is far left, 1.4 m away; nothing else is near it, I turn left. Action: turn left 45 degrees",
         "; nothing else is near it,"),
        ("No red box in view, only a red can on the left, so I look around. Action: turn left 45 degrees",
         ", only a red can on the left, so I look around. Action"),
    ],
)  # fmt: skip
def test_what_decides_weighs_most_and_the_clause_on_other_things_least(tokenizer, reply, cheap) -> None:
    ids = tokenizer.encode(reply, add_special_tokens=False).ids
    marks = tuple(tokenizer.encode(m, add_special_tokens=False).ids[0] for m in (";", ",", " Action"))
    weights = token_weights(ids, marks)
    groups = {
        weight: tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == weight])
        for weight in np.unique(weights)
    }
    before, behind = reply.split(cheap)
    least, goal, decides = (groups.get(np.float32(w), "").strip() for w in (0.4, 2.0, 6.0))
    seen = tokenizer.decode(ids[:2])  # "The", and the beginning of the goal's name
    assert (goal, least, decides) == (before.removeprefix(seen).strip(), cheap.strip(), seen + behind)


def test_shares_are_of_the_replies_that_agree_up_to_there() -> None:
    own = [10, 11, SEMICOLON, 20, COMMA, 30, 31, EOS]
    others = [
        ([10, 12, SEMICOLON, 21, COMMA, 33, 31, EOS], 6),  # another place, of which nothing else follows
        ([10, 11, SEMICOLON, 22, COMMA, 30, 31, EOS], 3),  # another clause, the same plan
        ([10, 11, SEMICOLON, 22, COMMA, 32, 31, EOS], 2),
        ([10, 11, SEMICOLON, 20, COMMA, 30, 34, EOS], 4),
    ]
    total = DRAWS + 1
    assert sorted(shares(own, others, MARKS)) == [
        (1, 12, pytest.approx(6 / total)),
        (3, 22, pytest.approx(5 / (total - 6))),
        (5, 32, pytest.approx(2 / (total - 6))),
        (6, 34, pytest.approx(4 / (total - 8))),
    ]
    assert shares(own, [], MARKS) == []
    # The expert's own token stays the likeliest.
    found = shares([10, 11, EOS], [([12, EOS], DRAWS - 4), ([13, EOS], 4)], MARKS)
    assert sum(share for _, _, share in found) == pytest.approx(0.45)
    assert found[0][2] / found[1][2] == pytest.approx((DRAWS - 4) / 4)


def test_a_batch_holds_the_shares_at_their_tokens_and_the_loss_is_theirs() -> None:
    replies = [
        "The red chair is left, 0.4 m away; nothing else is near it, and I have arrived. Action: stop",
        "The red chair is left, 0.5 m away; nothing else is near it, the way is clear. Action: forward 25 cm",
        "No red chair in view, nothing but the room, so I look around. Action: turn left 45 degrees",
    ]  # fmt: skip
    tokenizer = train_tokenizer([*replies * 30, *all_instructions()[::70]])

    def doubted(which: int, others: list[tuple[str, int]]) -> Frame:
        things = [RED] if which < 2 else []
        return Frame(
            7, (0.0, 0.0, 0.0), things, [("red chair", replies[which])], "plain", [0.1] * len(things),
            [1.0] * FREE_WAYS, doubts=[others],
        )  # fmt: skip

    frames = [doubted(0, [(replies[1], 8)]), doubted(1, []), doubted(2, [(replies[0], 3)])]
    batch = Questions(tokenizer, frames, 12, seed=1).draw(0)
    place, target, instead = (getattr(batch, n).tolist() for n in ("unsure", "targets", "instead"))
    asked = batch.wanted // batch.ids.shape[1]
    seen: Counter[int] = Counter()
    for where, other, share in zip(place, instead, batch.shares.tolist(), strict=True):
        row = int(batch.pictures[asked[where]])
        wanted = {0: ("4", "5", 8 / (DRAWS + 1)), 2: ("No", "The", 3 / (DRAWS + 1))}[row]
        assert tuple(tokenizer.decode([token]) for token in (target[where], other)) == wanted[:2]
        assert share == pytest.approx(wanted[2])
        seen[row] += 1
    assert seen == Counter(row for row in batch.pictures.tolist() if row != 1)

    model = build_model(SIZES["small"][1], 3).eval()
    images = np.random.default_rng(0).integers(0, 255, (3, 168, 252, 3)).astype(np.uint8)
    with torch.no_grad():
        features = tower_forward(model.model.visual, torch.from_numpy(images))[batch.pictures]
        loss, _, _ = reply_loss(model, None, batch, features)
        language = model.model.language_model
        hidden, _ = language_forward(language, *embed(language, batch.ids, features))
        logits = model.lm_head(hidden.flatten(0, 1)[batch.wanted])
    wanted = functional.one_hot(batch.targets, logits.shape[1]).float()
    for where, other, share in zip(place, instead, batch.shares.tolist(), strict=True):
        wanted[where, target[where]] -= share
        wanted[where, other] += share
    each = functional.cross_entropy(logits, wanted, reduction="none")
    assert loss.item() == pytest.approx(float((each * batch.weights).sum() / batch.weights.sum()), rel=1e-4)


def test_prompts_are_those_of_the_chat_template(tokenizer) -> None:
    from dsd_ros.vlm.prompts import PromptTemplate

    for text in ("find the silver bottle", "grole dinner the red chair"):
        rendered = PromptTemplate("{instruction}").render(text, IMAGE_TOKENS)
        assert [tokenizer.encode(rendered, add_special_tokens=False).ids] == prompt_ids(tokenizer, [text])
    for text in ("The red box, 3.5 m away. Action: stop", "Grüße, 3.5 m — ok?"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
