# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st

from dsd_ros.decoding.methods.split import rounded_up
from dsd_ros.decoding.packing import (
    PackingError,
    count_rows,
    id_bits,
    kept_bytes,
    pack_chances,
    pack_distribution,
    pack_head,
    pack_ids,
    pack_kept,
    pack_probabilities,
    pack_rows,
    unpack_chances,
    unpack_distribution,
    unpack_head,
    unpack_ids,
    unpack_kept,
    unpack_probabilities,
    unpack_rows,
)

LARGEST = 152_064


@st.composite
def vocabulary_and_ids(draw) -> tuple[int, np.ndarray]:
    size = draw(st.integers(1, 1 << 20))
    ids = draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=40))
    return size, np.array(sorted(ids))


@given(vocabulary_and_ids())
def test_ids_survive_in_as_few_bits_as_they_take(chosen):
    size, ids = chosen
    data = pack_ids(ids, size)
    assert len(data) == -(-len(ids) * id_bits(size) // 8)
    assert unpack_ids(data, len(ids), size).tolist() == ids.tolist()


def test_bits_of_an_id():
    sizes = {1: 1, 2: 1, 3: 2, 512: 9, 513: 10, 65_536: 16, LARGEST: 18}
    assert {size: id_bits(size) for size in sizes} == sizes
    assert pack_ids(np.array([1, 2, 5]), 8) == bytes([0b01010001, 0b1])  # from the lowest bit on
    assert unpack_ids(pack_ids(np.array([0, 65_535, 152_063]), LARGEST), 3, LARGEST)[-1] == 152_063


def test_a_distribution_is_sparse_where_that_is_shorter_and_always_exact():
    generator = np.random.default_rng(0)
    for size, kept in ((10, 10), (10, 1), (LARGEST, 40), (LARGEST, LARGEST)):
        p = np.zeros(size, np.float32)
        p[generator.choice(size, kept, replace=False)] = generator.random(kept) + 1e-3
        data = pack_distribution(p)
        assert (unpack_distribution(data, size) == p).all()
        assert len(data) == min(1 + 4 * size, 5 + -(-kept * id_bits(size) // 8) + 4 * kept)


@given(st.integers(0, 4), st.integers(0, 1 << 20))
def test_several_distributions_survive(count, seed):
    rows = list(np.random.default_rng(seed).random((count, 9), np.float32).round(1))
    data = pack_rows(rows)
    assert count_rows(data, count + 1) == count_rows(data, count) == count
    assert count_rows(bytes(4 * (count + 3)), count) == count  # however many empty ones a peer sends
    assert len(data) == sum(4 + len(pack_distribution(row)) for row in rows)
    assert [row.tolist() for row in unpack_rows(data, count, 9)] == [row.tolist() for row in rows]
    for wrong in (count + 1, max(0, count - 1)):
        if wrong != count:
            with pytest.raises(PackingError, match="do not hold"):
                unpack_rows(data, wrong, 9)


@given(st.lists(st.floats(0, 1, width=32), max_size=64))
def test_probabilities_survive_rounded_up(values):
    q = torch.tensor(values, dtype=torch.float32)
    r = rounded_up(q)
    data = pack_chances(r.numpy())
    assert len(data) == -(-3 * len(values) // 2)
    assert unpack_chances(data, len(values)).tolist() == r.tolist()
    assert bool((r >= q).all()) and bool((r <= q * (1 + 2**-7) + 2**-31).all())
    with pytest.raises(PackingError, match="bytes"):
        unpack_chances(data + b"?", len(values))


kept_ids = st.sets(st.integers(0, LARGEST - 1), min_size=1, max_size=20)


@given(st.lists(kept_ids, max_size=5), st.sampled_from([np.float16, np.float32]))
def test_what_is_kept_survives(chosen, dtype):
    rows = [(np.array(sorted(ids)), np.linspace(0.1, 1, len(ids)).astype(dtype)) for ids in chosen]
    data = pack_kept(rows, LARGEST)
    width = dtype().itemsize
    assert len(data) == 1 + sum(kept_bytes(len(ids), LARGEST, width) for ids, _ in rows)
    found = unpack_kept(data, len(rows), LARGEST)
    assert all(weights.dtype == dtype for _, weights in found)
    assert [(i.tolist(), w.tolist()) for i, w in found] == [(i.tolist(), w.tolist()) for i, w in rows]


@given(st.binary(max_size=200), st.integers(0, 5), st.sampled_from([2, 15, 512, LARGEST]))
@profile(max_examples=300)
def test_other_bytes_raise_nothing_but_wire_errors(data, rows, size):
    for unpack in (
        lambda: unpack_kept(data, rows, size),
        lambda: unpack_kept(b"\x04" + data, rows, size),
        lambda: unpack_distribution(data, size),
        lambda: unpack_rows(data, rows, size),
        lambda: unpack_chances(data, rows),
        lambda: unpack_probabilities(data, size),
        lambda: unpack_head(data, size),
        lambda: unpack_probabilities(data, rows),
    ):
        try:
            unpack()
        except PackingError as error:
            assert str(error)


@pytest.mark.parametrize("ids", [[3, 3], [5, 2], [1, 14]])
def test_ids_out_of_order_or_range_are_refused(ids):
    with pytest.raises(PackingError, match="ascend"):
        unpack_ids(pack_ids(np.array(ids), 16), 2, 14)


values = st.floats(0, 1, width=32)


@given(vocabulary_and_ids(), st.data())
def test_a_head_survives_bit_by_bit_whatever_the_vocabulary(chosen, data):
    size, ids = chosen
    found = data.draw(st.lists(values, min_size=len(ids), max_size=len(ids)))
    bound = data.draw(st.floats(0, allow_nan=False))
    packed = pack_head(ids, np.array(found, np.float32), bound, size)
    assert len(packed) == 8 + -(-len(ids) * id_bits(size) // 8) + 4 * len(ids)
    again = unpack_head(packed, size)
    assert (again[0].tolist(), again[1].tolist(), again[2]) == (ids.tolist(), found, bound)
    with pytest.raises(PackingError):
        unpack_head(packed + b"?", size)
    with pytest.raises(PackingError):
        unpack_head(packed[:-1], size)


@pytest.mark.parametrize("wrong", [np.nan, -0.5, 1.5, np.inf])
def test_what_is_no_probability_is_refused(wrong):
    p = np.array([0.5, wrong], np.float32)
    ids = np.array([1, 3])
    for read in (
        lambda: unpack_probabilities(pack_probabilities(p), 2),
        lambda: unpack_head(pack_head(ids, p, 0.5, 8), 8),
    ):
        with pytest.raises(PackingError, match="from 0 to 1"):
            read()
