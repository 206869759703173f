# SPDX-License-Identifier: Apache-2.0
"""Two sides of an answer over links that deliver messages on demand, with tables for models."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from dsd_lab.dragon.ablations import AblationState
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.mixture import Local
from dsd_ros.dragon.state import own_choice
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import PROTOCOL_VERSION, Question

SIDES = ("device", "cloud")


def question(**changes) -> Question:
    values = dict(
        ask=7, attempt=0, protocol_version=PROTOCOL_VERSION, tokenizer_fingerprint="t", vocab_size=6,
        text="why?", documents=2, temperature=1.0, seed=3, reply=1, head=2, max_tokens=8, window=3,
        aggregator="device",
    )  # fmt: skip
    return Question(**(values | changes))


class Tables:
    """p^s after a prefix, by its last two tokens, and log weights that change with its length."""

    def __init__(self, seed: int = 0, size: int = 6, noise: float = 0.6, padding: int = 0) -> None:
        random = np.random.default_rng(seed)
        common = random.normal(0, 1.5, (size, size, size))
        self.size, self.rows, self.weights = size, {}, {}
        for side in SIDES:
            logits = common + noise * random.normal(0, 1.5, common.shape)
            p = torch.softmax(torch.from_numpy(logits), dim=-1).float()
            self.rows[side] = p
            self.weights[side] = random.normal(0, 1, 5)
        self.padding = {"device": 0, "cloud": padding}

    def local(self, side: str, prefix: list[int]) -> Local:
        before, last = [0, 0, *prefix][-2:]
        p = torch.cat([self.rows[side][before, last], torch.zeros(self.padding[side])])
        return Local(p, float(self.weights[side][len(prefix) % 5]))

    def vocab_size(self, side: str) -> int:
        return self.size + self.padding[side]


def synchronous(tables: Tables, asked: Question, ends: frozenset[int] = frozenset()) -> list[int]:
    """What both mixtures together say, token by token: argmax p, or argmax(log p + G)."""
    tokens: list[int] = []
    while len(tokens) < asked.max_tokens and not (tokens and tokens[-1] in ends):
        device, cloud = (tables.local(side, tokens) for side in SIDES)
        p = mixture(device.p, cloud.p, device.log_weight, cloud.log_weight)
        tokens.append(own_choice(asked, asked.reply, p, len(tokens)))
    return tokens


class Sides:
    """Both sides, and what is on its way between them: by direction, or by direction and kind (``ordered`` False)."""

    def __init__(
        self,
        asked: Question,
        tables: Tables,
        ends: frozenset[int] = frozenset(),
        switch: Callable[..., bool] = lambda *_: False,
        ordered: bool = True,
        settings: AblationSettings | None = None,
    ) -> None:
        settings = settings or AblationSettings()
        sizes = [tables.vocab_size(side) for side in SIDES]
        self.sides = {
            "device": AblationState(settings, asked, "device", sizes[0], sizes[1], ends, switch),
            "cloud": AblationState(settings, asked, "cloud", sizes[1], sizes[0], ends, switch),
        }
        self.tables, self.ordered = tables, ordered
        self.links: dict[tuple[str, str], deque] = {}
        self.begun: dict[str, tuple[int, list[int]]] = {}
        self.bytes = 0

    def actions(self) -> list[tuple[str, ...]]:
        found = [("deliver", *link) for link, messages in self.links.items() if messages]
        for side, state in self.sides.items():
            if side in self.begun:
                found.append(("finish", side))
            elif state.drafts:
                found.append(("begin", side))
        return found

    def act(self, action: tuple[str, ...]) -> None:
        what, side = action[0], action[1]
        state = self.sides[side]
        if what == "begin":
            self.begun[side] = state.epoch, state.prefix
            return
        if what == "finish":
            epoch, prefix = self.begun.pop(side)
            if state.epoch != epoch or not state.drafts:
                return  # preempted
            assert state.prefix == prefix
            state.drafted(self.tables.local(side, prefix))
        else:
            self.sides[state.other].receive(self.links[action[1:]].popleft())
            side = state.other
        for message in self.sides[side].take():
            data = encode(message)
            self.bytes += len(data)
            kind = "" if self.ordered else type(message).__name__
            self.links.setdefault((side, kind), deque()).append(decode(data))
        self.check()

    def check(self) -> None:
        for state in self.sides.values():
            assert len(state._own) <= state.question.window
            assert len(state._theirs) <= 2 * state.question.window + 1
            for position, theirs in state._theirs.items():
                assert position >= len(state.tokens)
                assert theirs.proposal.rejections >= state.rejections[state.other]
        device, cloud = (state.tokens for state in self.sides.values())
        shorter = min(len(device), len(cloud))
        assert device[:shorter] == cloud[:shorter]
        assert any(state.aggregates for state in self.sides.values()) or any(
            getattr(m, "hands_over", False) for link in self.links.values() for m in link
        )
        assert not all(state.aggregates for state in self.sides.values())

    def run(self, choose_action: Callable[[int], int], most: int = 5000) -> list[int]:
        for _ in range(most):
            actions = self.actions()
            if not actions:
                break
            self.act(actions[choose_action(len(actions))])
        device, cloud = self.sides["device"], self.sides["cloud"]
        assert device.ended and cloud.ended, "the two sides wait for each other"
        assert device.tokens == cloud.tokens and device.steps == cloud.steps
        return device.tokens
