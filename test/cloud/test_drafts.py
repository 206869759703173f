# SPDX-License-Identifier: Apache-2.0
"""What is kept of a robot's streamed draft: by position, whatever order its messages come in."""

from __future__ import annotations

import random

from hypothesis import given, settings as profile, strategies as st

from dsd_ros.cloud.drafts import MOST_AHEAD, StreamedDraft
from dsd_ros.wire.messages import MAX_DRAFT, DraftTokens

SIZE, END = 10, 9


def tell(draft: StreamedDraft, start: int, tokens, stream: int = 1, reply: int = 1) -> None:
    draft.take(DraftTokens(1, reply, stream, start, list(tokens)))


def after(draft: StreamedDraft, verified, most: int = 16, reply: int = 1) -> list[int]:
    return draft.after(reply, verified, most, {END}, SIZE)


def test_what_follows_the_verified_tokens_is_found_as_far_as_it_is_usable():
    draft = StreamedDraft()
    tell(draft, 0, [1, 2, 3])
    tell(draft, 3, [4, 5])
    assert after(draft, []) == after(draft, []) == [1, 2, 3, 4, 5]
    assert after(draft, [1, 2]) == [3, 4, 5] and after(draft, [1, 2], 2) == [3, 4]
    assert after(draft, [1, 2], 0) == after(draft, [1, 2], -1) == []
    tell(draft, 6, [7])  # after a gap
    assert after(draft, [1, 2, 3]) == [4, 5]
    tell(draft, 5, [SIZE])  # no token of the target
    assert after(draft, [1, 2, 3]) == [4, 5]
    tell(draft, 4, [END])  # the target says an end without a pass of its own
    assert after(draft, [1, 2, 3]) == [4]
    assert draft.waits()
    assert after(draft, [1, 2, 3, 4, END, 1, 7]) == [] and not draft.waits()


def test_a_stream_that_contradicted_the_reply_is_void_until_the_next():
    draft = StreamedDraft()
    tell(draft, 0, [1, 2, 3, 4])
    assert after(draft, [1, 5]) == [] and not draft.waits()
    tell(draft, 2, [3])  # sent before the robot heard of it
    assert after(draft, [1, 5]) == [] and not draft.waits()
    tell(draft, 2, [6], stream=2)
    tell(draft, 2, [3])
    assert after(draft, [1, 5]) == [6]


def test_another_reply_begins_anew():
    draft = StreamedDraft()
    tell(draft, 0, [1, 2])
    assert after(draft, [], reply=0) == [] and after(draft, []) == [1, 2]  # late turns of an older one change nothing
    assert after(draft, [], reply=2) == [] and not draft.waits()
    tell(draft, 0, [3], reply=3)
    tell(draft, 0, [4], reply=2, stream=9)
    assert after(draft, [], reply=3) == [3] and after(draft, [], reply=2) == []


def test_what_is_kept_is_bounded():
    draft = StreamedDraft()
    for start in range(0, 1 << 20, 1 << 10):
        tell(draft, start, [1] * MAX_DRAFT)
    tell(draft, (1 << 32) - 1, [1] * MAX_DRAFT)
    assert len(draft._tokens) <= MOST_AHEAD
    for start in range(0, MOST_AHEAD, MAX_DRAFT):
        tell(draft, start, [1] * MAX_DRAFT)
    assert len(after(draft, [], 1 << 20)) == MOST_AHEAD


@given(seed=st.integers(0, 1 << 30))
@profile(max_examples=200)
def test_an_honest_draft_is_there_whatever_the_order_and_a_wrong_one_never_in_its_place(seed):
    """Streams of which all but the last err, in pieces, shuffled and doubled, while the reply grows."""
    chance = random.Random(seed)
    reply = [chance.randrange(END) for _ in range(40)]
    messages, last = [], (0, 0)
    for stream in range(1, 4):
        start, right = chance.randrange(20), chance.randrange(1, 20)
        tokens = reply[start : start + right]
        if stream < 3:
            tokens += [(reply[start + right] + 1) % END, *(chance.randrange(SIZE + 2) for _ in range(5))]
        else:
            last = start, start + right
        while tokens:
            count = chance.randrange(1, 6)
            messages.append(DraftTokens(1, 1, stream, start, tokens[:count]))
            start, tokens = start + count, tokens[count:]
    messages += chance.choices(messages, k=5)
    chance.shuffle(messages)
    draft, known = StreamedDraft(), 0
    for message in messages:
        draft.take(message)
        known = min(known + chance.randrange(3), last[1] - 1)
        found = after(draft, reply[:known])
        said = [m for m in messages if m.stream == draft._stream]
        assert all(
            any(m.start <= place < m.start + len(m.tokens) and m.tokens[place - m.start] == token for m in said)
            for place, token in enumerate(found, known)
        )
    known = chance.randrange(max(known, last[0]), last[1])
    assert after(draft, reply[:known], 40) == reply[known : last[1]]
