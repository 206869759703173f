"""The earlier pictures of an observation: which of them the other side still has, and which must travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from cachetools import LRUCache

from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_HISTORY, Observation, Past
from dsd_ros.wire.pictures import MAX_PIXELS, decode_picture, picture_digest

KEPT_PICTURES = MAX_HISTORY + 1  # by the verifier, of each session: a history and the present one
KEPT_BYTES = 3 * MAX_PIXELS
MAX_HISTORY_PIXELS = MAX_PIXELS  # of all earlier pictures of an observation together


V = TypeVar("V")


class LastPictures(LRUCache[bytes, V]):
    """What one side keeps of a session's last pictures, by digest. For one thread.

    At most ``KEPT_PICTURES`` of them and ``KEPT_BYTES`` in all. Robot and verifier count alike, so that the robot
    knows which ones the verifier has dropped.
    """

    def __init__(self, size_of: Callable[[V], int]) -> None:
        super().__init__(KEPT_BYTES, size_of)

    def __setitem__(self, digest: bytes, value: V) -> None:
        if self.getsizeof(value) <= self.maxsize:
            super().__setitem__(digest, value)
        while len(self) > KEPT_PICTURES:
            self.popitem()


def kept_pictures() -> LastPictures[np.ndarray]:
    """A session's last pictures, RGB uint8 (height, width, 3)."""
    return LastPictures(lambda picture: picture.nbytes)


class UnknownPicture(Exception):
    """A history names a picture that is not kept here (any more)."""


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
    observation: Observation, kept: LastPictures[np.ndarray]
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
                raise UnknownPicture("the verifier has not got an earlier picture; send all of them")
            known[past.digest] = picture
    image = decode_picture(observation)
    # In the history's order, twice what stands there twice: the robot's memory must forget the same ones.
    for past in observation.history:
        picture = known[past.digest]
        kept[past.digest] = picture
    if image is not None:
        kept[picture_digest(image)] = image
    return image, [(known[past.digest], past.action) for past in observation.history]


def _earlier(past: Past) -> np.ndarray:
    picture = decode_picture(past)
    if picture is None or picture_digest(picture) != past.digest:
        raise WireError("an earlier picture is not the one that its digest names; send both anew")
    return picture
