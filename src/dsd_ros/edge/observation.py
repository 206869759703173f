# SPDX-License-Identifier: Apache-2.0
"""The pictures of a session on their way to the verifier: each in full once, then by its digest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from dsd_ros.vlm.backbones import check_image
from dsd_ros.vlm.errors import ImageError
from dsd_ros.vlm.prompts import check_action
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_FRAME_BYTES, Observation, Past
from dsd_ros.wire.pictures import NO_PICTURE, LastPictures, check_history, encode_picture, picture_digest

History = Sequence[tuple[np.ndarray, str]]
_OTHER_BYTES = 64 * 1024  # at most, of an observation besides its pictures


class SessionPictures:
    """The present and earlier pictures of one reply at a time; for one thread.

    The verifier has a picture once it has answered a round about it (``arrived``), and forgets it with the session.
    Both sides keep the same last few.
    """

    def __init__(self, encoding: str) -> None:
        """``encoding``: one of limits.ENCODINGS."""
        self._encoding = encoding
        self._image: np.ndarray | None = None
        self._data = b""
        self._past: list[Past] = []
        self._encoded: LastPictures[bytes] = LastPictures(len)
        self._seen: LastPictures[int] = LastPictures(int)  # sizes of the pictures that the verifier has
        self._session = 0
        self._arrived = False  # the present reply's, in this session

    def begin(self, image: np.ndarray | None, history: History = ()) -> None:
        """Take the next reply's pictures, RGB uint8 (height, width, 3), the earlier ones oldest first.

        ImageError, PromptError (for an action) or WireError for what cannot be used or sent.
        """
        if history and image is None:
            raise ImageError("earlier pictures are given without a present one; give one, or no history")
        for earlier, action in history:
            check_image(earlier)
            check_action(action)
        check_history(earlier.shape[:2] for earlier, _ in history)
        data = b"" if image is None else encode_picture(image, self._encoding)
        past = [self._step(earlier, action) for earlier, action in history]
        size = len(data) + sum(len(step.image) for step in past) + _OTHER_BYTES
        if past and size > MAX_FRAME_BYTES:
            raise WireError(
                f"a picture and {len(past)} earlier ones take {size} bytes as {self._encoding} and a message "
                f"holds {MAX_FRAME_BYTES}; use fewer or smaller ones, or png"
            )
        self._image, self._data, self._past = image, data, past
        self._arrived = False

    def observation(self, session: int, reply: int, instruction: str, everything: bool = False) -> Observation:
        """The observation. ``everything``: with all pictures, even those that the verifier has."""
        if session != self._session:
            self._session, everything = session, True
        if everything:
            self._seen.clear()
            self._arrived = False
        history, along = [], set[bytes]()
        for step in self._past:
            known = step.digest in self._seen or step.digest in along
            along.add(step.digest)
            history.append(msgspec.structs.replace(step, image=b"") if known else step)
        height, width = (0, 0) if self._image is None else self._image.shape[:2]
        encoding = NO_PICTURE if self._image is None else self._encoding
        return Observation(session, reply, instruction, height, width, encoding, self._data, history=history)

    def arrived(self, session: int) -> None:
        """Note that the verifier has answered in ``session``, so it has read the observation."""
        if self._arrived or self._image is None or session != self._session:
            return
        self._arrived = True
        for step in self._past:
            self._seen[step.digest] = 3 * step.height * step.width
        digest = picture_digest(self._image)
        self._seen[digest] = self._image.nbytes
        self._encoded[digest] = self._data

    def _step(self, image: np.ndarray, action: str) -> Past:
        height, width = image.shape[:2]
        digest = picture_digest(image)
        data = self._encoded.get(digest)
        if data is None:
            data = encode_picture(image, self._encoding)
        self._encoded[digest] = data
        return Past(action, self._encoding, height, width, data, digest)
