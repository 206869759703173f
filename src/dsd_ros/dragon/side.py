# SPDX-License-Identifier: Apache-2.0
"""One side of one attempt at a question: run the state machine and the mixture, and measure both sides."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dsd_ros.decoding.aggregation import Decision
from dsd_ros.dragon.mixture import LocalMixture, Preempted
from dsd_ros.dragon.profiler import Profile
from dsd_ros.dragon.scheduler import switches
from dsd_ros.dragon.state import AggregationState
from dsd_ros.wire.messages import EndCode, Message, Proposal, Question, QuestionEnd, Verdict

_WRAP = 1 << 32
MAX_MEASURED_US = 600_000_000  # a longer measurement is discarded


class AnswerSide:
    """One side of an attempt. One thread calls ``work``; any thread may call the rest.

    ``send`` gets the messages in order, from either thread, and must not raise. ``changed`` is notified when there may
    be new work or new tokens. ``eos_token_ids``: of both sides.
    """

    state_class: Callable[..., AggregationState] = AggregationState

    def __init__(
        self,
        question: Question,
        side: str,
        other_vocab_size: int,
        eos_token_ids: frozenset[int],
        mixture: LocalMixture,
        send: Callable[[Message], object],
        profile: Profile,
        changed: threading.Condition | None = None,
    ) -> None:
        self.question = question
        self.mixture = mixture
        self.profile = profile
        self.changed = changed or threading.Condition()
        self.stopped = False
        self.times: list[float] = []  # time.monotonic() of each step
        self.preemptions = 0
        self.dropped = 0  # drafts made too late to be used
        self._send = send
        self._lock = threading.RLock()  # guards the state and everything below
        self._sending = threading.Lock()
        self._out: deque[Message] = deque()
        self._heard: tuple[int, float] | None = None  # the other side's newest clock, and when it arrived
        self.state = self.state_class(
            question, side, mixture.model.vocab_size, other_vocab_size, eos_token_ids, self._switch
        )

    @property
    def ended(self) -> bool:
        return self.state.ended

    def progress(self) -> tuple[list[int], list[float]]:
        """The tokens decided so far, and when each step of this attempt was."""
        with self._lock:
            return list(self.state.tokens), list(self.times)

    @property
    def owed(self) -> bool:
        """Whether the answer waits for the other side."""
        with self._lock:
            return not self.ended and self.state.waiting[self.state.side] > 0

    @property
    def wants_work(self) -> bool:
        """Whether ``work`` has something to do."""
        return not self.stopped and self.state.drafts

    def stop(self) -> None:
        """Give up: a forward pass in progress ends before its next layer, and nothing more is sent."""
        self.stopped = True
        with self.changed:
            self.changed.notify_all()

    def receive(self, message: Message) -> None:
        """Take a message of the other side; Contradiction for an impossible one."""
        now = time.monotonic()
        with self._lock:
            if self.stopped:
                return
            if isinstance(message, (Proposal, Verdict)):
                self._measure(message, now)
            self.state.receive(message)
            self._note()
        self._flush()

    def work(self) -> bool:
        """Make one draft; False if none is wanted. Raises what the model raises."""
        with self._lock:
            if not self.wants_work:
                return False
            epoch, prefix = self.state.epoch, self.state.prefix
        self.mixture.follow(prefix)
        began = time.monotonic()
        try:
            local = self.mixture.next(lambda: self.state.epoch != epoch or self.ended or self.stopped)
        except Preempted:
            self.preemptions += 1
            return True
        seconds = time.monotonic() - began
        with self._lock:
            if self.state.epoch != epoch or not self.wants_work:
                self.dropped += 1
                return True
            side = self.state.side
            if len(prefix) > len(self.question.answered):  # the first step also reads the question
                self.profile.delays[side].observe(seconds)
            self.state.drafted(local, min(round(1e6 * seconds), MAX_MEASURED_US))
            self._note()
        self._flush()
        return True

    # ------------------------------------------------------------------ under self._lock

    def _switch(self, side: str, decision: Decision) -> bool:
        return switches(
            self.profile.estimates(), side, decision.device_accepted, decision.cloud_accepted, *self.state.ahead
        )

    def _measure(self, message: Proposal | Verdict, now: float) -> None:
        if message.decode_us and message.position > len(self.question.answered):
            self.profile.delays[self.state.other].observe(min(message.decode_us, MAX_MEASURED_US) / 1e6)
        if message.echo:
            trip = (_stamp(now) - message.echo - message.held) % _WRAP
            if trip <= MAX_MEASURED_US:
                self.profile.link.observe(trip / 1e6)
        self._heard = message.sent, now

    def _note(self) -> None:
        """Collect the messages and steps of the state machine."""
        self._out.extend(self.state.take())
        for step in self.state.steps[len(self.times) :]:
            self.times.append(time.monotonic())
            self.profile.acceptance["device"].observe(float(step.device_accepted))
            self.profile.acceptance["cloud"].observe(float(step.cloud_accepted))

    def _flush(self) -> None:
        with self._sending:
            while not self.stopped or self.ended:  # the last verdict must be sent
                with self._lock:
                    if not self._out:
                        break
                    message = self._stamped(self._out.popleft())
                self._send(message)
        with self.changed:
            self.changed.notify_all()

    def _stamped(self, message: Message) -> Message:
        if not isinstance(message, (Proposal, Verdict)):
            return message
        now = time.monotonic()
        echo, held = 0, 0
        if self._heard is not None:
            echo = self._heard[0]
            held = min(round(1e6 * (now - self._heard[1])), _WRAP - 1)
        return replace(message, sent=_stamp(now), echo=echo, held=held)


def _stamp(now: float) -> int:
    """The monotonic clock in microseconds modulo 2^32; never 0, which means none."""
    return max(1, round(1e6 * now) % _WRAP)


def end_of(about: Any, code: EndCode, sentence: str) -> QuestionEnd:
    """The message that ends the question which ``about`` belongs to."""
    return QuestionEnd(about.ask, about.attempt, code, sentence[:1024])
