"""What was used last, bounded: the memory that robot and verifier keep of pictures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values put or looked up last, bounded in number and in bytes; the newest always stays. For one thread."""

    def __init__(self, count: int, size: int) -> None:
        self._count, self._room = count, size
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size = 0

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value of ``size`` bytes, and drop the oldest ones that there is no room for."""
        self.drop(key)
        self._held[key] = value, size
        self._size += size
        while len(self._held) > 1 and (len(self._held) > self._count or self._size > self._room):
            self.drop(next(iter(self._held)))

    def get(self, key: K) -> V | None:
        """The value, which is the newest now; None where there is none."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        if key in self._held:
            self._size -= self._held.pop(key)[1]

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self._size = 0

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)
