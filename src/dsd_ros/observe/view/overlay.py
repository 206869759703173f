# SPDX-License-Identifier: Apache-2.0
"""Draw instruction, reasoning and action over the camera picture, and the reply's tokens below it."""

from __future__ import annotations

import functools
import math
import textwrap
import time
from dataclasses import replace

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dsd_ros.decoding.modes import PRESETS, streams
from dsd_ros.observe.view.figures import ReplyFigures, percent
from dsd_ros.observe.view.state import Overlay, ShownReply

Colour = tuple[int, int, int]  # RGB

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
WIDTH = 480
PANEL_HEIGHT = 132
MAX_ASPECT = 2  # of a frame's picture: a row of a line-scan camera must not take gigabytes
PAUSE_S = 0.25
_ROUNDS_SHOWN, _TOKENS_SHOWN = 60, 240  # more than fit
_SIZE, _SMALL = 14, 12
_MARGIN = 6
_MAX_INSTRUCTION = 200  # characters
_LONGEST = 300  # characters of a line that are considered
FATES: dict[str, tuple[str, Colour]] = {
    "accepted": ("accepted", ACCEPTED),
    "rejected": ("rejected", REJECTED),
    "own": ("target's own", OWN),
    "ahead": ("drafted ahead", FAINT),
}


class OverlayPainter:
    """Draws the frames of one camera; text is redrawn only when it changes.

    :param bgr: pictures and frames are BGR, else RGB.
    :param pause: minimum time between two redraws of the text, s; a reply grows faster than people read.
    """

    def __init__(self, width: int = WIDTH, bgr: bool = False, pause: float = 0.0) -> None:
        self.width, self._pause = width, pause
        self._written = float("-inf")
        self._bgr = bgr
        self._shown: Overlay | None = None
        self._top = self._bottom = self._panel = np.empty((0, width, 3), np.uint8)
        self.drawn = 0  # number of redraws of the text

    def shape(self, image: np.ndarray) -> tuple[int, int, int]:
        """The shape of :meth:`frame`: a very tall picture is squeezed into a bounded height."""
        rows, columns = image.shape[:2]
        height = round(rows * min(self.width / columns, MAX_ASPECT * self.width / rows))
        return max(1, height) + PANEL_HEIGHT, self.width, 3

    def frame(self, image: np.ndarray, overlay: Overlay, canvas: np.ndarray | None = None) -> np.ndarray:
        """The picture (uint8 (H, W, 3)) scaled to the painter's width, with its overlay; below it tokens and figures.

        ``canvas``, of :meth:`shape`, is drawn on instead of a new array.
        """
        self._write(overlay)
        rows, width, _ = shape = self.shape(image)
        height = rows - PANEL_HEIGHT
        if canvas is None:
            canvas = np.empty(shape, np.uint8)
        cv2.resize(image, (width, height), dst=canvas[:height], interpolation=cv2.INTER_LINEAR)
        canvas[: min(height, len(self._top))] = self._top[:height]
        bottom = self._bottom[:height]
        canvas[height - len(bottom) : height] = bottom
        canvas[height:] = self._panel
        return canvas

    def _write(self, overlay: Overlay) -> None:
        # Identity first: comparing all rounds takes longer, and an unchanged overlay is the same object.
        if overlay is self._shown or overlay == self._shown:
            return
        now = time.monotonic()
        if now - self._written < self._pause:
            return
        self._written = now
        self._shown = overlay
        self.drawn += 1
        self._top = self._ordered(_top_bar(overlay, self.width))
        self._bottom = self._ordered(_bottom_bar(overlay, self.width))
        self._panel = self._ordered(panel(overlay, self.width))

    def _ordered(self, drawn: Image.Image) -> np.ndarray:
        rgb = np.asarray(drawn)
        return cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR) if self._bgr else rgb


def panel(overlay: Overlay, width: int = WIDTH) -> Image.Image:
    """The reply's tokens, a legend and the newest figures, PANEL_HEIGHT high."""
    legend_y = PANEL_HEIGHT - 2 * line_height(_SMALL) - 6
    canvas = blank(PANEL_HEIGHT, width)
    _draw_tokens(canvas, overlay.reply, legend_y - 2)
    _draw_legend(canvas, legend_y, overlay.reply.mode)
    text = shortened(_figures(overlay.newest), _SMALL, width - 2 * _MARGIN)
    write(canvas, _MARGIN, legend_y + line_height(_SMALL) + 2, text, _SMALL, INK)
    return canvas


def _figures(new: ReplyFigures) -> str:
    """The newest reply's figures in a line."""
    parts = [new.mode or "-", f"{new.seconds:.2f} s a reply"]
    if not streams(new.mode):
        parts.insert(1, f"tau {new.tau:.2f}")
    elif new.sooner:
        parts[1:] = [f"{percent(new.draft_share)} drafted", f"{parts[1]}, alone about {new.alone_seconds:.2f} s (est.)"]
    return "   ".join([*parts, f"picture {new.observation_age:.2f} s old"])


def _draw_tokens(canvas: Image.Image, reply: ShownReply, height: int) -> None:
    """Draw the reply's tokens in reading order into the top ``height`` pixels; of too many the newest stay visible.

    Accepted drafts are green, rejected ones red and struck out, the target's own tokens blue. An amber underline
    marks tokens drafted or sent ahead.
    """
    step, right = line_height(_SIZE) + 3, canvas.width - _MARGIN
    lines: list[list[tuple[str, Colour, bool, bool]]] = [[]]
    x = _MARGIN
    newest = replace(reply, rounds=reply.rounds[-_ROUNDS_SHOWN:])
    for token in token_run(newest)[-_TOKENS_SHOWN:]:
        width = text_width(token[0], _SIZE)
        if x + width > right and lines[-1]:
            lines.append([])
            x = _MARGIN
        lines[-1].append(token)
        x += width
    for number, line in enumerate(lines[-max(1, height // step) :]):
        x, y = _MARGIN, 4 + number * step
        for text, colour, struck, ahead in line:
            end = write(canvas, x, y, text, _SIZE, colour, struck)
            if ahead:
                canvas.paste(AHEAD, (x, y + step - 4, max(x, min(end, right)), y + step - 2))
            x = end


def token_run(reply: ShownReply) -> list[tuple[str, Colour, bool, bool]]:
    """(text, colour, struck out, drafted ahead) of every token shown."""
    run: list[tuple[str, Colour, bool, bool]] = []
    for round_ in reply.rounds:
        ahead = bool(round_.source)
        run += [(_shown(t), ACCEPTED, False, ahead) for t in round_.gained[: round_.accepted]]
        rejected = round_.rejected_text(reply.mode)
        run += [(_shown(t), REJECTED, rejected is round_.rejected, ahead) for t in rejected]
        run += [(_shown(t), OWN, False, False) for t in round_.gained[round_.accepted :]]
    return [token for token in run if token[0]]


def fates_of(mode: str) -> list[str]:
    """What can become of a token in a mode: FATES; of an unknown mode all of them."""
    if mode not in PRESETS:
        return list(FATES)
    drafts, ahead = PRESETS[mode].drafts, PRESETS[mode].predrafts
    return [fate for fate in FATES if fate == "own" or (drafts and (fate != "ahead" or ahead))]


def _draw_legend(canvas: Image.Image, y: int, mode: str) -> None:
    """Explain the tokens' colours."""
    x = _MARGIN
    for fate in fates_of(mode):
        text, colour = FATES[fate]
        end = write(canvas, x, y, text, _SMALL, colour)
        if fate == "ahead":
            canvas.paste(AHEAD, (x, y + line_height(_SMALL) - 2, end - 4, y + line_height(_SMALL)))
        x = end + 10


def _shown(piece: str) -> str:
    return piece.replace("\n", " ").replace("\t", " ")


def _top_bar(overlay: Overlay, width: int) -> Image.Image:
    """Instruction on the left, link on the right."""
    height = line_height(_SIZE) + 8
    bar = blank(height, width, BAR)
    paper = {None: BAR, True: CALM, False: ALARM}[overlay.link_ok]
    label = shortened(overlay.link or "no link status", _SMALL, 2 * width // 5)
    left = width - text_width(label, _SMALL) - 2 * _MARGIN
    bar.paste(paper, (left, 0, width, height))
    write(bar, left + _MARGIN, 6, label, _SMALL, INK)
    text = overlay.reply.instruction[:_MAX_INSTRUCTION] or "no instruction yet"
    write(bar, _MARGIN, 4, shortened(text, _SIZE, left - 2 * _MARGIN), _SIZE, INK)
    return bar


def _bottom_bar(overlay: Overlay, width: int) -> Image.Image:
    """Causes of a stop, the verified reasoning, and the action."""
    inside = width - 2 * _MARGIN
    rows: list[tuple[str, Colour, Colour]] = []
    if overlay.causes:
        paper = ALARM if overlay.stopped else BAR
        rows += [(text, INK, paper) for text in wrapped("; ".join(overlay.causes[:3]), _SMALL, inside, 2)]
    reasoning, _, action = overlay.reply.text.partition("Action:")
    if reasoning.strip():
        rows += [(text, INK, BAR) for text in wrapped(reasoning, _SMALL, inside, 2)]
    doing = overlay.action or action.strip()
    if doing:
        note = "" if overlay.verified else "  (not verified)"
        rows.append((f"> {doing}{note}", ACCEPTED if overlay.verified else AHEAD, BAR))
    step = line_height(_SMALL) + 3
    bar = blank(max(1, len(rows) * step), width, BAR)
    for number, (text, ink, paper) in enumerate(rows):
        y = number * step
        bar.paste(paper, (0, y, width, y + step))
        write(bar, _MARGIN, y + 1, shortened(text, _SMALL, inside), _SMALL, ink)
    return bar


def blank(height: int, width: int, paper: Colour = PAPER) -> Image.Image:
    """An empty picture."""
    return Image.new("RGB", (width, height), paper)


def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * 1.35)


def write(canvas: Image.Image, x: int, y: int, text: str, size: int, ink: Colour, struck: bool = False) -> int:
    """Write one line of text, struck out or not; returns the x after it."""
    pen, end = ImageDraw.Draw(canvas), x + text_width(text, size)
    pen.text((x, y + 1), text, ink, _font(size))
    if struck:
        middle = y + round(line_height(size) * 0.58)
        pen.line((x, middle, end, middle), ink, 1)
    return end


def text_width(text: str, size: int) -> int:
    """Pixels that one line of text takes."""
    return math.ceil(_font(size).getlength(text))


def wrapped(text: str, size: int, width: int, lines: int) -> list[str]:
    """A text in at most ``lines`` lines of about ``width`` pixels; what does not fit becomes "..."."""
    return textwrap.wrap(text, width // text_width("n", size), max_lines=lines, placeholder=" ...")


def shortened(text: str, size: int, width: int) -> str:
    """A text cut to a width in pixels, with "..." if shortened."""
    text = text.replace("\n", " ")[:_LONGEST]
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}...", size) > width:
        text = text[:-1]
    return f"{text.rstrip()}..."


@functools.lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
