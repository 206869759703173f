# SPDX-License-Identifier: Apache-2.0
"""Share the collected state and the drawn camera picture among the views of one process."""

from __future__ import annotations

import numpy as np
from rclpy.node import Node

from dsd_ros.observe.ros.live import Live
from dsd_ros.observe.view.overlay import PANEL_HEIGHT, PAUSE_S, OverlayPainter
from dsd_ros.ros.images import ImageBuffer, to_bgr
from dsd_ros.ros.settings import CameraSettings


class Sight:
    """The live state, and the newest camera picture with its overlay. Not thread-safe. Parameters as for Live."""

    def __init__(self, node: Node, image_transport: str = CameraSettings.image_transport) -> None:
        self.live = Live(node, image_transport)
        self.number = 0  # of the newest picture; 0: none yet
        self._picture = np.empty((0, 0, 3), np.uint8)
        self._header = b""
        self._sheets: dict[int, _Sheet] = {}

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

    def frame(self, width: int, panel: bool) -> np.ndarray:
        """The newest picture with its overlay: uint8 (H, width, 3), BGR, valid until the next :meth:`look`.

        With ``panel``, tokens and figures are drawn below it.
        """
        sheet = self._sheet(width)
        drawn = sheet.drawn
        if sheet.number != self.number or (panel and not sheet.panel):
            rows, _, _ = sheet.painter.shape(self._picture, panel)
            canvas = sheet.out.canvas(self._header, rows, width)
            drawn = sheet.painter.frame(self._picture, self.live.overlay, panel, canvas)
            sheet.drawn, sheet.number, sheet.panel = drawn, self.number, panel
        return drawn[:-PANEL_HEIGHT] if sheet.panel and not panel else drawn

    def message(self, width: int) -> bytearray:
        """:meth:`frame` with its panel as a serialised Image."""
        self.frame(width, panel=True)
        return self._sheet(width).out.sent

    def _sheet(self, width: int) -> _Sheet:
        if width not in self._sheets:
            self._sheets[width] = _Sheet(width)
        return self._sheets[width]


class _Sheet:
    """The canvas of one width."""

    def __init__(self, width: int) -> None:
        self.painter = OverlayPainter(width, bgr=True, pause=PAUSE_S)
        self.out = ImageBuffer()
        self.number = 0  # of the picture on it
        self.panel = False
        self.drawn = np.empty((0, width, 3), np.uint8)
