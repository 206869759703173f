"""Order between topics: DDS keeps it only within one, so what overtakes its beginning is held back here.

A draft belongs behind its observation, what is said about a question behind the question.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dsd_ros.wire import messages as wire

_HELD_LIMIT = 64  # messages that wait for one beginning
_REMEMBERED = 256
HELD_S = 0.5

_ABOUT_QUESTIONS = (wire.Proposal, wire.Verdict, wire.Reveal)
_Part = tuple[tuple[type, int], int]  # of what begins with such a message and has this number: which part


class TopicOrder:
    """Any thread may call; ``deliver`` is called with the messages in their order.

    :param begins: the messages that others wait for, here: the observation and the question at the verifier's end,
        the question's reply at the robot's.
    """

    def __init__(self, deliver: Callable[[wire.Message], None], *begins: type) -> None:
        self._deliver = deliver
        self._begins = begins
        self._lock = threading.Lock()
        self._begun: dict[tuple[type, int], int] = {}  # the newest part whose beginning came
        self._held: dict[tuple[type, int], list[tuple[float, wire.Message]]] = {}

    def arrived(self, message: wire.Message) -> None:
        """Deliver it, and what waited for it; or keep it until its beginning is here."""
        awaited, begun = self._waits(message), self._begins_what(message)
        released: list[wire.Message] = []
        with self._lock:
            if awaited is not None and awaited[1] > self._begun.get(awaited[0], -1):
                held = self._held.setdefault(awaited[0], [])
                if len(held) < _HELD_LIMIT:
                    held.append((time.monotonic(), message))
                return
            if begun is not None:
                key, part = begun
                self._begun.pop(key, None)
                self._begun[key] = part  # moved to the end: newest
                while len(self._begun) > _REMEMBERED:
                    self._begun.pop(next(iter(self._begun)))
                released = [late for _, late in self._held.pop(key, [])]
            elif isinstance(message, wire.SessionClose):
                self._begun.pop((wire.Observation, message.session), None)
                self._held.pop((wire.Observation, message.session), None)
        for item in (message, *released):
            self._deliver(item)

    def _waits(self, message: wire.Message) -> _Part | None:
        """What has to have begun before this message, and which part of it; None: nothing."""
        if isinstance(message, wire.Draft) and wire.Observation in self._begins:
            return (wire.Observation, message.session), message.reply
        if isinstance(message, _ABOUT_QUESTIONS):
            for begin in (wire.Question, wire.QuestionReply):
                if begin in self._begins:
                    return (begin, message.ask), message.attempt
        return None

    def _begins_what(self, message: wire.Message) -> _Part | None:
        if type(message) not in self._begins:
            return None
        if isinstance(message, wire.Observation):
            return (wire.Observation, message.session), message.reply
        assert isinstance(message, (wire.Question, wire.QuestionReply))
        return (type(message), message.ask), message.attempt

    def release_old(self) -> None:
        """A beginning that does not come is for the receiver to refuse: it knows more. Call every HELD_S / 2."""
        limit = time.monotonic() - HELD_S
        with self._lock:
            late = [key for key, held in self._held.items() if held and held[0][0] < limit]
            messages = [message for key in late for _, message in self._held.pop(key)]
        for message in messages:
            self._deliver(message)
