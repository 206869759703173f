"""From an RGB picture to what Qwen2-VL's vision tower reads.

The picture is first resized by the rule of qwen-vl-utils (both sides a multiple of patch size x
merge size, the number of pixels within the model's bounds, the aspect ratio kept as well as it can
be), then normalized and cut into patches by transformers' own image processor.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from dsd_ros.vlm.errors import ImageError, ModelError

MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = 3136, max_pixels: int = 12845056
) -> tuple[int, int]:
    """The size (height, width) a picture is resized to; qwen-vl-utils' rule of the same name.

    ImageError when one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"a picture of {width} x {height} pixels is too elongated for Qwen2-VL; "
            f"crop it to an aspect ratio below {MAX_ASPECT_RATIO}"
        )
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * stretch / factor) * factor
        new_width = math.ceil(width * stretch / factor) * factor
    return new_height, new_width


def check_image(image: np.ndarray) -> None:
    """ImageError unless ``image`` is a non-empty uint8 array of shape (height, width, 3), RGB."""
    if not isinstance(image, np.ndarray):
        raise ImageError(f"the image must be a numpy array, not {type(image).__name__}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ImageError(
            f"the image has shape {image.shape} and type {image.dtype}; "
            "give it as RGB of shape (height, width, 3) and type uint8"
        )


def read_image(path: str | Path) -> np.ndarray:
    """A picture file as RGB uint8 (height, width, 3), turned upright; ImageError when it is none."""
    try:
        with Image.open(path) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileNotFoundError:
        raise ImageError(f"the image {path} does not exist; name a PNG or JPEG file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"the image {path} cannot be read ({error}); name a PNG or JPEG file") from error


class ImageProcessor:
    """Pictures for one model, by the bounds and patch sizes of its ``preprocessor_config.json``."""

    def __init__(self, directory: str | Path) -> None:
        """ModelError when the directory holds no usable ``preprocessor_config.json``."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        path = Path(directory) / "preprocessor_config.json"
        if not path.exists():
            raise ModelError(f"{path} is missing; copy it from the original model")
        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(str(directory), local_files_only=True)
            size = self._processor.size
            self.min_pixels = int(size["shortest_edge"])
            self.max_pixels = int(size["longest_edge"])
            self.patch_size = int(self._processor.patch_size)
            self.merge_size = int(self._processor.merge_size)
        except Exception as error:
            raise ModelError(f"{path} cannot be used: {error}") from error

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the resized picture, in pixels."""
        factor = self.patch_size * self.merge_size
        return smart_resize(height, width, factor, self.min_pixels, self.max_pixels)

    def image_tokens(self, height: int, width: int) -> int:
        """How many tokens of the prompt a picture of this size takes."""
        factor = self.patch_size * self.merge_size
        new_height, new_width = self.resized(height, width)
        return (new_height // factor) * (new_width // factor)

    def __call__(self, image: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn RGB uint8 (H, W, 3) into pixel values and their grid.

        Returns float32 (patches, channels x temporal patch x patch x patch) and int64 (1, 3): time,
        height and width in patches. ImageError for anything that is not such a picture.
        """
        check_image(image)
        height, width = image.shape[:2]
        new_height, new_width = self.resized(height, width)
        if (new_height, new_width) != (height, width):
            picture = Image.fromarray(np.ascontiguousarray(image))
            image = np.asarray(picture.resize((new_width, new_height), Image.Resampling.BICUBIC))
        batch = self._processor(image, do_resize=False, input_data_format="channels_last", return_tensors="pt")
        return batch["pixel_values"], batch["image_grid_thw"]
