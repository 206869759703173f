# SPDX-License-Identifier: Apache-2.0
"""Read a picture from a file, from bytes or from an Image message's pixels; nothing else in the product does.

Every picture means one thing, RGB of 8 bits, upright; what has no such meaning is refused:

* Containers: ``CONTAINERS``. Pillow knows forty more, some of which damaged files crash.
* 16-bit samples keep their high byte. Floating-point and 32-bit samples are refused: nothing says what white is.
* Transparency is composited on white, as image viewers show it, so hidden colours do not count.
* CMYK is converted by Pillow's formula; colour profiles and gamma are ignored.
* Of an animation, the first frame counts.
* EXIF turns a picture if its orientation tag can be read; other tags do not matter, however odd.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from dsd_ros.limits import MAX_PIXELS, MAX_SIDE

CONTAINERS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")
MAX_FILE_BYTES = 128 << 20  # a bitmap of MAX_PIXELS takes up to 100 MB
_MODES = {"1", "L", "P", "RGB", "LA", "PA", "RGBA", "CMYK"}
_BOUNDS = f"sides up to {MAX_SIDE} and {MAX_PIXELS} pixels in all can: shrink it"
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Of a sensor_msgs/Image: encoding -> channels, and the indices of red, green and blue in a pixel.
RAW_LAYOUTS: dict[str, tuple[int, tuple[int, int, int]]] = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
}
_KEY_SCALES = {"L;2": 85, "L;4": 17}  # Pillow scales these grey samples to 8 bits, but not the transparent one

# Pillow warns of odd metadata and of large pictures; the bounds below decide.
warnings.filterwarnings("ignore", module=r"PIL\.")


class PictureError(ValueError):
    """A picture cannot be read: one sentence that names it, with the remedy."""


def read_picture(
    source: Path | bytes,
    name: str = "",
    *,
    containers: tuple[str, ...] = CONTAINERS,
    announced: tuple[int, int] | None = None,
) -> np.ndarray:
    """The picture in a file or in bytes, upright, as RGB uint8 (height, width, 3).

    name: what an error calls it. announced: the (height, width) that a peer announced; the rows are then taken as
    they are, and only 8-bit RGB without transparency is accepted. PictureError if the picture is damaged, in another
    container or larger than MAX_SIDE and MAX_PIXELS; the size is checked before anything is unpacked.
    """
    name = name or (f"the picture {source}" if isinstance(source, Path) else "the picture")
    remedy = f"give a picture as {', '.join(containers)}"
    data = source if isinstance(source, bytes) else _content(source, name, remedy)
    try:
        with Image.open(io.BytesIO(data), formats=containers) as picture:
            packed = _check(picture, name, announced)
            picture.load()
            if announced is not None:
                return np.array(picture)
            image, turn = _rgb(picture, packed, name), _turn(picture)
            return np.array(image if turn is None else image.transpose(turn))
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError(f"{name} is no picture, damaged, or in another container; {remedy}") from None
    except Image.DecompressionBombError:
        raise PictureError(f"{name} is too large to be used; {_BOUNDS}") from None
    except Exception as error:  # Pillow raises many kinds for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PictureError(f"{name} cannot be read ({reason}); {remedy}") from error


def check_size(height: int, width: int, name: str = "a picture") -> None:
    """PictureError for a picture of no pixels, or of more than this package works with."""
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise PictureError(f"{name} of {width} x {height} pixels cannot be used; {_BOUNDS}")


def raw_rgb(message: Any) -> np.ndarray:
    """The picture of a sensor_msgs/Image, of rclpy or decoded from a bag: uint8 (height, width, 3), RGB, contiguous.

    ``is_bigendian`` does not matter: all known encodings have one byte per sample. PictureError for an unknown
    encoding, or sizes that do not fit the data.
    """
    return np.ascontiguousarray(raw_pixels(message)[..., RAW_LAYOUTS[message.encoding][1]])


def raw_pixels(message: Any) -> np.ndarray:
    """A view of an Image's samples, (height, width, channels), without the rows' padding; errors as :func:`raw_rgb`."""
    if message.encoding not in RAW_LAYOUTS:
        known = ", ".join(RAW_LAYOUTS)
        raise PictureError(f"The camera sends pictures encoded as {message.encoding[:40]!r}; known are {known}.")
    height, width, step = message.height, message.width, message.step
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise PictureError(f"The camera sent a picture of {width} x {height} pixels.")
    channels = RAW_LAYOUTS[message.encoding][0]
    if step < width * channels or len(message.data) < step * height:
        raise PictureError(
            f"The camera sent {len(message.data)} bytes with a step of {step} for a "
            f"picture of {width} x {height} pixels in {message.encoding}."
        )
    rows = np.frombuffer(memoryview(message.data), dtype=np.uint8)[: height * step]
    return rows.reshape(height, step)[:, : width * channels].reshape(height, width, channels)


def _content(path: Path, name: str, remedy: str) -> bytes:
    try:
        if not path.exists():
            raise PictureError(f"{name} does not exist; {remedy}")
        if not path.is_file():
            raise PictureError(f"{name} is not a file; {remedy}")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, PictureError):
            raise
        raise PictureError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error}); {remedy}") from error
    if len(data) > MAX_FILE_BYTES:
        raise PictureError(f"{name} takes more than {MAX_FILE_BYTES >> 20} MiB; shrink it")
    return data


def _check(picture: ImageFile.ImageFile, name: str, announced: tuple[int, int] | None) -> str:
    """Check what the header says before the picture is unpacked; return how its samples are packed ("" if unknown)."""
    width, height = picture.size
    check_size(height, width, name)
    form = picture.tile[0][3] if picture.tile else ""  # of Pillow 11: .args
    packed = str(form[0] if isinstance(form, tuple) and form else form)
    if picture.format == "WEBP":  # always 8 bits; Pillow does not say
        packed = picture.mode
    if announced is not None and (
        (height, width) != announced or (picture.mode, packed) != ("RGB", "RGB") or "transparency" in picture.info
    ):
        raise PictureError(
            f"{name} is {packed} of {width} x {height} pixels and was announced as opaque 8-bit RGB of "
            f"{announced[1]} x {announced[0]}; send what was announced"
        )
    return packed


def _rgb(picture: Image.Image, packed: str, name: str) -> Image.Image:
    """The loaded picture as RGB, whatever its mode."""
    key = picture.info.get("transparency")  # of a palette, or the one colour that is transparent
    if picture.mode == "I;16" or (picture.mode == "I" and picture.format == "PPM"):
        samples = np.asarray(picture)
        picture = Image.fromarray((samples >> 8).astype(np.uint8))
        if key is not None:
            picture.putalpha(Image.fromarray(np.where(samples == key, 0, 255).astype(np.uint8)))
    elif picture.mode not in _MODES:
        raise PictureError(f"{name} has {picture.mode} samples, whose white is unknown; convert it to 8-bit RGB")
    elif packed == "RGB;16B" and key is not None:
        raise PictureError(f"{name} has 16-bit samples and a transparent colour; convert it to 8-bit RGB")
    elif packed in _KEY_SCALES and key is not None:
        picture.info["transparency"] = key * _KEY_SCALES[packed]
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def _turn(picture: Image.Image) -> Image.Transpose | None:
    """What makes the loaded picture upright. An orientation that cannot be read is none."""
    try:
        return _TURNS.get(picture.getexif().get(_ORIENTATION, 0))
    except Exception:  # damaged metadata beside good pixels raises many kinds
        return None
