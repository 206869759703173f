# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dsd_ros.vlm.backbones import ImageProcessor, smart_resize
from dsd_ros.vlm.errors import ImageError


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        ((112, 168), (3136, 12845056), (112, 168)),
        ((720, 1280), (3136, 12845056), (728, 1288)),
        ((480, 640), (3136, 12845056), (476, 644)),
        ((1080, 1920), (3136, 1003520), (728, 1316)),
        ((10, 10), (3136, 12845056), (56, 56)),
        ((13, 2500), (3136, 12845056), (28, 2492)),
        ((14, 42), (3136, 12845056), (56, 112)),
        ((5000, 7000), (3136, 12845056), (3024, 4228)),
    ],
)
def test_smart_resize_values(size, bounds, expected):
    assert smart_resize(*size, 28, *bounds) == expected


def test_smart_resize_is_the_packages_rule():
    vision = pytest.importorskip("qwen_vl_utils.vision_process", exc_type=ImportError)
    for height, width in [(112, 168), (720, 1280), (13, 2500), (10, 10), (5000, 7000)]:
        theirs = vision.smart_resize(height, width, 28, 3136, 12845056)
        assert smart_resize(height, width, 28, 3136, 12845056) == tuple(theirs)


@pytest.mark.parametrize("size", [(84, 140), (100, 133), (480, 640), (20, 30)])
def test_pixels_are_those_of_transformers(model_directory, picture, size):
    images = ImageProcessor(model_directory)
    image = picture(0, *size)
    pixels, grid = images(image)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(model_directory)(Image.fromarray(image), return_tensors="pt")
    assert pixels.dtype == torch.float32 and torch.equal(grid, theirs["image_grid_thw"])
    torch.testing.assert_close(pixels, theirs["pixel_values"])
    assert int(grid.prod()) // 4 == images.image_tokens(*size)


def test_views_of_arrays_are_read_right(model_directory, picture):
    images = ImageProcessor(model_directory)
    image = picture(0, 56, 84)
    for view in (image[:, ::-1], image[..., ::-1], np.asfortranarray(image)):
        assert torch.equal(images(view)[0], images(view.copy())[0])


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((0, 10, 3), np.uint8),
        np.zeros((2, 1000, 3), np.uint8),  # too elongated
        np.zeros((10, 10), np.uint8),
        np.zeros((10, 10, 4), np.uint8),
        np.zeros((3, 10, 10), np.uint8),
        np.zeros((10, 10, 3), np.float32),
        np.zeros((1, 10, 10, 3), np.uint8),
        [[0, 0, 0]],
        b"not a picture",
    ],
)
def test_what_is_no_picture(model, image):
    with pytest.raises(ImageError):
        model.prefill(image, "find the silver bottle")
