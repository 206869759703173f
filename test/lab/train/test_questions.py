"""What is drawn for training: the prompts of inference, the expert's replies, the pictures of a history in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsd_lab.train.architecture import IMAGE_TOKENS
from dsd_lab.train.batches import EOS, IMAGE, NOTHING, Ragged, token_weights
from dsd_lab.train.data import FREE_WAYS, Frame
from dsd_lab.train.questions import ACTIONS, CAPTION, UNHEARD, Mixer, Prompts, Questions, prompt_with_past
from dsd_lab.train.text import all_instructions, instruction_for, prompt_ids, train_tokenizer

RED, BLUE = ("chair", "red", 0.3, 1.0, 400), ("box", "blue", 0.7, 2.0, 300)
GONE = "No blue box anywhere here, so I stop. Action: stop"


def frame(before: str = "", things=(RED,), searched: bool = False) -> Frame:
    own = GONE if searched else "No blue box in view, so I look around. Action: turn left 45 degrees"
    if BLUE in things:
        own = "The blue box is right; nothing else is near it, the way is open. Action: stop"
    replies = [("blue box", own), ("red chair", "The red chair is left; fine. Action: forward 75 cm")]
    return Frame(
        7, (0.0, 0.0, 0.0), list(things), replies, before=before, searched=searched, free=[1.0] * FREE_WAYS
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    replies = [text for _, text in (*frame().replies, *frame(things=(RED, BLUE)).replies)]
    return train_tokenizer([*[GONE, *replies] * 30, *all_instructions()[::70]])


def walk() -> list[Frame]:
    """Eight turns without the box, then another run."""
    turn = "turn left 45 degrees"
    first = [frame(), *(frame(turn) for _ in range(6)), frame(turn, searched=True)]
    return [*first, frame(things=(RED, BLUE)), frame("forward 25 cm")]


def test_ragged_rows_come_back_in_any_order() -> None:
    table = Ragged([[1, 2], [], [3]])
    table.extend(Ragged([[4, 5, 6]]))
    assert table.take(np.array([3, 1, 0, 3])).tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert Ragged([]).take(np.array([], np.int64)).tolist() == []


def test_prompts_put_together_have_the_ids_of_inference(tokenizer) -> None:
    goals = ["red chair", "left blue box"]
    prompts = Prompts(tokenizer, goals, seed=5, variants=20, history=3)
    rng = np.random.default_rng([5, 31])
    texts = [instruction_for(goal, rng, unheard=UNHEARD) for goal in goals for _ in range(20)]
    draw = np.random.default_rng(1)
    actions = draw.integers(len(ACTIONS), size=(40, 3))
    actions[np.arange(3)[None] < draw.integers(4, size=40)[:, None]] = -1  # fewer steps
    told = np.arange(40) == 11
    actions[told] = -1
    flat, lengths = prompts.of(np.arange(40), told, actions)
    texts[11] = CAPTION
    for text, taken, ids in zip(texts, actions, np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
        past = [ACTIONS[number] for number in taken if number >= 0]
        assert ids.tolist() == prompt_with_past(tokenizer, text, past)
        if not past:
            assert ids.tolist() == prompt_ids(tokenizer, text)


def test_a_batch_asks_what_the_expert_answers_and_marks_where(tokenizer) -> None:
    labels = walk()
    mixer = Mixer(Questions(tokenizer, labels), 64, seed=2, variants=8, captions=True)
    batch, again = mixer.draw(3, 0.2), mixer.draw(3, 0.2)
    assert all(torch.equal(value, getattr(again, name)) for name, value in vars(batch).items())
    assert not torch.equal(batch.back, mixer.draw(4, 0.2).back)
    length = batch.ids.shape[1]
    replies = {}
    for place, token in zip(batch.wanted.tolist(), batch.targets.tolist(), strict=True):
        replies.setdefault(place // length, []).append(token)
    rows = batch.pictures[batch.back].tolist()
    captions = 0
    for n, ids in replies.items():
        assert ids[-1] == EOS
        text = tokenizer.decode(ids[:-1])
        known = [reply for _, reply in labels[rows[n]].replies]
        if text not in known:
            captions += 1
            assert text.startswith("red chair left 1.0 m")
            assert tuple(batch.classes[n].tolist()) == NOTHING
        assert text != GONE  # one picture cannot tell
        first = int(batch.image_at[n])
        assert (batch.ids[n, first : first + IMAGE_TOKENS] == IMAGE).all()
    assert 3 < captions < 30
    # What decides costs more than where the goal is, and that more than the clause on the rest; goal heads read both.
    assert sorted({round(weight, 3) for weight in batch.weights.tolist()}) == [0.4, 1.0, 2.0, 6.0]
    assert set(batch.telling.tolist()) <= set(batch.wanted.tolist())


def test_most_questions_are_about_a_pictures_first_goal(tokenizer) -> None:
    labels = walk()
    questions = Questions(tokenizer, labels)
    goals = list(questions.goals)
    first = [goals[questions.goal[n]] if n >= 0 else "" for n in questions.own]
    # Whether it is in view or not; not where it was searched for all round, which one picture cannot tell.
    assert first == ["" if frame.searched else "blue box" for frame in labels]
    mixer = Mixer(questions, 1000, seed=4, variants=2)
    batch = mixer.draw(0, 0.0)
    length = batch.ids.shape[1]
    said: dict[int, list[int]] = {}
    for place, token in zip(batch.wanted.tolist(), batch.targets.tolist(), strict=True):
        said.setdefault(place // length, []).append(token)
    rows = batch.pictures[batch.back].tolist()
    box = [
        "blue box" in tokenizer.decode(said[n]).partition("in view")[0].partition(";")[0]
        for n in range(1000)
        if not labels[rows[n]].searched
    ]
    # Half, and a third of the rest where it is not in view (as in eight of nine), half of it where it is.
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
def test_what_decides_costs_most_and_what_else_is_there_least(tokenizer, reply, cheap) -> None:
    ids = tokenizer.encode(reply, add_special_tokens=False).ids
    marks = tuple(tokenizer.encode(m, add_special_tokens=False).ids[0] for m in (";", ",", " Action"))
    weights = token_weights(np.array([ids]), np.ones((1, len(ids)), bool), marks)
    groups = {
        weight: tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == weight])
        for weight in np.unique(weights)
    }
    before, behind = reply.split(cheap)
    least, goal, decides = (groups.get(np.float32(w), "").strip() for w in (0.4, 2.0, 6.0))
    seen = tokenizer.decode(ids[:2])  # "The", and what the goal's name begins with
    where = before.removeprefix(seen).strip()
    assert (goal, least, decides) == (where, cheap.strip(), seen + behind)


def test_a_history_shows_earlier_pictures_oldest_first_and_lets_a_search_end(tokenizer) -> None:
    labels = walk()
    questions = Questions(tokenizer, labels, history=7)
    assert questions.before.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, -1, 8]
    mixer = Mixer(questions, 256, seed=2, variants=4, history=7)
    batch = mixer.draw(0, 0.0)
    runs = (batch.ids == IMAGE).sum(1) // IMAGE_TOKENS
    rows = torch.split(batch.pictures[batch.back], runs.tolist())
    assert sorted({len(some) for some in rows}) == [1, 2, 3, 4, 5, 6, 7, 8]
    length = batch.ids.shape[1]
    ended = 0
    for n, some in enumerate(rows):
        assert some.tolist() == list(range(int(some[-1]) - len(some) + 1, int(some[-1]) + 1))
        text = tokenizer.decode(batch.targets[batch.wanted // length == n].tolist()[:-1])
        if text == GONE:
            ended += 1
            assert some.tolist() == list(range(8))
        prompt = tokenizer.decode(batch.ids[n].tolist(), skip_special_tokens=False)
        assert (
            prompt.count("Before:")
            == len(some) - 1
            == prompt.count("Action: turn left")
            + (prompt.count("Action: forward 25 cm\nNow"))
            - text.count("Action: turn left")
        )
    assert ended > 5
    assert questions.gone.tolist().count(7) == 1  # of the last picture of the round
    # With fewer steps than a full round takes, nothing may say that there is none.
    assert max(Questions(tokenizer, labels, history=6).gone) == 0
    assert sum(Questions(tokenizer, labels, history=6).unseen) == sum(questions.unseen) - 1
