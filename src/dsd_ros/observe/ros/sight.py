# SPDX-License-Identifier: Apache-2.0
"""Share the collected state and the drawn camera picture among the views of one process."""

from __future__ import annotations

import numpy as np
from rclpy.node import Node

from dsd_ros.observe.ros.live import Live
from dsd_ros.observe.view.overlay import PAUSE_S, OverlayPainter
from dsd_ros.ros.images import ImageBuffer, to_bgr
from dsd_ros.ros.settings import CameraSettings


class Sight:
    """The live state, and the newest camera picture with its overlay. Not thread-safe. Parameters as for Live."""

    def __init__(self, node: Node, image_transport: str = CameraSettings.image_transport) -> None:
        self.live = Live(node, image_transport)
        self.number = 0  # of the newest picture; 0: none yet
        self._picture = np.empty((0, 0, 3), np.uint8)
        self._header = b""
        self._painter: OverlayPainter | None = None
        self._out = ImageBuffer()

    def close(self) -> None:
        self.live.close()

    def look(self, picture: bool, soon: bool = False) -> None:
        """Process new messages and, with ``picture``, the newest camera picture.

        Without it the camera is unsubscribed from, unless a picture is wanted ``soon``: a new subscription gets its
        first picture too late for the call that makes it.

        :raises ImageMessageError: when the camera sends an invalid picture.
        """
        self.live.poll()
        if not picture:
            if not soon:
                self.live.rest_camera()
            return
        taken = self.live.picture()
        if taken is not None:
            self._picture, self._header = to_bgr(taken), taken.header
            self.number += 1

    @property
    def picture(self) -> np.ndarray:
        """The newest picture without its overlay: uint8 (H, W, 3), BGR."""
        return self._picture

    def message(self, width: int) -> bytearray:
        """The newest picture with its overlay, ``width`` pixels wide, as a serialised Image."""
        if self._painter is None or self._painter.width != width:
            self._painter = OverlayPainter(width, bgr=True, pause=PAUSE_S)
        rows, _, _ = self._painter.shape(self._picture)
        canvas = self._out.canvas(self._header, rows, width)
        self._painter.frame(self._picture, self.live.overlay, canvas)
        return self._out.sent
