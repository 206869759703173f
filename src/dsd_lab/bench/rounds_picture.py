"""The rounds of a reply as swim-lanes, one mode under the other, all at one scale: docs/images/rounds.png.

python -m dsd_lab.bench.rounds_picture docs/images/rounds.png

decodes one held-out picture with the shipped pair in modes dsd and fsd, as `dsd-lab bench modes` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from dsd_lab.bench.modes import measure_modes
from dsd_lab.bench.profiles import load_profile
from dsd_lab.bench.sweeps import Variant, parse_modes
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.observe.view.overlay import draw_legend, draw_tokens
from dsd_ros.observe.view.state import Reply, Round
from dsd_ros.observe.view.timeline import draw_timeline, spans_of
from dsd_ros.observe.view.typeset import INK, PAPER, line_height, write
from dsd_ros.paths import models_directory

WIDTH = 1000
PROFILE = "go2-a100"
MODES = "dsd fsd"
_TIME_SCALE = 2.0  # slower than the profile, so that this machine's own haste does not show
_TOKENS_HEIGHT = 68
_MARGIN = 70  # of a timeline, left and right of its spans
_SIZE = 14


def reply_of(decoded: DecodedReply, text: Callable[[int], str], time_scale: float = 1.0) -> Reply:
    """A decoded reply as views show it; its seconds divided by ``time_scale``. ``text``: of one token."""
    reply = Reply(text=decoded.text, done=True)
    for record in decoded.records:
        reply = reply.with_round(_round_of(record, text, time_scale))
    return reply


def _round_of(record: RoundRecord, text: Callable[[int], str], scale: float) -> Round:
    return Round(
        drafted=record.drafted,
        accepted=record.accepted,
        gained=tuple(map(text, record.gained)),
        rejected=tuple(map(text, record.rejected)),
        source=record.source,
        ready=record.ready,
        began=record.began_seconds / scale,
        draft=record.draft_seconds / scale,
        wait=record.wait_seconds / scale,
        verify=record.verify_seconds / scale,
        model=record.model_seconds / scale,
        exits=tuple((layer, at / scale) for layer, at in zip(record.exit_layers, record.exit_seconds, strict=True)),
        first_exit=record.first_exit,
        predrafts=record.predrafts,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
    )


def draw_rounds(replies: Sequence[tuple[str, Reply]], width: int = WIDTH) -> np.ndarray:
    """uint8 (height, width, 3), RGB: each reply's title, tokens and lanes; the longest one takes the whole width."""
    seconds = [max(span.end for span in spans_of(reply)) for _, reply in replies]
    parts = []
    for (title, reply), whole in zip(replies, seconds, strict=True):
        head = _sheet(line_height(_SIZE) + 8, width)
        write(head, 6, 5, title, _SIZE, INK, PAPER)
        tokens = _sheet(_TOKENS_HEIGHT, width)
        draw_tokens(tokens, reply, _SIZE)
        lanes = draw_timeline(reply, _MARGIN + round((width - _MARGIN) * whole / max(seconds)))
        sheet = _sheet(lanes.shape[0] + 8, width)
        sheet[: lanes.shape[0], : lanes.shape[1]] = lanes
        parts += [head, tokens, sheet]
    legend = _sheet(line_height(_SIZE) + 6, width)
    draw_legend(legend, 6, 2)
    return np.concatenate([*parts, legend])


def _sheet(height: int, width: int) -> np.ndarray:
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = PAPER
    return canvas


def measure() -> list[tuple[str, Reply]]:
    """One held-out picture in each mode, over the profile's link at its models' times."""
    models = models_directory()
    tokenizer = Tokenizer.from_file(str(models / "draft" / "tokenizer.json"))
    profile = load_profile(PROFILE)
    found: list[tuple[str, Reply]] = []

    def keep(_: int, __: int, variant: Variant, decoded: DecodedReply) -> None:
        reply = reply_of(decoded, lambda token: tokenizer.decode([token]), _TIME_SCALE)
        figures = f"{len(decoded.tokens)} tokens in {decoded.rounds} rounds"
        title = f"mode {variant.decode.mode}: {decoded.seconds / _TIME_SCALE:.1f} s, {figures}"
        found.append((title, reply))

    measure_modes(
        profile, parse_modes(MODES, {}, profile.gamma), 1, str(models / "draft"), str(models / "target"),
        time_scale=_TIME_SCALE, progress=keep,
    )  # fmt: skip
    return found


def main() -> None:
    """Command line: the picture to write."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dsd_lab.bench.rounds_picture picture.png")
    picture = Image.fromarray(draw_rounds(measure()))
    picture.quantize(64, dither=Image.Dither.NONE).save(Path(sys.argv[1]), optimize=True)


if __name__ == "__main__":
    main()
