"""Write text into pictures quickly: every word is rendered once, then copied."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LONGEST = 300  # characters of a line that are considered
Colour = tuple[int, int, int]

PAPER: Colour = (24, 26, 31)
BAR: Colour = (43, 47, 56)
INK: Colour = (232, 234, 237)
FAINT: Colour = (150, 156, 166)
ACCEPTED: Colour = (96, 211, 128)
REJECTED: Colour = (240, 98, 92)
OWN: Colour = (116, 176, 255)  # the target's own tokens
AHEAD: Colour = (246, 190, 82)  # drafted ahead
ALARM: Colour = (176, 36, 40)
CALM: Colour = (28, 94, 58)


@functools.lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@functools.lru_cache(maxsize=4096)
def sprite(text: str, size: int, ink: Colour, paper: Colour, struck: bool = False) -> np.ndarray:
    """A line of text, read-only: uint8 (line_height(size), width, 3)."""
    font = _font(size)
    width = max(1, int(np.ceil(font.getlength(text))))
    picture = Image.new("RGB", (width, line_height(size)), paper)
    draw = ImageDraw.Draw(picture)
    draw.text((0, 1), text, ink, font)
    if struck:
        draw.line((0, line_height(size) * 0.58, width, line_height(size) * 0.58), ink, 1)
    drawn = np.asarray(picture)
    drawn.setflags(write=False)
    return drawn


def blank(height: int, width: int, paper: Colour = PAPER) -> np.ndarray:
    """An empty canvas: uint8 (height, width, 3)."""
    canvas = np.empty((height, width, 3), np.uint8)
    fill(canvas, paper)
    return canvas


def fill(canvas: np.ndarray, colour: Colour) -> None:
    """Fill a canvas or part of one with a colour. Copies rows: numpy is 70 times slower pixel by pixel."""
    width = canvas.shape[1]
    canvas[:] = _row(max(512, 1 << width.bit_length()), colour)[:, :width]


@functools.lru_cache(maxsize=64)
def _row(width: int, colour: Colour) -> np.ndarray:
    row = np.empty((1, width, 3), np.uint8)
    row[:] = colour
    row.setflags(write=False)
    return row


def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * 1.35)


def put(canvas: np.ndarray, x: int, y: int, drawn: np.ndarray) -> int:
    """Copy a drawing onto a canvas at (x, y), clipped; returns the x after it."""
    high, wide, _ = drawn.shape
    height, width = canvas.shape[0] - y, canvas.shape[1] - x
    if height >= high and width >= wide:
        if x >= 0 and y >= 0:
            canvas[y : y + high, x : x + wide] = drawn
    elif height > 0 and width > 0 and x >= 0 and y >= 0:
        canvas[y : y + high, x : x + wide] = drawn[:height, :width]
    return x + wide


def write(canvas: np.ndarray, x: int, y: int, text: str, size: int, ink: Colour, paper: Colour) -> int:
    """Write one line of text; returns the x after it."""
    for word in text.split(" "):
        x = put(canvas, x, y, sprite(word + " ", size, ink, paper))
    return x


def wrapped(text: str, size: int, width: int, lines: int) -> list[str]:
    """Wrap a text to at most ``lines`` lines of ``width`` pixels; what does not fit becomes "..."."""
    found, line = [], ""
    for word in text[: _LONGEST * lines].split():
        if len(found) > lines:
            break
        longer = f"{line} {word}".strip()
        if line and _length(longer, size) > width:
            found.append(line)
            line = word
        else:
            line = longer
    found.append(line)
    if len(found) > lines:
        found = found[:lines]
        found[-1] = shortened(found[-1] + " ...", size, width)
    return [shortened(line, size, width) for line in found]


def shortened(text: str, size: int, width: int) -> str:
    """A text cut to a width in pixels, with "..." if shortened."""
    if len(text) <= _LONGEST and _length(text, size) <= width:
        return text
    text = text.removesuffix("...")
    low, high = 0, min(len(text), _LONGEST)
    while low < high:  # binary search for the longest prefix that fits
        middle = (low + high + 1) // 2
        if _length(text[:middle] + "...", size) <= width:
            low = middle
        else:
            high = middle - 1
    return text[:low].rstrip() + "..."


@functools.lru_cache(maxsize=4096)
def _length(text: str, size: int) -> float:
    return _font(size).getlength(text)
