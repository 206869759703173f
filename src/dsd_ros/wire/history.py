"""The earlier pictures of an observation: which of them the other side still has, and which must travel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_HISTORY, Observation, Past
from dsd_ros.wire.pictures import MAX_PIXELS, decode_picture, picture_digest

KEPT_PICTURES = MAX_HISTORY + 1  # by the verifier, of each session: a history and the present one
KEPT_BYTES = 3 * MAX_PIXELS
MAX_HISTORY_PIXELS = MAX_PIXELS  # of all earlier pictures of an observation together

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class UnknownPicture(Exception):
    """A history names a picture that is not kept here (any more)."""


class Recent(Generic[K, V]):
    """The values put or looked up last, bounded in number and in bytes; the newest always stays. For one thread."""

    def __init__(self, count: int = KEPT_PICTURES, size: int = KEPT_BYTES) -> None:
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


def check_history(sides: Iterable[tuple[int, int]]) -> None:
    """WireError for earlier pictures of (height, width) each that are too many or too large."""
    sides = list(sides)
    pixels = sum(height * width for height, width in sides)
    if len(sides) > MAX_HISTORY or pixels > MAX_HISTORY_PIXELS:
        raise WireError(
            f"a history of {len(sides)} pictures with {pixels} pixels cannot be sent; {MAX_HISTORY} pictures "
            f"and {MAX_HISTORY_PIXELS} pixels in all can: use fewer or smaller ones"
        )


def read_pictures(
    observation: Observation, kept: Recent[bytes, np.ndarray]
) -> tuple[np.ndarray | None, list[tuple[np.ndarray, str]]]:
    """The present picture (None: there is none) and the earlier ones with their actions, oldest first.

    RGB uint8 (height, width, 3). What is there is put into ``kept``, and what is only named is taken from
    there. UnknownPicture where that has it no more; WireError for what is not as stated.
    """
    check_history((past.height, past.width) for past in observation.history)
    known: dict[bytes, np.ndarray] = {}
    for past in observation.history:
        if past.image:
            known[past.digest] = _earlier(past)
        elif past.digest not in known:
            picture = kept.get(past.digest)
            if picture is None:
                raise UnknownPicture(
                    "the verifier has not got an earlier picture; send all of them"
                )
            known[past.digest] = picture
    image = decode_picture(observation)
    for digest, picture in known.items():
        kept.put(digest, picture, picture.nbytes)
    if image is not None:
        kept.put(picture_digest(image), image, image.nbytes)
    return image, [(known[past.digest], past.action) for past in observation.history]


def _earlier(past: Past) -> np.ndarray:
    picture = decode_picture(past)
    if picture is None or picture_digest(picture) != past.digest:
        raise WireError("an earlier picture is not the one that its digest names; send both anew")
    return picture
