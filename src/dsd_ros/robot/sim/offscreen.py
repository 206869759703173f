# SPDX-License-Identifier: Apache-2.0
"""Offscreen rendering of MuJoCo worlds: one OpenGL context for any number of worlds in turn."""

from __future__ import annotations

import ctypes.util
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SimulatorError(RuntimeError):
    """The simulator cannot run here; the message says what to install."""


def import_mujoco() -> Any:
    """Import MuJoCo with an offscreen renderer: that of MUJOCO_GL, else OSMesa (faster), else EGL."""
    if not os.environ.get("MUJOCO_GL"):
        if ctypes.util.find_library("OSMesa"):
            os.environ["MUJOCO_GL"] = "osmesa"
        elif ctypes.util.find_library("EGL"):
            os.environ["MUJOCO_GL"] = "egl"
        else:
            raise SimulatorError(
                "The simulator's camera needs an offscreen renderer and found none: install "
                "OSMesa (Debian/Ubuntu: apt install libosmesa6) or EGL (apt install libegl1)."
            )
    try:
        import mujoco
    except Exception as error:  # it also raises what its renderers raise
        if isinstance(error, ModuleNotFoundError) and error.name == "mujoco":
            sentence = "The simulator needs MuJoCo, which is not installed: pip install mujoco==3.3.4"
            raise SimulatorError(sentence) from error
        raise SimulatorError(
            f"The simulator could not load MuJoCo with MUJOCO_GL={os.environ.get('MUJOCO_GL')} ({error}): install "
            "libosmesa6 or libegl1 from the system, or set MUJOCO_GL to osmesa or egl."
        ) from error
    return mujoco


class Offscreen:
    """An OpenGL context that renders models whose textures have the same sizes.

    Creating a context takes far longer than drawing a picture, so share one to draw many worlds. It belongs to the
    thread that created it: draw and close there.
    """

    def __init__(self, model: Any, width: int = 1024, height: int = 768) -> None:
        self._mujoco = import_mujoco()
        try:
            self._gl = self._mujoco.GLContext(width, height)
            self._gl.make_current()
            self._context = self._mujoco.MjrContext(model, self._mujoco.mjtFontScale.mjFONTSCALE_50.value)
        except Exception as error:  # whatever the OpenGL library raised
            raise SimulatorError(
                "The simulator's camera could not open an offscreen renderer with "
                f"MUJOCO_GL={os.environ.get('MUJOCO_GL')} ({error}): install OSMesa (apt "
                "install libosmesa6) or EGL (libegl1), or set MUJOCO_GL to the one you have."
            ) from error
        self._mujoco.mjr_setBuffer(self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._model = model

    def use(self, model: Any) -> None:
        """Switch to another model's textures; its floor must not be larger than the first model's."""
        self._gl.make_current()
        if model is self._model:
            return
        for texture in range(model.ntex):
            self._mujoco.mjr_uploadTexture(model, self._context, texture)
        # MuJoCo copies these only when the context is created.
        self._context.mat_texrepeat[: 2 * model.nmat] = model.mat_texrepeat.ravel()
        self._model = model

    def draw(self, scene: Any, width: int, height: int, depth: np.ndarray | None = None) -> NDArray[np.uint8]:
        """The scene as uint8 (height, width, 3), RGB; ``depth`` receives the depth buffer, bottom row first."""
        viewport = self._mujoco.MjrRect(0, 0, width, height)
        self._mujoco.mjr_render(viewport, scene, self._context)
        pixels: NDArray[np.uint8] = np.empty((height, width, 3), dtype=np.uint8)
        self._mujoco.mjr_readPixels(pixels, depth, viewport, self._context)
        upright: NDArray[np.uint8] = pixels[::-1].copy()
        return upright

    def draw_with_depth(self, scene: Any, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
        """The picture of :meth:`draw`, and each pixel's depth along the optical axis.

        Depths are float32 (height, width) in metres; NaN where nothing is visible.
        """
        buffer = np.empty((height, width), dtype=np.float32)
        # Reversed depth: 1 at the near plane, 0 at the far plane, precise in between.
        self._context.readDepthMap = self._mujoco.mjtDepthMap.mjDEPTH_ZEROFAR.value
        picture = self.draw(scene, width, height, buffer)
        extent = self._model.stat.extent
        near, far = self._model.vis.map.znear * extent, self._model.vis.map.zfar * extent
        values = buffer[::-1].astype(np.float64)
        depths = near * far / (near + values * (far - near))
        return picture, np.where(values > 0.0, depths, np.nan).astype(np.float32)

    def draw_geoms(self, scene: Any, width: int, height: int) -> NDArray[np.int64]:
        """The index of the geom in each pixel, -1 for none: int64 (height, width)."""
        flags = self._mujoco.mjtRndFlag
        scene.flags[flags.mjRND_SEGMENT] = 1
        scene.flags[flags.mjRND_IDCOLOR] = 1
        try:
            coded = self.draw(scene, width, height).astype(np.int64)
        finally:
            scene.flags[flags.mjRND_SEGMENT] = 0
            scene.flags[flags.mjRND_IDCOLOR] = 0
        codes = coded[..., 0] | coded[..., 1] << 8 | coded[..., 2] << 16
        owners = np.full(scene.ngeom + 1, -1, dtype=np.int64)
        for geom in scene.geoms[: scene.ngeom]:
            if geom.segid >= 0 and geom.objtype == self._mujoco.mjtObj.mjOBJ_GEOM:
                owners[geom.segid + 1] = geom.objid
        found: NDArray[np.int64] = owners[codes]
        return found

    def close(self) -> None:
        """Free the context. May be called twice."""
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None
