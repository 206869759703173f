# SPDX-License-Identifier: Apache-2.0
"""One pass for many robots: every reply is the one that its robot would have got alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial

import numpy as np
import pytest
from by_hand import Robot
from lossy_channel import LossyChannel
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.rounds import PendingRound
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.sequence import PromptChunk, TreeCheck, verify_trees_together
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.client import DecodeCancelled
from dsd_ros.wire.messages import Outcome, Refusal, RefusalCode
from dsd_ros.wire.pictures import encode_picture

ROBOTS = 8
PATIENT = LinkSettings(response_timeout_s=0.5, attempts=60)
MODES: list[dict[str, object]] = [  # one a robot; what each says is fixed, whatever the others do
    {"mode": "stream"},
    {"mode": "dsd", "draft_length": 5},
    {"mode": "mc-dsd", "temperature": 0.8},
    {"mode": "fsd", "pipeline_depth": 2},
    {"mode": "dssd", "temperature": 0.8},
    {"mode": "fsd", "proof": "coupled", "temperature": 1.0, "shape": "budget"},
    {"mode": "stream", "temperature": 1.2},
    {"mode": "tslt", "temperature": 0.9},
]


class Counting(LocalTarget):
    """Counts the rounds of each pass; waits a little for others, as a slower model would."""

    def __init__(self, model: object, pause: float = 0.0) -> None:
        super().__init__(model)
        self.sizes: list[int] = []
        self.pause = pause

    def verify(self, work, on_early):
        if rounds := sum(isinstance(item, PendingRound) for item in work):
            self.sizes.append(rounds)
            time.sleep(self.pause)
        yield from super().verify(work, on_early)


def together(works: Sequence[Callable[[], object]]) -> None:
    """Do all of it at the same time, and raise what one of it raised."""
    failures: list[BaseException] = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(500)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def replies_of(engine: VerifierEngine, number: int, model, pictures: list[np.ndarray], count: int, alone: bool):
    """The tokens of robot ``number``'s replies. Some are cancelled, and if it is not alone, its link is a bad one."""
    plan = random.Random(number)
    chosen = DecodeSettings(seed=number, max_tokens=14, **MODES[number])
    channel = LocalChannel(engine)
    if not alone:
        channel = LossyChannel(channel, number, loss=0.01, doubled=0.02, delayed=0.02, cut=0.01)
    found = []
    with closing(channel), EdgeSession(channel, model, chosen, PATIENT) as session:
        for reply in range(count):
            pause, cancelled_after = plan.random() * 0.03, plan.choice([0, 2, 5])
            if plan.random() < 0.3:
                polls = iter(range(1000))
                with suppress(DecodeCancelled):  # a short reply may end first
                    session.decode(pictures[0], "stop", cancelled=lambda p=polls, n=cancelled_after: next(p) >= n)
            if not alone:
                time.sleep(pause)
            found.append(session.decode(pictures[reply % 3], f"go {reply}").tokens)
    return found


@pytest.mark.parametrize("replies", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_replies_of_eight_robots_are_those_of_one(target, draft, picture, replies):
    """Bad links, cancelled replies, and arrivals at any moment: any composition of a batch."""
    pictures = [picture(n) for n in range(3)]
    alone = []
    for number in range(ROBOTS):
        with VerifierEngine(target) as engine:
            alone.append(replies_of(engine, number, draft, pictures, replies, alone=True))
    counting = Counting(target, pause=0.002)
    batched: list[list[list[int]]] = [[] for _ in range(ROBOTS)]
    with VerifierEngine(counting) as engine:

        def robot(number: int) -> None:
            batched[number] = replies_of(engine, number, draft, pictures, replies, alone=False)

        together([partial(robot, number) for number in range(ROBOTS)])
    assert batched == alone
    assert max(counting.sizes) >= 4 and np.mean(counting.sizes) > 1.5


# ------------------------------------------------------------------------------------ by hand


@pytest.fixture
def gate():
    return threading.Event()


class Held(Counting):
    """The first pass waits for the gate, and everything else behind it."""

    def __init__(self, model: object, gate: threading.Event) -> None:
        super().__init__(model)
        self._gate = gate
        self.entered = threading.Event()

    def verify(self, work, on_early):
        if any(isinstance(item, PendingRound) for item in work):
            self.entered.set()
            assert self._gate.wait(120)
        yield from super().verify(work, on_early)


def robots_in_a_batch(engine: VerifierEngine, held: Held, count: int) -> list[Robot]:
    """Robots whose next rounds share a pass: an earlier robot's round holds it."""
    robots = [Robot(engine) for _ in range(count + 1)]
    for robot in robots:
        assert robot.open().error == ""
        robot.observe()
    while engine.queue()[0]:  # pictures are read beside the passes
        time.sleep(0.001)
    robots[0].draft(1, 0, [1])
    assert held.entered.wait(60)
    return robots[1:]


@pytest.mark.parametrize(
    ("limits", "sizes"), [({}, [1, 4]), ({"max_batch": 3}, [1, 3, 1]), ({"max_batch_tokens": 4}, [1, 2, 2])]
)
def test_a_pass_takes_every_round_that_waits_within_its_limits(gate, limits, sizes):
    held = Held(TableModel(1, ends=False), gate)
    with VerifierEngine(held, EngineSettings(**limits)) as engine:
        robots = robots_in_a_batch(engine, held, 4)
        for robot in robots:
            robot.draft(1, 0, [1])
        gate.set()
        outcomes = [robot.get() for robot in robots]
    assert held.sizes == sizes
    assert all(isinstance(outcome, Outcome) and outcome.is_final for outcome in outcomes)


def test_one_robots_bad_round_fails_alone(gate):
    held = Held(TableModel(1, ends=False), gate)
    with VerifierEngine(held) as engine:
        robots = robots_in_a_batch(engine, held, 3)
        robots[0].draft(1, 0, [1])
        robots[1].draft(1, 0, [1, 2], parents=bytes([0, 9]))  # its second node names a parent that comes later
        robots[2].draft(1, 0, [1])
        gate.set()
        good, bad, other = [robot.get() for robot in robots]
        assert held.sizes == [1, 3] and good.next_token == other.next_token
        assert isinstance(bad, Refusal) and bad.code == RefusalCode.BAD_DISTRIBUTION
        robots[1].draft(1, 0, [1])
        assert robots[1].get().next_token == good.next_token


def test_a_pass_that_fails_is_taken_apart(gate, caplog):
    class Odd(TableModel):
        def forward_batch(self, feeds, on_layer=None):
            raise RuntimeError("odd batch")

        def forward_tokens(self, tokens, *rest):
            if 3 in tokens:
                raise RuntimeError("odd token")
            return super().forward_tokens(tokens, *rest)

    held = Held(Odd(1, ends=False), gate)
    with VerifierEngine(held) as engine:
        robots = robots_in_a_batch(engine, held, 3)
        for robot, token in zip(robots, (1, 3, 1), strict=True):
            robot.draft(1, 0, [token])
        gate.set()
        results = [robot.get() for robot in robots]
    assert [isinstance(result, Outcome) for result in results] == [True, False, True]
    assert results[1].code == RefusalCode.MODEL_ERROR and "each is verified by itself" in caplog.text


def test_trees_in_one_pass_have_the_logits_of_each_by_itself(target, picture):
    """Any shapes and lengths, rows that are known or not, with and without hidden states."""
    chance = random.Random(3)
    for _ in range(6):
        checks, wanted, hidden = [], [], []
        for number in range(chance.randrange(2, 7)):
            sequence = target.prefill(picture(number, 56, 56 + 28 * chance.randrange(3)), f"go {number}")
            sequence.append([chance.randrange(200) for _ in range(chance.randrange(4))])
            if chance.random() < 0.4:
                sequence.next_logits()
            nodes = chance.randrange(6)
            tokens = [chance.randrange(200) for _ in range(nodes)]
            parents = [chance.randrange(-1, node) if node else -1 for node in range(nodes)]
            heard = chance.random() < 0.5
            layers: list[np.ndarray] = []
            alone = sequence.fork()
            wanted.append(
                alone.verify_tree(tokens, parents, (lambda _, h, to=layers: to.append(h.clone())) if heard else None)
            )
            hidden.append(layers)
            checks.append(TreeCheck(sequence, tokens, parents, heard))
        seen: list[list] = []
        found = verify_trees_together(checks, lambda _, rows, to=seen: to.append([row.clone() for row in rows]))
        for rows, alone_rows in zip(found, wanted, strict=True):
            np.testing.assert_allclose(rows, alone_rows, atol=2e-5, rtol=1e-4)
        listened = [layers for check, layers in zip(checks, hidden, strict=True) if check.heard]
        for layer, rows in enumerate(seen):
            for mine, layers in zip(rows, listened, strict=True):
                np.testing.assert_allclose(mine, layers[layer], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("parts", "verified"), [((), []), ((5, 2), [5, 6])])
def test_a_prompt_read_in_parts_and_in_company_has_the_logits_of_one_read_whole(target, picture, parts, verified):
    """Whatever is read beforehand, the rest is read in the pass of the reply's first round, beside other robots'."""
    whole = target.prefill(picture(1), "go there")
    other = target.prefill(picture(2), "stop")
    other.append([9])
    third = target.prefill(picture(3), "turn")
    whole.append(verified)
    tokens, parents = [7, 8, 9], [-1, -1, 0]
    wanted, wanted_other = whole.fork().verify_tree(tokens, parents), other.fork().verify_tree([3], [-1])
    opened, opened_third = target.open(picture(1), "go there"), target.open(picture(3), "turn")
    opened.append(verified)
    assert opened.unread == opened.prompt_length > sum(parts)
    for part in parts:
        opened.read(part)
    assert opened.unread == opened.prompt_length - sum(parts)
    checks = [TreeCheck(opened, tokens, parents, True), TreeCheck(other, [3], [-1])]
    seen: list[int] = []
    chunks = [PromptChunk(opened_third, 10_000)]
    rows = verify_trees_together(checks, lambda _, hidden: seen.append(len(hidden[0])), chunks)
    assert opened.unread == opened_third.unread == 0 and set(seen) == {4}
    np.testing.assert_allclose(rows[0], wanted, atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(rows[1], wanted_other, atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(opened_third.next_logits(), third.next_logits(), atol=2e-5, rtol=1e-4)
    opened.keep_path([0, 2])
    whole.append([7, 9])
    np.testing.assert_allclose(opened.next_logits(), whole.next_logits(), atol=2e-5, rtol=1e-4)
    opened.rollback(0)
    whole.rollback(0)
    np.testing.assert_allclose(opened.next_logits(), whole.next_logits(), atol=2e-5, rtol=1e-4)


class Noting(Held):
    """Notes what each pass had to do: the drafts' lengths, and the tokens of prompts that it read."""

    def __init__(self, model: object, gate: threading.Event) -> None:
        super().__init__(model, gate)
        self.passes: list[tuple[int, int]] = []
        self.robots: list[int] = []  # of each pass
        self.seen = threading.Semaphore(0)  # pictures

    def prefill(self, image, instruction, history):
        sequence = super().prefill(image, instruction, history)
        self.seen.release()
        return sequence

    def verify(self, work, on_early):
        replies = [item.reply for item in work]
        before = sum(reply.unread for reply in replies)
        yield from super().verify(work, on_early)
        rounds = sum(isinstance(item, PendingRound) for item in work)
        self.robots.append(len(work))
        self.passes.append((rounds, before - sum(reply.unread for reply in replies)))


def test_a_prompt_rides_in_the_pass_of_its_first_round(gate):
    """While a pass runs, a robot's observation and its first draft arrive: one more pass does both."""
    held = Noting(TableModel(1, ends=False), gate)
    with VerifierEngine(held) as engine:
        first, second = Robot(engine), Robot(engine)
        for robot in (first, second):
            robot.open()
        first.observe()
        first.draft(1, 0, [1])
        assert held.entered.wait(60)
        second.observe()
        second.draft(1, 0, [1])
        gate.set()
        assert first.get().next_token == second.get().next_token
    assert held.passes[-1] == (1, 2) and len(held.passes) <= 3  # the engine is closed: the last pass is noted


def test_a_long_prompt_stalls_nobody(gate, target, draft, picture):
    """It is read in parts, with the other robots' rounds, and its reply is the one of a verifier without limits."""
    image, small = encode_picture(picture(1, 112, 112)), encode_picture(picture(2))
    height, width = picture(2).shape[:2]
    found = {}
    for limits in ({}, {"max_batch_tokens": 12}, {"max_batch": 1, "max_batch_tokens": 12}):
        gate.clear()
        held = Noting(target, gate)
        with VerifierEngine(held, EngineSettings(**limits)) as engine:
            busy, long = Robot(engine), Robot(engine)
            busy.open(mode="ar", max_tokens=60)
            long.open()
            busy.observe(height=height, width=width, image=small)
            assert held.entered.wait(20)
            long.observe(height=112, width=112, image=image, instruction="go there and back again")
            long.draft(1, 0, [1, 2])
            assert all(held.seen.acquire(timeout=20) for _ in (busy, long))
            gate.set()
            outcome = long.get()
        found[str(limits)] = outcome.accepted, outcome.next_token
        if limits == {"max_batch_tokens": 12}:
            parts = [read for _, read in held.passes if read]
            assert len(parts) > 2 and max(parts) <= 12
            assert sum(rounds > 0 and 0 < read <= 11 for rounds, read in held.passes) >= len(parts) // 2
        elif limits:
            assert set(held.robots) == {1}
    assert len(set(found.values())) == 1


def test_a_prompt_that_cannot_be_read_fails_alone(gate):
    class Odd(TableModel):
        def forward_tree(self, feed, on_layer=None):
            return self.forward_batch([feed])[0]

        def forward_batch(self, feeds, on_layer=None):
            if any(feed.prompt is not None and feed.prompt.hidden[0, -1] == 4 for feed in feeds):
                raise RuntimeError("odd prompt")
            return [TableModel.forward_tree(self, feed) for feed in feeds]

    held = Held(Odd(1, ends=False), gate)
    with VerifierEngine(held) as engine:
        robots = [Robot(engine) for _ in range(3)]
        for robot in robots:
            robot.open()
        robots[0].observe()
        robots[0].draft(1, 0, [1])
        assert held.entered.wait(60)
        robots[1].observe(instruction="odd!")
        robots[2].observe()
        robots[2].draft(1, 0, [1])
        gate.set()
        assert robots[0].get().next_token == robots[2].get().next_token
        refusal = robots[1].get()
        assert refusal.code == RefusalCode.MODEL_ERROR and refusal.round == 0
        robots[1].draft(1, 0, [1])
        assert robots[1].get() == refusal
        robots[1].observe(reply=2)
        robots[1].draft(1, 0, [1], reply=2)
        assert isinstance(robots[1].get(), Outcome)


def test_a_hook_that_fails_leaves_every_reply_as_it_was(target, picture):
    sequences = [target.prefill(picture(n), "go") for n in range(3)]
    for sequence in sequences:
        sequence.append([5])
    wanted = [sequence.fork().verify([7, 8]) for sequence in sequences]

    def fail(*_):
        raise RuntimeError("the link is odd")

    checks = [TreeCheck(sequence, [7, 8], [-1, 0], True) for sequence in sequences]
    with pytest.raises(RuntimeError, match="odd"):
        verify_trees_together(checks, fail)
    for sequence, rows in zip(sequences, wanted, strict=True):
        assert sequence.tokens == [5]
        np.testing.assert_allclose(sequence.verify([7, 8]), rows, atol=2e-5, rtol=1e-4)
