# SPDX-License-Identifier: Apache-2.0
"""The outbox: answers first and in order, early outcomes by confidence, none after their round's final outcome."""

from __future__ import annotations

import threading

from hypothesis import given, settings as profile, strategies as st

from dsd_ros.wire.messages import Outcome, Refusal
from dsd_ros.wire.outbox import Outbox

SESSIONS = [1, 2]


def outcome(confidence=0.5, final=False, number=1, reply=1, token=0, session=SESSIONS[0], layer=1):
    return Outcome(session, reply, number, layer, 0, token, confidence, final)


def refusal(sentence=""):
    return Refusal(SESSIONS[0], 1, 1, "code", sentence)


def drain(box: Outbox) -> list:
    return list(iter(box.get_nowait, None))


def test_a_final_outcome_sent_again_does_not_reopen_earlier_rounds():
    box = Outbox()
    box.put(outcome(final=True, number=3))
    box.put(outcome(final=True, number=1))
    box.put(outcome(0.9, number=2))
    assert [message.round for message in drain(box)] == [3, 1]
    box.put(outcome(0.9, number=1, reply=2))
    assert len(box) == 1


def test_without_early_ones_only_answers_are_popped():
    box = Outbox()
    box.put(outcome())
    assert box.get_nowait(early=False) is None
    box.put(refusal())
    assert box.get_nowait(early=False) == refusal()
    assert len(box) == 1


def test_it_is_bounded():
    box = Outbox(limit=3, early_limit=4)
    for number in range(20):
        assert box.put(outcome(number / 20))
    assert [early.confidence for early in drain(box)] == [0.95, 0.9, 0.85, 0.8]
    assert [box.put(refusal()) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not box.put(outcome(final=True))
    assert box.put(outcome(0.5))


def test_closed_sessions_leave_nothing_in_the_outbox():
    box = Outbox()
    for number in range(3000):
        box.put(outcome(final=True, session=number))
        box.get_nowait()
    assert len(box._finished) < 300


def test_it_wakes_who_waits():
    woken = threading.Event()
    box = Outbox(on_ready=woken.set)
    got = []
    waiting = threading.Thread(target=lambda: got.extend([box.get(30), box.get(30)]))
    waiting.start()
    box.put(refusal())
    assert woken.wait(10)
    while not got and waiting.is_alive() and len(box):
        waiting.join(0.01)
    box.close()
    waiting.join(10)
    assert got == [refusal(), None] and box.closed
    assert not box.put(refusal()) and box.get(30) is None and len(box) == 0
    assert Outbox().get(0.01) is None


OUTCOMES = st.builds(
    outcome,
    st.floats(0, 1),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 3),
    st.sampled_from(SESSIONS),
)
ACTIONS = st.lists(st.one_of(OUTCOMES, st.builds(refusal, st.text(max_size=3)), st.none()))


@given(ACTIONS)
@profile(max_examples=200)
def test_whatever_comes_it_keeps_its_promises(actions):
    """None stands for a fetch."""
    box = Outbox()
    answers, fetched = [], []
    finished: dict[bytes, tuple[int, int]] = {}
    for action in [*actions, *[None] * len(actions)]:
        if action is None:
            waiting = list(box._early)
            message = box.get_nowait()
            if message is None:
                assert len(box) == 0
            elif isinstance(message, Outcome) and not message.is_final:
                assert (message.reply, message.round) > finished.get(message.session, (0, 0))
                assert fetched == answers, "an early outcome overtook an answer"
                assert message.confidence == max(early.confidence for early in waiting)
            else:
                fetched.append(message)
            continue
        assert box.put(action)
        if isinstance(action, Refusal) or action.is_final:
            answers.append(action)
            if isinstance(action, Outcome):
                name = action.reply, action.round
                finished[action.session] = max(name, finished.get(action.session, (0, 0)))
    assert fetched == answers
