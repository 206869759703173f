# SPDX-License-Identifier: Apache-2.0
"""Mode stream, the verifier's half, message by message: the target's own reply, whatever a robot drafts."""

from __future__ import annotations

import queue
import random
import threading
from functools import cache
from itertools import pairwise

import pytest
from by_hand import IMAGE, Robot
from by_reference import reply_alone
from hypothesis import Phase, given, settings as profile, strategies as st
from stepped import Speaking, Stepped
from table_model import TableModel
from worded_table import FORM, WordedTable, constrained_alone

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.rounds import RoundRefused
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.wire.messages import Draft, DraftTokens, Refusal, RefusalCode, SessionClose, VerifiedTokens

TARGET = TableModel(3, 12)
ENDLESS = TableModel(3, 12, ends=False)
LONGEST = 40


@cache
def own_reply(number: int = 1, instruction: str = "go", **values) -> tuple[int, ...]:
    """What ``ENDLESS`` says, greedily unless ``values`` say otherwise."""
    chosen = DecodeSettings(**{"max_tokens": LONGEST} | values)
    return tuple(reply_alone(ENDLESS, IMAGE, instruction, chosen, number))


def streaming(engine: VerifierEngine, **changes) -> Robot:
    robot = Robot(engine)
    assert robot.open(**{"mode": "stream", "max_tokens": LONGEST} | changes).error == ""
    return robot


@pytest.fixture
def target():
    return Stepped(ENDLESS)


@pytest.fixture
def engine(target):
    with VerifierEngine(target) as engine:
        yield engine
        target.free()


# ------------------------------------------------------------------------------- exactness


def test_a_right_draft_saves_passes_and_a_wrong_one_costs_none(engine, target):
    said = own_reply()
    robot = streaming(engine)
    robot.tell(0, said[:5])  # before the observation
    robot.observe()
    target.begun()
    robot.tell(5, said[5:9])
    target.step()
    first = robot.get()
    assert (first.at, first.tokens, first.accepted, first.drafted) == (0, list(said[:6]), 5, 5)
    robot.tell(9, [(said[9] + 1) % 11])
    target.begun()  # its draft was read when it began
    target.step()
    second = robot.get()
    assert (second.at, second.tokens) == (6, list(said[6 : 6 + len(second.tokens)])) and second.accepted >= 3
    target.free()
    rest = robot.verified(known=first.tokens + second.tokens)
    assert rest == list(said)
    assert len(target.passes) <= 2 + LONGEST - 10 + 1


ROBOTS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "truncated": {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "seed": 6},
    "constrained": {"temperature": 1.0, "seed": 7},
}


@cache
def wanted_of(kind: str) -> list[int]:
    """The reply of a robot of this kind."""
    if kind == "constrained":
        chosen = DecodeSettings(mode="stream", max_tokens=FORM.limit, **ROBOTS[kind])
        return constrained_alone(WordedTable(2), IMAGE, "go", chosen, FORM)
    chosen = DecodeSettings(mode="stream", max_tokens=LONGEST, **ROBOTS[kind])
    return reply_alone(TARGET, IMAGE, "go", chosen, ends=TARGET.eos_token_ids)


class Inventive:
    """A robot that tells what it likes, loses its link, asks and asks again; all it hears has to be the reply."""

    def __init__(self, engine: VerifierEngine, target: Stepped, kind: str, seed: int) -> None:
        self.engine, self.target, self.wanted = engine, target, wanted_of(kind)
        self.chance = random.Random(seed)
        self.known: list[int] = []
        self.ended = False
        form = {"grammar": FORM.text, "max_tokens": FORM.limit} if kind == "constrained" else {}
        self.values = {**ROBOTS[kind], **form}
        target.step()  # of the robots before this one
        self.robot = streaming(engine, **self.values)
        self.sent: list[DraftTokens] = []
        self.robot.observe()

    def tell(self) -> None:
        """Right, wrong in the middle, or of nothing at all; from anywhere."""
        chance, wanted = self.chance, self.wanted
        start = chance.choice([len(self.known), chance.randrange(len(wanted) + 3), chance.randrange(1 << 32)])
        tokens = list(wanted[start : start + chance.randrange(9)])
        if chance.random() < 0.5:
            place = chance.randrange(len(tokens) + 1)
            tokens[place:] = [chance.choice([0, 3, 11, 12, 500, (1 << 20) - 1]) for _ in range(chance.randrange(30))]
        if not tokens:  # that would be a question
            return
        reply, stream = chance.choice([(1, 1), (1, 2), (1, 3), (1, 2), (0, 9), (2, 0)]) if chance.random() < 0.9 else (
            1, (1 << 32) - 1,
        )  # fmt: skip
        self.sent.append(DraftTokens(self.robot.session, reply, stream, start, tokens))
        self.robot.send(self.sent[-1])

    def again(self) -> None:
        for message in self.chance.choices(self.sent, k=2) if self.sent else ():
            self.robot.send(message)

    def ask(self) -> None:
        self.robot.tell(self.chance.randrange(len(self.known) + 1))

    def observe(self) -> None:
        self.robot.observe(verified=self.known[: self.chance.randrange(len(self.known) + 1)])

    def step(self) -> None:
        self.target.step()
        self.hear()

    def cut(self) -> None:
        """The link is gone, and what was on it; another one resumes the session."""
        before = self.robot
        self.engine.disconnect(before.peer)
        self.robot = Robot(self.engine)
        self.target.step()
        assert self.robot.open(mode="stream", resume=before.ticket).session == before.session
        self.robot.tell(len(self.known))

    def leave(self) -> None:
        """Another session, as after a restart of the verifier: it goes on after the known tokens."""
        self.target.step()
        self.robot = streaming(self.engine, **self.values)
        self.robot.observe(verified=list(self.known))

    def hear(self, timeout: float | None = None) -> None:
        """Take what has come; every message is a piece of the target's own reply."""
        while not self.ended:
            try:
                message = self.robot.inbox.get(timeout is not None, timeout)
            except queue.Empty:
                assert timeout is None, "nothing came"
                return
            if message.session != self.robot.session:  # it has left that one
                continue
            if isinstance(message, Refusal):
                assert (message.code, message.reply) == (RefusalCode.NO_OBSERVATION, 1)  # it was lost with the link
                self.robot.observe(verified=list(self.known))
                continue
            end = message.at + len(message.tokens)
            assert message.tokens == self.wanted[message.at : end]
            assert message.accepted <= message.drafted and message.accepted <= max(0, len(message.tokens) - 1)
            assert message.ended == (end == len(self.wanted))
            if message.at <= len(self.known):
                self.known += message.tokens[len(self.known) - message.at :]
                self.ended = message.ended

    def finish(self) -> None:
        self.robot.tell(len(self.known))
        self.hear(60)
        assert self.known == self.wanted


ACTIONS = st.lists(
    st.sampled_from(["tell", "tell", "tell", "step", "step", "again", "ask", "observe", "cut", "leave"]), max_size=40
)


@given(st.sampled_from([*ROBOTS]), ACTIONS, st.integers(0, 1 << 30), st.integers(1, 3))
@profile(max_examples=60, phases=[Phase.reuse, Phase.generate])  # a shorter example of a failure takes minutes
def test_whatever_robots_invent_they_hear_the_targets_own_reply(kind, actions, seed, count):
    target = Stepped(WordedTable(2) if kind == "constrained" else TARGET)
    with VerifierEngine(target, EngineSettings(max_batch=2)) as engine:
        robots = [Inventive(engine, target, kind, seed + number) for number in range(count)]
        for number, action in enumerate(actions):
            getattr(robots[number % count], action)()
        target.free()
        for robot in robots:
            robot.finish()
        assert engine.metrics.registry.get_sample_value("dsd_verifier_failures_total") == 0


# --------------------------------------------------------------------------- pause and resume


def test_a_reply_pauses_without_a_robot_and_goes_on_when_asked(engine, target):
    robot = streaming(engine)
    robot.observe()
    target.begun()
    engine.disconnect(robot.peer)
    target.free()  # nobody waits for what this pass decides
    other = streaming(engine)  # its turns come after that of the reply, which has paused by now
    other.observe()
    other.verified()
    decoded = len(engine._sessions._sessions[robot.session].reply.tokens)
    assert 1 <= decoded < 3
    again = Robot(engine)
    assert again.open(mode="stream", resume=robot.ticket).session == robot.session
    again.tell(0)
    again.session = robot.session
    assert again.verified() == list(own_reply())


def test_a_reply_that_was_complete_is_told_again():
    with VerifierEngine(ENDLESS) as engine:
        robot = streaming(engine)
        robot.observe()
        tokens = robot.verified()
        engine.disconnect(robot.peer)
        again = Robot(engine)
        again.session = again.open(mode="stream", resume=robot.ticket).session
        for known in (0, 7, LONGEST):
            again.tell(known, stream=known)
            assert again.get() == VerifiedTokens(again.session, 1, known, tokens[known:], ended=True)
        again.tell(LONGEST + 1)
        assert again.get().code == RefusalCode.NO_OBSERVATION
        # Another verifier, which is told of all of it, says that it has ended.
        other = streaming(engine)
        other.observe(verified=tokens)
        assert other.get() == VerifiedTokens(other.session, 1, LONGEST, [], ended=True)


@pytest.mark.parametrize("how", ["observation", "close", "disconnect"])
def test_a_reply_that_nobody_wants_ends_at_the_next_step(engine, target, how):
    robot, other = streaming(engine), streaming(engine)
    robot.observe()
    target.begun()
    if how == "observation":
        robot.observe(reply=2, instruction="on")
    elif how == "close":
        robot.send(SessionClose(robot.session))
    else:
        engine.disconnect(robot.peer)
    target.free()
    other.observe()
    other.verified()
    if how == "observation":
        while robot.get().reply == 1:
            pass
    steps = sum(robot.session in step for step in target.passes)
    assert steps < 4 or (how == "observation" and steps < LONGEST + 4)


def test_a_robot_that_does_not_know_how_far_it_was_is_asked_for_its_observation(engine, target):
    target.free()
    robot = streaming(engine)
    robot.tell(0, stream=4)
    refusal = robot.get()
    assert (refusal.code, refusal.reply, refusal.round) == (RefusalCode.NO_OBSERVATION, 1, 4)
    robot.observe(verified=list(own_reply()[:9]))
    assert robot.verified(known=list(own_reply()[:9])) == list(own_reply())
    robot.tell(0, reply=0)  # of a reply that is over
    robot.tell(0, reply=2, stream=1)
    assert robot.get().reply == 2


def test_an_observation_that_waits_over_a_link_that_is_down_is_no_duplicate():
    may_see, seeing = threading.Event(), threading.Event()

    class Slow(TableModel):
        def open(self, *observation):
            seeing.set()
            assert may_see.wait(60)
            return super().open(*observation)

    with VerifierEngine(Slow(3, 12, ends=False)) as engine:
        robot = streaming(engine)
        robot.observe()
        assert seeing.wait(60)
        engine.disconnect(robot.peer)
        again = Robot(engine)
        again.session = again.open(mode="stream", resume=robot.ticket).session
        again.tell(0)
        again.observe()  # while the first one waits until its picture has been seen
        may_see.set()
        assert again.verified() == list(own_reply())


# ------------------------------------------------------------------------------------ others


def test_where_a_pass_has_no_room_for_all_those_with_drafts_go_first_and_nobody_starves():
    target = Stepped(ENDLESS)
    with VerifierEngine(target, EngineSettings(max_batch=2)) as engine:
        first, plain, drafting, other = (streaming(engine) for _ in range(4))
        first.observe()
        target.begun()  # while it is held, the others arrive
        drafting.tell(0, own_reply())
        for robot in (plain, other, drafting):
            robot.observe()
        target.free()
        for robot in (first, plain, drafting, other):
            assert robot.verified() == list(own_reply())
    sessions = [robot.session for robot in (first, plain, drafting, other)]
    places = {session: [n for n, step in enumerate(target.passes) if session in step] for session in sessions}
    assert len(places[drafting.session]) == 3  # of at most 17 tokens each
    assert places[drafting.session][-1] < 12
    for taken in places.values():
        assert all(after - before <= 4 for before, after in pairwise(taken))


def test_a_stream_has_no_rounds_and_a_round_no_stream(engine, target):
    target.free()
    robot = streaming(engine)
    robot.send(Draft(robot.session, 1, 1, 0, [1]))
    assert robot.get().code == RefusalCode.OUT_OF_STEP
    robot.open(mode="dsd")
    robot.tell(0, [1])
    assert robot.get().code == RefusalCode.OUT_OF_STEP
    robot.session += 1
    robot.tell(0, [1], stream=8)
    refusal = robot.get()
    assert (refusal.code, refusal.round) == (RefusalCode.UNKNOWN_SESSION, 8)


def test_a_stream_has_one_proof(engine):
    assert "mode ar proves nothing by 'split'" in Robot(engine).open(mode="ar", proof="split").error
    assert Robot(engine).open(mode="ar", proof="coupled").error == ""


def test_a_step_that_fails_is_refused_and_can_be_asked_for_again():
    class Odd(TableModel):
        fails = True

        def forward_tokens(self, *arguments):
            if self.fails:
                raise RuntimeError("odd pass")
            return super().forward_tokens(*arguments)

    model = Odd(3, 12, ends=False)
    with VerifierEngine(model) as engine:
        robot = streaming(engine)
        robot.observe()
        assert isinstance(first := robot.get(), VerifiedTokens)  # the first token comes with the prompt
        assert robot.get().code == RefusalCode.MODEL_ERROR
        model.fails = False
        robot.tell(1)
        assert robot.verified(known=first.tokens) == list(own_reply())


def test_the_end_of_the_context_is_the_same_with_any_draft():
    model = TableModel(3, 12, ends=False, max_length=10)
    found = []
    for drafted in (0, 3, 16):
        target = Stepped(model)
        with VerifierEngine(target) as engine:
            robot, tokens = streaming(engine), []
            if drafted:
                robot.tell(0, own_reply()[:drafted])
            robot.observe()
            target.free()
            while isinstance(message := robot.get(), VerifiedTokens):
                tokens += message.tokens
            assert message.code == RefusalCode.MODEL_ERROR and "10 tokens" in message.sentence
            found.append(tokens)
    assert found[0] == found[1] == found[2] == list(own_reply()[:9])


# ------------------------------------------------------------ a target that decodes replies itself


@pytest.fixture
def speaking():
    target = Speaking(ENDLESS)
    with VerifierEngine(target) as engine:
        yield engine, target


def test_what_a_target_decodes_by_itself_is_passed_on_and_drafts_are_handed_to_it(speaking):
    engine, target = speaking
    said = list(own_reply())
    robot = streaming(engine)
    robot.observe()
    generation = target.begun.get(timeout=10)
    robot.tell(0, said[:4])
    robot.tell(4, said[4:6])
    assert [(message.start, message.tokens) for message in target.drafts] == [(0, said[:4]), (4, said[4:6])]
    plan = [(1, 0), (5, 4), (3, 0)]  # tokens; of them from the draft: its last is the target's own, if it was a step
    at = 0
    for count, accepted in plan:
        generation.take(generation, said[at : at + count], 0.002)
        found = robot.get()
        assert (found.at, found.tokens, found.accepted) == (at, said[at : at + count], accepted)
        assert found.compute_us >= 2000 and found.accepted <= found.drafted
        at += count
    generation.take(generation, said[at:], 0.002)
    assert robot.get().ended and robot.silent()
    assert not target.begun.qsize()


def test_a_reply_that_a_target_decodes_pauses_and_goes_on_from_what_is_verified(speaking):
    engine, target = speaking
    said = list(own_reply())
    robot = streaming(engine)
    robot.observe()
    first = target.begun.get(timeout=10)
    first.take(first, said[:3], 0.0)
    assert robot.get().tokens == said[:3]
    engine.disconnect(robot.peer)
    first.take(first, said[3:5], 0.0)  # nobody takes it
    assert first.stopped
    again = Robot(engine)
    again.session = again.open(mode="stream", resume=robot.ticket).session
    again.tell(2)
    assert again.get().tokens == said[2:3]
    second = target.begun.get(timeout=10)
    assert second is not first and list(second.reply.tokens) == said[:3]
    first.take(first, said[5:8], 0.0)  # late, and of another decoding
    second.take(second, said[3:], 0.0)
    assert again.verified(known=said[:3]) == said


def test_the_next_reply_stops_the_one_before_and_a_refusal_ends_its_own_alone(speaking):
    engine, target = speaking
    robot = streaming(engine)
    robot.observe()
    before = target.begun.get(timeout=10)
    robot.observe(reply=2)
    now = target.begun.get(timeout=10)
    before.take(before, [1], 0.0)
    now.take(now, RoundRefused(RefusalCode.MODEL_ERROR, "the engine does not like it"), 0.0)
    refusal = robot.get()
    assert (refusal.reply, refusal.code, refusal.sentence) == (
        2,
        RefusalCode.MODEL_ERROR,
        "the engine does not like it",
    )
    assert before.stopped and robot.silent()
    robot.observe(reply=3)
    last = target.begun.get(timeout=10)
    said = list(own_reply(3))
    last.take(last, said, 0.0)
    assert robot.verified(reply=3) == said
