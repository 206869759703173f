"""What a training asks about its pictures: everything tokenized once, batches drawn without loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsd_lab.train.architecture import IMAGE_TOKENS
from dsd_lab.train.batches import EOS, NOTHING, Batch, Ragged, Shares, assemble
from dsd_lab.train.data import Frame
from dsd_lab.train.doubt import shares
from dsd_lab.train.goal_heads import goal_classes
from dsd_lab.train.text import instruction_for
from dsd_lab.worlds.guide import full_round
from dsd_ros.vlm.prompts import DEFAULT_PAST, DEFAULT_PRESENT, PromptTemplate

CAPTION = "describe the room"
GONE = "No {goal} anywhere here, so I stop. Action: stop"  # the expert's reply behind a full round
ACTIONS = (
    "stop", *(f"forward {n} cm" for n in (25, 50, 75)),
    *(f"turn {side} {n} degrees" for side in ("left", "right") for n in (15, 30, 45)),
)  # fmt: skip
_CAPTION_PIECE = 2
_BLOCK = 20_000  # texts tokenized at once
# So many questions are about a picture's first goal, on and beside the expert's way the one that leads there; two
# thirds with those that are so by chance.
_OWN = 0.5
_SEEN = 0.68  # of the others are about something in view
_ALL_STEPS = 0.75  # of the prompts with a history hold all of it that there is
UNHEARD = 0.5  # of the instructions hold words that nobody has said
VARIANTS = 384  # instructions per goal that a stage draws from


def caption(frame: Frame) -> str:
    """All things in a picture from left to right."""
    parts = []
    for kind, colour, column, gap, _ in sorted(frame.things, key=lambda t: t[2]):
        side = "left" if column < 0.36 else "right" if column > 0.64 else "middle"
        parts.append(f"{colour} {kind} {side} {gap:.1f} m")
    return (", ".join(parts) or "nothing but the room") + "."


def tokenize(tokenizer: Any, texts: Sequence[str], end: Sequence[int] = ()) -> Ragged:
    """Token ids of texts, each with `end` behind it."""
    table = Ragged([])
    for first in range(0, len(texts), _BLOCK):
        some = tokenizer.encode_batch(list(texts[first : first + _BLOCK]), add_special_tokens=False)
        table.extend(Ragged([[*one.ids, *end] for one in some]))
    return table


def prompt_with_past(tokenizer: Any, instruction: str, actions: Sequence[str] = ()) -> list[int]:
    """Ids of a prompt with a picture in front of each action, oldest first, and the present one."""
    past = [(IMAGE_TOKENS, action) for action in actions]
    text = PromptTemplate("{instruction}").render(instruction, IMAGE_TOKENS, past)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Questions:
    """All questions and replies of some pictures as tables; rows of `labels` are the pictures'."""

    def __init__(self, tokenizer: Any, labels: Sequence[Frame], history: int = 0) -> None:
        """`history`: how many earlier pictures a prompt will show at most."""
        self.tokenizer, self.history = tokenizer, history
        self.goals: dict[str, int] = {}
        self.marks = _marks(tokenizer)
        self.replies = Ragged([])
        self.doubts = Shares()  # of each reply
        self.goal = np.zeros(0, np.int64)  # of each question
        self.classes = np.zeros((0, len(NOTHING)), np.int64)
        self.gone = np.zeros(0, np.int64)  # steps of a full round behind which there is no such goal, 0: none
        self.start = np.zeros(0, np.int64)  # of each picture: its first question, and how many
        self.seen = np.zeros(0, np.int64)
        self.unseen = np.zeros(0, np.int64)
        self.own = np.zeros(0, np.int64)  # ... and the one about its first goal, -1: none
        self.before = np.zeros(0, np.int64)  # the picture a step earlier, -1: none
        self.action = np.zeros(0, np.int64)  # and what was done in between
        self.labels: list[Frame] = []
        self.add(labels)

    def add(self, labels: Sequence[Frame]) -> None:
        """Append more pictures."""
        first, count = len(self.labels), len(self.goal)
        self.labels += list(labels)
        texts: list[str] = []
        doubts: list[Sequence[tuple[str, int]]] = []
        goals, classes, gone, start, seen, unseen, own, before, action = ([] for _ in range(9))
        for row, frame in enumerate(labels, first):
            before.append(row - 1 if frame.before and row > first else -1)
            action.append(ACTIONS.index(frame.before) if frame.before else 0)
        self.before = _longer(self.before, before)
        self.action = _longer(self.action, action)
        for row, frame in enumerate(labels, first):
            start.append(count + len(texts))
            known = [n for n, (goal, _) in enumerate(frame.replies) if frame.find(goal) is not None]
            other = [n for n in range(len(frame.replies)) if n not in known]
            if frame.searched and other[:1] == [0] and not self._round(row, frame.replies[0][0]):
                del other[0]  # one picture cannot tell that
            asked = known + other
            own.append(start[-1] + asked.index(0) if 0 in asked else -1)
            for n in asked:
                goal, text = frame.replies[n]
                texts.append(text)
                doubts.append(frame.doubts[n] if frame.doubts else ())
                goals.append(self.goals.setdefault(goal, len(self.goals)))
                classes.append(goal_classes(frame, goal))
                gone.append(self._round(row, goal) if n in other else 0)
            seen.append(len(known))
            unseen.append(len(other))
        said = tokenize(self.tokenizer, texts, [EOS])
        self.replies.extend(said)
        self.doubts.add(self._shares(said, doubts))
        self.classes = np.concatenate([self.classes, np.array(classes, np.int64).reshape(-1, len(NOTHING))])
        self.goal, self.gone = _longer(self.goal, goals), _longer(self.gone, gone)
        self.start = _longer(self.start, start)
        self.seen, self.unseen = _longer(self.seen, seen), _longer(self.unseen, unseen)
        self.own = _longer(self.own, own)

    def _shares(self, said: Ragged, doubts: Sequence[Sequence[tuple[str, int]]]) -> list[list[tuple[int, int, float]]]:
        """What else could follow in replies, by the other replies to the same questions."""
        others = tokenize(self.tokenizer, [text for row in doubts for text, _ in row], [EOS])
        ids = iter(others.rows())
        return [
            shares(own.tolist(), [(next(ids).tolist(), count) for _, count in row], self.marks) if row else []
            for own, row in zip(said.rows(), doubts, strict=True)
        ]  # fmt: skip

    def _round(self, row: int, goal: str) -> int:
        """The fewest steps up to a picture that were a full round without a goal; 0 where none were."""
        actions: list[str] = []
        seen = [False]
        while len(actions) < self.history and self.before[row] >= 0:
            actions.insert(0, ACTIONS[self.action[row]])
            row = int(self.before[row])
            seen.insert(0, self.labels[row].find(goal) is not None)
            if seen[0] or not actions[0].startswith("turn"):
                return 0
            if full_round(actions, seen):
                return len(actions)
        return 0


def _marks(tokenizer: Any) -> tuple[int, int, int]:
    """Ids of ";", "," and " Action", which part a reply's clauses."""
    encoded = tokenizer.encode_batch([";", ",", " Action"], add_special_tokens=False)
    first, second, third = (one.ids[0] for one in encoded)
    return first, second, third


def _longer(array: np.ndarray, more: Sequence[int]) -> np.ndarray:
    return np.concatenate([array, np.array(more, np.int64)])


class Prompts:
    """Prompts in pieces: instructions in many words, pictures, actions, and where the reply begins."""

    def __init__(self, tokenizer: Any, goals: Sequence[str], seed: int, variants: int, history: int) -> None:
        rng = np.random.default_rng([seed, 31])
        self.variants = variants
        texts = [instruction_for(goal, rng, unheard=UNHEARD) for goal in goals for _ in range(variants)]
        past, action = DEFAULT_PAST.split("{image}")
        picture = f"<|vision_start|>{'<|image_pad|>' * IMAGE_TOKENS}<|vision_end|>"
        begin = "<|im_start|>user\n"
        pieces = [picture, "<|im_end|>\n<|im_start|>assistant\n", begin + CAPTION]
        self.then = len(pieces)  # an action with another earlier picture behind it
        pieces += [action.replace("{action}", name) + past for name in ACTIONS]
        self.now = len(pieces)  # ... with the present one behind it
        pieces += [action.replace("{action}", name) + DEFAULT_PRESENT for name in ACTIONS]
        self.plain = len(pieces)
        pieces += [begin + text for text in texts]
        self.with_past = len(pieces)
        if history:
            pieces += [begin + text + past for text in texts]
        self.pieces = tokenize(tokenizer, pieces)

    def of(self, chosen: np.ndarray, caption: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(flat ids, lengths) of prompts: `chosen` instructions, or `caption` where that is True.

        `actions` (N, K) are those of earlier steps, oldest first, -1 in front where there are fewer.
        """
        steps = (actions >= 0).sum(1)
        begin = np.where(steps > 0, self.with_past, self.plain) + chosen
        begin = np.where(caption, _CAPTION_PIECE, begin)
        columns = [begin]
        width = actions.shape[1]
        for place in range(width):
            here = actions[:, place] >= 0
            after = self.now if place == width - 1 else self.then
            columns += [np.where(here, 0, -1), np.where(here, after + actions[:, place], -1)]
        columns += [np.zeros_like(begin), np.ones_like(begin)]
        index = np.stack(columns, axis=1)
        lengths = np.where(index >= 0, self.pieces.lengths[index], 0).sum(1)
        return self.pieces.take(index[index >= 0]), lengths


class Mixer:
    """Draws batches: each picture's own goal and others, mostly in view, and captions while training is young."""

    def __init__(
        self,
        questions: Questions,
        batch: int,
        seed: int,
        pool: np.ndarray | None = None,
        history: int = 0,
        variants: int = VARIANTS,
        captions: bool = False,
    ) -> None:
        """`pool`: numbers of the pictures to draw from, some more than once (all alike by default)."""
        self.questions, self.batch, self.seed = questions, batch, seed
        self.history = history
        asked = np.flatnonzero(questions.seen + questions.unseen > 0)
        self.pool = asked if pool is None else pool[np.isin(pool, asked)]
        tokenizer = questions.tokenizer
        self.prompts = Prompts(tokenizer, list(questions.goals), seed, variants, history)
        self.said = Ragged([])
        self.said.extend(questions.replies)
        gone = [GONE.replace("{goal}", goal) for goal in questions.goals]
        self.said.extend(tokenize(tokenizer, gone, [EOS]))
        if captions:
            self.said.extend(tokenize(tokenizer, [caption(f) for f in questions.labels], [EOS]))

    def draw(self, step: int, caption_share: float) -> Batch:
        """The batch of a step; equal steps give equal batches."""
        rng = np.random.default_rng([self.seed, 30, step])
        q, size = self.questions, self.batch
        rows = self.pool[rng.integers(len(self.pool), size=size)]
        told = rng.random(size) < caption_share
        seen, unseen = q.seen[rows], q.unseen[rows]
        in_view = (seen > 0) & ((rng.random(size) < _SEEN) | (unseen == 0))
        first = q.start[rows] + np.where(in_view, 0, seen)
        count = np.where(in_view, seen, unseen)
        asked = first + (rng.random(size) * count).astype(np.int64)
        asked = np.where((rng.random(size) < _OWN) & (q.own[rows] >= 0), q.own[rows], asked)
        variant = rng.integers(self.prompts.variants, size=size)
        chosen = q.goal[asked] * self.prompts.variants + variant
        earlier, actions = self._earlier(rows, told, np.where(told, 0, q.gone[asked]), rng)
        gone = q.gone[asked] > 0
        prompts = self.prompts.of(chosen, told, actions)
        reply = np.where(gone, len(q.replies) + q.goal[asked], asked)
        reply = np.where(told, len(q.replies) + len(q.goals) + rows, reply)
        lengths = self.said.lengths[reply]
        expert = reply < len(q.replies)
        instead = q.doubts.take(reply[expert], (np.cumsum(lengths) - lengths)[expert])
        pictures = np.concatenate([earlier, rows[:, None]], axis=1)
        classes = np.where(told[:, None], np.array(NOTHING), q.classes[asked])
        replies = (self.said.take(reply), lengths)
        return assemble(prompts, replies, pictures[pictures >= 0], classes, q.marks, instead)

    def _earlier(
        self, rows: np.ndarray, told: np.ndarray, needed: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Earlier pictures and actions (N, K), oldest first, -1 in front where there are fewer.

        None in front of a question that asks for all in view (`told`), no fewer than are `needed`.
        """
        size, most = len(rows), self.history
        pictures, actions = np.full((size, most), -1), np.full((size, most), -1)
        if not most:
            return pictures, actions
        limit = np.where(rng.random(size) < _ALL_STEPS, most, rng.integers(most + 1, size=size))
        limit = np.maximum(limit, needed)
        here = np.where(told, -1, rows)
        for k in range(most):
            going = (here >= 0) & (k < limit)
            before = np.where(going, self.questions.before[here], -1)
            pictures[:, most - 1 - k] = before
            actions[:, most - 1 - k] = np.where(before >= 0, self.questions.action[here], -1)
            here = before
        return pictures, actions
