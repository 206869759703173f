# SPDX-License-Identifier: Apache-2.0
"""Parts of distributions as bytes: token ids in as few bits as their vocabulary takes, and their values.

Integers and floats are little-endian; ids fill their bytes from the lowest bit on, ceil(log2 V) bits each.
Sizes, order and range of ids are checked here; whether values make a distribution, where they are used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch


class PackingError(ValueError):
    """Bytes that do not hold what they should; one sentence."""


_DENSE, _SPARSE = 0, 1
_COUNT_BYTES = 4
_MAX_ENTRIES = 1 << 25  # of all rows that are unpacked together: 64 rows over a vocabulary of 524 288
_BOUND_BYTES = 8
_CHANCE_BITS = 12
_LEAST_UPPER = 0x3000  # upper half of 2^-31, the least probability that travels, as float32


def id_bits(vocab_size: int) -> int:
    """ceil(log2 V): the bits of one id of a vocabulary of V."""
    return max(1, (vocab_size - 1).bit_length())


def pack_ids(ids: np.ndarray, vocab_size: int) -> bytes:
    """Ids (n,), each below ``vocab_size``, in ceil(n ceil(log2 V) / 8) bytes."""
    return _pack_bits(ids, id_bits(vocab_size))


def unpack_ids(data: bytes, count: int, vocab_size: int) -> np.ndarray:
    """(count,) int64 ascending ids from ``pack_ids``; PackingError unless each is above the one before."""
    ids = _unpack_bits(data, count, id_bits(vocab_size))
    if count and (int(ids[-1]) >= vocab_size or bool((np.diff(ids) <= 0).any())):
        raise PackingError(f"packed ids must ascend and be below the vocabulary's size, {vocab_size}")
    return ids


def _pack_bits(values: np.ndarray, width: int) -> bytes:
    shifts = np.arange(width, dtype=np.uint32)
    bits = (np.asarray(values, dtype=np.uint32)[:, None] >> shifts) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _unpack_bits(data: bytes, count: int, width: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * width, bitorder="little")
    return bits.reshape(count, width).astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))


def ids_bytes(count: int, vocab_size: int) -> int:
    """The length of ``pack_ids`` of ``count`` ids."""
    return (count * id_bits(vocab_size) + 7) // 8


def pack_distribution(p: np.ndarray) -> bytes:
    """One distribution (V,) float32, exactly: whole, or as the ids and values above 0 where that is shorter."""
    ids = np.flatnonzero(p)
    if _COUNT_BYTES + ids_bytes(len(ids), len(p)) + 4 * len(ids) >= 4 * len(p):
        return bytes([_DENSE]) + p.astype("<f4", copy=False).tobytes()
    return struct.pack("<BI", _SPARSE, len(ids)) + pack_ids(ids, len(p)) + p[ids].astype("<f4", copy=False).tobytes()


def unpack_distribution(data: bytes, vocab_size: int) -> np.ndarray:
    """(vocab_size,) float32 from ``pack_distribution``; PackingError for bytes that hold something else."""
    p = np.zeros(vocab_size, np.float32)
    if len(data) == 1 + 4 * vocab_size and data[0] == _DENSE:
        p[:] = np.frombuffer(data, "<f4", offset=1)
        return p
    if len(data) >= 1 + _COUNT_BYTES and data[0] == _SPARSE:
        count = int.from_bytes(data[1 : 1 + _COUNT_BYTES], "little")
        at = 1 + _COUNT_BYTES + ids_bytes(count, vocab_size)
        if 1 <= count <= vocab_size and len(data) == at + 4 * count:
            ids = unpack_ids(data[1 + _COUNT_BYTES : at], count, vocab_size)
            p[ids] = np.frombuffer(data, "<f4", offset=at)
            return p
    raise PackingError(f"{len(data)} bytes are no packed distribution over a vocabulary of {vocab_size}")


def pack_rows(rows: Sequence[np.ndarray]) -> bytes:
    """Several distributions (V,) float32: each by ``pack_distribution`` after its length as uint32."""
    packed = [pack_distribution(row) for row in rows]
    return b"".join(struct.pack("<I", len(data)) + data for data in packed)


def unpack_rows(data: bytes, rows: int, vocab_size: int) -> list[np.ndarray]:
    """``rows`` arrays (vocab_size,) from ``pack_rows``; PackingError for bytes that hold something else."""
    found = []
    at = 0
    _check_entries(rows, vocab_size)
    for _ in range(rows):
        begin = at + _COUNT_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        if len(data) < at:
            break
        found.append(unpack_distribution(data[begin:at], vocab_size))
    if len(found) != rows or at != len(data):
        raise PackingError(f"{len(data)} bytes do not hold {rows} packed distributions")
    return found


def count_rows(data: bytes, most: int) -> int:
    """How many distributions bytes from ``pack_rows`` hold, by the lengths in them alone; ``most`` for more."""
    rows = at = 0
    while at < len(data) and rows < most:
        at += _COUNT_BYTES + int.from_bytes(data[at : at + _COUNT_BYTES], "little")
        rows += 1
    return rows


def pack_chances(chances: np.ndarray) -> bytes:
    """Probabilities (n,) float32 from ``methods.split.rounded_up`` in 12 bits each.

    The upper half of a float32 less that of 2^-31: its sign and its exponent's first bits are always alike.
    """
    upper = np.asarray(chances, np.float32).view(np.uint32).astype(np.int64) >> 16
    return _pack_bits((upper - _LEAST_UPPER).clip(0, (1 << _CHANCE_BITS) - 1), _CHANCE_BITS)


def unpack_chances(data: bytes, count: int) -> np.ndarray:
    """(count,) float32 from ``pack_chances``, 2^-31 up to 2; PackingError when the size is another."""
    _check_size(data, (_CHANCE_BITS * count + 7) // 8, f"probabilities of {count} tokens")
    upper = _unpack_bits(data, count, _CHANCE_BITS) + _LEAST_UPPER
    return (upper.astype(np.uint32) << 16).view(np.float32)


def pack_kept(rows: Sequence[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> bytes:
    """What is kept of some distributions: (ids ascending (k,), weights (k,) all float16 or all float32) each.

    The bytes of a weight, 2 or 4 (1 byte); then of each row its count less one (2 bytes), its ids, its weights.
    """
    width = rows[0][1].dtype.itemsize if rows else 2
    return bytes([width]) + b"".join(
        struct.pack("<H", len(ids) - 1) + pack_ids(ids, vocab_size) + weights.astype(f"<f{width}", copy=False).tobytes()
        for ids, weights in rows
    )


def kept_bytes(count: int, vocab_size: int, width: int = 2) -> int:
    """The length of a row of ``pack_kept`` with ``count`` ids and weights of ``width`` bytes."""
    return 2 + ids_bytes(count, vocab_size) + width * count


def unpack_kept(data: bytes, rows: int, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``rows`` pairs of ids and weights from ``pack_kept``; PackingError for bytes that hold something else."""
    width = data[0] if data else 0
    if width not in (2, 4):
        raise PackingError("truncated distributions must begin with the bytes of a weight, 2 or 4")
    kept = []
    at = 1
    _check_entries(rows, vocab_size)
    for _ in range(rows):
        count = int.from_bytes(data[at : at + 2], "little") + 1
        end = at + kept_bytes(count, vocab_size, width)
        values = end - width * count
        if len(data) < end or count > vocab_size:
            raise PackingError(f"{len(data)} bytes do not hold {rows} truncated distributions")
        ids = unpack_ids(data[at + 2 : values], count, vocab_size)
        kept.append((ids, np.frombuffer(data[values:end], f"<f{width}").astype(f"=f{width}")))
        at = end
    if at != len(data):
        raise PackingError(f"{len(data) - at} bytes are left over after {rows} truncated distributions")
    return kept


def pack_head(ids: np.ndarray, values: np.ndarray, bound: float, vocab_size: int) -> bytes:
    """A distribution's head: a bound of all other probabilities as float64, the ids ascending (k,), theirs (k,)."""
    return struct.pack("<d", bound) + pack_ids(ids, vocab_size) + values.astype("<f4", copy=False).tobytes()


def unpack_head(data: bytes, vocab_size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(ids (k,) int64, probabilities (k,) float32, bound) from ``pack_head``; PackingError for anything else.

    How many there are follows from the size: each takes more than four bytes.
    """
    width = id_bits(vocab_size)
    count = 8 * max(0, len(data) - _BOUND_BYTES) // (width + 32)
    at = _BOUND_BYTES + ids_bytes(count, vocab_size)
    if count > vocab_size or len(data) != at + 4 * count:
        raise PackingError(f"{len(data)} bytes are no head of a distribution over a vocabulary of {vocab_size}")
    ids = unpack_ids(data[_BOUND_BYTES:at], count, vocab_size)
    (bound,) = struct.unpack_from("<d", data)
    if not bound >= 0:  # nor is a NaN
        raise PackingError("the bound of a distribution's head must be 0 or more")
    return ids, _probabilities(data, at), float(bound)


def pack_probabilities(values: np.ndarray) -> bytes:
    """Probabilities (k,) as float32: a whole distribution, or those of some tokens."""
    return values.astype("<f4", copy=False).tobytes()


def unpack_probabilities(data: bytes, count: int) -> np.ndarray:
    """(count,) float32 from ``pack_probabilities``; PackingError for another size, or for what is no probability."""
    _check_size(data, 4 * count, f"{count} probabilities")
    return _probabilities(data, 0)


def pack_distributions(q: torch.Tensor) -> bytes:
    """Distributions (gamma, V) as float32, row by row."""
    return pack_probabilities(q.detach().cpu().float().contiguous().numpy())


def unpack_distributions(data: bytes, rows: int, vocab_size: int) -> torch.Tensor:
    """(rows, vocab_size) float32 from ``pack_distributions``; PackingError for another size."""
    _check_size(data, 4 * rows * vocab_size, f"distributions of {rows} tokens over a vocabulary of {vocab_size}")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32)).reshape(rows, vocab_size)


def _check_entries(rows: int, vocab_size: int) -> None:
    """Before a few bytes become rows of a vocabulary whose size a peer named."""
    if rows * vocab_size > _MAX_ENTRIES:
        raise PackingError(
            f"{rows} distributions over a vocabulary of {vocab_size} take {4 * rows * vocab_size} bytes when unpacked, "
            f"and at most {4 * _MAX_ENTRIES} are; draft fewer tokens"
        )


def _check_size(data: bytes, size: int, what: str) -> None:
    if len(data) != size:
        raise PackingError(f"{what} take {size} bytes, not {len(data)}")


def _probabilities(data: bytes, at: int) -> np.ndarray:
    values = np.frombuffer(data, "<f4", offset=at).astype(np.float32)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise PackingError("probabilities must be numbers from 0 to 1")
    return values
