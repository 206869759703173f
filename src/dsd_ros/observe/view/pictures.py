"""Pictures on their way to rerun, without what its own way for them costs."""

from __future__ import annotations

import struct
from typing import Any

import cv2
import numpy as np

_QUALITY = 75  # of JPEG


class Pictures:
    """Sends pictures one by one, each at once, as columns of one row.

    As ``rerun.EncodedImage`` each would be copied, checked and held back for its neighbours on its way.
    """

    def __init__(self, recording: Any) -> None:
        import pyarrow as pa
        import rerun as rr

        self._pa, self._rr, self._recording = pa, rr, recording
        self._descriptor = rr.EncodedImage.descriptor_blob()
        self._blob = pa.list_(pa.field("item", pa.uint8(), nullable=False))  # as rerun has it
        self._kinds = (pa.duration("ns"), pa.uint8(), pa.list_(self._blob))
        self._one = pa.py_buffer(struct.pack("=2i", 0, 1))

    def send(self, entity: str, bgr: np.ndarray, at: float) -> None:
        """Show a picture (uint8 (H, W, 3), blue first) from ``at`` on, s."""
        _, data = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        self._rr.send_columns(
            entity,
            [_Column(self.times(at))],
            [_Column(self.blobs(data), self._descriptor)],
            recording=self._recording,
            strict=True,
        )

    def times(self, at: float) -> Any:
        """Seconds as a column of one row."""
        pa = self._pa
        when = struct.pack("=q", round(1e9 * at))
        return pa.Array.from_buffers(self._kinds[0], 1, [None, pa.py_buffer(when)])

    def blobs(self, data: np.ndarray) -> Any:
        """Bytes as a column of one row."""
        pa, (_, byte, rows) = self._pa, self._kinds
        content = pa.Array.from_buffers(byte, data.size, [None, pa.py_buffer(data)])
        ends = pa.py_buffer(struct.pack("=2i", 0, data.size))
        blob = pa.Array.from_buffers(self._blob, 1, [None, ends], children=[content])
        return pa.Array.from_buffers(rows, 1, [None, self._one], children=[blob])


class _Column:
    """What ``rerun.send_columns`` takes for a column: of times without a descriptor, else of components."""

    def __init__(self, array: Any, descriptor: Any = None) -> None:
        self._array, self._descriptor = array, descriptor

    def timeline_name(self) -> str:
        return "time"

    def component_descriptor(self) -> Any:
        return self._descriptor

    def as_arrow_array(self) -> Any:
        return self._array
