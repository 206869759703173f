# SPDX-License-Identifier: Apache-2.0
"""Picture files: each mode and container has one meaning or is refused by a sentence, and damage never escapes."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import partial

import numpy as np
import PIL
import pytest
from in_process import dsd
from PIL import Image

from dsd_ros.limits import MAX_PIXELS, MAX_SIDE
from dsd_ros.pictures import CONTAINERS, PictureError, read_picture

# Pillow 12, the last for Python 3.10, makes libwebp's decoder before it gives the size.
TOO_LARGE = "too large" if int(PIL.__version__.split(".")[0]) > 12 else "cannot be read"
PIXELS = np.random.default_rng(3).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def saved(picture: Image.Image, container: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, container, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, depth: int, kind: int, row: bytes, extra: bytes = b"", height: int = 1) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def test_a_file_and_its_bytes_are_read_alike(tmp_path):
    for container in ("PNG", "BMP", "PPM"):
        path = tmp_path / "view"
        Image.fromarray(PIXELS).save(path, container)
        assert np.array_equal(read_picture(path), PIXELS)
        assert np.array_equal(read_picture(path.read_bytes()), PIXELS)
    for container, options in (("WEBP", {"lossless": True}), ("JPEG", {"quality": 100}), ("GIF", {})):
        read = read_picture(saved(Image.fromarray(PIXELS), container, **options))
        assert read.shape == PIXELS.shape and read.dtype == np.uint8
    read[:] = 0  # the caller's own


def test_sixteen_bit_grey_is_the_same_picture_as_eight_bit_grey():
    grey = PIXELS[..., 0]
    expected = np.repeat(grey[..., None], 3, axis=2)
    wide = grey.astype(np.uint16) * 257
    assert np.array_equal(read_picture(saved(Image.fromarray(wide))), expected)
    assert np.array_equal(read_picture(b"P5 30 20 65535\n" + wide.astype(">u2").tobytes()), expected)
    assert np.array_equal(read_picture(saved(Image.fromarray(grey))), expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "LA", "RGBA", "CMYK"])
def test_every_accepted_mode_shows_its_picture(mode):
    red = Image.new("RGB", (8, 6), (255, 0, 0)).convert("L" if mode in ("1", "L", "LA") else "RGB").convert(mode)
    expected = np.asarray(red.convert("RGB"))
    data = saved(red, "JPEG", quality=100) if mode == "CMYK" else saved(red)
    assert np.abs(read_picture(data).astype(int) - expected).max() <= 3


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(2, 8, 4, b"\x40\x00\x40\xff"), [255, 64]),  # hidden grey
        (png(2, 8, 6, b"\x40\x40\x40\x00\x40\x40\x40\xff"), [255, 64]),  # hidden colour
        (png(2, 16, 4, b"\x40\0\0\0\x40\0\xff\xff"), [255, 64]),
        (png(2, 8, 2, b"\1\1\1\2\2\2", chunk(b"tRNS", b"\0\1\0\1\0\1")), [255, 2]),  # a transparent colour
        (png(2, 1, 0, b"\x40", chunk(b"tRNS", b"\0\0")), [255, 255]),
        (png(2, 2, 0, b"\x60", chunk(b"tRNS", b"\0\1")), [255, 170]),
        (png(2, 4, 0, b"\x12", chunk(b"tRNS", b"\0\1")), [255, 34]),
        (png(2, 16, 0, b"\x12\x34\x12\x35", chunk(b"tRNS", b"\x12\x34")), [255, 18]),
        (png(2, 1, 3, b"\x40", chunk(b"PLTE", bytes([9] * 3 + [7] * 3)) + chunk(b"tRNS", b"\0")), [255, 7]),
    ],
)
def test_what_is_transparent_is_white_whatever_colour_is_hidden_there(data, expected):
    assert read_picture(data)[0].tolist() == [[value] * 3 for value in expected]


def test_partial_transparency_is_composited_on_white():
    data = saved(Image.new("RGBA", (2, 2), (0, 100, 255, 51)))
    assert read_picture(data)[0, 0].tolist() == [204, 224, 255]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5), "F samples, whose white is unknown; convert"),
        (png(1, 16, 2, bytes(6), chunk(b"tRNS", bytes(6))), "16-bit samples and a transparent colour; convert"),
        (saved(Image.fromarray(PIXELS), "TIFF"), "another container; give a picture as PNG, JPEG"),
        (saved(Image.new("F", (2, 2)), "TIFF"), "another container"),
        (saved(Image.fromarray(PIXELS), "AVIF"), "another container"),
        (saved(Image.fromarray(PIXELS))[:300], "cannot be read"),
        (saved(Image.fromarray(PIXELS), "JPEG")[:-40], "cannot be read"),
        (b"", "damaged"),
        (png(20_000, 8, 2, b"", height=20_000), "is too large to be used; sides up to"),
        (png(MAX_SIDE + 1, 1, 0, b""), f"sides up to {MAX_SIDE}"),
        (b"P6 8192 8192 255\n", f"{MAX_PIXELS} pixels in all"),
        (b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\0;", "too large"),
        (b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0", TOO_LARGE),
    ],
)
def test_what_has_no_meaning_here_is_refused_in_a_sentence(data, said):
    with pytest.raises(PictureError, match=said) as caught:
        read_picture(data)
    assert "\n" not in str(caught.value)


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for container in ("GIF", "PNG", "WEBP"):
        data = saved(frames[0], container, save_all=True, append_images=frames[1:], lossless=True)
        assert read_picture(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_a_picture_upright(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    turned = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}
    image = np.zeros((2, 3, 3), np.uint8)
    image[0, 0] = 255
    read = read_picture(saved(Image.fromarray(image), exif=exif))
    assert read.shape == ((2, 3, 3) if turn < 5 else (3, 2, 3))
    assert read[turned[turn]].tolist() == [255] * 3 and read.sum() == 3 * 255


def tag(number: int, kind: int, count: int, value: bytes) -> bytes:
    return struct.pack("<HHI", number, kind, count) + value


@pytest.mark.parametrize(
    "tags",
    [
        tag(0x0112, 5, 1, struct.pack("<I", 26)),  # a rational for an orientation
        tag(0x0112, 2, 4, b"six\0"),
        tag(0x0112, 3, 1, b"\x63\0\0\0"),
        tag(0x0112, 200, 1, bytes(4)),
        tag(0x011A, 10, 1, struct.pack("<I", 26)),  # -1/0
        tag(0x8769, 4, 1, struct.pack("<I", 1 << 31)),  # a directory beyond the end
        tag(0x8769, 4, 1, struct.pack("<I", 8)),  # a directory within itself
        tag(0x010F, 2, 1 << 31, bytes(4)),
    ],
)
def test_odd_exif_tags_in_a_good_picture_are_harmless(tags):
    body = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + tags + bytes(4) + struct.pack("<ii", -1, 0)
    plain = saved(Image.fromarray(PIXELS), "JPEG")
    odd = saved(Image.fromarray(PIXELS), "JPEG", exif=body)
    assert np.array_equal(read_picture(odd), read_picture(plain))


def test_what_is_no_picture_file_is_named(tmp_path, capsys):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "broken.avif").write_bytes(saved(Image.fromarray(PIXELS), "AVIF")[:-50])
    for name in ("text.png", "missing.png", ".", "broken.avif", "/dev/zero"):
        with pytest.raises(PictureError, match="give a picture as PNG, JPEG"):
            read_picture(tmp_path / name)
        code, _, err = dsd(capsys, "decode", "--image", str(tmp_path / name), "--instruction", "find the chair")
        assert code == 2 and err.startswith(f"dsd: the picture {tmp_path / name} ") and err.count("\n") == 1


def samples() -> list[bytes]:
    """Small files of many containers, accepted or not."""
    image = Image.fromarray(PIXELS)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = [saved(image, container) for container in (*CONTAINERS, "AVIF", "DDS", "TIFF", "ICO", "TGA", "PCX", "SGI")]
    made += [saved(image, "JPEG2000"), saved(image.convert("L").convert("F"), "SPIDER"), saved(image, "QOI")]
    made += [saved(image.convert("P"), "BLP"), saved(image, "JPEG", exif=exif, progressive=True)]
    made += [saved(image.convert(mode), "PNG", exif=exif) for mode in ("1", "L", "P", "LA", "RGBA", "I;16")]
    made += [saved(image, c, save_all=True, append_images=[image.rotate(90)]) for c in ("GIF", "PNG", "WEBP")]
    made += [saved(image.convert("CMYK"), "JPEG"), saved(image.convert("RGBA"), "WEBP", lossless=True, exif=exif)]
    made += [b"P5 30 20 1000\n" + bytes(1200), b"P3 30 20 255\n" + b"7 " * 1800, b"Pf 30 20 -1\n" + bytes(2400)]
    return made


def damaged(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.randrange(min(len(data), rng.choice((64, 64, 1 << 20))))
        data[at : at + rng.choice((1, 1, 1, 2, 4))] = rng.choice(
            (bytes([rng.randrange(256)]), b"\xff\xff", b"\0\0\0\0", b"", b"\x7f\xff\xff\xff")
        )
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data)


@pytest.mark.parametrize("count", [1_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(count):
    rng, made, read = random.Random(33), samples(), 0
    readers = [read_picture, partial(read_picture, containers=("PNG",), announced=(20, 30))]
    for number in range(count):
        data = damaged(made[number % len(made)], rng)
        for reader in readers:
            try:
                picture = reader(data)
            except PictureError as error:
                assert "\n" not in str(error)
            else:
                read += 1
                assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.size > 0
    assert count // 20 < read < count
