"""Token rows for training: ragged tables on the host, padded into batches without loops.

A prompt is put together from pieces that are tokenized once. Special tokens cut a text before
anything else does, so that pieces between them have the same ids alone as in the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from dsd_lab.train.architecture import IMAGE_TOKENS, SPECIAL_TOKENS
from dsd_lab.train.devices import moved

EOS = SPECIAL_TOKENS.index("<|im_end|>")
IMAGE = SPECIAL_TOKENS.index("<|image_pad|>")
NOTHING = (-100, -100, -100, 0, 0, 0)  # classes of which no loss is taken, as of captions
_DECIDES = 6.0  # what an error costs in a token that settles what the robot does
TELLING = 1.5  # a token that weighs more tells of the goal or the action
Instead = tuple[np.ndarray, np.ndarray, np.ndarray]  # places, tokens, shares
NONE_INSTEAD: Instead = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


class Ragged:
    """Rows of different lengths in one flat array."""

    def __init__(self, rows: Sequence[Sequence[float]], dtype: type = np.int32) -> None:
        self.lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        self.starts = np.cumsum(self.lengths) - self.lengths
        flat = [token for row in rows for token in row]
        self.flat = np.array(flat, dtype=dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[np.ndarray]:
        """Every row."""
        return np.split(self.flat, self.starts[1:])[: len(self)]

    def take(self, index: np.ndarray) -> np.ndarray:
        """The rows of an index, one behind the other."""
        lengths = self.lengths[index]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return self.flat[np.repeat(self.starts[index], lengths) + inside]

    def extend(self, other: Ragged) -> None:
        """Append another table's rows."""
        self.starts = np.concatenate([self.starts, other.starts + len(self.flat)])
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.flat = np.concatenate([self.flat, other.flat])


class Shares:
    """For each of some replies: what else could follow at a place in it, and with what share (see doubt.py)."""

    def __init__(self) -> None:
        self.places, self.tokens = Ragged([]), Ragged([])
        self.shares = Ragged([], np.float32)

    def __len__(self) -> int:
        return len(self.places)

    def add(self, rows: Sequence[Sequence[tuple[int, int, float]]]) -> None:
        """Append (place, token, share) of more replies."""
        parts: tuple[list[Any], ...] = tuple([[one[k] for one in row] for row in rows] for k in range(3))
        self.places.extend(Ragged(parts[0]))
        self.tokens.extend(Ragged(parts[1]))
        self.shares.extend(Ragged(parts[2], np.float32))

    def take(self, index: np.ndarray, starts: np.ndarray) -> Instead:
        """Those of some replies, as places in a row of all their tokens, in which each begins at its of `starts`."""
        at = self.places.take(index) + np.repeat(starts, self.places.lengths[index])
        return at, self.tokens.take(index), self.shares.take(index)


@dataclass
class Batch:
    """Padded token rows (N, length), and flat places in them.

    `pictures` are the rows of the different pictures; `back` says which of them fills each run of image
    tokens, in the order of the runs. `images` and `wanted` are places in the flattened rows: of image
    tokens, and of those tokens whose next one is learned; `targets` and `weights` are of the latter. Where another
    token than a target could be right, too, `unsure` is its place among the targets.
    """

    pictures: torch.Tensor  # (M,)
    back: torch.Tensor  # (runs of image tokens,)
    ids: torch.Tensor  # (N, length)
    images: torch.Tensor  # (runs * IMAGE_TOKENS,)
    image_at: torch.Tensor  # (N,) where the image tokens of the present picture begin
    wanted: torch.Tensor  # (W,)
    targets: torch.Tensor  # (W,) the next tokens
    weights: torch.Tensor  # (W,) what an error there costs
    unsure: torch.Tensor  # (U,)
    instead: torch.Tensor  # (U,) the other token
    shares: torch.Tensor  # (U,) and its share of the loss; the target's is what is left of 1
    telling: torch.Tensor  # (T,) places that tell of goal or action
    classes: torch.Tensor  # (N, 6) where the goal stands, as goal_heads.goal_classes has it

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        if device.type == "cpu":
            return self
        return Batch(*(moved(getattr(self, f.name), device) for f in fields(self)))


def assemble(
    prompts: tuple[np.ndarray, np.ndarray],
    replies: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray,
    classes: np.ndarray,
    marks: tuple[int, int, int] = (-1, -1, -1),
    instead: Instead = NONE_INSTEAD,
) -> Batch:
    """Pad prompts and replies, each as (flat ids, lengths), into one batch.

    `rows` are the pictures of all runs of image tokens, row by row, in each from the oldest to the present one.
    `instead` are places among all tokens of the replies, other tokens there, and their shares.
    """
    (asked, before), (said, behind) = prompts, replies
    count, length = len(before), int((before + behind).max())
    place = np.arange(length)[None]
    first, end = before[:, None], (before + behind)[:, None]
    ids = np.zeros((count, length), np.int64)
    ids[place < first] = asked
    inside = (place >= first) & (place < end)
    ids[inside] = said
    weights = token_weights(ids, inside, marks)
    ids = ids[:, :-1]
    wanted = np.flatnonzero(inside[:, 1:])  # a token is foretold in front of it
    is_image = ids == IMAGE
    # Runs stand in whole numbers, so the last picture begins that many tokens before the last image token.
    last = ids.shape[1] - 1 - is_image[:, ::-1].argmax(1)
    image_at = last - (IMAGE_TOKENS - 1)
    pictures, back = np.unique(rows, return_inverse=True)
    telling = wanted[weights > TELLING]
    unsure, others, shares = instead
    arrays = (pictures, back, ids, np.flatnonzero(is_image), image_at, wanted, said.astype(np.int64), weights,
              unsure.astype(np.int64), others.astype(np.int64), shares,
              telling, classes.astype(np.int64))  # fmt: skip
    return Batch(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))


def token_weights(ids: np.ndarray, inside: np.ndarray, marks: tuple[int, int, int] = (-1, -1, -1)) -> np.ndarray:
    """What errors in replies cost, flat over `inside`: most in what decides, then where the goal is.

    `ids` and `inside` (True at a reply's tokens) are (N, length); `marks` are the ids of ";", "," and
    " Action". What decides is the first token, "The" or "No", which tells whether the goal is in view; the second,
    with which the goal is named ("left", or its colour); the plan ("the box is in the way, so I go round its right"),
    which settles the action; and the action. The clause on the
    other things, from the first mark to the next comma (without ";": to the action), is the hardest to get right and
    matters least; at full weight its noise drowns what steers the robot.
    """
    semicolon, comma, action = ((ids == mark) & inside for mark in marks)
    told, marked = action.any(1), semicolon.any(1)
    last = action.argmax(1)
    first = np.where(marked, semicolon.argmax(1), np.where(comma.any(1), comma.argmax(1), last))
    place = np.arange(ids.shape[1])[None]
    plan = comma & (place > first[:, None]) & marked[:, None]
    end = np.where(plan.any(1), plan.argmax(1), last)
    weights = np.where(place < first[:, None], 2.0, 0.4).astype(np.float32)
    begin = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    named = np.pad(begin, ((0, 0), (1, 0)))[:, :-1] & inside
    weights[begin | named | (place > end[:, None])] = _DECIDES
    weights[~told] = 1.0
    found: np.ndarray = weights[inside]
    return found


@dataclass
class Example:
    """One question about a picture: the picture's row, goal (None: caption), ids of the reply."""

    row: int
    goal: str | None
    reply: list[int]
    classes: tuple[int, ...] = NOTHING


def collate(examples: list[Example], prompts: list[list[int]], marks: tuple[int, int, int] = (-1, -1, -1)) -> Batch:
    """Pad prompts of one picture each, and replies, into one batch."""
    asked, said = Ragged(prompts), Ragged([e.reply for e in examples])
    return assemble(
        (asked.flat, asked.lengths),
        (said.flat, said.lengths),
        np.array([e.row for e in examples]),
        np.array([e.classes for e in examples]),
        marks,
    )
