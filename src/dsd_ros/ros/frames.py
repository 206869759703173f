"""The pictures of the last decodes, so that a later one can be told what the robot saw and did before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cachetools import LRUCache

from dsd_ros.wire.messages import MAX_HISTORY

KEPT_FRAMES = 4 * MAX_HISTORY  # some were decoded and never acted upon
KEPT_BYTES = 256 << 20

Stamp = tuple[int, int]  # seconds and nanoseconds


class Frames:
    """Pictures by their stamps, bounded in number and in bytes. For one thread."""

    def __init__(self, count: int = KEPT_FRAMES, size: int = KEPT_BYTES) -> None:
        # Each picture counts as a fair share of the room at least, which bounds their number too.
        self._kept: LRUCache[Stamp, np.ndarray] = LRUCache(size, lambda image: max(image.nbytes, size // count))

    def remember(self, stamp: Stamp, image: np.ndarray) -> None:
        """Keep a picture, RGB uint8 (height, width, 3), in place of the oldest when there is no room."""
        if image.nbytes <= self._kept.maxsize:
            self._kept[stamp] = image

    def history(self, stamps: Sequence[Stamp], actions: Sequence[str], most: int) -> list[tuple[np.ndarray, str]]:
        """The last ``most`` of those steps whose pictures are still here, oldest first, with their actions."""
        if most < 1:
            return []
        steps = [
            (image, action)
            for stamp, action in zip(stamps, actions, strict=True)
            if (image := self._kept.get(stamp)) is not None
        ]
        return steps[-most:]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
