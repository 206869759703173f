# SPDX-License-Identifier: Apache-2.0
"""Write text into pictures quickly: every word is rendered once, then pasted."""

from __future__ import annotations

import functools
import math

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
def sprite(text: str, size: int, ink: Colour, paper: Colour, struck: bool = False) -> Image.Image:
    """A line of text, line_height(size) high. It is shared: do not draw on it."""
    picture = blank(line_height(size), max(1, math.ceil(_length(text, size))), paper)
    draw = ImageDraw.Draw(picture)
    draw.text((0, 1), text, ink, _font(size))
    if struck:
        draw.line((0, line_height(size) * 0.58, picture.width, line_height(size) * 0.58), ink, 1)
    return picture


def blank(height: int, width: int, paper: Colour = PAPER) -> Image.Image:
    """An empty picture."""
    return Image.new("RGB", (width, height), paper)


def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * 1.35)


def write(canvas: Image.Image, x: int, y: int, text: str, size: int, ink: Colour, paper: Colour) -> int:
    """Write one line of text; returns the x after it."""
    for word in text.split(" "):
        drawn = sprite(word + " ", size, ink, paper)
        canvas.paste(drawn, (x, y))
        x += drawn.width
    return x


def wrapped(text: str, size: int, width: int, lines: int) -> list[str]:
    """Wrap a text to at most ``lines`` lines of ``width`` pixels; what does not fit becomes "..."."""
    found: list[str] = []
    line = ""
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
