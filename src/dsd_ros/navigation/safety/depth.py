# SPDX-License-Identifier: Apache-2.0
"""The nearest obstacle in a depth image, within the corridor that the robot's body needs. Pure geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsd_ros.navigation.safety.causes import DepthView

_MAX_PIXELS, _MAX_SIDE, _MIN_FOCAL = 1e6, 8192, 1e-3  # pixels
_KNOWN_SHARE = 0.5  # of the pixels that see the corridor; with fewer known ones, the distance is unknown
_COLUMNS = 160  # width of the grid of pixels that is evaluated
_OUTLIERS = 8  # this many nearer points on that grid count as noise
_FLOOR_CLEARANCE_M = 0.06  # things that are lower are the floor, or can be stepped on
_SLOPE = math.tan(math.radians(3.0))  # a walking body pitches: further away, more counts as floor

# Metres per unit of each encoding (REP 118).
UNITS = {"32FC1": ("f4", 1.0), "16UC1": ("u2", 0.001)}


class DepthError(ValueError):
    """A message that is not a valid depth image; one sentence."""


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera: focal lengths, centre and image size, in pixels."""

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int

    @property
    def known(self) -> bool:
        """Whether the camera reported them at all, and in numbers that a camera can have."""
        lengths, sides = (self.fx, self.fy, self.cx, self.cy), (self.width, self.height)
        possible = all(abs(value) <= _MAX_PIXELS for value in lengths)  # NaN compares as false
        return possible and min(self.fx, self.fy) > _MIN_FOCAL and 1 <= min(sides) <= max(sides) <= _MAX_SIDE


def read_depth(
    data: bytes | memoryview, encoding: str, height: int, width: int, step: int, big_endian: bool
) -> np.ndarray:
    """Depths along the optical axis in metres, float32 (height, width); 0 and NaN: unknown.

    :raises DepthError: for an unknown encoding, or sizes that do not fit the data.
    """
    if encoding not in UNITS:
        raise DepthError(f"The depth image's encoding is {encoding[:40]!r}; known are {', '.join(UNITS)}.")
    code, unit = UNITS[encoding]
    kind = np.dtype((">" if big_endian else "<") + code)
    if height < 1 or width < 1 or step < width * kind.itemsize or len(data) < height * step:
        raise DepthError(
            f"The depth image says {width} x {height} pixels in rows of {step} bytes, but has {len(data)} bytes."
        )
    rows = np.frombuffer(data, dtype=np.uint8, count=height * step).reshape(height, step)
    pixels = np.ascontiguousarray(rows[:, : width * kind.itemsize]).view(kind)
    metres: np.ndarray = pixels.astype(np.float32) * np.float32(unit)
    return metres


class DepthCorridor:
    """The rays of one camera, computed once; call :meth:`nearest` for each image.

    :param reach: how far ahead (m) the corridor must be visible.
    """

    def __init__(self, view: DepthView, camera: Intrinsics, reach: float) -> None:
        if not camera.known:
            raise DepthError(
                "The depth camera's info has no usable focal length, centre or size: publish those of the camera."
            )
        self._view, self.camera = view, camera
        self._stride = max(1, camera.width // _COLUMNS)
        columns = np.arange(0, camera.width, self._stride, dtype=np.float32)
        rows = np.arange(0, camera.height, self._stride, dtype=np.float32)
        across = (columns - np.float32(camera.cx)) / np.float32(camera.fx)
        down = ((rows - np.float32(camera.cy)) / np.float32(camera.fy))[:, None]
        c = math.cos(view.camera_pitch)
        s = math.sin(view.camera_pitch)
        # Metres ahead, aside and up per metre of depth, in the level frame of the camera.
        self._ahead, self._up = c - s * down, -s - c * down
        self._aside = np.abs(across)[None, :]
        self._watched = self._looks_at(reach) | self._looks_at(2.0 * reach)

    @property
    def blind(self) -> bool:
        """Whether no pixel sees the corridor, because the camera is mounted or described wrongly."""
        return not self._watched.any()

    def _looks_at(self, ahead: float) -> NDArray[np.bool_]:
        """Mask of the pixels whose rays pass through the corridor at distance ``ahead`` (m)."""
        with np.errstate(divide="ignore"):
            depth = np.where(self._ahead > 1e-3, ahead / self._ahead, np.inf)
            height = self._view.camera_height + depth * self._up
            inside: NDArray[np.bool_] = (height > 0.0) & (height < self._view.corridor_height)
            inside = inside & (depth * self._aside < self._view.corridor_width / 2)
        return inside

    def nearest(self, depths: np.ndarray) -> float | None:
        """Distance from the camera to the nearest obstacle in the corridor, m; infinite when there is none.

        None when too few of the pixels that see the corridor are known: a covered lens must not pass for a free path.

        :param depths: float32 (height, width), m along the optical axis; -inf: too near, inf: nothing there, NaN and
            0: unknown.
        """
        if depths.shape != (self.camera.height, self.camera.width):
            raise DepthError(
                f"The depth image is {depths.shape[1]} x {depths.shape[0]} pixels, but the camera's info "
                f"says {self.camera.width} x {self.camera.height}."
            )
        view = self._view
        grid = depths[:: self._stride, :: self._stride]
        known = (grid > 0.0) | (grid == -np.inf)  # NaN compares as false
        if self.blind or known[self._watched].mean() < _KNOWN_SHARE:
            return None
        too_near = grid == -np.inf
        finite = np.where(np.isfinite(grid) & known, grid, np.float32(1e6))
        ahead = finite * self._ahead
        height = view.camera_height + finite * self._up
        body = (height > _FLOOR_CLEARANCE_M + _SLOPE * np.abs(ahead)) & (height < view.corridor_height)
        inside = body & (finite * self._aside < view.corridor_width / 2) & (ahead > 0.0)
        found = np.concatenate([ahead[inside], np.zeros(int((too_near & self._watched).sum()))])
        if len(found) <= _OUTLIERS:
            return math.inf
        return float(np.partition(found, _OUTLIERS)[_OUTLIERS])
