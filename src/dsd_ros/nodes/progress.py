"""A reply as it grows, published round by round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rclpy.publisher import Publisher

from dsd_msgs.msg import ReplyProgress, RoundStats
from dsd_ros.edge.results import RoundRecord

_MAX_TEXT = 8192  # as in ReplyProgress.msg
_MAX_PIECE, _MAX_GAINED, _MAX_REJECTED, _MAX_EXITS = 64, 128, 64, 256  # as in RoundStats.msg
_PLAIN = RoundStats.get_fields_and_field_types().keys() - {
    "gained", "rejected", "exit_layers", "exit_seconds"
}  # fmt: skip


class Progress:
    """Publishes one reply's rounds; ``header`` is that of its picture.

    :param instruction: what the reply answers.
    :param text: turns tokens into text; without it, single tokens are not told.
    """

    def __init__(
        self, publisher: Publisher, header: Any, instruction: str = "", text: Callable[[list[int]], str] | None = None
    ) -> None:
        self._publisher = publisher
        self._text = text
        self._pieces: dict[int, str] = {}
        self._message = ReplyProgress(header=header, instruction=instruction)

    def tell(self, text: str, tokens: int, last: RoundRecord, done: bool = False) -> None:
        """``text`` of ``tokens`` is verified, ``last`` was the newest round; ``done``: said once more, at the end."""
        message = self._message
        message.text, message.verified_tokens, message.done = text[:_MAX_TEXT], tokens, done
        if not done:
            message.rounds += 1
        if not done:
            message.last_round = self._round(last)
        self._publisher.publish(message)

    def _round(self, last: RoundRecord) -> RoundStats:
        stats = RoundStats(**{name: value for name, value in asdict(last).items() if name in _PLAIN})
        stats.exit_layers = list(last.exit_layers[:_MAX_EXITS])
        stats.exit_seconds = list(last.exit_seconds[:_MAX_EXITS])
        if self._text is not None:
            stats.gained = [self._piece(token) for token in last.gained[:_MAX_GAINED]]
            stats.rejected = [self._piece(token) for token in last.rejected[:_MAX_REJECTED]]
        return stats

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            assert self._text is not None
            piece = self._pieces[token] = shortened(self._text([token]))
        return piece


def shortened(text: str, limit: int = _MAX_PIECE) -> str:
    """The beginning of a text that takes at most ``limit`` bytes in UTF-8."""
    if len(text) * 4 <= limit:
        return text
    return text.encode()[:limit].decode(errors="ignore")
