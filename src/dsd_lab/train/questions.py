# SPDX-License-Identifier: Apache-2.0
"""What a training asks about its pictures: replies tokenized once, instructions drawn anew for each question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from dsd_lab.train.frames import Frame
from dsd_lab.train.tokenizer import EOS, prompt_ids
from dsd_lab.train.vision import NOTHING, goal_classes
from dsd_lab.worlds.expert import DRAWS
from dsd_lab.worlds.phrases import instruction_for

CAPTION = "describe the room"
UNHEARD = 0.5  # share of the instructions with strange words
TELLING = 1.5  # a token that weighs more tells of the goal or the action
_DECIDES = 6.0  # weight of the tokens that settle what the robot does
_OWN = 0.5  # share of the questions about the picture's first goal
_SEEN = 0.68  # share of the others about something in view
_BLOCK = 20_000  # texts tokenized at once
_MOST = 0.45  # share of all other tokens at a place: the expert's own stays the likeliest
Marks = tuple[int, int, int]  # ids of ";", "," and " Action", which part a reply into clauses
Doubt = tuple[int, int, float]  # place in a reply, another token there, its share of the loss


class Question(NamedTuple):
    """A goal and the reply to it: its tokens, what an error in each costs, and what else could follow."""

    goal: str | None  # None: a caption
    reply: list[int]
    weights: np.ndarray
    doubts: list[Doubt]
    classes: tuple[int, ...] = NOTHING  # of the goal heads


@dataclass
class Batch:
    """Padded token rows (N, length) about a picture each, and flat places in them."""

    pictures: torch.Tensor  # (N,) rows of the pictures
    ids: torch.Tensor  # (N, length)
    wanted: torch.Tensor  # (W,) places whose next token is learned
    targets: torch.Tensor  # (W,) the next tokens
    weights: torch.Tensor  # (W,) what an error there costs
    unsure: torch.Tensor  # (U,) places among the targets where another token could be right, too
    instead: torch.Tensor  # (U,) the other token
    shares: torch.Tensor  # (U,) its share of the loss; the target has the rest
    telling: torch.Tensor  # (T,) places that tell of goal or action
    classes: torch.Tensor  # (N, 6) where the goal stands, as `goal_classes` has it

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))


class Questions:
    """Draws batches of questions about pictures, equal ones for equal steps."""

    def __init__(
        self, tokenizer: Any, labels: Sequence[Frame], batch: int, seed: int, pool: Sequence[int] | None = None
    ) -> None:
        """`pool`: rows of the pictures to draw from, some more than once (default: all alike)."""
        self.tokenizer, self.labels, self.batch, self.seed = tokenizer, labels, batch, seed
        self.marks: Marks = tuple(one[0] for one in tokens_of(tokenizer, [";", ",", " Action"]))  # type: ignore[assignment]
        self.asked = self._questions()
        rows = range(len(labels)) if pool is None else pool
        self.pool = np.array([row for row in rows if self.asked[row]])

    def _questions(self) -> list[list[Question]]:
        """The questions of each picture. One picture cannot tell the end of a search, so that is not asked."""
        rows = [
            (row, goal, text, frame.doubts[n] if frame.doubts else [])
            for row, frame in enumerate(self.labels)
            for n, (goal, text) in enumerate(frame.replies)
            if n > 0 or not frame.searched or frame.find(goal) is not None
        ]
        replies = tokens_of(self.tokenizer, [text for _, _, text, _ in rows], EOS)
        others = iter(tokens_of(self.tokenizer, [text for *_, doubts in rows for text, _ in doubts], EOS))
        asked: list[list[Question]] = [[] for _ in self.labels]
        for (row, goal, _, doubts), reply in zip(rows, replies, strict=True):
            doubted = shares(reply, [(next(others), count) for _, count in doubts], self.marks)
            classes = goal_classes(self.labels[row], goal)
            asked[row].append(Question(goal, reply, token_weights(reply, self.marks), doubted, classes))
        return asked

    def draw(self, step: int, captions: float = 0.0) -> Batch:
        """The batch of a step; a share of `captions` asks for all that is in view."""
        rng = np.random.default_rng([self.seed, 30, step])
        rows = self.pool[rng.integers(len(self.pool), size=self.batch)].tolist()
        questions = [self._question(row, rng, captions) for row in rows]
        texts = [instruction_for(q.goal, rng, unheard=UNHEARD) if q.goal else CAPTION for q in questions]
        return collate(rows, prompt_ids(self.tokenizer, texts), questions)

    def _question(self, row: int, rng: np.random.Generator, captions: float) -> Question:
        frame, asked = self.labels[row], self.asked[row]
        if rng.random() < captions:
            (reply,) = tokens_of(self.tokenizer, [caption(frame)], EOS)
            return Question(None, reply, np.ones(len(reply), np.float32), [])
        if frame.replies[0][0] == asked[0].goal and rng.random() < _OWN:
            return asked[0]
        seen = [q for q in asked if frame.find(str(q.goal)) is not None]
        unseen = [q for q in asked if frame.find(str(q.goal)) is None]
        some = seen if seen and (not unseen or rng.random() < _SEEN) else unseen
        return some[int(rng.integers(len(some)))]


def caption(frame: Frame) -> str:
    """All things in a picture, from left to right."""
    parts = []
    for kind, colour, column, gap, _ in sorted(frame.things, key=lambda t: t[2]):
        side = "left" if column < 0.36 else "right" if column > 0.64 else "middle"
        parts.append(f"{colour} {kind} {side} {gap:.1f} m")
    return (", ".join(parts) or "nothing but the room") + "."


def tokens_of(tokenizer: Any, texts: Sequence[str], *end: int) -> list[list[int]]:
    """Token ids of texts, each followed by `end`."""
    found: list[list[int]] = []
    for first in range(0, len(texts), _BLOCK):
        some = tokenizer.encode_batch(list(texts[first : first + _BLOCK]), add_special_tokens=False)
        found += [[*one.ids, *end] for one in some]
    return found


def collate(rows: Sequence[int], prompts: Sequence[Sequence[int]], questions: Sequence[Question]) -> Batch:
    """Pad prompts and replies into one batch."""
    length = max(len(p) + len(q.reply) for p, q in zip(prompts, questions, strict=True)) - 1
    ids = np.zeros((len(rows), length), np.int64)
    wanted: list[int] = []
    doubts: list[Doubt] = []
    for n, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        whole = [*prompt, *question.reply[:-1]]
        ids[n, : len(whole)] = whole
        doubts += [(len(wanted) + place, token, share) for place, token, share in question.doubts]
        first = n * length + len(prompt) - 1  # a token is predicted at the place before it
        wanted += range(first, first + len(question.reply))
    weights = np.concatenate([q.weights for q in questions])
    places = np.array(wanted)
    unsure, instead, share = (np.array([d[k] for d in doubts]) for k in range(3))
    targets = np.array([token for q in questions for token in q.reply])
    arrays = (
        np.array(rows), ids, places, targets, weights, unsure.astype(np.int64), instead.astype(np.int64),
        share.astype(np.float32), places[weights > TELLING], np.array([q.classes for q in questions]),
    )  # fmt: skip
    return Batch(*(torch.from_numpy(array) for array in arrays))


def token_weights(ids: Sequence[int], marks: Marks) -> np.ndarray:
    """What an error in each token of a reply costs.

    Most in what decides: the first two tokens ("The" or "No", and the goal's name), the plan and the action. Then where
    the goal is. Least in the clause on other things, which is the hardest to get right and steers nothing.
    """
    semicolon, comma, action = marks
    ids = list(ids)
    weights = np.ones(len(ids), np.float32)
    if action not in ids:
        return weights
    end = ids.index(action)
    first = ids.index(semicolon) if semicolon in ids else ids.index(comma) if comma in ids else end
    if semicolon in ids and comma in ids[first + 1 :]:
        end = ids.index(comma, first + 1)
    weights[:first], weights[first:], weights[end + 1 :], weights[:2] = 2.0, 0.4, _DECIDES, _DECIDES
    return weights


def shares(ids: Sequence[int], others: Sequence[tuple[Sequence[int], int]], marks: Marks) -> list[Doubt]:
    """What else could follow in a reply, from its tokens and those of the replies to misjudged views.

    The share of a token is of the replies that agree up to there; at most _MOST for all others at a place. The clause
    on other things is compared by itself. X. Geng, "Label Distribution Learning", 2016.
    """
    parts = _clauses(ids, marks)
    begins = (0, len(parts[0]), len(parts[0]) + len(parts[1]))
    agreed = [DRAWS + 1] * len(parts)
    apart: list[tuple[int, int, int, int]] = []  # clause, place, token, count
    for other, count in others:
        for k, (mine, their) in enumerate(zip(parts, _clauses(other, marks), strict=True)):
            pairs = zip(mine, their, strict=False)
            place = next((n for n, (one, two) in enumerate(pairs) if one != two), None)
            if place is None:
                continue
            apart.append((k, place, int(their[place]), count))
            if k == 0:  # of another goal's place, nothing else follows
                agreed[1] -= count
                agreed[2] -= count
                break
    found: list[Doubt] = []
    for (k, place), group in groupby(sorted(apart), key=lambda one: one[:2]):
        tokens: Counter[int] = Counter()
        for _, _, token, count in group:
            tokens[token] += count
        scale = 1.0 / max(agreed[k], tokens.total() / _MOST)
        found += [(begins[k] + place, token, n * scale) for token, n in tokens.items()]
        agreed[k] -= tokens.total()
    return found


def _clauses(ids: Sequence[int], marks: Marks) -> tuple[Sequence[int], ...]:
    """Where the goal is; what else there is; the plan with its action."""
    semicolon, comma, _ = marks
    ids = list(ids)
    if semicolon not in ids:
        return ids, [], []
    first = ids.index(semicolon) + 1
    second = ids.index(comma, first) + 1 if comma in ids[first:] else first
    return ids[:first], ids[first:second], ids[second:]
