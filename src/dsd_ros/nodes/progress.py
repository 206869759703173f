"""A reply as it grows, published round by round."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rclpy.publisher import Publisher

from dsd_msgs.msg import ReplyProgress, RoundStats
from dsd_ros.edge.results import RoundRecord

_MAX_TEXT = 8192  # as in ReplyProgress.msg


class Progress:
    """Publishes one reply's rounds; ``header`` is that of its picture."""

    def __init__(self, publisher: Publisher, header: Any) -> None:
        self._publisher = publisher
        self._message = ReplyProgress(header=header)

    def tell(self, text: str, tokens: int, last: RoundRecord, done: bool = False) -> None:
        """``text`` of ``tokens`` is verified, ``last`` was the newest round; ``done``: said once more, at the end."""
        message = self._message
        message.text, message.verified_tokens, message.done = text[:_MAX_TEXT], tokens, done
        if not done:
            message.rounds += 1
        message.last_round = RoundStats(**{f.name: getattr(last, f.name) for f in fields(last)})
        self._publisher.publish(message)
