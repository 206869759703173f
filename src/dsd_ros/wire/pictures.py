# SPDX-License-Identifier: Apache-2.0
"""The pictures of an Observation: lossless, or lossy with both models seeing what was decoded."""

from __future__ import annotations

import hashlib
import io
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from cachetools import LRUCache
from PIL import Image

from dsd_ros.limits import ENCODINGS, LOSSLESS, MAX_HISTORY, MAX_PIXELS
from dsd_ros.pictures import PictureError, check_size, read_picture
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import DIGEST_BYTES, MAX_IMAGE_BYTES, Observation, Past

NO_PICTURE = "none"
MAX_HISTORY_PIXELS = MAX_PIXELS  # of all earlier pictures of an observation together
KEPT_PICTURES = MAX_HISTORY + 1  # by the verifier, of each session: a history and the present one
KEPT_BYTES = 3 * MAX_PIXELS
_QUALITY = 90  # of a JPEG or WebP: objects keep their colours and edges

V = TypeVar("V")


class UnknownPicture(Exception):
    """A history names a picture that is not kept here, or no longer."""


def check_picture(image: np.ndarray) -> None:
    """WireError unless ``image`` is RGB uint8 (height, width, 3), and small enough to be sent."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise WireError(
            f"the image has shape {image.shape} and type {image.dtype}; "
            "give it as RGB of shape (height, width, 3) and type uint8"
        )
    _check_size(*image.shape[:2])


def encode_picture(image: np.ndarray, encoding: str = "png") -> bytes:
    """RGB uint8 (height, width, 3) to bytes; WireError for another array or one too large to send."""
    check_picture(image)
    image = np.ascontiguousarray(image)
    if encoding == "rgb8":
        data = image.tobytes()
    elif encoding in ENCODINGS:
        buffer = io.BytesIO()
        # PNG's level 1 is several times faster than the default and little larger; so is WebP's method 0.
        Image.fromarray(image).save(buffer, encoding.upper(), compress_level=1, quality=_QUALITY, method=0)
        data = buffer.getvalue()
    else:
        raise WireError(f"unknown picture encoding {encoding!r}; use one of {', '.join(ENCODINGS)}")
    if len(data) > MAX_IMAGE_BYTES:
        raise WireError(f"the image takes {len(data)} bytes as {encoding} and {MAX_IMAGE_BYTES} can be sent; shrink it")
    return data


def decode_picture(observation: Observation | Past) -> np.ndarray | None:
    """RGB uint8 (height, width, 3), None where there is none; WireError if the picture is not what its fields say."""
    height, width = observation.height, observation.width
    if observation.encoding == NO_PICTURE:
        if observation.image or height or width:
            raise WireError(
                f"an observation without a picture has an image of {len(observation.image)} bytes "
                f"and {width} x {height} pixels; all must be 0"
            )
        return None
    return decode_bytes(observation.image, observation.encoding, height, width)


def decode_bytes(data: bytes, encoding: str, height: int, width: int) -> np.ndarray:
    """RGB uint8 (height, width, 3) of an encoded picture; WireError if it is not what is said of it."""
    _check_size(height, width)
    if encoding == "rgb8":
        if len(data) != 3 * height * width:
            raise WireError(
                f"a picture of {width} x {height} pixels takes {3 * height * width} bytes as rgb8, not {len(data)}"
            )
        pixels: np.ndarray = np.frombuffer(data, np.uint8).reshape(height, width, 3).copy()
        return pixels
    if encoding not in ENCODINGS:
        raise WireError(f"unknown picture encoding {encoding!r}; use one of {', '.join(ENCODINGS)}")
    try:
        return read_picture(data, containers=(encoding.upper(),), announced=(height, width))
    except PictureError as error:
        raise WireError(str(error)) from error


def picture_digest(image: np.ndarray) -> bytes:
    """8 bytes that stand for an RGB uint8 (height, width, 3) picture.

    BLAKE2b over its sides, height first, as little-endian uint32, and its rows.
    """
    digest = hashlib.blake2b(struct.pack("<II", *image.shape[:2]), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def name_of(image: np.ndarray, data: bytes, encoding: str) -> bytes:
    """8 bytes that name a picture on the wire: its pixels' digest, or if it is lossy, its bytes' (two machines may
    decode them a shade differently).
    """
    if encoding in LOSSLESS:
        return picture_digest(image)
    sides = struct.pack("<II", *image.shape[:2])
    return hashlib.blake2b(sides + encoding.encode() + data, digest_size=DIGEST_BYTES).digest()


class LastPictures(LRUCache[bytes, V]):
    """One side's memory of a session's last pictures, by digest: KEPT_PICTURES and KEPT_BYTES at most.

    For one thread at a time, which holds ``lock`` where there are several. Robot and verifier count alike, so the
    robot knows which ones the verifier has dropped.
    """

    def __init__(self, size_of: Callable[[V], int]) -> None:
        super().__init__(KEPT_BYTES, size_of)
        self.lock = threading.Lock()

    def __setitem__(self, digest: bytes, value: V) -> None:
        if self.getsizeof(value) <= self.maxsize:
            super().__setitem__(digest, value)
        while len(self) > KEPT_PICTURES:
            self.popitem()


def kept_pictures() -> LastPictures[np.ndarray]:
    """A session's last pictures, RGB uint8 (height, width, 3)."""
    return LastPictures(lambda picture: picture.nbytes)


def check_history(sides: Iterable[tuple[int, int]]) -> None:
    """WireError for earlier pictures, of (height, width) each, that are too many or too large."""
    sides = list(sides)
    pixels = sum(height * width for height, width in sides)
    if len(sides) > MAX_HISTORY or pixels > MAX_HISTORY_PIXELS:
        raise WireError(
            f"a history of {len(sides)} pictures with {pixels} pixels cannot be sent; at most {MAX_HISTORY} pictures "
            f"with {MAX_HISTORY_PIXELS} pixels in all can: use fewer or smaller ones"
        )


def read_pictures(
    observation: Observation, kept: LastPictures[np.ndarray]
) -> tuple[np.ndarray | None, list[tuple[np.ndarray, str]]]:
    """The present picture (None: there is none) and the earlier ones with their actions, oldest first.

    RGB uint8 (height, width, 3). Pictures that are sent go into ``kept``; those that are only named are taken from
    there. UnknownPicture for one that is not there; WireError for one that is not what its fields say.
    """
    check_history((past.height, past.width) for past in observation.history)
    known: dict[bytes, np.ndarray] = {}
    for past in observation.history:
        if past.image:
            known[past.digest] = _earlier(past)
        elif past.digest not in known:
            picture = kept.get(past.digest)
            if picture is None:
                raise UnknownPicture("the verifier does not have an earlier picture; send all of them")
            known[past.digest] = picture
    image = decode_picture(observation)
    # In the history's order, repetitions included: the robot's memory must forget the same pictures.
    for past in observation.history:
        picture = known[past.digest]
        kept[past.digest] = picture
    if image is not None:
        kept[name_of(image, observation.image, observation.encoding)] = image
    return image, [(known[past.digest], past.action) for past in observation.history]


def _earlier(past: Past) -> np.ndarray:
    picture = decode_picture(past)
    if picture is None or name_of(picture, past.image, past.encoding) != past.digest:
        raise WireError("an earlier picture does not match its digest; send both again")
    return picture


def _check_size(height: int, width: int) -> None:
    try:
        check_size(height, width)
    except PictureError as error:
        raise WireError(str(error)) from error
