# SPDX-License-Identifier: Apache-2.0
"""The pictures of a session on their way to the verifier: each in full once, then by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from dsd_ros.edge.settings import LinkSettings
from dsd_ros.limits import LOSSLESS
from dsd_ros.vlm.backbones import check_image, resize, smart_resize
from dsd_ros.vlm.errors import ImageError
from dsd_ros.vlm.prompts import Chat, check_action
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_FRAME_BYTES, Observation, Past, SessionReply
from dsd_ros.wire.pictures import (
    NO_PICTURE,
    LastPictures,
    check_history,
    check_picture,
    decode_bytes,
    encode_picture,
    name_of,
    picture_digest,
)

History = Sequence[tuple[np.ndarray, str]]
_OTHER_BYTES = 1 << 19  # at most, of an observation besides its pictures


class _Sent(NamedTuple):
    """A picture as it travels. ``image``: what both models see."""

    image: np.ndarray
    data: bytes
    name: bytes


class SessionPictures:
    """The present and earlier pictures of one reply at a time; for one thread.

    A picture is shrunk and encoded for the link, and both models see what that decodes to. The verifier has a picture
    once it has answered a round about it (``arrived``), and forgets it with the session. Both sides keep the same last
    few.
    """

    def __init__(self, link: LinkSettings) -> None:
        self._encoding, self._longest = link.image_encoding, link.image_size
        self._present: tuple[np.ndarray, _Sent] | None = None  # the caller's picture, and as it travels
        self._past: list[Past] = []
        # As they travel, by the digests of the caller's pictures; for a target that reads pictures of these sizes.
        self._made: LastPictures[_Sent] = LastPictures(lambda sent: len(sent.data) + sent.image.nbytes)
        self._bounds = (0, 0, 0)
        self._seen: LastPictures[int] = LastPictures(int)  # sizes of the pictures that the verifier has
        self._session = 0
        self._arrived = False  # the present reply's, in this session

    def check(self, image: np.ndarray | None, history: History = ()) -> None:
        """ImageError, PromptError (for an action) or WireError for what cannot be used or sent."""
        if history and image is None:
            raise ImageError("earlier pictures are given without a present one; give one, or no history")
        for earlier, action in history:
            check_image(earlier)
            if action:  # a conversation has none
                check_action(action)
        check_history(earlier.shape[:2] for earlier, _ in history)
        if image is not None:
            check_picture(image)

    def begin(
        self, image: np.ndarray | None, history: History = (), verifier: SessionReply | None = None
    ) -> tuple[np.ndarray | None, History]:
        """Take the next reply's pictures, RGB uint8 (height, width, 3), the earlier ones oldest first, and return them
        as both models see them. ``verifier`` says how large the target reads them.

        Errors as from ``check``, and WireError for more than a message holds: the reply before then stays.
        """
        self.check(image, history)
        bounds = (0, 0, 0)
        if verifier is not None:
            bounds = (verifier.side_factor, verifier.min_pixels, verifier.max_pixels)
        if bounds != self._bounds:
            self._bounds = bounds
            self._made.clear()
        present = None if image is None else (image, self._make(image))
        steps = [(self._earlier(earlier), action) for earlier, action in history]
        past = [
            Past(action, self._encoding, sent.image.shape[0], sent.image.shape[1], sent.data, sent.name)
            for sent, action in steps
        ]
        size = len(present[1].data if present else b"") + sum(len(step.image) for step in past) + _OTHER_BYTES
        if past and size > MAX_FRAME_BYTES:
            raise WireError(
                f"a picture and {len(past)} earlier ones take {size} bytes as {self._encoding} and a message "
                f"holds {MAX_FRAME_BYTES}; use fewer or smaller ones, or jpeg"
            )
        self._present, self._past, self._arrived = present, past, False
        seen = present[1].image if present else None
        return seen, [(earlier.image, action) for earlier, action in steps]

    def observation(self, session: int, reply: int, instruction: str, everything: bool = False) -> Observation:
        """The observation. ``instruction``: or a ``Chat``, whose pictures are the earlier ones and the present one.
        ``everything``: with all pictures, even those that the verifier has.
        """
        chat = instruction.encode() if isinstance(instruction, Chat) else b""
        instruction = "" if chat else instruction
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
        if self._present is None:
            return Observation(session, reply, instruction, 0, 0, NO_PICTURE, b"", history=history, messages=chat)
        sent = self._present[1]
        height, width = sent.image.shape[:2]
        picture = height, width, self._encoding, sent.data
        return Observation(session, reply, instruction, *picture, history=history, messages=chat)

    def arrived(self, session: int) -> None:
        """Note that the verifier has answered in ``session``, so it has read the observation."""
        if self._arrived or self._present is None or session != self._session:
            return
        self._arrived = True
        for step in self._past:
            self._seen[step.digest] = 3 * step.height * step.width
        image, sent = self._present
        self._seen[sent.name] = sent.image.nbytes
        self._made[sent.name if sent.image is image else picture_digest(image)] = sent

    def _earlier(self, image: np.ndarray) -> _Sent:
        digest = picture_digest(image)
        sent = self._made.get(digest) or self._make(image)
        if sent.name == digest:  # the caller's own picture, whose array may have been used for others meanwhile
            sent = sent._replace(image=image)
        self._made[digest] = sent
        return sent

    def _make(self, image: np.ndarray) -> _Sent:
        height, width = self._size(*image.shape[:2])
        image = resize(image, height, width)
        data = encode_picture(image, self._encoding)
        if self._encoding not in LOSSLESS:
            image = decode_bytes(data, self._encoding, height, width)
        return _Sent(image, data, name_of(image, data, self._encoding))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) on the link: never larger than the picture is."""
        if self._longest:
            shrink = min(1.0, self._longest / max(height, width))
            return max(1, round(height * shrink)), max(1, round(width * shrink))
        if not self._bounds[0]:
            return height, width
        smaller = smart_resize(height, width, *self._bounds)
        return smaller if smaller[0] * smaller[1] < height * width else (height, width)
