"""The picture of an Observation: raw rows or PNG, both lossless, so that both models see the same."""

from __future__ import annotations

import hashlib
import io
import struct

import numpy as np
from PIL import Image

from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import DIGEST_BYTES, MAX_IMAGE_BYTES, Observation, Past

ENCODINGS = ("png", "rgb8")
NO_PICTURE = "none"
MAX_PIXELS = 1 << 24


def encode_picture(image: np.ndarray, encoding: str = "png") -> bytes:
    """RGB uint8 (height, width, 3) to bytes; WireError for another array or one too large to send."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise WireError(
            f"the image has shape {image.shape} and type {image.dtype}; "
            "give it as RGB of shape (height, width, 3) and type uint8"
        )
    height, width = image.shape[:2]
    _check_size(height, width)
    image = np.ascontiguousarray(image)
    if encoding == "rgb8":
        data = image.tobytes()
    elif encoding == "png":
        buffer = io.BytesIO()
        # Level 1 is several times faster than the default and little larger.
        Image.fromarray(image).save(buffer, "PNG", compress_level=1)
        data = buffer.getvalue()
    else:
        raise WireError(f"unknown picture encoding {encoding!r}; use one of {', '.join(ENCODINGS)}")
    if len(data) > MAX_IMAGE_BYTES:
        raise WireError(f"the image takes {len(data)} bytes as {encoding} and {MAX_IMAGE_BYTES} can be sent; shrink it")
    return data


def picture_digest(image: np.ndarray) -> bytes:
    """8 bytes that stand for an RGB uint8 (height, width, 3) picture: BLAKE2b over its sides, height first, as
    little-endian uint32, and its rows."""
    digest = hashlib.blake2b(struct.pack("<II", *image.shape[:2]), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def decode_picture(observation: Observation | Past) -> np.ndarray | None:
    """RGB uint8 (height, width, 3), None where there is none; WireError for what is not as stated."""
    height, width = observation.height, observation.width
    if observation.encoding == NO_PICTURE:
        if observation.image or height or width:
            raise WireError(
                f"an observation without a picture came with {len(observation.image)} bytes of one "
                f"of {width} x {height} pixels; all must be 0"
            )
        return None
    _check_size(height, width)
    if observation.encoding == "rgb8":
        if len(observation.image) != 3 * height * width:
            raise WireError(
                f"a picture of {width} x {height} pixels takes {3 * height * width} bytes as rgb8, "
                f"not {len(observation.image)}"
            )
        return np.frombuffer(observation.image, np.uint8).reshape(height, width, 3).copy()
    if observation.encoding != "png":
        raise WireError(f"unknown picture encoding {observation.encoding!r}; use one of {', '.join(ENCODINGS)}")
    try:
        with Image.open(io.BytesIO(observation.image), formats=["PNG"]) as picture:
            # The header is read, the pixels are not yet: what is larger than stated is never unpacked.
            if picture.size != (width, height) or picture.mode != "RGB":
                raise WireError(
                    f"the picture is {picture.mode} of {picture.size[0]} x {picture.size[1]} pixels "
                    f"and was announced as RGB of {width} x {height}"
                )
            return np.array(picture)
    except WireError:
        raise
    except Exception as error:  # Pillow raises many kinds on damaged files
        raise WireError(f"the picture is no readable PNG: {error}") from error


def _check_size(height: int, width: int) -> None:
    if not (1 <= height <= 8192 and 1 <= width <= 8192 and height * width <= MAX_PIXELS):
        raise WireError(
            f"a picture of {width} x {height} pixels cannot be sent; sides up to 8192 and "
            f"{MAX_PIXELS} pixels in all can"
        )
