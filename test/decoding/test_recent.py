from __future__ import annotations

from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from dsd_ros.decoding.recent import Recent


@profile(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50), st.booleans())))
def test_recent_is_bounded_and_drops_the_oldest(steps):
    recent: Recent[int, int] = Recent(4, 80)
    order: dict[int, int] = {}  # oldest first, with sizes
    for number, (key, size, put) in enumerate(steps):
        if put:
            recent.put(key, number, size)
            order.pop(key, None)
            order[key] = size
            while len(order) > 1 and (len(order) > 4 or sum(order.values()) > 80):
                del order[next(iter(order))]
        else:
            found = recent.get(key)
            assert (found is not None) == (key in order)
            if key in order:
                order[key] = order.pop(key)
        assert len(recent) == len(order) and all(key in recent for key in order)
    recent.clear()
    assert len(recent) == 0
